"""Scoring a split: exact counts, one merge of metric states at the end."""

from typing import Any, NamedTuple

import torch
from torch import nn

from gem_train.feed import Feed
from gem_train.metrics import BinaryMetrics
from gem_train.protocols import BatchSource, EmbeddingModule
from gem_train.timing import PhaseTimer
from gem_train.world import World

__all__ = ["Evaluation", "evaluate"]


class Evaluation(NamedTuple):
    """Scores of one split."""

    num_samples: int
    """Samples scored, of all ranks."""
    loss: float
    """Mean of the weighted loss per sample."""
    tasks: dict[str, dict[str, Any]]
    """Task -> values of `BinaryMetrics.compute`."""

    @property
    def ne(self) -> float | None:
        """NE of the first task, or None where it does not exist."""
        value = next(iter(self.tasks.values()))["ne"] if self.tasks else None
        return None if value is None else float(value)


def evaluate(
    model: nn.Module, embeddings: EmbeddingModule, source: BatchSource, world: World, *, curve_points: int = 20
) -> Evaluation:
    """Scores a source from its current position to its end. All ranks call it.

    Args:
        model: A `TrainableModel`.
        embeddings: The tables.
        source: The split; a slice may be empty on some ranks.
        world: The ranks.
        curve_points: Points of the calibration curve.

    Returns:
        The scores, the same on all ranks.

    Raises:
        ValueError: if the source gives no sample, or some ranks more batches than others: scores are of all samples.
    """
    was_training = model.training
    model.eval()
    metrics: dict[str, BinaryMetrics] = {}
    loss = torch.zeros((), dtype=torch.float64, device=world.device)
    num_samples = 0
    feed = Feed(source, embeddings=embeddings, world=world, timer=PhaseTimer(world.device))
    try:
        with torch.no_grad():
            while (staged := feed.next()) is not None:
                outputs = model(staged.batch, embeddings.lookup(staged.pending))
                loss += model.loss(outputs, staged.batch).total.double()  # type: ignore[operator]
                feed.ahead()
                num_samples += staged.num_samples
                for task, logits in outputs.items():
                    state = metrics.setdefault(task, BinaryMetrics(world.device))
                    state.update(logits.float(), staged.batch.labels[task])
    finally:
        feed.close()
        model.train(was_training)
    if feed.dropped:
        # Agreed between the ranks, so all of them raise.
        raise ValueError(
            f"evaluate: `source` must give every rank the same number of batches, got one that ended on some ranks "
            f"while others had {feed.dropped} samples more; give ranks that have none left batches without samples"
        )
    if num_samples == 0:
        raise ValueError("evaluate: `source` must give at least one sample, got none; check the split")
    for state in metrics.values():
        if world.size > 1:
            state.all_reduce()
    return Evaluation(
        num_samples,
        float(world.sum(loss)) / num_samples,
        {task: state.compute(curve_points=curve_points) for task, state in metrics.items()},
    )
