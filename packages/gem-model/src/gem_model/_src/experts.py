"""Several Wukong experts in place of one: every expert sees every sample, their gated outputs are summed."""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn

from gem_model._src.blocks import Gating, normalize
from gem_model._src.interaction import Interaction
from gem_model.config import RankingConfig
from gem_model.flops import BatchSizes, ModuleFlops, nest


class Expert(nn.Module):
    """A Wukong layer whose tokens a gate of its own lets pass or holds back, sample by sample."""

    def __init__(self, config: RankingConfig, num_inputs: int) -> None:
        super().__init__()
        self._num_tokens = config.num_tokens
        self.interaction = Interaction(config, num_inputs)
        self.gate = Gating(config.dim)

    def forward(self, x: Tensor) -> Tensor:
        """(B, n, d) -> (B, n_F + n_L, d)."""
        gated: Tensor = self.gate(self.interaction(x))
        return gated

    def flops(self, sizes: BatchSizes) -> dict[str, ModuleFlops]:
        """FLOPs by module."""
        gate = self.gate.flops(sizes.num_samples * self._num_tokens)
        return nest({"interaction": self.interaction.flops(sizes), "gate": gate})


class ExpertSum(nn.Module):
    """Sum of experts in one process. What replaces it over several ranks keeps its own experts under ``experts``."""

    def __init__(self, experts: Iterable[nn.Module]) -> None:
        super().__init__()
        self.experts = nn.ModuleList(experts)

    def forward(self, x: Tensor) -> Tensor:
        """(B, n, d) -> (B, n_F + n_L, d)."""
        first, *others = self.experts
        total: Tensor = first(x)
        for expert in others:
            total = total + expert(x)
        return total


class MixedInteraction(nn.Module):
    """LN(sum of experts): Kunlun's mixture of Wukong experts, all of which read all tokens.

    No sample is routed, as in expert parallelism for dense mixtures (Meta, "GEM Training", 2026-08-03). The norm after
    the sum makes the scale independent of the number of experts.
    """

    def __init__(self, config: RankingConfig, num_inputs: int) -> None:
        super().__init__()
        self._num_experts = config.num_experts
        self.mixture = ExpertSum(Expert(config, num_inputs) for _ in range(config.num_experts))

    def forward(self, x: Tensor) -> Tensor:
        """(B, n, d) -> (B, n_F + n_L, d)."""
        return normalize(self.mixture(x))

    def flops(self, sizes: BatchSizes) -> dict[str, ModuleFlops]:
        """FLOPs by module: of these samples in all experts, wherever the experts are."""
        # All are alike, and there is one here whatever has replaced the sum.
        expert = next(module for module in self.mixture.modules() if isinstance(module, Expert))
        counts = expert.flops(sizes)
        return nest({f"mixture.experts.{position}": counts for position in range(self._num_experts)})
