"""CPU kernels of jagged attention: padded groups of similar length, batched matmuls, no score matrix of the batch."""

from __future__ import annotations

import torch
from torch import Tensor

from gem_kernels._src.attention.batching import (
    Chunk,
    Group,
    PackedOutput,
    Rows,
    compute_dtype,
    plan_chunks,
    plan_groups,
)
from gem_kernels._src.attention.window import pair_mask


def _mask_scores(scores: Tensor, chunk: Chunk, group: Group, tail: Tensor | None, left: int, right: int) -> None:
    """Write -inf over padded keys and pairs outside the window; scores is (n, H, rows, keys) of one chunk."""
    if tail is not None and chunk.k_stop > group.min_k:
        first = max(chunk.k_start, group.min_k)
        padding = tail[:, None, None, first - group.min_k : chunk.k_stop - group.min_k]
        scores[..., first - chunk.k_start :].masked_fill_(padding, float("-inf"))
    if left >= 0 or right >= 0:
        rows, keys = torch.arange(chunk.q_start, chunk.q_stop), torch.arange(chunk.k_start, chunk.k_stop)
        scores.masked_fill_(~pair_mask(rows, keys, left, right), float("-inf"))


def _scores(
    q_chunk: Tensor, k: Tensor, chunk: Chunk, group: Group, tail: Tensor | None, left: int, right: int, repeat: int
) -> Tensor:
    """(n * H_kv, G * rows, keys) scores of one chunk with -inf where there is no pair; q is scaled already."""
    scores = torch.bmm(q_chunk, k[:, chunk.k_start : chunk.k_stop].transpose(1, 2))
    n = group.sequences.numel()
    shaped = scores.view(n, -1, chunk.q_stop - chunk.q_start, chunk.k_stop - chunk.k_start)
    _mask_scores(shaped, chunk, group, tail, left, right)
    return scores


def forward(
    q: Tensor, k: Tensor, v: Tensor, offsets_q: Tensor, offsets_k: Tensor, scale: float, left: int, right: int
) -> tuple[Tensor, Tensor]:
    """Output (T_q, H, D_v) and log-sum-exp (T_q, H), float32 or wider."""
    dtype = compute_dtype(q.dtype)
    heads, heads_kv, dim_v = q.shape[1], k.shape[1], v.shape[2]
    repeat = heads // heads_kv
    out = PackedOutput(q.shape[0], heads, dim_v, q.dtype)
    lse = PackedOutput(q.shape[0], heads, 1, dtype, fill=float("-inf"))
    for group in plan_groups(torch.diff(offsets_q), torch.diff(offsets_k), heads):
        n = group.sequences.numel()
        rows_q = Rows(offsets_q, group, group.len_q, group.min_q)
        rows_k = Rows(offsets_k, group, group.len_k, group.min_k)
        q_g = rows_q.gather(q, dtype).mul_(scale).view(n * heads_kv, repeat, group.len_q, -1)
        k_g, v_g = rows_k.gather(k, dtype), rows_k.gather(v, dtype)
        out_g = q_g.new_zeros(n * heads_kv, repeat, group.len_q, dim_v)
        lse_g = q_g.new_full((n * heads_kv, repeat, group.len_q, 1), float("-inf"))
        for chunk in plan_chunks(group, heads, left, right):
            if chunk.k_start == chunk.k_stop:
                continue
            q_c = q_g[:, :, chunk.q_start : chunk.q_stop].flatten(1, 2)
            p = _scores(q_c, k_g, chunk, group, rows_k.tail_padding, left, right, repeat)
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
    return out.packed(), lse.packed()[..., 0]


def backward(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    offsets_q: Tensor,
    offsets_k: Tensor,
    scale: float,
    left: int,
    right: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients dq, dk, dv in the dtype and shape of q, k, v."""
    dtype = compute_dtype(q.dtype)
    heads, heads_kv = q.shape[1], k.shape[1]
    repeat = heads // heads_kv
    delta = (do.to(dtype) * out.to(dtype)).sum(-1, keepdim=True)
    if dlse is not None:
        delta -= dlse[..., None].to(dtype)
    # exp(score - inf) = 0 for rows without a key.
    lse = lse.to(dtype)[..., None]
    lse = lse.masked_fill(lse == float("-inf"), float("inf"))
    dq = PackedOutput.like(q)
    dk = PackedOutput.like(k)
    dv = PackedOutput.like(v)
    for group in plan_groups(torch.diff(offsets_q), torch.diff(offsets_k), heads):
        n = group.sequences.numel()
        rows_q = Rows(offsets_q, group, group.len_q, group.min_q)
        rows_k = Rows(offsets_k, group, group.len_k, group.min_k)
        q_g = rows_q.gather(q, dtype).mul_(scale).view(n * heads_kv, repeat, group.len_q, -1)
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
            p = _scores(q_c, k_g, chunk, group, rows_k.tail_padding, left, right, repeat)
            p.sub_(lse_c).exp_()
            dv_g[:, keys] += torch.bmm(p.transpose(1, 2), do_c)
            ds = torch.bmm(do_c, v_g[:, keys].transpose(1, 2)).sub_(delta_c).mul_(p)
            dq_g[:, :, rows] = (
                torch.bmm(ds, k_g[:, keys]).mul_(scale).view(n * heads_kv, repeat, rows.stop - rows.start, -1)
            )
            dk_g[:, keys] += torch.bmm(ds.transpose(1, 2), q_c)
        rows_q.scatter(dq, dq_g)
        rows_k.scatter(dk, dk_g)
        rows_k.scatter(dv, dv_g)
    return dq.packed(), dk.packed(), dv.packed()
