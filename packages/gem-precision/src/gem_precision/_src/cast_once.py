"""Parameters in bfloat16, made for all layers of a model by one op as its forward begins."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_COPIES = "_gem_precision_copies"
"""Attribute of a layer while the model around it runs. No buffer, so it is in no state dict."""
DEVICES = ("cuda",)
"""Where an op for every layer costs the host more than what it computes."""


class Copies(NamedTuple):
    """Parameters of one layer in bfloat16."""

    weight: Tensor
    bias: Tensor | None
    versions: tuple[int, ...]
    """Of the parameters when they were copied."""


def parameters_of(layer: nn.Linear) -> list[Tensor]:
    """Weight, and bias if there is one."""
    return [layer.weight] if layer.bias is None else [layer.weight, layer.bias]


def copies_of(layer: nn.Linear) -> Copies | None:
    """The layer's parameters in bfloat16 if they have been made and still are what the parameters say."""
    copies: Copies | None = layer.__dict__.get(_COPIES)
    if copies is None or copies.versions != tuple(p._version for p in parameters_of(layer)):
        return None
    return copies


class CastOnce:
    """Hooks of the module that `convert` was given: before its forward and after it."""

    def __init__(self, layers: list[nn.Linear]) -> None:
        self._layers = layers

    def before(self, module: nn.Module, args: Any) -> None:
        """Make the copies, of the layers whose parameters are whole: those of a sharded unit are gathered later."""
        if torch.compiler.is_compiling():
            return
        found = [layer for layer in self._layers if all(_is_whole(p) for p in parameters_of(layer))]
        masters = [p.detach() for layer in found for p in parameters_of(layer)]
        if not masters:
            return
        # In one piece: nothing here depends on how many layers there are but views.
        flat = torch.empty(sum(p.numel() for p in masters), dtype=torch.bfloat16, device=masters[0].device)
        copies = torch._utils._unflatten_dense_tensors(flat, masters)  # type: ignore[no-untyped-call]
        torch._foreach_copy_(list(copies), masters)
        rest = iter(copies)
        for layer in found:
            weight, bias = next(rest), None if layer.bias is None else next(rest)
            versions = tuple(p._version for p in parameters_of(layer))
            layer.__dict__[_COPIES] = Copies(weight, bias, versions)

    def after(self, module: nn.Module, args: Any, output: Any) -> None:
        """Forget the copies; backward keeps those it needs."""
        if torch.compiler.is_compiling():
            return
        for layer in self._layers:
            layer.__dict__.pop(_COPIES, None)


def _is_whole(parameter: Tensor) -> bool:
    return (
        type(parameter) in (Tensor, nn.Parameter)
        and parameter.device.type in DEVICES
        and parameter.dtype == torch.float32
        and parameter.is_contiguous()
    )


def cast_once(module: nn.Module, layers: list[nn.Linear]) -> None:
    """Have ``module`` copy the parameters of these layers when its forward begins."""
    hooks = CastOnce(layers)
    module.register_forward_pre_hook(hooks.before)
    module.register_forward_hook(hooks.after)
