"""CPU kernels of GDPA: padded groups of similar length and batched matmuls.

Padded keys and values are zero, so that without a window or targets no score needs a mask: whatever act(0) is, it
meets a zero row.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from gem_kernels._src.attention.batching import Chunk, Group, PackedOutput, compute_dtype, plan_chunks
from gem_kernels._src.attention.pairing import Pairing
from gem_kernels._src.attention.sides import Sides, plan_pairing
from gem_kernels._src.attention.window import pair_mask, target_pair_mask
from gem_kernels._src.gdpa.cpu_activation import cpu_activation


class _Sides(Sides):
    """The rows of one group, and which of their pairs are valid."""

    def __init__(self, pairing: Pairing, group: Group, num_targets: Tensor | None, left: int, right: int) -> None:
        super().__init__(pairing, group)
        self._window = left, right
        self._history: Tensor | None = None  # (n,)
        if num_targets is not None:
            self._history = torch.diff(pairing.offsets_k.long())[group.sequences] - num_targets.long()[group.sequences]

    def chunks(self, num_heads: int) -> list[Chunk]:
        """Chunks that have keys."""
        last = None if self._history is None else int(self._history.min())
        planned = plan_chunks(self.group, num_heads, *self._window, last_position=last)
        return [chunk for chunk in planned if chunk.k_start < chunk.k_stop]

    def zero_invalid(self, x: Tensor, chunk: Chunk) -> Tensor:
        """Zero the invalid pairs of (n * H_kv, G * rows, keys), in place."""
        left, right = self._window
        if left < 0 and right < 0 and self._history is None:
            return x
        rows, keys = torch.arange(chunk.q_start, chunk.q_stop), torch.arange(chunk.k_start, chunk.k_stop)
        if self._history is None:
            invalid = ~pair_mask(rows, keys, left, right)
        else:
            invalid = ~target_pair_mask(rows, keys, self._history, left, right)[:, None]
        x.view(self.group.sequences.numel(), -1, *invalid.shape[-2:]).masked_fill_(invalid, 0.0)
        return x


def _plan(
    pairing: Pairing, num_heads: int, num_targets: Tensor | None, left: int, right: int
) -> Iterator[tuple[_Sides, int]]:
    """The sides of every group, and its number of sequences."""
    for group in plan_pairing(pairing, num_heads):
        yield _Sides(pairing, group, num_targets, left, right), group.sequences.numel()


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pairing: Pairing,
    activation: str,
    pre_scale: float,
    post_scale: float,
    left: int,
    right: int,
    num_targets: Tensor | None,
    num_rows: int,
) -> Tensor:
    """Output (num_rows, H, D_v) in the dtype of q."""
    dtype = compute_dtype(q.dtype)
    act = cpu_activation(activation)
    heads, heads_kv, dim_v = q.shape[1], k.shape[1], v.shape[2]
    repeat = heads // heads_kv
    out = PackedOutput(num_rows, heads, dim_v, q.dtype)
    for sides, n in _plan(pairing, heads, num_targets, left, right):
        len_q = sides.group.len_q
        q_g = sides.gather_q(q, dtype).mul_(pre_scale).view(n * heads_kv, repeat, len_q, -1)
        k_g = sides.rows_k.gather(k, dtype, zero_padding=True)
        v_g = sides.rows_k.gather(v, dtype, zero_padding=True)
        out_g = q_g.new_zeros(n * heads_kv, repeat, len_q, dim_v)
        for chunk in sides.chunks(heads):
            rows, keys = slice(chunk.q_start, chunk.q_stop), slice(chunk.k_start, chunk.k_stop)
            p = act.value(torch.bmm(q_g[:, :, rows].flatten(1, 2), k_g[:, keys].transpose(1, 2)))
            p = sides.zero_invalid(p, chunk)
            out_g[:, :, rows] = torch.bmm(p, v_g[:, keys]).view(n * heads_kv, repeat, rows.stop - rows.start, -1)
        sides.rows_q.scatter(out, out_g.mul_(post_scale))
    return out.packed()


def backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    pairing: Pairing,
    activation: str,
    pre_scale: float,
    post_scale: float,
    left: int,
    right: int,
    num_targets: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients dq, dk, dv in the dtype and shape of q, k, v."""
    dtype = compute_dtype(q.dtype)
    act = cpu_activation(activation)
    heads, heads_kv = q.shape[1], k.shape[1]
    repeat = heads // heads_kv
    shared = pairing.request_index is not None
    # Rows that several sequences add to are summed in the dtype of the computation.
    dq = PackedOutput.like(q, dtype if pairing.broadcast_q else None)
    dk, dv = (PackedOutput.like(x, dtype if shared else None) for x in (k, v))
    for sides, n in _plan(pairing, heads, num_targets, left, right):
        rows_q, rows_k, len_q = sides.rows_q, sides.rows_k, sides.group.len_q
        q_g = sides.gather_q(q, dtype).mul_(pre_scale).view(n * heads_kv, repeat, len_q, -1)
        # Padded queries carry no gradient; post_scale enters once, through do.
        do_g = rows_q.gather(do, dtype, zero_padding=True).mul_(post_scale).view(n * heads_kv, repeat, len_q, -1)
        k_g = rows_k.gather(k, dtype, zero_padding=True)
        v_g = rows_k.gather(v, dtype, zero_padding=True)
        dq_g, dk_g, dv_g = torch.zeros_like(q_g), torch.zeros_like(k_g), torch.zeros_like(v_g)
        for chunk in sides.chunks(heads):
            rows, keys = slice(chunk.q_start, chunk.q_stop), slice(chunk.k_start, chunk.k_stop)
            q_c, do_c = q_g[:, :, rows].flatten(1, 2), do_g[:, :, rows].flatten(1, 2)
            scores = torch.bmm(q_c, k_g[:, keys].transpose(1, 2))
            dp = torch.bmm(do_c, v_g[:, keys].transpose(1, 2))
            ds = sides.zero_invalid(act.gradient(dp, scores), chunk)
            p = sides.zero_invalid(act.value(scores), chunk)
            dv_g[:, keys] += torch.bmm(p.transpose(1, 2), do_c)
            dq_c = torch.bmm(ds, k_g[:, keys]).mul_(pre_scale)
            dq_g[:, :, rows] = dq_c.view(n * heads_kv, repeat, rows.stop - rows.start, -1)
            dk_g[:, keys] += torch.bmm(ds.transpose(1, 2), q_c)
        sides.add_dq(dq, dq_g.view(n * heads, len_q, -1))
        write = rows_k.scatter_add if shared else rows_k.scatter
        write(dk, dk_g)
        write(dv, dv_g)
    return dq.packed().to(q.dtype), dk.packed().to(k.dtype), dv.packed().to(v.dtype)
