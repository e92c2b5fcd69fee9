"""Where one fused op of gem_kernels stands for several plain ones: pure functions, so that all ranks agree."""

from __future__ import annotations

import torch
from torch import Tensor, nn

_DEVICES = ("cuda",)
"""The CPU kernels of the block run the attention twice, which costs more there than what they keep out of memory."""


def fuses_norm_block(attention: nn.Module, residual: Tensor, keys: Tensor, dropout: float) -> bool:
    """Whether a GDPA layer computes the norms and sums around it, too, with the rounding of the plain computation.

    Not with a layer that a recipe has replaced by one that cannot; nor where the residual is wider than the keys,
    since the op has one dtype; nor with dropout, which stands between norm and residual. A compiler fuses the plain
    computation with all that stands around it.
    """
    device_type = residual.device.type
    return (
        # First: a compiler that looked at what follows would break its graph there.
        not torch.compiler.is_compiling()
        and device_type in _DEVICES
        and bool(getattr(attention, "has_norm_block", False))
        and residual.dtype == keys.dtype
        and not torch.is_autocast_enabled(device_type)
        and dropout == 0.0
    )


def joins_products(layers: tuple[nn.Linear, ...], x: Tensor) -> bool:
    """Whether linear layers that read x may be one product of their joined weights.

    Where they are alike and say how (``product``), and nobody watches their calls or counts their ops.
    """
    first = layers[0]
    return (
        not torch.compiler.is_compiling()
        and x.device.type in _DEVICES
        and hasattr(first, "product")
        and x.dtype == getattr(first, "operand_dtype", None)
        and all(type(layer) is type(first) and layer.recipe == first.recipe for layer in layers)
        and not any(layer._forward_hooks or layer._forward_pre_hooks for layer in layers)
        and not torch.is_autocast_enabled(x.device.type)
        and torch._C._len_torch_dispatch_stack() == 0
        and all(type(layer.weight) is nn.Parameter for layer in layers)
    )
