"""When the block takes Hopper's attention with its layer norm and residual inside, and the launches."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from gem_kernels._src.attention.hopper.call import call, descriptor, sequence_descriptor
from gem_kernels._src.attention.hopper.launch import (
    MAX_ROWS,
    is_copyable,
    is_on_hopper,
    multiprocessors,
    query_chunks,
)
from gem_kernels._src.attention.hopper.schedule import MAX_SORTED
from gem_kernels._src.attention.pairing import pair_sequences
from gem_kernels._src.attention.reuse import once
from gem_kernels._src.gdpa import hopper_launch as gdpa_hopper
from gem_kernels._src.gdpa_norm_block.arguments import Options, Parameters, Statistics

BACKWARD_STAGES = 3
"""Tiles of 64 query rows and of rows before the RMS norm in shared memory."""
BACKWARD_OUT_STAGES = 2
"""Tiles of 64 rows of dout, which become gradients."""
MIN_WORKS = 512
"""Sequences times heads, about four for each multiprocessor of a large GPU."""
BACKWARD_HEAD_DIM = 128
"""The queries' gradient is made in two halves of 64 columns, each a row of the widest swizzle of shared memory."""


def attends(x: Tensor, k: Tensor, v: Tensor, offsets_q: Tensor, offsets_k: Tensor, options: Options) -> bool:
    """Whether ``launch_attend`` computes this call, for rows x (T_q, H, D) before the layer norm.

    Like all rules here a function of sizes, strides, dtype and device alone, so that all ranks of a job agree.
    """
    pairing = pair_sequences(x, offsets_q, offsets_k, None, options.max_seqlen_q, -1, -1)
    return (
        options.query_residual
        and x.shape[0] > 0
        and k.shape[0] > 0
        and gdpa_hopper.applies(x, k, v, pairing, None, -1, -1)
    )


def launch_attend(
    x: Tensor,
    k: Tensor,
    v: Tensor,
    offsets_q: Tensor,
    offsets_k: Tensor,
    parameters: Parameters,
    mean: Tensor,
    rstd: Tensor,
    options: Options,
    dout: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """gdpa(n, k, v) + n (T_q, H, D), contiguous, with n the layer norm of x; the caller has asked ``attends``.

    With ``dout`` (T_q, H, D), which ``readable`` has made, also its products with the rows of each head, (H, T_q)
    float32.
    """
    # Imported here: Gluon exists for NVIDIA GPUs only, and not in every Triton.
    from gem_kernels._src.attention.hopper.tiles import ROWS
    from gem_kernels._src.gdpa.hopper_activation import pair_activation, scaled_activation
    from gem_kernels._src.gdpa_norm_block.hopper_forward import attend_kernel

    num_heads, dim = x.shape[1:]
    offsets_q, offsets_k = offsets_q.contiguous(), offsets_k.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    products = None
    if dout is not None:
        products = torch.empty(num_heads, x.shape[0], dtype=torch.float32, device=x.device)
    pairs = pair_activation(options.activation, x.dtype)
    if pairs is not None:
        value, scale = pairs.value, options.post_scale * options.pre_scale * pairs.scale
    else:
        act = scaled_activation(options.activation)
        value, scale = act.value, options.post_scale * act.value_scale
    stages = gdpa_hopper.STAGES[dim]
    arguments = (
        descriptor(x, ROWS),
        sequence_descriptor(k, gdpa_hopper.BLOCK_N),
        sequence_descriptor(v, gdpa_hopper.BLOCK_N),
        descriptor(out, ROWS),
        out,
        out.stride(0),
        *((x, out.stride(0), mean) if dout is None or products is None else (dout, dout.stride(0), products)),
        x.shape[0],
        mean,
        rstd,
        *_affine(parameters, x),
        *once(query_chunks, x, offsets_q, offsets_k, gdpa_hopper.BLOCK_N * stages),
        num_heads,
        options.pre_scale,
        scale,
    )
    constants = {
        "ACTIVATION": value,
        "IN_PAIRS": pairs is not None,
        "HAS_PRE_SCALE": pairs is None and options.pre_scale != 1.0,
        "HAS_WEIGHT": parameters.norm_weight is not None,
        "HAS_BIAS": parameters.norm_bias is not None,
        "PRODUCTS": products is not None,
        "GROUP": num_heads // k.shape[1],
        "STAGES": stages,
        "BLOCK_N": gdpa_hopper.BLOCK_N,
        "D": dim,
        "num_warps": 4,
    }
    call(attend_kernel, multiprocessors(x.device), arguments, constants, x.device)
    return out, products


def readable(dout: Tensor) -> Tensor:
    """A gradient (T_q, H, D) as the kernels read it: what ``is_copyable`` asks, and rows 32 bytes apart at least."""
    return dout if is_copyable(dout) and dout.stride(0) > 0 and dout.stride(0) % 16 == 0 else dout.contiguous()


def _affine(parameters: Parameters, other: Tensor) -> tuple[Tensor, Tensor]:
    """Weight and bias of the layer norm; for an absent one, which is not read, a pointer to something."""
    weight, bias = parameters.norm_weight, parameters.norm_bias
    return other if weight is None else weight, other if bias is None else bias


def makes_gradients(x: Tensor, k: Tensor, v: Tensor, offsets_q: Tensor, options: Options) -> bool:
    """Whether ``launch_attend_backward`` computes the gradients of this call: all keys of a sequence in one tile.

    A sequence and head is one unit of work, of which there must be enough for all multiprocessors. Where there is a
    query residual, ``attends`` holds too.
    """
    return (
        is_on_hopper(x)
        and x.dtype in (torch.float16, torch.bfloat16)
        and x.shape[2] == BACKWARD_HEAD_DIM
        and k.shape[1] == x.shape[1]
        and (offsets_q.shape[0] - 1) * x.shape[1] >= MIN_WORKS
        and 0 < options.max_seqlen_k <= 128
        and 0 < x.shape[0] <= MAX_ROWS
        and 0 < k.shape[0] <= MAX_ROWS
        and all(is_copyable(y) for y in (x, k, v))
    )


def _longest_first(offsets_q: Tensor, offsets_k: Tensor) -> Tensor:
    """(B, 4) int32: first query row, query rows, first key row and keys of every sequence, most queries first.

    Of more than ``MAX_SORTED`` as they come: ordering compares each with each.
    """
    from gem_kernels._src.gdpa_norm_block.hopper_backward import BLOCK, OTHERS, order_kernel

    num_sequences = offsets_q.shape[0] - 1
    chunks = torch.empty(num_sequences, 4, dtype=torch.int32, device=offsets_q.device)
    constants = {"SORTED": num_sequences <= MAX_SORTED, "BLOCK": BLOCK, "OTHERS": OTHERS}
    arguments = (offsets_q, offsets_k, chunks, num_sequences)
    call(order_kernel, triton.cdiv(num_sequences, BLOCK), arguments, constants, offsets_q.device)
    return chunks


def launch_attend_backward(
    dout: Tensor,
    total: Tensor,
    x: Tensor,
    k: Tensor,
    v: Tensor,
    offsets_q: Tensor,
    offsets_k: Tensor,
    parameters: Parameters,
    statistics: Statistics,
    along: Tensor,
    options: Options,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Gradients of n, the layer norm of x, and of k and v, contiguous; the caller has asked ``makes_gradients``.

    From dout, the gradient of rms_norm(total), which ``readable`` has made, and ``along`` (T_q,), what its backward
    takes ``total`` times. Without weight and bias of the layer norm the first is a part of the gradient of x in the
    place of that of n, and the last are sums of that, (2, H, T_q) float32, else None: see the kernel.
    """
    # Imported here: Gluon exists for NVIDIA GPUs only, and not in every Triton.
    from gem_kernels._src.attention.hopper.tiles import ROWS
    from gem_kernels._src.gdpa.hopper_activation import pair_activation, scaled_activation
    from gem_kernels._src.gdpa_norm_block.hopper_backward import attend_bwd_kernel

    num_heads, dim = x.shape[1:]
    offsets_q, offsets_k = offsets_q.contiguous(), offsets_k.contiguous()
    dx, dk, dv = (torch.empty(y.shape, dtype=y.dtype, device=y.device) for y in (x, k, v))
    sums = None
    if parameters.norm_weight is None and parameters.norm_bias is None:
        sums = torch.empty(2, num_heads, x.shape[0], dtype=torch.float32, device=x.device)
    pairs = pair_activation(options.activation, x.dtype)
    if pairs is not None:
        value, derivative = pairs.value_and_slope, pairs.slope
        dv_scale = ds_scale = options.pre_scale * options.post_scale * pairs.scale
    else:
        act = scaled_activation(options.activation)
        value, derivative = act.value, act.derivative
        dv_scale = options.post_scale * act.value_scale
        ds_scale = options.pre_scale * options.post_scale * act.derivative_scale
    arguments = (
        sequence_descriptor(x, ROWS),
        sequence_descriptor(total, ROWS),
        _halves(dout, ROWS),
        sequence_descriptor(k, ROWS),
        sequence_descriptor(v, ROWS),
        _halves(dx, ROWS),
        sequence_descriptor(dk, ROWS),
        sequence_descriptor(dv, ROWS),
        statistics.mean if sums is None else sums,
        *statistics,
        along,
        *_affine(parameters, x),
        x if parameters.rms_weight is None else parameters.rms_weight,
        once(_longest_first, offsets_q, offsets_k),
        x.shape[0],
        (offsets_q.shape[0] - 1) * num_heads,
        num_heads,
        options.pre_scale,
        dv_scale,
        ds_scale,
    )
    constants = {
        "ACTIVATION": value,
        "ACTIVATION_DERIVATIVE": derivative,
        "IN_PAIRS": pairs is not None,
        "HAS_PRE_SCALE": pairs is None and options.pre_scale != 1.0,
        "HAS_WEIGHT": parameters.norm_weight is not None,
        "HAS_BIAS": parameters.norm_bias is not None,
        "HAS_RMS_WEIGHT": parameters.rms_weight is not None,
        "ADD": options.query_residual,
        "SUMS": sums is not None,
        "RESIDUAL": options.residual,
        "STAGES": BACKWARD_STAGES,
        "OUT_STAGES": BACKWARD_OUT_STAGES,
        "D": dim,
        "num_warps": 4,
    }
    call(attend_bwd_kernel, multiprocessors(x.device), arguments, constants, x.device)
    return dx, dk, dv, sums


def _halves(x: Tensor, rows: int) -> Any:
    """A ``sequence_descriptor`` of x (T, H, D) in tiles of half a head: one row of such a tile is one of a swizzle."""
    return sequence_descriptor(x.unflatten(2, (2, -1)).flatten(1, 2), rows)
