"""When the linear layers with a norm take Hopper's own matmuls, and their launches."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from gem_kernels._src.attention.hopper.call import call, descriptor
from gem_kernels._src.attention.hopper.launch import MAX_ROWS, is_on_hopper, multiprocessors
from gem_kernels._src.attention.launch import device_guard
from gem_kernels._src.norm_linear.configs import MAX_FUSED_NORM

BLOCK_K = 32
"""Features of the input at a time."""
STAGES = 6
"""Tiles of x and of the weight in shared memory, beside the tiles of the output: as many bytes as three tiles of 64
features, but a consumer gives them back sooner."""
DX_BLOCK_N = 32
"""Features of the output at a time in the gradient of x."""
DX_STAGES = 4
DWEIGHT_BLOCK_N = 128
DWEIGHT_STAGES = 4
_TILE_ROWS = 128


def columns_of(out_features: int) -> int | None:
    """Columns of a tile, for so many features of the output; None where they do not fill whole tiles."""
    block_n = min(256, out_features)
    return block_n if block_n in (64, 128, 256) and out_features % block_n == 0 else None


def applies(x: Tensor, weight: Tensor, *, norm_of_output: bool) -> bool:
    """Whether the kernels compute x (M, K) times weight (N, K) with a norm: whole tiles, and rows for every program.

    A pure function of shapes, strides, dtype and device, so that all ranks of a job agree.
    """
    block_n = columns_of(weight.shape[0])
    return (
        is_on_hopper(x)
        and x.dtype in (torch.float16, torch.bfloat16)
        and block_n is not None
        and (not norm_of_output or weight.shape[0] <= min(2 * block_n, MAX_FUSED_NORM))
        and x.shape[1] % BLOCK_K == 0
        and _TILE_ROWS * multiprocessors(x.device) <= x.shape[0] <= MAX_ROWS
        and all(y.stride(1) == 1 and y.stride(0) % 8 == 0 and y.data_ptr() % 16 == 0 for y in (x, weight))
    )


def has_backward_tiles(in_features: int, out_features: int) -> bool:
    """Whether a row of x lies in the two halves of a program, and the weight's gradient in tiles of 128 by 256."""
    return in_features in (128, 256, 512) and out_features % DWEIGHT_BLOCK_N == 0


def applies_backward(dout: Tensor, x: Tensor, weight: Tensor) -> bool:
    """Whether the kernels compute the gradients of a linear layer (N, K) after an RMS norm, for x (M, K).

    As ``applies``, a pure function of shapes, strides, dtype and device.
    """
    return (
        is_on_hopper(x)
        and x.dtype in (torch.float16, torch.bfloat16)
        and has_backward_tiles(x.shape[1], weight.shape[0])
        and _TILE_ROWS * multiprocessors(x.device) <= x.shape[0] <= MAX_ROWS
        and all(y.stride(1) == 1 and y.stride(0) % 8 == 0 and y.data_ptr() % 16 == 0 for y in (dout, x, weight))
    )


def _matrix(x: Tensor, rows: int, columns: int) -> Any:
    """What the copy engine needs to know of x (M, N), read in tiles (rows, columns)."""
    return descriptor(x.unflatten(1, (x.shape[1] // columns, columns)), rows)


def _programs(x: Tensor) -> int:
    return min(triton.cdiv(x.shape[0], _TILE_ROWS), multiprocessors(x.device))


def launch_hopper_rmsnorm_linear(x: Tensor, folded: Tensor, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """Output (M, N) and reciprocal root mean squares (M,) of the rows of x; the caller has asked ``applies``."""
    # Imported here: Gluon exists for NVIDIA GPUs only, and not in every Triton.
    from gem_kernels._src.attention.hopper.tiles import ROWS, TILE_ROWS
    from gem_kernels._src.norm_linear.hopper_matmul import _rmsnorm_linear_hopper_kernel

    (num_rows, in_features), out_features = x.shape, folded.shape[0]
    out = torch.empty(num_rows, out_features, dtype=x.dtype, device=x.device)
    rrms = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    block_n = columns_of(out_features)
    assert block_n is not None
    arguments = (
        _matrix(x, TILE_ROWS, BLOCK_K),
        _matrix(folded, block_n, BLOCK_K),
        _matrix(out, ROWS, block_n),
        folded if bias is None else bias.contiguous(),
        rrms,
        num_rows,
        eps,
    )
    constants = {
        "HAS_BIAS": bias is not None,
        "N": out_features,
        "K": in_features,
        "BLOCK_N": block_n,
        "BLOCK_K": BLOCK_K,
        "STAGES": STAGES,
        "num_warps": 4,
    }
    with device_guard(x):
        call(_rmsnorm_linear_hopper_kernel, _programs(x), arguments, constants, x.device)
    return out, rrms


def launch_hopper_linear_norm(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor | None,
    norm_bias: Tensor | None,
    is_layer: bool,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """Output (M, N), its value before the affine part (empty if there is none), and the factors (M,) of the norm.

    The caller has asked ``applies``.
    """
    from gem_kernels._src.attention.hopper.tiles import ROWS, TILE_ROWS
    from gem_kernels._src.norm_linear.hopper_matmul import _linear_norm_hopper_kernel

    (num_rows, in_features), out_features = x.shape, weight.shape[0]
    is_affine = norm_weight is not None or norm_bias is not None
    out = torch.empty(num_rows, out_features, dtype=x.dtype, device=x.device)
    normalized = torch.empty(num_rows if is_affine else 0, out_features, dtype=x.dtype, device=x.device)
    rstd = torch.empty(num_rows, dtype=torch.float32, device=x.device)
    block_n = columns_of(out_features)
    assert block_n is not None
    arguments = (
        _matrix(x, TILE_ROWS, BLOCK_K),
        _matrix(weight, block_n, BLOCK_K),
        _matrix(out, ROWS, block_n),
        _matrix(normalized if is_affine else out, ROWS, block_n),
        weight if bias is None else bias.contiguous(),
        weight if norm_weight is None else norm_weight.contiguous(),
        weight if norm_bias is None else norm_bias.contiguous(),
        rstd,
        num_rows,
        eps,
    )
    constants = {
        "IS_LAYER": is_layer,
        "HAS_BIAS": bias is not None,
        "HAS_NORM_WEIGHT": norm_weight is not None,
        "HAS_NORM_BIAS": norm_bias is not None,
        "N": out_features,
        "K": in_features,
        "BLOCK_N": block_n,
        "BLOCK_K": BLOCK_K,
        "STAGES": STAGES,
        "num_warps": 4,
    }
    with device_guard(x):
        call(_linear_norm_hopper_kernel, _programs(x), arguments, constants, x.device)
    return out, normalized, rstd


def launch_hopper_rmsnorm_linear_backward(
    dout: Tensor, x: Tensor, folded: Tensor, rrms: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of x (M, K) in its dtype and of the folded weight (N, K) in float32; asked ``applies_backward``."""
    from gem_kernels._src.attention.hopper.tiles import ROWS
    from gem_kernels._src.norm_linear.hopper_backward import _dweight_hopper_kernel, _dx_hopper_kernel

    (num_rows, in_features), out_features = x.shape, folded.shape[0]
    half, block_k = in_features // 2, min(256, in_features)
    dx = torch.empty(num_rows, in_features, dtype=x.dtype, device=x.device)
    num_blocks = triton.cdiv(num_rows, ROWS)
    tiles = (out_features // DWEIGHT_BLOCK_N) * (in_features // block_k)
    blocks_per_split = triton.cdiv(num_blocks, max(multiprocessors(x.device) // tiles, 1))
    splits = triton.cdiv(num_blocks, blocks_per_split)
    sums = torch.empty(splits, out_features, in_features, dtype=torch.float32, device=x.device)
    with device_guard(x):
        dx_arguments = (
            _matrix(dout, ROWS, DX_BLOCK_N),
            _matrix(folded, DX_BLOCK_N, half),
            _matrix(x, ROWS, half),
            _matrix(dx, ROWS, half),
            rrms,
            num_rows,
        )
        constants = {
            "N": out_features,
            "HALF": half,
            "BLOCK_N": DX_BLOCK_N,
            "STAGES": DX_STAGES,
            "num_warps": 4,
        }
        call(_dx_hopper_kernel, min(num_blocks, multiprocessors(x.device)), dx_arguments, constants, x.device)
        arguments = (
            _matrix(dout, ROWS, DWEIGHT_BLOCK_N),
            _matrix(x, ROWS, block_k),
            sums,
            rrms,
            num_rows,
            blocks_per_split,
        )
        constants = {
            "N": out_features,
            "K": in_features,
            "BLOCK_N": DWEIGHT_BLOCK_N,
            "BLOCK_K": block_k,
            "STAGES": DWEIGHT_STAGES,
            "num_warps": 4,
        }
        call(_dweight_hopper_kernel, splits * tiles, arguments, constants, x.device)
    return dx, sums.sum(0)
