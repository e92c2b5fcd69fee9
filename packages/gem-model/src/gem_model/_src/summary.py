"""The cross step: what a sequence tower learns from the context, and what the context learns from the sequence."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from gem_kernels.modules import JaggedAttention
from gem_model._src.blocks import Gating, SumKronLinear, TokenLinear, activation_module, normalize
from gem_model._src.jagged import Jagged, fixed_offsets
from gem_model.config import RankingConfig, SequenceTowerConfig
from gem_model.flops import BatchSizes, ModuleFlops, attention_flops, linear_flops, nest


class ContextSummary(nn.Module):
    """X_sum = Gating(token-mixing MLP(X)): a few tokens of the tower's width that carry the context."""

    def __init__(self, config: RankingConfig, tower: SequenceTowerConfig, num_inputs: int) -> None:
        super().__init__()
        self._dim, self._num_tokens = config.dim, tower.num_context_tokens
        self.expand = TokenLinear(num_inputs, 2 * tower.num_context_tokens)
        self.activation = activation_module(config.activation)
        self.contract = TokenLinear(2 * tower.num_context_tokens, tower.num_context_tokens)
        if tower.dim != config.dim:
            self.width = nn.Linear(config.dim, tower.dim)
        self.gating = Gating(tower.dim)
        self._changes_width = tower.dim != config.dim

    def forward(self, x: Tensor) -> Tensor:
        """(B, n, d) -> (B, n_sum, d_tower)."""
        x = self.contract(self.activation(self.expand(x)))
        return self.gating(self.width(x) if self._changes_width else x)

    def flops(self, sizes: BatchSizes) -> dict[str, ModuleFlops]:
        """FLOPs by module."""
        rows = sizes.num_samples * self._num_tokens
        children = {
            "expand": self.expand.flops(sizes.num_samples, self._dim),
            "contract": self.contract.flops(sizes.num_samples, self._dim),
            "gating": self.gating.flops(rows),
        }
        own = ModuleFlops(gemm=linear_flops(self.width, rows)) if self._changes_width else None
        return nest(children, own)


class SequencePooling(nn.Module):
    """S_sum = Gating([target-aware pooling ‖ hierarchical seed pooling ‖ recent tokens]).

    The context tokens (target-aware pooling: InterFormer's PMA with queries that know the candidate) and learned seeds
    (HSP, Kunlun) attend over the same keys and values in one jagged attention. SumKronLinear compresses what the seeds
    found and is their output projection. Without `project_pooling` the events themselves are keys and values: each head
    reads its slice of their columns, and what stands there the layers before learn.
    """

    def __init__(self, config: RankingConfig, tower: SequenceTowerConfig) -> None:
        super().__init__()
        self._tower = tower
        self.has_recent = tower.num_recent > 0
        self.query = nn.Linear(tower.dim, tower.dim)
        if tower.project_pooling:
            # A bias of the keys would not change a softmax, and the output projection has one for the values.
            self.key = nn.Linear(tower.dim, tower.dim, bias=False)
            self.value = nn.Linear(tower.dim, tower.dim, bias=False)
        self.attention = JaggedAttention()
        self.output = nn.Linear(tower.dim, tower.dim)
        if tower.num_seeds:
            self.seeds = nn.Parameter(torch.empty(tower.num_seeds, tower.dim))
            self.seed_query = nn.Linear(tower.dim, tower.dim)
            self.compress = SumKronLinear(tower.num_seeds, tower.num_seed_tokens, tower.dim, tower.kron_rank)
            nn.init.normal_(self.seeds)
        self._changes_width = tower.dim != config.dim
        if self._changes_width:
            self.width = nn.Linear(tower.dim, config.dim)
        self.gating = Gating(config.dim)

    def forward(
        self, x_sum: Tensor, s: Jagged, keys_and_values: tuple[Tensor, Tensor], recent: Tensor | None
    ) -> Tensor:
        """X_sum (B, n_sum, d_tower), normalised events (T, d_tower) and the latest of them -> (B, num_pooled, d)."""
        return self.summarize(self.attend(self.queries(x_sum), s, keys_and_values), recent)

    def queries(self, x_sum: Tensor) -> Tensor:
        """X_sum (B, n_sum, d_tower) -> what attends over the events, (B, num_queries, d_tower)."""
        queries: Tensor = self.query(normalize(x_sum))
        if self._tower.num_seeds:
            # Copied first: torch joins what lies in one piece at twice the rate.
            seeds = self.seed_query(normalize(self.seeds)).expand(x_sum.shape[0], -1, -1).contiguous()
            queries = torch.cat((queries, seeds), dim=1)
        return queries

    def attend(self, queries: Tensor, s: Jagged, keys_and_values: tuple[Tensor, Tensor]) -> Tensor:
        """(B, num_queries, d_tower) over the normalised events -> (B, num_queries, d_tower)."""
        tower = self._tower
        num_samples, num_queries = queries.shape[:2]
        heads = (tower.num_heads, tower.head_dim)
        keys, values = keys_and_values
        if tower.project_pooling:
            keys, values = self.key(keys), self.value(values)
        keys_are_values = keys is values
        keys = keys.view(-1, *heads)
        # One tensor where they are one: the attention then makes one gradient.
        values = keys if keys_are_values else values.view(-1, *heads)
        pooled: Tensor = self.attention(
            queries.reshape(num_samples * num_queries, *heads),
            keys,
            values,
            offsets_q=fixed_offsets(num_samples, num_queries, queries.device).to(s.offsets.dtype),
            offsets_k=s.offsets,
            max_seqlen_q=num_queries,
            max_seqlen_k=s.max_seqlen,
        )
        return pooled.view(num_samples, num_queries, tower.dim)

    def summarize(self, pooled: Tensor, recent: Tensor | None) -> Tensor:
        """What the queries found (B, num_queries, d_tower), and the latest events -> (B, num_pooled, d)."""
        num_context, num_seeds = self._tower.num_context_tokens, self._tower.num_seeds
        # One split and no two slices: the gradients are joined, not each laid in zeros and added.
        found, *found_by_seeds = pooled.split([num_context, num_seeds] if num_seeds else num_context, dim=1)
        tokens = [self.output(found), *(self.compress(x) for x in found_by_seeds)]
        if recent is not None:
            tokens.append(recent.to(tokens[0].dtype))
        s_sum = torch.cat(tokens, dim=1)
        s_sum = self.width(s_sum) if self._changes_width else s_sum
        gated: Tensor = self.gating(s_sum)
        return gated

    def flops(self, sizes: BatchSizes) -> dict[str, ModuleFlops]:
        """FLOPs by module."""
        tower, rows = self._tower, sizes.num_samples
        num_events = sizes.num_events(tower.name)
        num_context = rows * tower.num_context_tokens
        num_pooled = rows * tower.num_pooled_tokens
        own = linear_flops(self.query, num_context) + linear_flops(self.output, num_context)
        if tower.project_pooling:
            own += linear_flops(self.key, num_events) + linear_flops(self.value, num_events)
        pairs = num_events * (tower.num_context_tokens + tower.num_seeds)
        children = {
            "attention": {"": ModuleFlops(attention=attention_flops(pairs, tower.dim))},
            "gating": self.gating.flops(num_pooled),
        }
        if tower.num_seeds:
            own += linear_flops(self.seed_query, tower.num_seeds)
            children["compress"] = self.compress.flops(rows)
        if self._changes_width:
            own += linear_flops(self.width, num_pooled)
        return nest(children, ModuleFlops(gemm=own))


class CrossSummary(NamedTuple):
    """What one cross step gives."""

    x_sum: Tensor
    """(B, n_sum, d_tower)."""
    s_sum: Tensor
    """(B, num_pooled_tokens, d)."""


class Cross(nn.Module):
    """Both directions of the cross step for one tower."""

    def __init__(self, config: RankingConfig, tower: SequenceTowerConfig, num_inputs: int) -> None:
        super().__init__()
        self.context = ContextSummary(config, tower, num_inputs)
        self.pooling = SequencePooling(config, tower)

    def forward(
        self, x: Tensor, s: Jagged, keys_and_values: tuple[Tensor, Tensor], recent: Tensor | None
    ) -> CrossSummary:
        """Context tokens (B, n, d) and a tower's events.

        ``s`` is their layout; read are the normalised events, as keys and as values (T, d_tower), which may be one
        tensor, and the latest of them (B, num_recent, d_tower).
        """
        x_sum = self.context(x)
        return CrossSummary(x_sum, self.pooling(x_sum, s, keys_and_values, recent))

    def before_events(self, x: Tensor) -> tuple[Tensor]:
        """Context tokens (B, n, d) -> pooling queries (B, num_queries, d_tower)."""
        return (self.pooling.queries(self.context(x)),)

    def flops(self, sizes: BatchSizes) -> dict[str, ModuleFlops]:
        """FLOPs by module."""
        return nest({"context": self.context.flops(sizes), "pooling": self.pooling.flops(sizes)})
