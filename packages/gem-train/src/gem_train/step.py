"""One training step: lookup, forward, backward, guard, clip, update."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from gem_train.config import TrainerConfig
from gem_train.feed import Staged
from gem_train.guard import GradientGuard
from gem_train.optimizer import set_learning_rate
from gem_train.protocols import EmbeddingModule
from gem_train.schedule import LearningRateSchedule
from gem_train.timing import PhaseTimer

__all__ = ["ClipGradients", "Prepare", "StepResult", "TrainStep"]

ClipGradients = Callable[[Iterable[nn.Parameter], float], Tensor]
"""(parameters, max_norm) -> global gradient norm before clipping; max_norm may be infinite."""
Prepare = Callable[[Any, Mapping[str, Tensor]], None]
"""(batch, embeddings): what is to be done with the model before it runs on them."""


class StepResult(NamedTuple):
    """What is left of a step for the metrics; device tensors."""

    logits: dict[str, Tensor]
    """Task -> (B,), detached."""
    loss_sum: Tensor
    """Scalar: weighted sum of this rank's sample losses."""
    grad_norm: Tensor
    """Scalar: global norm of the dense gradients before clipping."""


class TrainStep:
    """Applies one batch to the dense model and the sparse tables.

    The loss is the sum over this rank's samples divided by the samples of all ranks; gradients are summed over ranks by
    the parallel model and by the tables. So a step does not depend on how the samples are spread, and a rank without
    samples takes part with zeros.
    """

    def __init__(
        self,
        config: TrainerConfig,
        *,
        model: nn.Module,
        embeddings: EmbeddingModule,
        sparse_learning_rate: float,
        optimizer: torch.optim.Optimizer,
        schedule: LearningRateSchedule,
        clip: ClipGradients,
        device: torch.device,
        timer: PhaseTimer,
        prepare: Prepare | None = None,
    ) -> None:
        """Binds the parts of a run.

        Args:
            config: Learning rate and clipping.
            model: A `TrainableModel`.
            embeddings: The tables, updated inside backward.
            sparse_learning_rate: Peak step size of the tables.
            optimizer: The dense optimizer.
            schedule: Multiplier of both learning rates.
            clip: Global norm and clipping over the mesh of the model.
            device: Where the model is.
            timer: Takes the times of the phases.
            prepare: Called before each forward pass, such as a `gem_train.recipes.SegmentCapture`; None does nothing.
        """
        self._config = config
        self._model = model
        self._embeddings = embeddings
        self._sparse_learning_rate = sparse_learning_rate
        self._optimizer = optimizer
        self._schedule = schedule
        self._clip = clip
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        self._timer = timer
        self._prepare = prepare
        self.guard = GradientGuard(model, optimizer, device)

    def learning_rate(self, step: int) -> float:
        """Dense learning rate of the step with this index."""
        return self._config.learning_rate * self._schedule(step)

    def __call__(
        self,
        step: int,
        staged: Staged,
        *,
        ahead: Callable[[], Staged | None] = lambda: None,
        look_up_ahead: bool = True,
    ) -> StepResult:
        """Does the step with this index.

        Args:
            step: Index from 0.
            staged: The batch.
            ahead: Stages the next batch, such as `Feed.ahead`; called between forward and backward.
            look_up_ahead: Read the next batch's rows, which travel during the dense optimizer's step. Not before a
                checkpoint or an evaluation, which must find the tables between two steps.

        Returns:
            Logits, loss and gradient norm, detached.

        Raises:
            NonFiniteError: naming the first tensor that is NaN or infinite.
        """
        multiplier = self._schedule(step)
        set_learning_rate(self._optimizer, self._config.learning_rate * multiplier)
        self._embeddings.set_learning_rate(self._sparse_learning_rate * multiplier)
        with self._timer("embedding"):
            embeddings = self._embeddings.lookup(staged.pending)
        if self._prepare is not None:
            self._prepare(staged.batch, embeddings)
        self.guard.watch(embeddings)
        with self._timer("forward"):
            outputs: dict[str, Tensor] = self._model(staged.batch, embeddings)
            loss: Any = self._model.loss(outputs, staged.batch)  # type: ignore[operator]
        self.guard.observe("the loss", loss.total)
        # On CUDA, forward is enqueued and backward is not: the host waits for the next ids while the device computes.
        following = ahead()
        with self._timer("backward"):
            (loss.total / max(1, staged.num_samples)).backward()
        if following is not None and look_up_ahead:
            with self._timer("embedding"):
                # The tables are updated; what is looked up now is updated with the next step's rate.
                self._embeddings.set_learning_rate(self._sparse_learning_rate * self._schedule(step + 1))
                self._embeddings.start_lookup(following.pending)
        with self._timer("optimizer"):
            self.guard.inspect_parameters()
            max_norm = self._config.max_grad_norm if self._config.max_grad_norm > 0 else float("inf")
            grad_norm = self._clip(self._parameters, max_norm).detach()
            self.guard.observe("the global gradient norm (a gradient on another rank, or its own sum)", grad_norm)
            self.guard.arm()
            self.guard.check(step)
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)
        logits = {task: output.detach() for task, output in outputs.items()}
        return StepResult(logits, loss.total.detach(), grad_norm)
