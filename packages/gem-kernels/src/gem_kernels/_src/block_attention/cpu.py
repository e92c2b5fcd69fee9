"""CPU kernels of block attention: blocks of similar length padded to batches, one batched matmul per product."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from gem_kernels._src.attention.batching import Group, PackedOutput, Rows, compute_dtype, plan_groups
from gem_kernels._src.block_attention.blocks import block_offsets
from gem_kernels._src.block_attention.rotary import rotate_all


class _Tiles(NamedTuple):
    """The inputs of one group of blocks; n blocks, G query heads per key head, L tokens after padding."""

    rows: Rows
    q: Tensor
    """(n * H_kv, G * L, D), scaled."""
    k: Tensor
    """(n * H_kv, L, D)."""
    v: Tensor
    """(n * H_kv, L, D_v)."""
    p: Tensor
    """(n * H_kv, G * L, L) probabilities, 0 at padded keys."""


def _tiles(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, group: Group, scale: float) -> _Tiles:
    dtype = compute_dtype(q.dtype)
    num_blocks, num_heads_kv = group.sequences.numel(), k.shape[1]
    rows = Rows(offsets, group, group.len_q, group.min_q)
    q_g = rows.gather(q, dtype).mul_(scale).view(num_blocks * num_heads_kv, -1, q.shape[2])
    k_g, v_g = rows.gather(k, dtype), rows.gather(v, dtype)
    scores = torch.bmm(q_g, k_g.transpose(1, 2))
    if rows.tail_padding is not None:
        tail = scores.view(num_blocks, -1, group.len_q)[:, :, group.min_q :]
        tail.masked_fill_(rows.tail_padding[:, None, :], float("-inf"))
    return _Tiles(rows, q_g, k_g, v_g, torch.softmax(scores, dim=-1))


def forward(
    q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, block_size: int, scale: float, rotary: Tensor | None
) -> Tensor:
    """Output (T, H, D_v) in the dtype of q."""
    q, k, v = rotate_all((q, k, v), rotary)
    offsets = block_offsets(offsets, q.shape[0], block_size)
    lengths = torch.diff(offsets)
    out = PackedOutput(q.shape[0], q.shape[1], v.shape[2], q.dtype)
    for group in plan_groups(lengths, lengths, q.shape[1]):
        tiles = _tiles(q, k, v, offsets, group, scale)
        tiles.rows.scatter(out, torch.bmm(tiles.p, tiles.v))
    return out.packed()


def backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets: Tensor,
    block_size: int,
    scale: float,
    rotary: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients dq, dk, dv in the dtype and shape of q, k, v."""
    q, k, v = rotate_all((q, k, v), rotary)
    offsets = block_offsets(offsets, q.shape[0], block_size)
    lengths = torch.diff(offsets)
    dq, dk, dv = (PackedOutput.like(x) for x in (q, k, v))
    for group in plan_groups(lengths, lengths, q.shape[1]):
        tiles = _tiles(q, k, v, offsets, group, scale)
        # Padded queries carry no gradient: with do = 0 their dp and dp - delta are 0.
        do_g = tiles.rows.gather(do, tiles.p.dtype, zero_padding=True).view(*tiles.q.shape[:2], -1)
        dp = torch.bmm(do_g, tiles.v.transpose(1, 2))
        delta = torch.linalg.vecdot(tiles.p, dp)
        ds = dp.sub_(delta[..., None]).mul_(tiles.p)
        tiles.rows.scatter(dv, torch.bmm(tiles.p.transpose(1, 2), do_g))
        tiles.rows.scatter(dk, torch.bmm(ds.transpose(1, 2), tiles.q))
        tiles.rows.scatter(dq, torch.bmm(ds, tiles.k).mul_(scale))
    gradients = rotate_all((dq.packed(), dk.packed(), dv.packed()), rotary, inverse=True)
    return gradients[0], gradients[1], gradients[2]
