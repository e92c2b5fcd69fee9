"""What the kernels of few keys compute of a tile of rows of one head."""

import triton
import triton.language as tl


@triton.jit
def normalize(q, mean, rstd, D: tl.constexpr, BLOCK_D: tl.constexpr):
    """(M, BLOCK_D) float32 rows after the layer norm; 0 beyond D."""
    unit = (q.to(tl.float32) - mean[:, None]) * rstd[:, None]
    if D != BLOCK_D:
        unit = tl.where((tl.arange(0, BLOCK_D) < D)[None, :], unit, 0.0)
    return unit


@triton.jit
def attend(
    unit,  # (M, BLOCK_D) float32
    k,  # (BLOCK_K, BLOCK_D), 0 beyond the last key
    v,
    pre_scale,
    post_scale,
    ACTIVATION: tl.constexpr,
    QUERY_RESIDUAL: tl.constexpr,
):
    """Scores (M, BLOCK_K), the same activated in the dtype of v, and the sum before the RMS norm (M, BLOCK_D)."""
    scores = tl.dot(unit.to(k.dtype), tl.trans(k)) * pre_scale
    activated = ACTIVATION(scores).to(v.dtype)
    total = tl.dot(activated, v) * post_scale
    if QUERY_RESIDUAL:
        total += unit
    return scores, activated, total


@triton.jit
def head_gradients(
    q,  # (M, BLOCK_D)
    dout,  # (M, BLOCK_D)
    k,  # (BLOCK_K, BLOCK_D)
    v,
    mean,  # (M,), as all statistics
    rstd,
    rrms,
    inner,  # mean over all heads of dout times the sum before the RMS norm, times rrms²
    pre_scale,
    post_scale,
    ACTIVATION: tl.constexpr,
    DERIVATIVE: tl.constexpr,
    QUERY_RESIDUAL: tl.constexpr,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Normalised rows, activated scores, gradient of the raw scores in the dtype of k, gradient of the sum."""
    unit = normalize(q, mean, rstd, D, BLOCK_D)
    scores, activated, total = attend(unit, k, v, pre_scale, post_scale, ACTIVATION, QUERY_RESIDUAL)
    dtotal = (dout.to(tl.float32) - total * inner[:, None]) * rrms[:, None]
    dactivated = tl.dot(dtotal.to(v.dtype), tl.trans(v))
    dscores = (dactivated * DERIVATIVE(scores) * (pre_scale * post_scale)).to(k.dtype)
    return unit, activated, dscores, dtotal
