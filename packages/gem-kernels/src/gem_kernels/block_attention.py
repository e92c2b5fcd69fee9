"""Softmax self-attention within blocks of each packed sequence.

Each sequence is cut, from its own start, into blocks of ``block_size`` tokens, the last of which may be shorter. For
block c and head h: ``o = softmax(scale * q_c @ k_c.T) @ v_c``. No token attends outside its block, so the cost is
linear in the length, one block is one tile, and the kernel is bound by memory.

Source: the block attention of Meta's GEM training posts and ads_model_kernel_library.
"""

from __future__ import annotations

from torch import Tensor

from gem_kernels._src.autocast import autocast_operands
from gem_kernels._src.block_attention.check import NAME, check_inputs, check_rotary
from gem_kernels._src.block_attention.op import block_attention_op
from gem_kernels._src.validate import check_bool, check_scale

__all__ = ["block_attention"]


def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    offsets: Tensor,
    max_seqlen: int,
    block_size: int = 64,
    scale: float | None = None,
    rotary: Tensor | None = None,
    validate: bool = False,
) -> Tensor:
    """Softmax self-attention of packed sequences, block by block.

    Shapes: B sequences, T packed rows, H query heads, H_kv key heads (H_kv divides H; query head h reads key head
    ``h // (H / H_kv)``), D and D_v head dims.

    Args:
        q: (T, H, D). float16, bfloat16 or float32 with D <= 256; on CPU also float64 and any D. Any strides; a last
            dim that is not contiguous is copied.
        k: (T, H_kv, D), dtype and device of q.
        v: (T, H_kv, D_v), dtype and device of q.
        offsets: (B + 1,) int32 or int64 on q's device, from 0 to T (FlashAttention's ``cu_seqlens``).
        max_seqlen: Longest sequence in tokens; an upper bound is allowed. A Python int, so that nothing waits for the
            device.
        block_size: Tokens of a block: 32, 64 or 128.
        scale: Factor on the scores, > 0; default ``D ** -0.5``.
        rotary: (T, D) table [sin (D / 2) | cos (D / 2)] of the angles of every row, float32 or in the dtype of q. The
            channels (2 i, 2 i + 1) = (a, b) of each head of q, k and v become (a cos_i - b sin_i, b cos_i + a sin_i)
            before the attention, in the same kernel. A table, so that angles may come from positions or from time
            gaps; it gets no gradient. Needs D even and D_v = D.
        validate: On CUDA, also check the values of the offsets, which waits for the device. On CPU they always are.

    Returns:
        (T, H, D_v) in the dtype of q, contiguous.

    Raises:
        ValueError: on a shape, device, block size or offset that does not fit.
        TypeError: on a dtype or argument type that does not fit.

    Numerics: scores, softmax, rotation and sums in float32 (float64 for float64); on CUDA, rotated inputs,
    probabilities and score gradients are rounded to the dtype of the inputs before the next product. float32 inputs use
    full-precision matmuls, not TF32. The forward saves nothing but its inputs: the backward rotates them and computes
    the probabilities again, and turns the gradients back. Both give the same bits on every run. Under autocast q, k and
    v are cast to the autocast dtype.
    """
    q, k, v = autocast_operands(q, k, v)
    check_inputs(q, k, v, offsets, max_seqlen, block_size)
    check_rotary(rotary, q, v)
    scale = q.shape[2] ** -0.5 if scale is None else scale
    check_scale(NAME, scale)
    check_bool(NAME, validate=validate)
    return block_attention_op(q, k, v, offsets, max_seqlen, block_size, float(scale), validate, rotary)
