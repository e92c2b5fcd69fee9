"""Triton kernels of maps over the token axis: every sample is a matrix of columns, read and written once in its rows.

The weight is as small as a tile, so each program keeps all of it. The sums over samples of the weight's gradient are
cut into parts, one per program, and added in their order: the same bits on every run.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gem_kernels._src.attention.configs import power_of_two
from gem_kernels._src.attention.launch import device_guard
from gem_kernels._src.tiles.matrix import load_matrix, store_matrix

MAX_TOKENS = 128
"""Tokens on either side that a tile holds."""
_PROGRAMS = 528
"""Of the backward: parts of its sums, four for each multiprocessor of a large GPU."""


@triton.jit
def _load_weight(
    weight_ptr,
    DTYPE: tl.constexpr,
    NUM_OUT: tl.constexpr,
    NUM_IN: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
):
    """The weight rounded to DTYPE, and what the rounding left, rounded likewise."""
    outputs, inputs = tl.arange(0, BLOCK_O), tl.arange(0, BLOCK_I)
    mask = (outputs < NUM_OUT)[:, None] & (inputs < NUM_IN)[None, :]
    weight = tl.load(weight_ptr + outputs[:, None] * NUM_IN + inputs[None, :], mask=mask, other=0.0).to(tl.float32)
    high = weight.to(DTYPE)
    return high, (weight - high.to(tl.float32)).to(DTYPE)


@triton.jit
def _rest(
    column, FIRST: tl.constexpr, NUM_OUT: tl.constexpr, DIM: tl.constexpr, BLOCK_O: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Offsets and mask of output tokens from FIRST on, in a tensor of their own."""
    rows, columns = tl.arange(0, BLOCK_O), column + tl.arange(0, BLOCK_D)
    mask = ((rows >= FIRST) & (rows < NUM_OUT))[:, None] & (columns < DIM)[None, :]
    return (rows - FIRST)[:, None] * DIM + columns[None, :], mask


@triton.jit
def token_linear_fwd_kernel(
    x_ptr,  # (B, NUM_IN, DIM), matrices contiguous
    weight_ptr,  # (NUM_OUT, NUM_IN) contiguous
    bias_ptr,  # (NUM_OUT,) or None
    out_ptr,  # (B, FIRST, DIM) contiguous
    rest_ptr,  # (B, NUM_OUT - FIRST, DIM) contiguous, or None with FIRST = NUM_OUT
    stride_xb,
    FIRST: tl.constexpr,
    NUM_OUT: tl.constexpr,
    NUM_IN: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_D: tl.constexpr,
    EXACT: tl.constexpr,
):
    tiles: tl.constexpr = (DIM + BLOCK_D - 1) // BLOCK_D
    pid = tl.program_id(0)
    # int64 before the sizes: a batch may have more than 2**31 elements.
    b, column = (pid // tiles).to(tl.int64), pid % tiles * BLOCK_D
    high, low = _load_weight(weight_ptr, x_ptr.dtype.element_ty, NUM_OUT, NUM_IN, BLOCK_O, BLOCK_I)
    x = load_matrix(x_ptr + b * stride_xb, column, NUM_IN, DIM, BLOCK_I, BLOCK_D)
    out = tl.dot(high, x)
    if EXACT:
        out = tl.dot(low, x, out)
    if bias_ptr is not None:
        outputs = tl.arange(0, BLOCK_O)
        bias = tl.load(bias_ptr + outputs, mask=outputs < NUM_OUT, other=0.0)
        if not EXACT:
            bias = bias.to(x_ptr.dtype.element_ty)
        out += bias.to(tl.float32)[:, None]
    store_matrix(out_ptr + b * (FIRST * DIM), out, column, FIRST, DIM, BLOCK_O, BLOCK_D)
    if rest_ptr is not None:
        offs, mask = _rest(column, FIRST, NUM_OUT, DIM, BLOCK_O, BLOCK_D)
        rest_ptr += b * ((NUM_OUT - FIRST) * DIM)
        tl.store(rest_ptr + offs, out.to(rest_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_samples"])
def token_linear_bwd_kernel(
    x_ptr,  # (B, NUM_IN, DIM), matrices contiguous
    dout_ptr,  # (B, FIRST, DIM), matrices contiguous
    drest_ptr,  # (B, NUM_OUT - FIRST, DIM), matrices contiguous, or None with FIRST = NUM_OUT
    weight_ptr,  # (NUM_OUT, NUM_IN) contiguous
    dx_ptr,  # (B, NUM_IN, DIM) contiguous
    partial_ptr,  # (P, NUM_OUT, NUM_IN + 1) float32: gradients of the weight and, last, of the bias
    stride_xb,
    stride_db,
    stride_rb,
    num_samples,
    FIRST: tl.constexpr,
    NUM_OUT: tl.constexpr,
    NUM_IN: tl.constexpr,
    DIM: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    BLOCK_D: tl.constexpr,
    EXACT: tl.constexpr,
    STAGES: tl.constexpr,
):
    tiles: tl.constexpr = (DIM + BLOCK_D - 1) // BLOCK_D
    high, low = _load_weight(weight_ptr, x_ptr.dtype.element_ty, NUM_OUT, NUM_IN, BLOCK_O, BLOCK_I)
    dweight = tl.zeros([BLOCK_O, BLOCK_I], dtype=tl.float32)
    dbias = tl.zeros([BLOCK_O], dtype=tl.float32)
    for tile in tl.range(tl.program_id(0), num_samples * tiles, tl.num_programs(0), num_stages=STAGES):
        b, column = tl.cast(tile // tiles, tl.int64), tile % tiles * BLOCK_D
        x = load_matrix(x_ptr + b * stride_xb, column, NUM_IN, DIM, BLOCK_I, BLOCK_D)
        dout = load_matrix(dout_ptr + b * stride_db, column, FIRST, DIM, BLOCK_O, BLOCK_D)
        if drest_ptr is not None:
            offs, mask = _rest(column, FIRST, NUM_OUT, DIM, BLOCK_O, BLOCK_D)
            # One of both is zero.
            dout += tl.load(drest_ptr + b * stride_rb + offs, mask=mask, other=0.0)
        dx = tl.dot(tl.trans(high), dout)
        if EXACT:
            dx = tl.dot(tl.trans(low), dout, dx)
        store_matrix(dx_ptr + b * (NUM_IN * DIM), dx, column, NUM_IN, DIM, BLOCK_I, BLOCK_D)
        dweight = tl.dot(dout, tl.trans(x), dweight)
        dbias += tl.sum(dout.to(tl.float32), 1)
    partial_ptr += tl.program_id(0).to(tl.int64) * (NUM_OUT * (NUM_IN + 1))
    outputs, inputs = tl.arange(0, BLOCK_O), tl.arange(0, BLOCK_I)
    ptrs = partial_ptr + outputs * (NUM_IN + 1)
    mask = (outputs < NUM_OUT)[:, None] & (inputs < NUM_IN)[None, :]
    tl.store(ptrs[:, None] + inputs[None, :], dweight, mask=mask)
    tl.store(ptrs + NUM_IN, dbias, mask=outputs < NUM_OUT)


def is_large(num_out: int, num_in: int) -> bool:
    """Whether a weight needs more registers than four warps have for it, its gradient and tiles of 64 columns."""
    return power_of_two(num_out) * power_of_two(num_in) > 64 * 64


def warps(num_out: int, num_in: int) -> int:
    """Of one program."""
    return 8 if is_large(num_out, num_in) else 4


def constants(
    num_out: int, num_in: int, dim: int, *, exact: bool, backward: bool, first: int | None = None
) -> dict[str, int | bool]:
    """Compile-time arguments that depend on shapes."""
    found = {
        "FIRST": num_out if first is None else first,
        "NUM_OUT": num_out,
        "NUM_IN": num_in,
        "DIM": dim,
        "BLOCK_O": power_of_two(num_out),
        "BLOCK_I": power_of_two(num_in),
        "BLOCK_D": min(power_of_two(dim), 64),
        "EXACT": exact,
    }
    return found | {"STAGES": 2} if backward else found


def whole_matrices(x: Tensor) -> Tensor:
    """``x`` (B, n, d) whose matrices lie in one piece each, copied only if they do not."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()


def launch_forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, *, exact: bool, first: int | None = None
) -> tuple[Tensor, Tensor | None]:
    """(B, n, d) -> (B, m, d) in the dtype of x, contiguous; weight and bias are.

    With ``first`` those tokens alone, and beside them the others (B, m - first, d).
    """
    x = whole_matrices(x)
    num_samples, num_in, dim = x.shape
    num_out = weight.shape[0]
    flags = constants(num_out, num_in, dim, exact=exact, backward=False, first=first)
    out = torch.empty(num_samples, flags["FIRST"], dim, dtype=x.dtype, device=x.device)
    rest = None if first is None else torch.empty(num_samples, num_out - first, dim, dtype=x.dtype, device=x.device)
    size = num_samples * triton.cdiv(dim, flags["BLOCK_D"])
    if size:
        with device_guard(x):
            token_linear_fwd_kernel[(size,)](
                x, weight, bias, out, rest, x.stride(0), **flags, num_warps=warps(num_out, num_in)
            )
    return out, rest


def launch_backward(
    x: Tensor, dout: Tensor, weight: Tensor, *, exact: bool, drest: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, in its dtype, and of weight (m, n) and bias (m,), in float32."""
    x, dout = whole_matrices(x), whole_matrices(dout)
    drest = None if drest is None else whole_matrices(drest)
    num_samples, num_in, dim = x.shape
    num_out = weight.shape[0]
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    first = None if drest is None else dout.shape[1]
    flags = constants(num_out, num_in, dim, exact=exact, backward=True, first=first)
    programs = min(_PROGRAMS, num_samples * triton.cdiv(dim, flags["BLOCK_D"]))
    partial = torch.empty(programs, num_out, num_in + 1, dtype=torch.float32, device=x.device)
    if programs:
        strides = (x.stride(0), dout.stride(0), 0 if drest is None else drest.stride(0))
        with device_guard(x):
            token_linear_bwd_kernel[(programs,)](
                x, dout, drest, weight, dx, partial, *strides, num_samples, **flags, num_warps=warps(num_out, num_in)
            )
    sums = partial.sum(0)
    return dx, sums[:, :num_in], sums[:, num_in]
