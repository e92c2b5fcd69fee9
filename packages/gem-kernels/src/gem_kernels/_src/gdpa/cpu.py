"""CPU kernels of GDPA: padded groups of similar length and batched matmuls.

Padded keys and values are zero, so that without a window no score needs a mask: act(0) = 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gem_kernels._src.attention.batching import Chunk, PackedOutput, Rows, compute_dtype, plan_chunks, plan_groups
from gem_kernels._src.attention.window import pair_mask
from gem_kernels._src.gdpa.cpu_activation import CPU_ACTIVATIONS


def _zero_outside_window(x: Tensor, chunk: Chunk, left: int, right: int) -> Tensor:
    """Zero the pairs of (n * H_kv, G * rows, keys) that the window excludes, in place."""
    if left >= 0 or right >= 0:
        rows, keys = torch.arange(chunk.q_start, chunk.q_stop), torch.arange(chunk.k_start, chunk.k_stop)
        outside = ~pair_mask(rows, keys, left, right)
        x.view(-1, *outside.shape).masked_fill_(outside, 0.0)
    return x


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets_q: Tensor,
    offsets_k: Tensor,
    activation: str,
    pre_scale: float,
    post_scale: float,
    left: int,
    right: int,
) -> Tensor:
    """Output (T_q, H, D_v) in the dtype of q."""
    dtype = compute_dtype(q.dtype)
    act = CPU_ACTIVATIONS[activation]
    heads, heads_kv, dim_v = q.shape[1], k.shape[1], v.shape[2]
    repeat = heads // heads_kv
    out = PackedOutput(q.shape[0], heads, dim_v, q.dtype)
    for group in plan_groups(torch.diff(offsets_q), torch.diff(offsets_k), heads):
        n = group.sequences.numel()
        rows_q = Rows(offsets_q, group, group.len_q, group.min_q)
        rows_k = Rows(offsets_k, group, group.len_k, group.min_k)
        q_g = rows_q.gather(q, dtype).mul_(pre_scale).view(n * heads_kv, repeat, group.len_q, -1)
        k_g = rows_k.gather(k, dtype, zero_padding=True)
        v_g = rows_k.gather(v, dtype, zero_padding=True)
        out_g = q_g.new_zeros(n * heads_kv, repeat, group.len_q, dim_v)
        for chunk in plan_chunks(group, heads, left, right):
            if chunk.k_start == chunk.k_stop:
                continue
            rows, keys = slice(chunk.q_start, chunk.q_stop), slice(chunk.k_start, chunk.k_stop)
            p = act.value(torch.bmm(q_g[:, :, rows].flatten(1, 2), k_g[:, keys].transpose(1, 2)))
            p = _zero_outside_window(p, chunk, left, right)
            out_g[:, :, rows] = torch.bmm(p, v_g[:, keys]).view(n * heads_kv, repeat, rows.stop - rows.start, -1)
        rows_q.scatter(out, out_g.mul_(post_scale))
    return out.packed()


def backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets_q: Tensor,
    offsets_k: Tensor,
    activation: str,
    pre_scale: float,
    post_scale: float,
    left: int,
    right: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients dq, dk, dv in the dtype and shape of q, k, v."""
    dtype = compute_dtype(q.dtype)
    act = CPU_ACTIVATIONS[activation]
    heads, heads_kv = q.shape[1], k.shape[1]
    repeat = heads // heads_kv
    dq, dk, dv = (PackedOutput.like(x) for x in (q, k, v))
    for group in plan_groups(torch.diff(offsets_q), torch.diff(offsets_k), heads):
        n = group.sequences.numel()
        rows_q = Rows(offsets_q, group, group.len_q, group.min_q)
        rows_k = Rows(offsets_k, group, group.len_k, group.min_k)
        q_g = rows_q.gather(q, dtype).mul_(pre_scale).view(n * heads_kv, repeat, group.len_q, -1)
        # Padded queries carry no gradient; post_scale enters once, through do.
        do_g = rows_q.gather(do, dtype, zero_padding=True).mul_(post_scale).view(n * heads_kv, repeat, group.len_q, -1)
        k_g = rows_k.gather(k, dtype, zero_padding=True)
        v_g = rows_k.gather(v, dtype, zero_padding=True)
        dq_g, dk_g, dv_g = torch.zeros_like(q_g), torch.zeros_like(k_g), torch.zeros_like(v_g)
        for chunk in plan_chunks(group, heads, left, right):
            if chunk.k_start == chunk.k_stop:
                continue
            rows, keys = slice(chunk.q_start, chunk.q_stop), slice(chunk.k_start, chunk.k_stop)
            q_c, do_c = q_g[:, :, rows].flatten(1, 2), do_g[:, :, rows].flatten(1, 2)
            scores = torch.bmm(q_c, k_g[:, keys].transpose(1, 2))
            dp = torch.bmm(do_c, v_g[:, keys].transpose(1, 2))
            ds = _zero_outside_window(act.gradient(dp, scores), chunk, left, right)
            p = _zero_outside_window(act.value(scores), chunk, left, right)
            dv_g[:, keys] += torch.bmm(p.transpose(1, 2), do_c)
            dq_c = torch.bmm(ds, k_g[:, keys]).mul_(pre_scale)
            dq_g[:, :, rows] = dq_c.view(n * heads_kv, repeat, rows.stop - rows.start, -1)
            dk_g[:, keys] += torch.bmm(ds.transpose(1, 2), q_c)
        rows_q.scatter(dq, dq_g)
        rows_k.scatter(dk, dk_g)
        rows_k.scatter(dv, dv_g)
    return dq.packed(), dk.packed(), dv.packed()
