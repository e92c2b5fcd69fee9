"""Compiling a model unit by unit, so that what lies between its matrix products and attention is fused."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch

from gem_model.model import RankingModel

__all__ = ["compile_units"]

_VARIANTS = 16
"""Graphs kept of one layer: a compiler takes 0 and 1 apart from larger numbers, in samples and in events."""


def compile_units(model: RankingModel, *, backend: str | Callable[..., Any] = "inductor") -> RankingModel:
    """Compile the forward pass of each of the model's shard units with ``torch.compile``, in place.

    Norms, casts, activations, sums and the sums of gradients become few passes over memory; matrix products and the
    attention ops stay what they are. Sizes are dynamic: batches of other numbers of samples and events run the same
    code, and only batches with 0 or 1 of them compile once more. A unit compiles when it first runs, which takes
    minutes for a model of some layers with the default backend.

    Units and not the whole: what ``fully_shard`` does before and after a unit stays outside of the compiled code, and
    gathers overlap as before. Call it after ``gem_precision.convert``, before or after ``fully_shard``. Parameters,
    names and the state dict do not change; ``copy.deepcopy`` gives a compiled model with its own parameters.

    Raises dynamo's ``recompile_limit`` for the process, if it is lower than what the layers of one class may need.

    Args:
        model: Whose ``shard_units`` to compile.
        backend: Of ``torch.compile``; ``aot_eager`` traces alike and generates no code.

    Returns:
        ``model`` itself.

    Raises:
        TypeError: if ``model`` is no RankingModel.
        ValueError: if its units are compiled already.
    """
    if not isinstance(model, RankingModel):
        raise TypeError(f"compile_units: `model` must be a RankingModel, got {type(model).__name__}.")
    units = [model.get_submodule(name) for name in model.shard_units]
    if any("forward" in unit.__dict__ for unit in units):
        raise ValueError(
            "compile_units: `model` must have units that run their class's forward, got a replaced one; "
            "compile a model once, and make a new one to compile anew."
        )
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, _VARIANTS * len(units))
    for unit in units:
        # Bound to the unit and not closed over it: a copy of the model binds the copy.
        unit.forward = types.MethodType(torch.compile(type(unit).forward, dynamic=True, backend=backend), unit)
    return model
