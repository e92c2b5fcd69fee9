"""The arguments of the block that are no tensors, in one object for its forward, its backward and their kernels."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class Options(NamedTuple):
    """Everything but tensors, in the order of the ops' arguments."""

    max_seqlen_q: int
    max_seqlen_k: int
    activation: str
    pre_scale: float
    post_scale: float
    query_residual: bool
    residual: bool
    eps: float


class Parameters(NamedTuple):
    """The optional weights of the two norms, each (H * D,)."""

    norm_weight: Tensor | None
    norm_bias: Tensor | None
    rms_weight: Tensor | None


class Statistics(NamedTuple):
    """Numbers per row, (T_q,) float32 (float64 for float64): what the forward keeps besides its inputs."""

    mean: Tensor
    """Of the rows of q."""
    rstd: Tensor
    """Reciprocal standard deviations of the rows of q."""
    rrms: Tensor
    """Reciprocal root mean squares of the rows before the RMS norm."""


class Kept(NamedTuple):
    """Rows of the forward that a backward which does not make them again reads, (T_q, H, D) in the dtype of q."""

    normed: Tensor
    """After the layer norm."""
    total: Tensor
    """Before the RMS norm."""


class Gradients(NamedTuple):
    """Gradients of all tensors; empty for an absent parameter."""

    dq: Tensor
    dk: Tensor
    dv: Tensor
    dnorm_weight: Tensor
    dnorm_bias: Tensor
    drms_weight: Tensor
