"""Softmax attention over packed sequences as a plain loop: the oracle of ``gem_kernels.jagged_attention``.

Works in the dtype of its inputs on any device; float64 gives the oracle, the kernel's dtype gives the eager error that
the tests' tolerance is derived from. The backward is the closed form, not autograd.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gem_kernels._src.attention.window import normalize_window, pair_mask


class _Pair(NamedTuple):
    """One query sequence and the keys it reads."""

    q_rows: slice
    """Of q."""
    out_rows: slice
    """Of the output; those of q, unless q holds seeds."""
    k_rows: slice


def _pairs(
    q: Tensor, offsets_q: Tensor | None, offsets_k: Tensor, request_index: Tensor | None
) -> tuple[list[_Pair], int]:
    """Pairs that have a query and a key, and the rows of the output."""
    bounds_k = offsets_k.tolist()
    requests = list(range(len(bounds_k) - 1)) if request_index is None else request_index.tolist()
    bounds_q = [i * q.shape[0] for i in range(len(requests) + 1)] if offsets_q is None else offsets_q.tolist()
    found = []
    for i, r in enumerate(requests):
        out_rows, k_rows = slice(*bounds_q[i : i + 2]), slice(*bounds_k[r : r + 2])
        if out_rows.start < out_rows.stop and k_rows.start < k_rows.stop:
            found.append(_Pair(slice(0, q.shape[0]) if offsets_q is None else out_rows, out_rows, k_rows))
    return found, bounds_q[-1]


def _heads_first(x: Tensor, rows: slice, repeat: int) -> Tensor:
    """(T, H, D) rows of one sequence as (H * repeat, L, D), each head repeated for its group of query heads."""
    return x[rows].transpose(0, 1).repeat_interleave(repeat, dim=0)


def _buckets(times_q: Tensor, times_k: Tensor, per_octave: int, num_buckets: int) -> Tensor:
    """(L_q, L_k) time bucket of each pair."""
    gap = (times_q[:, None] - times_k[None, :]).abs().to(torch.float32).clamp(min=1.0)
    mantissa, exponent = torch.frexp(gap)  # gap = mantissa * 2**exponent, 0.5 <= mantissa < 1
    bucket = per_octave * (exponent - 1) + (per_octave * (2 * mantissa - 1)).floor().nan_to_num(0.0).long()
    return torch.where(torch.isfinite(gap), bucket.clamp(max=num_buckets - 1), num_buckets - 1)


class _Bias:
    """The additive bias of sequence b and the sums of its gradient, by plain indexing."""

    def __init__(
        self,
        position_bias: Tensor | None,
        time_bias: Tensor | None,
        times_q: Tensor | None,
        times_k: Tensor | None,
        per_octave: int,
    ) -> None:
        self.tables = [position_bias, time_bias]
        self.gradients = [None if table is None else torch.zeros_like(table) for table in self.tables]
        self._times_q, self._times_k, self._per_octave = times_q, times_k, per_octave

    def entries(self, rows: slice, keys: slice) -> list[tuple[int, Tensor]]:
        """(table, (L_q, L_k) entry of each pair) for the tables that exist."""
        found = []
        position, time = self.tables
        if position is not None:
            distance = torch.arange(keys.stop - keys.start)[None, :] - torch.arange(rows.stop - rows.start)[:, None]
            radius = position.shape[1] // 2
            found.append((0, (distance.clamp(-radius, radius) + radius).to(position.device)))
        if time is not None:
            assert self._times_q is not None
            assert self._times_k is not None
            found.append((1, _buckets(self._times_q[rows], self._times_k[keys], self._per_octave, time.shape[1])))
        return found

    def add(self, scores: Tensor, rows: slice, keys: slice) -> Tensor:
        """(H, L_q, L_k) scores plus bias."""
        for i, entry in self.entries(rows, keys):
            table = self.tables[i]
            assert table is not None
            scores = scores + table.to(scores.dtype)[:, entry]
        return scores

    def accumulate(self, ds: Tensor, rows: slice, keys: slice) -> None:
        """Add the gradient (H, L_q, L_k) of the scores to the tables' gradients."""
        for i, entry in self.entries(rows, keys):
            gradient = self.gradients[i]
            assert gradient is not None
            gradient.index_add_(1, entry.flatten(), ds.flatten(1).to(gradient.dtype))


def _probabilities(
    qs: Tensor, ks: Tensor, scale: float, left: int, right: int, bias: _Bias, rows: slice, keys: slice
) -> tuple[Tensor, Tensor]:  # (H, L_q, L_k), (H, L_q)
    positions_q = torch.arange(qs.shape[1], device=qs.device)
    positions_k = torch.arange(ks.shape[1], device=qs.device)
    mask = pair_mask(positions_q, positions_k, left, right)
    scores = bias.add(qs @ ks.transpose(1, 2) * scale, rows, keys).masked_fill(~mask, float("-inf"))
    lse = torch.logsumexp(scores, dim=-1)
    # A row without a valid key has lse = -inf; its probabilities are 0, not exp(-inf + inf).
    p = torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0.0)[..., None])
    return p, lse


def jagged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    offsets_q: Tensor | None,
    offsets_k: Tensor,
    scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    position_bias: Tensor | None = None,
    time_bias: Tensor | None = None,
    times_q: Tensor | None = None,
    times_k: Tensor | None = None,
    time_buckets_per_octave: int = 1,
    request_index: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Output (T_q, H, D_v) in the dtype of q and log-sum-exp (T_q, H); arguments as in ``gem_kernels``.

    T_q is B S for seeds.
    """
    scale = q.shape[2] ** -0.5 if scale is None else scale
    left, right = normalize_window(causal, window_size)
    repeat = q.shape[1] // k.shape[1]
    bias = _Bias(position_bias, time_bias, times_q, times_k, time_buckets_per_octave)
    pairs, num_rows = _pairs(q, offsets_q, offsets_k, request_index)
    out = q.new_zeros(num_rows, q.shape[1], v.shape[2])
    lse = q.new_full((num_rows, q.shape[1]), float("-inf"))
    for rows, out_rows, keys in pairs:
        qs, ks, vs = _heads_first(q, rows, 1), _heads_first(k, keys, repeat), _heads_first(v, keys, repeat)
        p, lse_b = _probabilities(qs, ks, scale, left, right, bias, out_rows, keys)
        out[out_rows] = (p @ vs).transpose(0, 1)
        lse[out_rows] = lse_b.transpose(0, 1)
    return out, lse


def jagged_attention_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    offsets_q: Tensor | None,
    offsets_k: Tensor,
    scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    dlse: Tensor | None = None,
    position_bias: Tensor | None = None,
    time_bias: Tensor | None = None,
    times_q: Tensor | None = None,
    times_k: Tensor | None = None,
    time_buckets_per_octave: int = 1,
    request_index: Tensor | None = None,
) -> tuple[Tensor, ...]:
    """Gradients dq, dk, dv from ``do`` (T_q, H, D_v) and, when the caller uses the log-sum-exp, ``dlse`` (T_q, H).

    With P the probabilities: dV = Pᵀ dO, dS = P ⊙ (dO Vᵀ - rowsum(dO ⊙ O) + dlse), dQ = scale dS K, dK = scale dSᵀ Q.
    Then the gradients of those tables that are given, ``position_bias`` first: sums of dS over the pairs of each entry.
    """
    scale = q.shape[2] ** -0.5 if scale is None else scale
    left, right = normalize_window(causal, window_size)
    repeat = q.shape[1] // k.shape[1]
    bias = _Bias(position_bias, time_bias, times_q, times_k, time_buckets_per_octave)
    # Sums over sequences are kept in float32 at least, as one matmul would.
    dq, dk, dv = (torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32)) for x in (q, k, v))
    for rows, out_rows, keys in _pairs(q, offsets_q, offsets_k, request_index)[0]:
        qs, ks, vs = _heads_first(q, rows, 1), _heads_first(k, keys, repeat), _heads_first(v, keys, repeat)
        dos = _heads_first(do, out_rows, 1)
        p, _ = _probabilities(qs, ks, scale, left, right, bias, out_rows, keys)
        dp = dos @ vs.transpose(1, 2)
        delta = (p * dp).sum(dim=-1, keepdim=True)
        if dlse is not None:
            delta = delta - dlse[out_rows].transpose(0, 1)[..., None].to(delta.dtype)
        ds = p * (dp - delta)
        bias.accumulate(ds, out_rows, keys)
        ds = ds * scale
        dq[rows] += (ds @ ks).transpose(0, 1)
        dk[keys] += (ds.transpose(1, 2) @ qs).unflatten(0, (-1, repeat)).sum(1).transpose(0, 1)
        dv[keys] += (p.transpose(1, 2) @ dos).unflatten(0, (-1, repeat)).sum(1).transpose(0, 1)
    return (
        dq.to(q.dtype),
        dk.to(k.dtype),
        dv.to(v.dtype),
        *(gradient for gradient in bias.gradients if gradient is not None),
    )
