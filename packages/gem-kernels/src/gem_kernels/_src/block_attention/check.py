"""Input checks of block attention."""

from __future__ import annotations

import torch
from torch import Tensor

from gem_kernels._src.block_attention.configs import BLOCK_SIZES
from gem_kernels._src.validate import (
    DtypeError,
    check_capacity,
    check_int,
    check_max_seqlen,
    check_offset_values,
    check_offsets,
    check_same,
    check_tensor,
    check_values,
)

NAME = "block_attention"


def check_block_size(op: str, block_size: int) -> None:
    """Raise unless ``block_size`` is one that the kernels are built for."""
    check_int(op, "block_size", block_size)
    if block_size not in BLOCK_SIZES:
        raise ValueError(
            f"{op}: `block_size` must be one of {', '.join(map(str, BLOCK_SIZES))}, got {block_size}; choose one of "
            "them."
        )


def check_inputs(q: Tensor, k: Tensor, v: Tensor, offsets: Tensor, max_seqlen: int, block_size: int) -> None:
    """Raise on any shape, dtype or device mismatch; never reads tensor data."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_values(NAME, name, x)
    check_same(NAME, {"q": q, "k": k, "v": v})
    for name, x in (("k", k), ("v", v)):
        if x.shape[0] != q.shape[0]:
            raise ValueError(
                f"{NAME}: `{name}` must have as many rows as `q`, {q.shape[0]}, got {x.shape[0]}; use "
                "jagged_attention for keys of other lengths."
            )
    if k.shape[2] != q.shape[2]:
        raise ValueError(
            f"{NAME}: `k` must have the head dim of `q`, {q.shape[2]}, got {k.shape[2]}; project both to one width."
        )
    if v.shape[1] != k.shape[1]:
        raise ValueError(
            f"{NAME}: `v` must have as many heads as `k`, {k.shape[1]}, got {v.shape[1]}; give both the same number of "
            "heads."
        )
    if q.shape[1] % k.shape[1] != 0:
        raise ValueError(
            f"{NAME}: the heads of `k` must divide the heads of `q`, got {k.shape[1]} and {q.shape[1]}; "
            "repeat or drop heads so that they do."
        )
    check_offsets(NAME, "offsets", offsets, q)
    check_max_seqlen(NAME, "max_seqlen", max_seqlen)
    check_block_size(NAME, block_size)


def check_rotary(rotary: Tensor | None, q: Tensor, v: Tensor) -> None:
    """Raise unless ``rotary`` is a table of sines and cosines for every row and pair of channels of q, k and v."""
    if rotary is None:
        return
    if not isinstance(rotary, Tensor):
        raise TypeError(
            f"{NAME}: `rotary` must be a Tensor or None, got {type(rotary).__name__}; convert it with torch.as_tensor."
        )
    check_tensor(NAME, "rotary", rotary)
    dim = q.shape[2]
    if dim % 2 != 0:
        raise ValueError(
            f"{NAME}: `rotary` rotates pairs of channels: the head dim of `q` must be even, got {dim}; use an even "
            "one, or rotate q and k before."
        )
    if v.shape[2] != dim:
        raise ValueError(
            f"{NAME}: `rotary` rotates `v` too: its head dim must be that of `q`, {dim}, got {v.shape[2]}; project "
            "both to one width, or rotate q and k before."
        )
    if rotary.dim() != 2 or rotary.shape[0] != q.shape[0] or rotary.shape[1] != dim:
        raise ValueError(
            f"{NAME}: `rotary` must have shape (T, D) = ({q.shape[0]}, {dim}), sines in its first half and cosines in "
            f"the second, got {tuple(rotary.shape)}; give a row for each token."
        )
    if rotary.dtype not in (torch.float32, q.dtype):
        raise DtypeError(
            f"{NAME}: `rotary` must be float32 or have the dtype of `q`, {q.dtype}, got {rotary.dtype}; cast it."
        )
    if rotary.device != q.device:
        raise ValueError(
            f"{NAME}: `rotary` must be on the device of `q`, {q.device}, got {rotary.device}; move it there."
        )
    if rotary.requires_grad:
        raise ValueError(f"{NAME}: `rotary` gets no gradient, got a table that requires one; pass `rotary.detach()`.")


def check_lengths(q: Tensor, offsets: Tensor, max_seqlen: int, *, read_offsets: bool) -> None:
    """Raise when the lengths do not fit the packed rows; reads the offsets only if ``read_offsets``."""
    check_capacity(NAME, "offsets", "max_seqlen", max_seqlen, offsets.shape[0] - 1, q.shape[0])
    if read_offsets:
        check_offset_values(NAME, "offsets", offsets, q.shape[0], "max_seqlen", max_seqlen)
