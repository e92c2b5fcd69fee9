"""Triton backward of jagged attention, deterministic: no gradient row is written by two programs.

``delta`` first (row sums of dO * O), then one kernel per side: dK and dV (``backward_dkdv``), dQ (``backward_dq``).
Few queries over many keys take one kernel for all (``backward_few_queries``), some calls on Hopper its own kernels
(``hopper_backward``).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gem_kernels._src.attention.configs import power_of_two
from gem_kernels._src.attention.launch import call_flags, clamp_window, device_guard, unit_stride
from gem_kernels._src.jagged_attention import hopper_launch
from gem_kernels._src.jagged_attention.backward_dkdv import launch_dkdv
from gem_kernels._src.jagged_attention.backward_dq import launch_dq_of_rows, launch_dq_of_seeds
from gem_kernels._src.jagged_attention.backward_few_queries import few_queries, launch_few_queries
from gem_kernels._src.jagged_attention.bias import Bias, pair_with_bias
from gem_kernels._src.jagged_attention.packed import are_thirds, empty_thirds

DELTA_ROWS = 16
"""Rows of one program of the delta kernel: memory-bound, so many small programs."""


@triton.jit(do_not_specialize=["num_rows"])
def _jagged_attention_bwd_delta_kernel(
    out_ptr,  # (T_q, H, D_v) contiguous
    do_ptr,  # (T_q, H, D_v)
    dlse_ptr,  # (T_q, H) float32 contiguous, read only if HAS_DLSE
    delta_ptr,  # (T_q, H) float32 contiguous
    stride_dot,
    stride_doh,
    num_rows,  # T_q * H
    num_heads,
    HAS_DLSE: tl.constexpr,
    D_V: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_DV: tl.constexpr,
):
    """Write delta = rowsum(dO * O) - dLSE: dS = P * (dP - delta) then holds with and without a gradient of the LSE."""
    rows = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    offs_d = tl.arange(0, BLOCK_DV)
    mask = rows < num_rows
    mask_rd = mask[:, None] & (offs_d < D_V)[None, :]
    out = tl.load(out_ptr + rows[:, None] * D_V + offs_d[None, :], mask=mask_rd, other=0.0).to(tl.float32)
    offs_do = rows // num_heads * stride_dot + rows % num_heads * stride_doh
    do = tl.load(do_ptr + offs_do[:, None] + offs_d[None, :], mask=mask_rd, other=0.0).to(tl.float32)
    delta = tl.sum(out * do, 1)
    if HAS_DLSE:
        delta -= tl.load(dlse_ptr + rows, mask=mask, other=0.0)
    tl.store(delta_ptr + rows, delta, mask=mask)


def launch_delta(out: Tensor, do: Tensor, dlse: Tensor | None) -> Tensor:
    """(T_q, H) float32 row sums of dO * O, less dLSE."""
    total, num_heads, dim_v = out.shape
    delta = torch.empty(total, num_heads, dtype=torch.float32, device=out.device)
    dlse = None if dlse is None else dlse.to(torch.float32).contiguous()
    _jagged_attention_bwd_delta_kernel[(triton.cdiv(total * num_heads, DELTA_ROWS),)](
        out,
        do,
        dlse,
        delta,
        do.stride(0),
        do.stride(1),
        total * num_heads,
        num_heads,
        HAS_DLSE=dlse is not None,
        D_V=dim_v,
        BLOCK_R=DELTA_ROWS,
        BLOCK_DV=power_of_two(dim_v),
        num_warps=4,
    )
    return delta


def launch_backward(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    offsets_q: Tensor | None,
    offsets_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    left: int,
    right: int,
    bias: Bias | None = None,
    request_index: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients dq, dk and dv in the shapes of q, k and v.

    Contiguous, or side by side in rows of one tensor where q, k and v are and there is a window.
    """
    sides = (offsets_q, offsets_k, max_seqlen_q, max_seqlen_k, scale, left, right, bias, request_index)
    dq, dk, dv = _launch(do, dlse, q, k, v, out, lse, *sides, False)
    assert dv is not None
    return dq, dk, dv


def launch_backward_of_one(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    out: Tensor,
    lse: Tensor,
    offsets_q: Tensor | None,
    offsets_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    left: int,
    right: int,
    request_index: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Gradients of q, and of k where it is the values, too."""
    sides = (offsets_q, offsets_k, max_seqlen_q, max_seqlen_k, scale, left, right, None, request_index)
    dq, dk, dv = _launch(do, dlse, q, k, k, out, lse, *sides, True)
    return dq, dk if dv is None else dk.add_(dv)


def _launch(
    do: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    offsets_q: Tensor | None,
    offsets_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    scale: float,
    left: int,
    right: int,
    bias: Bias | None,
    request_index: Tensor | None,
    keys_are_values: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:
    """As ``launch_backward``; with ``keys_are_values`` dv may be None, and dk then is the gradient of both."""
    do, q, k, v = (unit_stride(x) for x in (do, q, k, v))
    out, lse = out.contiguous(), lse.contiguous()
    if out.shape[0] == 0 or k.shape[0] == 0:
        dq, dk, dv = (torch.zeros(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
        return dq, dk, dv
    left, right = clamp_window(left, right)
    bias = (bias or Bias()).tables(torch.float32)
    pairing = pair_with_bias(q, offsets_q, offsets_k, request_index, max_seqlen_q, left, right, bias)
    if hopper_launch.backward_applies(q, k, v, pairing, max_seqlen_k, bias):
        offsets = (pairing.offsets_q, pairing.offsets_k)
        places = empty_thirds(q) if (left >= 0 or right >= 0) and are_thirds(q, k, v) else None
        return hopper_launch.launch_hopper_backward(
            do, dlse, q, k, v, out, lse, *offsets, max_seqlen_k, scale, left, right, places
        )
    shared = call_flags(q, k, v, left, right) | bias.flags()
    with device_guard(q):
        if few_queries(q, k, v, pairing, left, right, bias):
            return launch_few_queries(do, dlse, q, k, v, out, lse, pairing, scale, keys_are_values=keys_are_values)
        args = (do, q, k, v, lse, launch_delta(out, do, dlse), pairing, max_seqlen_k, scale, left, right, bias, shared)
        if (left >= 0 or right >= 0) and not pairing.broadcast_q and are_thirds(q, k, v):
            # A window leaves dQ to its own kernel.
            dq, dk, dv = empty_thirds(q)
            launch_dkdv(*args, dk=dk, dv=dv)
            return launch_dq_of_rows(*args, dq=dq), dk, dv
        dq_beside, dk, dv = launch_dkdv(*args)
        if dq_beside is not None:
            return dq_beside, dk, dv
        launch_dq = launch_dq_of_seeds if pairing.broadcast_q else launch_dq_of_rows
        return launch_dq(*args), dk, dv
