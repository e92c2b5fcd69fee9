"""When an op may launch its kernels itself: torch.library's way to them costs the host as much as a launch."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def launches_directly(*tensors: Tensor) -> bool:
    """Whether nothing looks on: plain tensors on CUDA, no compiler, and no mode that counts, fakes or records ops."""
    return (
        not torch.compiler.is_compiling()
        and all(type(x) in (Tensor, nn.Parameter) and x.is_cuda for x in tensors)
        and torch._C._len_torch_dispatch_stack() == 0
    )
