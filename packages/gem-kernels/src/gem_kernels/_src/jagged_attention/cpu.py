"""CPU kernels of jagged attention: padded groups of similar length, batched matmuls, no score matrix of the batch."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from gem_kernels._src.attention.batching import Chunk, Group, PackedOutput, Rows, compute_dtype, plan_chunks
from gem_kernels._src.attention.pairing import Pairing
from gem_kernels._src.attention.sides import Sides, plan_pairing
from gem_kernels._src.attention.window import pair_mask
from gem_kernels._src.jagged_attention.bias import Bias, position_index, time_buckets
from gem_kernels._src.results import as_result


def _mask_scores(scores: Tensor, chunk: Chunk, group: Group, tail: Tensor | None, left: int, right: int) -> None:
    """Write -inf over padded keys and pairs outside the window; scores is (n, H, rows, keys) of one chunk."""
    if tail is not None and chunk.k_stop > group.min_k:
        first = max(chunk.k_start, group.min_k)
        padding = tail[:, None, None, first - group.min_k : chunk.k_stop - group.min_k]
        scores[..., first - chunk.k_start :].masked_fill_(padding, float("-inf"))
    if left >= 0 or right >= 0:
        rows, keys = torch.arange(chunk.q_start, chunk.q_stop), torch.arange(chunk.k_start, chunk.k_stop)
        scores.masked_fill_(~pair_mask(rows, keys, left, right), float("-inf"))


def _plan(pairing: Pairing, num_heads: int) -> Iterator[Sides]:
    return (Sides(pairing, group) for group in plan_pairing(pairing, num_heads))


class _GroupBias:
    """The bias of one group of sequences; adds nothing where there is none."""

    def __init__(self, bias: Bias, rows_q: Rows, rows_k: Rows) -> None:
        self._bias = bias
        self._times: tuple[Tensor, Tensor] | None = None
        if bias.times_q is not None and bias.times_k is not None:
            gather = [
                rows.gather(times[:, None, None], times.dtype)[..., 0]  # (n, L)
                for rows, times in ((rows_q, bias.times_q), (rows_k, bias.times_k))
            ]
            self._times = (gather[0], gather[1])

    def position_index(self, chunk: Chunk) -> Tensor:
        """(rows, keys) entry of the position table."""
        rows, keys = torch.arange(chunk.q_start, chunk.q_stop), torch.arange(chunk.k_start, chunk.k_stop)
        return position_index(rows, keys, self._bias.radius)

    def time_buckets(self, chunk: Chunk) -> Tensor:
        """(n, rows, keys) entry of the time table."""
        assert self._times is not None
        times_q, times_k = (
            self._times[0][:, chunk.q_start : chunk.q_stop],
            self._times[1][:, chunk.k_start : chunk.k_stop],
        )
        return time_buckets(times_q, times_k, self._bias.buckets_per_octave, self._bias.num_buckets)

    def add(self, scores: Tensor, chunk: Chunk) -> None:
        """Add the bias to the (n, H, rows, keys) scores of one chunk."""
        if self._bias.position is not None:
            scores.add_(self._bias.position[:, self.position_index(chunk)])
        if self._bias.time is not None:
            scores.add_(self._bias.time[:, self.time_buckets(chunk)].transpose(0, 1))


def _scores(
    q_chunk: Tensor,
    k: Tensor,
    chunk: Chunk,
    group: Group,
    tail: Tensor | None,
    left: int,
    right: int,
    bias: _GroupBias,
) -> Tensor:
    """(n * H_kv, G * rows, keys) scores of one chunk with -inf where there is no pair; q is scaled already."""
    scores = torch.bmm(q_chunk, k[:, chunk.k_start : chunk.k_stop].transpose(1, 2))
    n = group.sequences.numel()
    shaped = scores.view(n, -1, chunk.q_stop - chunk.q_start, chunk.k_stop - chunk.k_start)
    bias.add(shaped, chunk)
    _mask_scores(shaped, chunk, group, tail, left, right)
    return scores


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pairing: Pairing,
    scale: float,
    left: int,
    right: int,
    bias: Bias,
) -> tuple[Tensor, Tensor]:
    """Output (T_q, H, D_v) and log-sum-exp (T_q, H), float32 or wider."""
    dtype = compute_dtype(q.dtype)
    heads, heads_kv, dim_v = q.shape[1], k.shape[1], v.shape[2]
    repeat = heads // heads_kv
    bias = bias.tables(dtype)
    num_rows = pairing.num_queries * q.shape[0] if pairing.broadcast_q else q.shape[0]
    out = PackedOutput(num_rows, heads, dim_v, q.dtype)
    lse = PackedOutput(num_rows, heads, 1, dtype, fill=float("-inf"))
    for sides in _plan(pairing, heads):
        group, rows_q, rows_k = sides.group, sides.rows_q, sides.rows_k
        n = group.sequences.numel()
        bias_g = _GroupBias(bias, rows_q, rows_k)
        q_g = sides.gather_q(q, dtype).mul_(scale).view(n * heads_kv, repeat, group.len_q, -1)
        k_g, v_g = rows_k.gather(k, dtype), rows_k.gather(v, dtype)
        out_g = q_g.new_zeros(n * heads_kv, repeat, group.len_q, dim_v)
        lse_g = q_g.new_full((n * heads_kv, repeat, group.len_q, 1), float("-inf"))
        for chunk in plan_chunks(group, heads, left, right):
            if chunk.k_start == chunk.k_stop:
                continue
            q_c = q_g[:, :, chunk.q_start : chunk.q_stop].flatten(1, 2)
            p = _scores(q_c, k_g, chunk, group, rows_k.tail_padding, left, right, bias_g)
            # A row without a key has maximum -inf; subtracting 0 instead leaves exp(-inf) = 0.
            top = p.amax(-1, keepdim=True)
            p.sub_(top.masked_fill(top == float("-inf"), 0.0)).exp_()
            total = p.sum(-1, keepdim=True)
            value = torch.bmm(p, v_g[:, chunk.k_start : chunk.k_stop]).div_(total.masked_fill(total == 0.0, 1.0))
            shape = (n * heads_kv, repeat, chunk.q_stop - chunk.q_start, -1)
            out_g[:, :, chunk.q_start : chunk.q_stop] = value.view(shape)
            lse_g[:, :, chunk.q_start : chunk.q_stop] = total.log_().add_(top).view(shape)
        rows_q.scatter(out, out_g)
        rows_q.scatter(lse, lse_g)
    return out.packed(), as_result(lse.packed()[..., 0])


def backward(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    pairing: Pairing,
    scale: float,
    left: int,
    right: int,
    bias: Bias,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients dq, dk, dv in the dtype and shape of q, k, v."""
    dtype = compute_dtype(q.dtype)
    heads, heads_kv = q.shape[1], k.shape[1]
    repeat = heads // heads_kv
    bias = bias.tables(dtype)
    delta = (do.to(dtype) * out.to(dtype)).sum(-1, keepdim=True)
    if dlse is not None:
        delta -= dlse[..., None].to(dtype)
    # exp(score - inf) = 0 for rows without a key.
    lse = lse.to(dtype)[..., None]
    lse = lse.masked_fill(lse == float("-inf"), float("inf"))
    # Rows that several sequences add to are summed in the dtype of the computation.
    shared = pairing.request_index is not None
    dq = PackedOutput.like(q, dtype if pairing.broadcast_q else None)
    dk, dv = (PackedOutput.like(x, dtype if shared else None) for x in (k, v))
    for sides in _plan(pairing, heads):
        group, rows_q, rows_k = sides.group, sides.rows_q, sides.rows_k
        n = group.sequences.numel()
        bias_g = _GroupBias(bias, rows_q, rows_k)
        q_g = sides.gather_q(q, dtype).mul_(scale).view(n * heads_kv, repeat, group.len_q, -1)
        # Padded queries carry no gradient: their do, and with it dp - delta, is 0.
        do_g = rows_q.gather(do, dtype, zero_padding=True).view(n * heads_kv, repeat, group.len_q, -1)
        delta_g = rows_q.gather(delta, dtype, zero_padding=True).view(n * heads_kv, repeat, group.len_q, 1)
        lse_g = rows_q.gather(lse, dtype).view(n * heads_kv, repeat, group.len_q, 1)
        k_g, v_g = rows_k.gather(k, dtype), rows_k.gather(v, dtype)
        dq_g, dk_g, dv_g = torch.zeros_like(q_g), torch.zeros_like(k_g), torch.zeros_like(v_g)
        for chunk in plan_chunks(group, heads, left, right):
            if chunk.k_start == chunk.k_stop:
                continue
            rows = slice(chunk.q_start, chunk.q_stop)
            keys = slice(chunk.k_start, chunk.k_stop)
            q_c, do_c, delta_c, lse_c = (x[:, :, rows].flatten(1, 2) for x in (q_g, do_g, delta_g, lse_g))
            p = _scores(q_c, k_g, chunk, group, rows_k.tail_padding, left, right, bias_g)
            p.sub_(lse_c).exp_()
            dv_g[:, keys] += torch.bmm(p.transpose(1, 2), do_c)
            ds = torch.bmm(do_c, v_g[:, keys].transpose(1, 2)).sub_(delta_c).mul_(p)
            dq_g[:, :, rows] = (
                torch.bmm(ds, k_g[:, keys]).mul_(scale).view(n * heads_kv, repeat, rows.stop - rows.start, -1)
            )
            dk_g[:, keys] += torch.bmm(ds.transpose(1, 2), q_c)
        sides.add_dq(dq, dq_g.view(n * heads, group.len_q, -1))
        write = rows_k.scatter_add if shared else rows_k.scatter
        write(dk, dk_g)
        write(dv, dv_g)
    return dq.packed().to(q.dtype), dk.packed().to(k.dtype), dv.packed().to(v.dtype)


def _sum_by_position(ds: Tensor, chunk: Chunk, radius: int) -> Tensor:
    """(H, 2 radius + 1) sums of ds (H, rows, keys) over the pairs of each entry."""
    num_heads, num_rows, num_keys = ds.shape
    # Rows from the last to the first, each one entry longer: read with the old stride, diagonals are columns.
    sheared = pad(ds.flip(1), (0, num_rows)).flatten(1)[:, :-num_rows]
    diagonals = sheared.view(num_heads, num_rows, num_rows + num_keys - 1).sum(1)
    distance = torch.arange(1 - num_rows, num_keys) + (chunk.k_start - chunk.q_start)
    return ds.new_zeros(num_heads, 2 * radius + 1).index_add_(1, distance.clamp(-radius, radius) + radius, diagonals)


def backward_tables(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    pairing: Pairing,
    scale: float,
    left: int,
    right: int,
    bias: Bias,
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients (H, 2 P + 1) of the position table and (H, N) of the time table, summed in float64."""
    dtype = compute_dtype(q.dtype)
    heads, heads_kv = q.shape[1], k.shape[1]
    repeat = heads // heads_kv
    bias = bias.tables(dtype)
    delta = (do.to(dtype) * out.to(dtype)).sum(-1, keepdim=True)
    if dlse is not None:
        delta -= dlse[..., None].to(dtype)
    lse = lse.to(dtype)[..., None]
    lse = lse.masked_fill(lse == float("-inf"), float("inf"))
    dposition = None if bias.position is None else bias.position.new_zeros(bias.position.shape, dtype=torch.float64)
    dtime = None if bias.time is None else bias.time.new_zeros(bias.time.shape, dtype=torch.float64)
    for sides in _plan(pairing, heads):
        group, rows_q, rows_k = sides.group, sides.rows_q, sides.rows_k
        n = group.sequences.numel()
        bias_g = _GroupBias(bias, rows_q, rows_k)
        q_g = sides.gather_q(q, dtype).mul_(scale).view(n * heads_kv, repeat, group.len_q, -1)
        # Padded queries: do and delta of 0 make dS 0.
        do_g = rows_q.gather(do, dtype, zero_padding=True).view(n * heads_kv, repeat, group.len_q, -1)
        delta_g = rows_q.gather(delta, dtype, zero_padding=True).view(n * heads_kv, repeat, group.len_q, 1)
        lse_g = rows_q.gather(lse, dtype).view(n * heads_kv, repeat, group.len_q, 1)
        k_g, v_g = rows_k.gather(k, dtype), rows_k.gather(v, dtype)
        for chunk in plan_chunks(group, heads, left, right):
            if chunk.k_start == chunk.k_stop:
                continue
            rows, keys = slice(chunk.q_start, chunk.q_stop), slice(chunk.k_start, chunk.k_stop)
            q_c, do_c, delta_c, lse_c = (x[:, :, rows].flatten(1, 2) for x in (q_g, do_g, delta_g, lse_g))
            p = _scores(q_c, k_g, chunk, group, rows_k.tail_padding, left, right, bias_g)
            p.sub_(lse_c).exp_()
            ds = torch.bmm(do_c, v_g[:, keys].transpose(1, 2)).sub_(delta_c).mul_(p)
            ds = ds.view(n, heads, rows.stop - rows.start, keys.stop - keys.start)
            if dposition is not None:
                dposition += _sum_by_position(ds.sum(0, dtype=torch.float64), chunk, bias.radius)
            if dtime is not None:
                buckets = (
                    bias_g.time_buckets(chunk)[:, None] + torch.arange(heads).mul_(bias.num_buckets)[:, None, None]
                )
                sums = torch.bincount(buckets.flatten(), weights=ds.flatten().double(), minlength=dtime.numel())
                dtime += sums.view(dtime.shape)
    return dposition, dtime
