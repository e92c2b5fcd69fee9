"""Transforms of torch that do not go through emulated low precision: forward-mode AD and those of torch.func."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad


def refuse_transforms(layer: str, **tensors: Tensor | None) -> None:
    """Raise if a tensor has a forward-mode tangent or is one of torch.func: a rounding to FP8 has a backward only."""
    # Nearly always outside of forward-mode AD; this one number says so without an op for every tensor.
    has_tangents = getattr(forward_ad, "_current_level", 0) >= 0
    # torch.func has levels of its own, which a traced call may not ask for.
    may_be_wrapped = not torch.compiler.is_compiling()
    for name, x in tensors.items():
        if x is None:
            continue
        if has_tangents and forward_ad.unpack_dual(x).tangent is not None:
            found = "have no tangent of forward-mode AD (torch.func.jvp, jacfwd, forward_ad)"
        elif may_be_wrapped and torch._C._functorch.is_functorch_wrapped_tensor(x):
            found = "be no tensor of torch.func (grad, vjp, jacrev, vmap)"
        else:
            continue
        raise NotImplementedError(
            f"{layer}: `{name}` must {found}, as casts to FP8 have a backward for torch.autograd only, got one; "
            "use torch.autograd.grad, or leave the layer out with convert(..., filter=...)."
        )
