"""Registration of the transpose: CPU and CUDA kernels, fake, autograd."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


@torch.library.custom_op("gem_kernels::transpose_tokens", mutates_args=(), device_types="cuda")
def transpose_tokens_op(x: Tensor) -> Tensor:
    """(B, N, M) of x (B, M, N), contiguous."""
    # Imported here: Triton is absent where only the CPU kernel is used.
    from gem_kernels._src.transpose_tokens.kernel import launch

    return launch(x)


@transpose_tokens_op.register_kernel("cpu")
def _transpose_cpu(x: Tensor) -> Tensor:
    # A copy even where the transpose is contiguous already: an op must not return its input.
    return x.transpose(1, 2).clone(memory_format=torch.contiguous_format)


@transpose_tokens_op.register_fake
def _transpose_fake(x: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], x.shape[2], x.shape[1])


def _backward(ctx: Any, grad: Tensor) -> Tensor:
    return transpose_tokens_op(grad)


transpose_tokens_op.register_autograd(_backward)
