"""The hybrid ranking model: sequence towers and a non-sequence tower that learn from each other in every layer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gem_model._src.arguments import check_batch, check_inputs, check_label, check_outputs
from gem_model._src.events import EventTokens, event_numbers
from gem_model._src.heads import Heads
from gem_model._src.jagged import Jagged
from gem_model._src.layer import HybridLayer, Readout
from gem_model._src.segments import Captured
from gem_model._src.tokens import ContextTokens
from gem_model.config import RankingConfig
from gem_model.flops import BatchSizes, FlopCount, nest
from gem_model.protocols import RankingBatch

__all__ = ["Loss", "RankingModel"]


class Loss(NamedTuple):
    """Sums, never means, so that the caller divides by the number of samples of all ranks."""

    sum: dict[str, Tensor]
    """Task -> scalar float32, sum of the samples' log losses, in nats."""
    count: int  # type: ignore[assignment]
    """Samples of this rank."""
    total: Tensor
    """Scalar float32: weighted sum over tasks."""


class RankingModel(nn.Module):
    """Dense part of a ranking model in the manner of Kunlun, InterFormer and Wukong.

    A layer l holds context tokens X (B, n, d) and, per sequence, events S (T, d_tower):

    1. X_sum = Gating(MLP over tokens(X)).
    2. S_sum = Gating([attention(X_sum -> S) ‖ SumKron(attention(seeds -> S)) ‖ latest events]).
    3. X' = Wukong([X ‖ S_sum]), or the gated sum of several Wukong experts.
    4. S = S + RMSNorm(GDPA(LN(S), w1(X_sum), w2(X_sum)) + LN(S)).
    5. S' = S + self-attention(LN(S)), in a sliding window, in blocks, or not at all.

    Heads read the last X and a last S_sum. Embeddings come from outside. Nothing in the model looks across samples, and
    there may be no event or no sample at all.

    Args:
        config: Features, tasks and sizes.

    Raises:
        TypeError: if ``config`` is no RankingConfig.
    """

    def __init__(self, config: RankingConfig) -> None:
        super().__init__()
        if not isinstance(config, RankingConfig):
            raise TypeError(
                f"RankingModel: `config` must be a RankingConfig, got {type(config).__name__}; make one, or take one "
                "of gem_model.presets."
            )
        self.config = config
        self.context_tokens = ContextTokens(config)
        self.event_tokens = nn.ModuleDict(
            {tower.name: EventTokens(tower, config.embedding_dim, config.activation) for tower in config.sequences}
        )
        self.layers = nn.ModuleList(HybridLayer(config, index) for index in range(config.num_layers))
        self.readout = Readout(config)
        self.heads = Heads(config, self.readout.width)
        self._captured = Captured()

    def forward(self, batch: RankingBatch, embeddings: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Score a batch.

        Args:
            batch: B samples with their histories.
            embeddings: Feature -> (B, embedding_dim) for context features, (T, embedding_dim) for event features.

        Returns:
            Task -> logits (B,), float32.

        Raises:
            ValueError: if the batch or the embeddings lack something that the config names, or have another shape.
            TypeError: if an argument has another type, or a tensor another dtype than the layer that reads it.
        """
        check_inputs(batch, embeddings, self.config, self.context_tokens, self.event_tokens)
        if self._captured.fit(self, batch):
            return self._captured(self, batch, embeddings)
        x = self.context_tokens({name: embeddings[name] for name in self.config.context_features}, batch.dense)
        sequences = {}
        for tower in self.config.sequences:
            events = {name: embeddings[name] for name in tower.event_features}
            sequence = batch.sequences[tower.name]
            tokens = self.event_tokens[tower.name](events, event_numbers(tower, sequence, self.config.embedding_dim))
            sequences[tower.name] = Jagged(tokens, sequence.offsets, sequence.max_seqlen)
        for layer in self.layers:
            x, sequences = layer(x, sequences)
        return self.heads(self.readout(x, sequences))

    def loss(self, outputs: Mapping[str, Tensor], batch: RankingBatch, *, validate: bool = False) -> Loss:
        """Log loss of each task, summed over the samples.

        Args:
            outputs: Task -> logits (B,), of `forward`.
            batch: The same batch, with labels.
            validate: On CUDA, also check the values of the labels, which waits for the device. On CPU they always are.

        Returns:
            Sums by task, the number of samples, and the weighted total.

        Raises:
            ValueError: if logits or a label are missing, or a label has another shape than its logits or is not
                between 0 and 1.
            TypeError: if an argument has another type.
        """
        check_outputs(outputs, self.config)
        check_batch(batch, self.config)
        # A traced program cannot branch on data.
        on_cpu = all(x.device.type == "cpu" for x in outputs.values())
        read_values = validate or (on_cpu and not torch.compiler.is_compiling())
        weights = self.config.task_weights or (1.0,) * len(self.config.tasks)
        sums = {}
        for task in self.config.tasks:
            check_label(task, batch.labels, outputs[task], read_values=read_values)
            label = batch.labels[task]
            sums[task] = F.binary_cross_entropy_with_logits(outputs[task], label.float(), reduction="sum")
        total = torch.stack([w * s for w, s in zip(weights, sums.values(), strict=True)]).sum()
        return Loss(sums, batch.num_samples, total)

    def flops(self, batch: RankingBatch) -> FlopCount:
        """Count the FLOPs of one forward (and backward) of this batch, exactly, from its lengths.

        Counted are matrix products and attention over unmasked pairs. With offsets on a GPU this waits for the device;
        give the batch before it is copied there.

        Raises:
            TypeError: if ``batch`` has another type.
            ValueError: if it lacks a sequence that the config names.
        """
        check_batch(batch, self.config)
        lengths = {
            tower.name: torch.diff(batch.sequences[tower.name].offsets.cpu()).long() for tower in self.config.sequences
        }
        sizes = BatchSizes(num_samples=batch.num_samples, lengths=lengths)
        children = {"context_tokens": self.context_tokens.flops(sizes)}
        for name, tokens in self.event_tokens.items():
            assert isinstance(tokens, EventTokens)
            children[f"event_tokens.{name}"] = tokens.flops(sizes)
        for index, layer in enumerate(self.layers):
            assert isinstance(layer, HybridLayer)
            children[f"layers.{index}"] = layer.flops(sizes)
        children["readout"] = self.readout.flops(sizes)
        children["heads"] = self.heads.flops(sizes)
        return FlopCount(by_module=nest(children))

    @property
    def shard_units(self) -> tuple[str, ...]:
        """Fully qualified names of the modules to shard as units, in the order they run.

        The towers of a layer and its interaction are units of their own, so that the weights of the interaction can
        be gathered while the towers compute.
        """
        towers = [tower.name for tower in self.config.sequences]
        units = ["context_tokens", *(f"event_tokens.{name}" for name in towers)]
        for index in range(self.config.num_layers):
            units += [f"layers.{index}.towers.{name}" for name in towers]
            units.append(self.expert_layers[index] if self.expert_layers else f"layers.{index}.interaction")
        return (*units, *(f"readout.towers.{name}" for name in towers), "heads")

    @property
    def expert_layers(self) -> tuple[str, ...]:
        """Fully qualified names of the modules that sum experts over the whole batch; none with one expert.

        Each has its experts in ``experts`` and may be replaced from outside, before the model is sharded, by a module
        that spreads them over ranks: one that maps (B, n, d) to the sum of the outputs of all experts, and keeps those
        it holds in ``experts``, under their positions.
        """
        if self.config.num_experts == 1:
            return ()
        return tuple(f"layers.{index}.interaction.mixture" for index in range(self.config.num_layers))
