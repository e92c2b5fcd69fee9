"""Modules of torch that read the weight of a linear layer themselves, so that the layer's class has no say.

Two kinds: modules that never call the layer, and the fast paths that torch's encoder takes in eval mode without
gradients. What a model's own code reads cannot be seen from outside.
"""

from __future__ import annotations

from torch import nn

_READERS = (("MultiheadAttention", "out_proj"), ("LinearCrossEntropyLoss", "linear"))
"""Class and the layer that its forward reads. By name, because older versions of torch do not have them all."""


def readers(module: nn.Module) -> dict[int, str]:
    """By ``id`` of the layer, the class of the module that reads its weight and never calls it."""
    found = {}
    for parent in module.modules():
        for name, attribute in _READERS:
            kind = getattr(nn, name, None)
            # A subclass with a forward of its own may well call the layer.
            if kind is not None and isinstance(parent, kind) and type(parent).forward is kind.forward:
                found[id(getattr(parent, attribute))] = name
    return found


def take_off_fast_paths(module: nn.Module) -> None:
    """Make the encoders in ``module`` that hold a linear layer of another class call it in eval mode, too."""
    for parent in module.modules():
        if isinstance(parent, nn.TransformerEncoderLayer) and reads_other_layers(parent):
            # "None that the fast path knows": it alone reads this number, the other path calls ``activation``.
            parent.activation_relu_or_gelu = 0
    for parent in module.modules():
        # The encoder hands nested tensors to its layers, which only their fast path takes.
        if isinstance(parent, nn.TransformerEncoder) and any(reads_other_layers(x) for x in parent.layers):
            parent.use_nested_tensor = False


def reads_other_layers(parent: nn.Module) -> bool:
    """Whether a fast path of ``parent`` would read the weight of a linear layer that is no plain ``nn.Linear``."""
    return isinstance(parent, nn.TransformerEncoderLayer) and any(
        type(layer) is not nn.Linear for layer in (parent.linear1, parent.linear2)
    )


def bypassed(module: nn.Module) -> dict[int, str]:
    """By ``id`` of the layer, what reads its weight in place of a call, also where it does so in eval mode only."""
    found = readers(module)
    for parent in module.modules():
        if isinstance(parent, nn.TransformerEncoderLayer) and parent.activation_relu_or_gelu != 0:
            for layer in (parent.linear1, parent.linear2):
                found[id(layer)] = "the fast path of TransformerEncoderLayer, in eval mode without gradients,"
    return found
