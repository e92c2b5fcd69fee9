"""One layer of the hybrid model: every tower takes its step, then the context tokens interact with all summaries."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from gem_model._src.blocks import normalize
from gem_model._src.event_norm import normalize_events
from gem_model._src.experts import MixedInteraction
from gem_model._src.interaction import Interaction
from gem_model._src.jagged import Jagged
from gem_model._src.sequence_layer import SequenceLayer
from gem_model._src.summary import Cross
from gem_model.config import RankingConfig
from gem_model.flops import BatchSizes, ModuleFlops, nest


class LayerOutput(NamedTuple):
    """State between two layers."""

    x: Tensor
    """(B, num_tokens, d)."""
    sequences: dict[str, Jagged]
    """Sequence name -> events (T, d_tower)."""


class HybridLayer(nn.Module):
    """Kunlun's layer: summaries in both directions, PFFN and self-attention on the events, Wukong on the context."""

    def __init__(self, config: RankingConfig, index: int) -> None:
        super().__init__()
        num_inputs = config.num_tokens if index else config.num_input_tokens
        self.towers = nn.ModuleDict(
            {
                tower.name: SequenceLayer(config, tower, num_inputs, tower.self_attention[index])
                for tower in config.sequences
            }
        )
        num_tokens = num_inputs + config.num_pooled_tokens
        self.interaction = (
            Interaction(config, num_tokens) if config.num_experts == 1 else MixedInteraction(config, num_tokens)
        )

    def forward(self, x: Tensor, sequences: dict[str, Jagged]) -> LayerOutput:
        """Context tokens (B, n, d) and events by sequence name."""
        tokens, following = [x], {}
        for name, tower in self.towers.items():
            s_sum, values = tower(x, sequences[name])
            tokens.append(s_sum)
            following[name] = sequences[name]._replace(values=values)
        return LayerOutput(self.interaction(_concatenate(tokens)), following)

    def tower(self, name: str) -> SequenceLayer:
        """The layer of a sequence."""
        tower = self.towers[name]
        assert isinstance(tower, SequenceLayer)
        return tower

    def after_events(self, x: Tensor, *found: Tensor) -> tuple[Tensor]:
        """Context tokens (B, n, d), and what each tower's `SequenceLayer.over_events` found -> (B, num_tokens, d)."""
        return (self.interaction(_concatenate([x, *_summaries(self.towers, found)])),)

    def flops(self, sizes: BatchSizes) -> dict[str, ModuleFlops]:
        """FLOPs by module."""
        children = {f"towers.{name}": _flops(tower, sizes) for name, tower in self.towers.items()}
        return nest({**children, "interaction": self.interaction.flops(sizes)})


class Readout(nn.Module):
    """What the heads see: the last context tokens and a last summary of each sequence, normalised and flattened."""

    def __init__(self, config: RankingConfig) -> None:
        super().__init__()
        self.width = (config.num_tokens + config.num_pooled_tokens) * config.dim
        self.towers = nn.ModuleDict({tower.name: Cross(config, tower, config.num_tokens) for tower in config.sequences})
        self._num_recent = {tower.name: tower.num_recent for tower in config.sequences}
        # Keys and values of the pooling, which are one reader where neither is projected.
        self._num_readers = {tower.name: 2 if tower.project_pooling else 1 for tower in config.sequences}

    def forward(self, x: Tensor, sequences: dict[str, Jagged]) -> Tensor:
        """Context tokens (B, n, d) and events by sequence name -> (B, width)."""
        tokens = [x]
        for name, tower in self.towers.items():
            s = sequences[name]
            events = normalize_events(s.values, s.offsets, self._num_recent[name], self._num_readers[name])
            tokens.append(tower(x, s, (events.normalized[0], events.normalized[-1]), events.recent).s_sum)
        return normalize(_concatenate(tokens)).reshape(x.shape[0], self.width)

    def tower(self, name: str) -> Cross:
        """The last cross step of a sequence."""
        tower = self.towers[name]
        assert isinstance(tower, Cross)
        return tower

    def over_events(self, name: str, s: Jagged, queries: Tensor) -> tuple[Tensor, Tensor | None]:
        """What the queries find in a tower's events (B, num_queries, d_tower), and the latest of these."""
        events = normalize_events(s.values, s.offsets, self._num_recent[name], self._num_readers[name])
        keys_and_values = (events.normalized[0], events.normalized[-1])
        return self.tower(name).pooling.attend(queries, s, keys_and_values), events.recent

    def after_events(self, x: Tensor, *found: Tensor) -> Tensor:
        """Context tokens (B, n, d), and what each tower's `over_events` found -> (B, width)."""
        return normalize(_concatenate([x, *_summaries(self.towers, found)])).reshape(x.shape[0], self.width)

    def flops(self, sizes: BatchSizes) -> dict[str, ModuleFlops]:
        """FLOPs by module."""
        return nest({f"towers.{name}": _flops(tower, sizes) for name, tower in self.towers.items()})


def _summaries(towers: nn.ModuleDict, found: tuple[Tensor, ...]) -> list[Tensor]:
    """Each tower's summary of what its queries and its latest events have brought."""
    rest, summaries = iter(found), []
    for tower in towers.values():
        cross = tower.cross if isinstance(tower, SequenceLayer) else tower
        assert isinstance(cross, Cross)
        pooled = next(rest)
        summaries.append(cross.pooling.summarize(pooled, next(rest) if cross.pooling.has_recent else None))
    return summaries


def _concatenate(tokens: list[Tensor]) -> Tensor:
    """Join tokens of a sample; under autocast they may come in two precisions, and the wider wins."""
    dtype = tokens[0].dtype
    for token in tokens[1:]:
        dtype = torch.promote_types(dtype, token.dtype)
    return torch.cat([token.to(dtype) for token in tokens], dim=1)


def _flops(module: nn.Module, sizes: BatchSizes) -> dict[str, ModuleFlops]:
    assert isinstance(module, SequenceLayer | Cross)
    return module.flops(sizes)
