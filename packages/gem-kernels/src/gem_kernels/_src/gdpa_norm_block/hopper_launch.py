"""When the block takes Hopper's kernels, forward in one or its attention alone, and the launches."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from gem_kernels._src.attention.hopper.call import call, sequence_descriptor
from gem_kernels._src.attention.hopper.launch import MAX_ROWS, is_copyable, is_on_hopper, multiprocessors
from gem_kernels._src.attention.hopper.schedule import BLOCK, MAX_SORTED, OTHERS, make_schedule
from gem_kernels._src.attention.pairing import pair_sequences
from gem_kernels._src.attention.reuse import once
from gem_kernels._src.gdpa import hopper_launch as gdpa_hopper
from gem_kernels._src.gdpa_norm_block.arguments import Kept, Options, Parameters, Statistics

FORWARD_HEADS = (2, 3, 4)
"""Of 128 numbers each: 128 rows with all of them fill most of shared memory."""
FORWARD_STAGES = 6
"""Tiles of 64 rows beside them."""
BACKWARD_STAGES = 4
"""Tiles of 64 query rows and of their gradients in shared memory."""
MIN_WORKS = 512
"""Sequences times heads, about four for each multiprocessor of a large GPU."""
HEAD_DIM = 128
"""Of the forward in one kernel and of the gradients, each half of it a row of the widest swizzle of shared memory."""
MAX_KEYS = 128
"""Of a sequence, of both: all in shared memory, or two tiles of the forward."""


def _serves(x: Tensor, k: Tensor, v: Tensor, options: Options) -> bool:
    """What both kernels of the block ask: half precision, heads of 128 that can be copied, and few keys."""
    return (
        is_on_hopper(x)
        and x.dtype in (torch.float16, torch.bfloat16)
        and x.shape[2] == HEAD_DIM
        and 0 < options.max_seqlen_k <= MAX_KEYS
        and 0 < x.shape[0] <= MAX_ROWS
        and 0 < k.shape[0] <= MAX_ROWS
        and all(is_copyable(y) for y in (x, k, v))
    )


def is_one_kernel(q: Tensor, k: Tensor, v: Tensor, options: Options) -> bool:
    """Whether ``launch_block`` computes this call's forward, from q to the output.

    Like all rules here a function of sizes, strides, dtype and device alone, so that all ranks of a job agree.
    """
    has_residuals = options.query_residual and options.residual
    return _serves(q, k, v, options) and has_residuals and q.shape[1] in FORWARD_HEADS


def launch_block(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    offsets_q: Tensor,
    offsets_k: Tensor,
    parameters: Parameters,
    options: Options,
    *,
    has_out: bool = True,
    keep: bool = False,
) -> tuple[Tensor, Statistics, Kept | None]:
    """Output (T_q, H, D), contiguous, and statistics, both empty unless ``has_out``; rows for the backward if ``keep``.

    The caller has asked ``is_one_kernel``.
    """
    # Imported here: Gluon exists for NVIDIA GPUs only, and not in every Triton.
    from gem_kernels._src.attention.hopper.tiles import ROWS
    from gem_kernels._src.gdpa.hopper_activation import forward_activation
    from gem_kernels._src.gdpa_norm_block.hopper_forward import CONSUMERS, block_fwd_kernel

    num_rows, num_heads, dim = q.shape
    offsets_q, offsets_k = offsets_q.contiguous(), offsets_k.contiguous()
    out = torch.empty(num_rows if has_out else 0, num_heads, dim, dtype=q.dtype, device=q.device)
    statistics = Statistics(*(torch.empty(out.shape[0], dtype=torch.float32, device=q.device) for _ in range(3)))
    kept = None
    if keep:
        kept = Kept(*(torch.empty(q.shape, dtype=q.dtype, device=q.device) for _ in range(2)))
    of_activation, scale = forward_activation(options.activation, q.dtype, options.pre_scale, options.post_scale)
    q_desc = sequence_descriptor(q, ROWS)
    arguments = (
        q_desc,
        sequence_descriptor(k, ROWS),
        sequence_descriptor(v, ROWS),
        # What is not written has the descriptor of another: empty tensors have none.
        sequence_descriptor(out, ROWS) if has_out else q_desc,
        *((q_desc, q_desc) if kept is None else (sequence_descriptor(x, ROWS) for x in kept)),
        *(q if parameter is None else parameter for parameter in parameters),
        *statistics,
        *once(make_schedule, offsets_q, offsets_k, num_rows, tile_rows=CONSUMERS * ROWS, resident_keys=0, max_tiles=1),
        options.eps,
        options.pre_scale,
        scale,
    )
    constants = {
        **of_activation,
        "HAS_WEIGHT": parameters.norm_weight is not None,
        "HAS_BIAS": parameters.norm_bias is not None,
        "HAS_RMS_WEIGHT": parameters.rms_weight is not None,
        "HAS_OUT": has_out,
        "KEEP": keep,
        "GROUP": num_heads // k.shape[1],
        "KEY_TILES": triton.cdiv(options.max_seqlen_k, ROWS),
        "STAGES": FORWARD_STAGES,
        "H": num_heads,
        "D": dim,
        "num_warps": 4,
    }
    call(block_fwd_kernel, multiprocessors(q.device), arguments, constants, q.device)
    return out, statistics, kept


def attends(x: Tensor, k: Tensor, v: Tensor, offsets_q: Tensor, offsets_k: Tensor, options: Options) -> bool:
    """Whether ``launch_attend`` computes this call, for rows x (T_q, H, D) after the layer norm."""
    pairing = pair_sequences(x, offsets_q, offsets_k, None, options.max_seqlen_q, -1, -1)
    return (
        options.query_residual
        and x.shape[0] > 0
        and k.shape[0] > 0
        and gdpa_hopper.applies(x, k, v, pairing, None, -1, -1)
    )


def launch_attend(x: Tensor, k: Tensor, v: Tensor, offsets_q: Tensor, offsets_k: Tensor, options: Options) -> Tensor:
    """gdpa(x, k, v) + x (T_q, H, D), contiguous; the caller has asked ``attends``."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    gdpa_hopper.launch_hopper_forward(
        out,
        x,
        k,
        v,
        offsets_q.contiguous(),
        offsets_k.contiguous(),
        options.activation,
        options.pre_scale,
        options.post_scale,
        add_queries=True,
    )
    return out


def makes_gradients(x: Tensor, k: Tensor, v: Tensor, offsets_q: Tensor, options: Options) -> bool:
    """Whether ``launch_attend_backward`` computes the gradients of this call: all keys of a sequence in one tile.

    A sequence and head is one unit of work, of which there must be enough for all multiprocessors.
    """
    num_works = (offsets_q.shape[0] - 1) * x.shape[1]
    return _serves(x, k, v, options) and k.shape[1] == x.shape[1] and num_works >= MIN_WORKS


def _longest_first(offsets_q: Tensor, offsets_k: Tensor) -> Tensor:
    """(B, 4) int32: first query row, query rows, first key row and keys of every sequence, most queries first.

    Of more than ``MAX_SORTED`` as they come: ordering compares each with each.
    """
    from gem_kernels._src.gdpa_norm_block.hopper_backward import order_kernel

    num_sequences = offsets_q.shape[0] - 1
    chunks = torch.empty(num_sequences, 4, dtype=torch.int32, device=offsets_q.device)
    constants = {"SORTED": num_sequences <= MAX_SORTED, "BLOCK": BLOCK, "OTHERS": OTHERS}
    arguments = (offsets_q, offsets_k, chunks, num_sequences)
    call(order_kernel, triton.cdiv(num_sequences, BLOCK), arguments, constants, offsets_q.device)
    return chunks


def launch_attend_backward(
    do: Tensor, x: Tensor, k: Tensor, v: Tensor, offsets_q: Tensor, offsets_k: Tensor, options: Options
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x, k and v from that of gdpa(x, k, v) + x (without x, unless there is a query residual).

    All contiguous; the caller has asked ``makes_gradients``.
    """
    # Imported here: Gluon exists for NVIDIA GPUs only, and not in every Triton.
    from gem_kernels._src.attention.hopper.tiles import ROWS
    from gem_kernels._src.gdpa.hopper_activation import pair_activation, scaled_activation
    from gem_kernels._src.gdpa_norm_block.hopper_backward import attend_bwd_kernel

    num_heads, dim = x.shape[1:]
    offsets_q, offsets_k = offsets_q.contiguous(), offsets_k.contiguous()
    dx, dk, dv = (torch.empty(y.shape, dtype=y.dtype, device=y.device) for y in (x, k, v))
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
        *(sequence_descriptor(y, ROWS) for y in (x, do, k, v)),
        sequence_descriptor(dx.view(x.shape[0], 2 * num_heads, dim // 2), ROWS),
        sequence_descriptor(dk, ROWS),
        sequence_descriptor(dv, ROWS),
        once(_longest_first, offsets_q, offsets_k),
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
        "ADD": options.query_residual,
        "STAGES": BACKWARD_STAGES,
        "D": dim,
        "num_warps": 4,
    }
    call(attend_bwd_kernel, multiprocessors(x.device), arguments, constants, x.device)
    return dx, dk, dv
