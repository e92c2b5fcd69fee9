"""One layer of a sequence tower: cross step, GDPA-PFFN, self-attention."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from gem_kernels.join_columns import split_thirds
from gem_kernels.modules import GDPA, BlockAttention, JaggedAttention
from gem_model._src.blocks import normalize
from gem_model._src.event_norm import normalize_events
from gem_model._src.fused import fuses_norm_block, joins_products
from gem_model._src.jagged import Jagged, fixed_offsets
from gem_model._src.rms_norm import rms_norm
from gem_model._src.summary import Cross
from gem_model.config import RankingConfig, SelfAttention, SequenceTowerConfig
from gem_model.flops import BatchSizes, ModuleFlops, attention_flops, linear_flops, nest


class PersonalizedFeedForward(nn.Module):
    """GDPA-PFFN: a feed-forward layer over the events whose weights are made from the context (Kunlun, InterFormer).

    With q = LN(S), K = w1(X_sum) and V = w2(X_sum) per head: S + RMSNorm(c act(q Kᵀ / sqrt(D)) V + q). The n_sum tokens
    are the hidden units. q has unit variance and so have the scores; c = 1 / sqrt(n_sum) keeps the sum over hidden
    units at unit variance too.
    """

    def __init__(self, tower: SequenceTowerConfig) -> None:
        super().__init__()
        self._tower = tower
        self.key = nn.Linear(tower.dim, tower.dim)
        self.value = nn.Linear(tower.dim, tower.dim)
        self.attention = GDPA(
            activation=tower.pffn_activation,
            pre_scale=1.0 / math.sqrt(tower.head_dim),
            post_scale=1.0 / math.sqrt(tower.num_context_tokens),
        )
        self.dropout = nn.Dropout(tower.dropout)

    def forward(self, s: Jagged, normalized: Tensor, x_sum: Tensor) -> Tensor:
        """Events (T, d), the same normalised, and context tokens (B, n_sum, d) -> (T, d)."""
        return self.apply_weights(s, normalized, *self.make_weights(x_sum))

    def make_weights(self, x_sum: Tensor) -> tuple[Tensor, Tensor]:
        """Context tokens (B, n_sum, d) -> keys and values, (B, n_sum, d) each."""
        x_sum = normalize(x_sum)
        return self.key(x_sum), self.value(x_sum)

    def apply_weights(self, s: Jagged, normalized: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """Events (T, d), the same normalised, and what `make_weights` gives -> (T, d)."""
        num_samples, num_tokens = keys.shape[:2]
        heads = (self._tower.num_heads, self._tower.head_dim)
        keys, values = (x.reshape(num_samples * num_tokens, *heads) for x in (keys, values))
        layout = {
            "offsets_q": s.offsets,
            "offsets_k": fixed_offsets(num_samples, num_tokens, keys.device).to(s.offsets.dtype),
            "max_seqlen_q": s.max_seqlen,
            "max_seqlen_k": num_tokens,
        }
        dropout = self.dropout.p if self.training else 0.0
        if fuses_norm_block(self.attention, s.values, keys, dropout):
            block: Tensor = self.attention(s.values.view(-1, *heads), keys, values, **layout, norm_block=True)
            # A sharded module must not return a view; nobody else holds this tensor, so it need not be one.
            rows: Tensor = torch.ops.aten._unsafe_view.default(block, (-1, self._tower.dim))
            return rows
        out = self.attention(normalized.to(keys.dtype).view(-1, *heads), keys, values, **layout)
        return s.values + self.dropout(rms_norm(out.view(-1, self._tower.dim) + normalized))

    def flops(self, sizes: BatchSizes) -> dict[str, ModuleFlops]:
        """FLOPs by module."""
        tower = self._tower
        rows = sizes.num_samples * tower.num_context_tokens
        pairs = sizes.num_events(tower.name) * tower.num_context_tokens
        return nest(
            {"attention": {"": ModuleFlops(attention=attention_flops(pairs, tower.dim))}},
            ModuleFlops(gemm=linear_flops(self.key, rows) + linear_flops(self.value, rows)),
        )


class EventSelfAttention(nn.Module):
    """S + W_o attention(LN(S)), bidirectional within a sliding window or within diagonal blocks."""

    def __init__(self, tower: SequenceTowerConfig, kind: SelfAttention) -> None:
        super().__init__()
        self._tower, self._kind = tower, kind
        self.query = nn.Linear(tower.dim, tower.dim)
        self.key = nn.Linear(tower.dim, tower.dim, bias=False)
        self.value = nn.Linear(tower.dim, tower.dim, bias=False)
        self.attention: nn.Module
        if kind == "window":
            self.attention = JaggedAttention(window_size=(tower.window, tower.window))
        else:
            self.attention = BlockAttention(block_size=tower.block_size)
        self.output = nn.Linear(tower.dim, tower.dim)
        self.dropout = nn.Dropout(tower.dropout)

    def forward(self, s: Jagged) -> Tensor:
        """(T, d) -> (T, d)."""
        tower = self._tower
        joins = self._kind == "window" and joins_products((self.query, self.key, self.value), s.values)
        events = normalize_events(s.values, s.offsets, num_recent=0, num_readers=1 if joins else 3)
        q, k, v = (
            x.view(-1, tower.num_heads, tower.head_dim) for x in self._projections(events.normalized, joins=joins)
        )
        if self._kind == "window":
            out = self.attention(
                q,
                k,
                v,
                offsets_q=s.offsets,
                offsets_k=s.offsets,
                max_seqlen_q=s.max_seqlen,
                max_seqlen_k=s.max_seqlen,
            )
        else:
            out = self.attention(q, k, v, offsets=s.offsets, max_seqlen=s.max_seqlen)
        return events.rows + self.dropout(self.output(out.view(-1, tower.dim)))

    def _projections(self, readers: tuple[Tensor, ...], *, joins: bool) -> tuple[Tensor, ...]:
        """Queries, keys and values (T, d) of the normalised events, by one product or three."""
        layers = (self.query, self.key, self.value)
        if joins:
            weight = torch.cat((self.query.weight, self.key.weight, self.value.weight))
            # Only queries have a bias.
            joined = self.query.product(readers[0], weight, self.query.bias)  # type: ignore[operator]
            if joined is not None:
                return split_thirds(joined)
            readers = readers * 3
        return tuple(f(x) for f, x in zip(layers, readers, strict=True))

    def flops(self, sizes: BatchSizes) -> dict[str, ModuleFlops]:
        """FLOPs by module."""
        tower = self._tower
        rows = sizes.num_events(tower.name)
        if self._kind == "window":
            pairs = sizes.window_pairs(tower.name, tower.window)
        else:
            pairs = sizes.block_pairs(tower.name, tower.block_size)
        return nest(
            {"attention": {"": ModuleFlops(attention=attention_flops(pairs, tower.dim))}},
            ModuleFlops(gemm=sum(linear_flops(x, rows) for x in (self.query, self.key, self.value, self.output))),
        )


class SequenceLayerOutput(NamedTuple):
    """What a sequence layer gives."""

    s_sum: Tensor
    """(B, num_pooled_tokens, d) for the interaction of the same layer."""
    values: Tensor
    """(T, d_tower) for the next layer."""


class SequenceLayer(nn.Module):
    """Cross step, then PFFN, then self-attention unless the layer skips it."""

    def __init__(
        self, config: RankingConfig, tower: SequenceTowerConfig, num_inputs: int, self_attention: SelfAttention
    ) -> None:
        super().__init__()
        self._num_recent = tower.num_recent
        # Keys and values of the pooling are two readers where each is projected; the PFFN's queries are one more.
        self._num_readers = 3 if tower.project_pooling else 2
        self.cross = Cross(config, tower, num_inputs)
        self.feed_forward = PersonalizedFeedForward(tower)
        self.has_self_attention = self_attention != "none"
        if self.has_self_attention:
            self.self_attention = EventSelfAttention(tower, self_attention)

    def forward(self, x: Tensor, s: Jagged) -> SequenceLayerOutput:
        """Context tokens (B, n, d) and events (T, d_tower)."""
        # One LayerNorm serves the pooling's keys and values and the PFFN's queries.
        events = normalize_events(s.values, s.offsets, self._num_recent, self._num_readers)
        x_sum, s_sum = self.cross(x, s, (events.normalized[0], events.normalized[-2]), events.recent)
        queries = events.normalized[-1]
        values = self.feed_forward(s._replace(values=events.rows), queries, x_sum)
        if self.has_self_attention:
            values = self.self_attention(s._replace(values=values))
        return SequenceLayerOutput(s_sum, values)

    def before_events(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """What the events meet, made of context tokens (B, n, d): pooling queries, and keys and values of the PFFN."""
        x_sum = self.cross.context(x)
        keys, values = self.feed_forward.make_weights(x_sum)
        return self.cross.pooling.queries(x_sum), keys, values

    def over_events(
        self, s: Jagged, queries: Tensor, keys: Tensor, values: Tensor
    ) -> tuple[Tensor, Tensor | None, Tensor]:
        """The part of the layer whose sizes change with every batch.

        Returns:
            What the queries found (B, num_queries, d_tower), the latest events (B, num_recent, d_tower) or None, and
            the events for the next layer (T, d_tower).
        """
        events = normalize_events(s.values, s.offsets, self._num_recent, self._num_readers)
        pooled = self.cross.pooling.attend(queries, s, (events.normalized[0], events.normalized[-2]))
        rows = self.feed_forward.apply_weights(s._replace(values=events.rows), events.normalized[-1], keys, values)
        if self.has_self_attention:
            rows = self.self_attention(s._replace(values=rows))
        return pooled, events.recent, rows

    def flops(self, sizes: BatchSizes) -> dict[str, ModuleFlops]:
        """FLOPs by module."""
        children = {"cross": self.cross.flops(sizes), "feed_forward": self.feed_forward.flops(sizes)}
        if self.has_self_attention:
            children["self_attention"] = self.self_attention.flops(sizes)
        return nest(children)
