"""Forward-mode AD does not go through emulated low precision."""

from __future__ import annotations

from torch import Tensor
from torch.autograd import forward_ad


def refuse_tangents(layer: str, **tensors: Tensor | None) -> None:
    """Raise if a tensor has a forward-mode tangent: a rounding to FP8 has a formula for the backward only."""
    # Nearly always outside of forward-mode AD; this one number says so without an op for every tensor.
    if getattr(forward_ad, "_current_level", 0) < 0:
        return
    for name, x in tensors.items():
        if x is not None and forward_ad.unpack_dual(x).tangent is not None:
            raise NotImplementedError(
                f"{layer}: `{name}` must have no tangent of forward-mode AD (torch.func.jvp, jacfwd, forward_ad), as "
                "casts to FP8 have a backward formula only, got one; use torch.autograd.grad, or leave the layer out "
                "with convert(..., filter=...)."
            )
