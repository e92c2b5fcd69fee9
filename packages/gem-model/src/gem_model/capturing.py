"""CUDA graphs for what a batch's number of samples fixes: the host launches a few graphs and not their kernels."""

from __future__ import annotations

import gc
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from gem_model._src import segments
from gem_model._src.graphs import capture_graphs
from gem_model._src.segments import Captured, Tensors
from gem_model.model import RankingModel
from gem_model.protocols import RankingBatch

__all__ = ["capture_segments"]


def capture_segments(model: RankingModel, batch: RankingBatch, embeddings: Mapping[str, Tensor]) -> RankingModel:
    """Capture the parts of the model that run over samples in CUDA graphs, in place; those over events stay.

    A step of a small model launches a thousand kernels, most of them over context tokens, and the host needs longer
    for that than the device for their work. Sizes over samples are the same in every batch of as many samples, whatever
    the lengths: one graph forward and one backward stand for all between two parts over events.

    They run in training, with gradients, for batches of ``batch.num_samples`` samples, where no gradient of a parameter
    waits to be added to and no earlier forward pass waits for its backward. Everything else, such as evaluation, the
    last batch of an epoch, gradient accumulation, or a pass under ``FlopCounterMode``, runs as before.

    Call it after ``gem_precision.convert`` and before an optimizer sees gradients, for a model on one GPU that is
    neither sharded nor compiled. Results are those of the model itself, for the same kernels run. The graphs keep the
    activations of their parts in memory of their own, also between steps. They read parameters where they lie:
    optimizers and ``load_state_dict`` write there, but a model must not be moved or converted afterwards.
    ``copy.deepcopy`` gives a model without graphs. The random state stays as it was. No other thread may allocate
    page-locked memory meanwhile.

    Args:
        model: On CUDA, in training mode.
        batch: Of the size to capture, on the device. Its values do not matter.
        embeddings: As for the model's forward; those that will need gradients must say so here.

    Returns:
        ``model`` itself.

    Raises:
        TypeError: if ``model`` is no RankingModel.
        ValueError: if the model is not in training, not whole on CUDA, under autocast, has replaced units, or if the
            batch has no sample.
    """
    _check(model, batch)
    functions = segments.functions(model)
    inputs: dict[str, Tensors] = {}
    used: dict[str, list[nn.Parameter]] = {}

    def record(name: str, *given: Tensor) -> Tensors:
        inputs[name] = tuple(x.detach().clone().requires_grad_(x.requires_grad) for x in given)
        outputs = functions[name](*inputs[name])
        used[name] = _parameters_of(outputs, model)
        return tuple(x.detach().requires_grad_(x.requires_grad) for x in outputs)

    model._captured = Captured()
    device = next(model.parameters()).device
    # Dropout draws afterwards what it would have drawn without graphs.
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        segments.run(model, batch, embeddings, record)
        # Parameters keep the stream of the graph that they were last part of while that graph lives, and capture runs
        # on another stream.
        gc.collect()
        calls = capture_graphs(functions, inputs, used)
    parameters = [p for p in model.parameters() if any(p is q for found in used.values() for q in found)]
    model._captured = Captured(calls, parameters, batch.num_samples)
    return model


def _parameters_of(outputs: Tensors, model: nn.Module) -> list[nn.Parameter]:
    """Those of the model's parameters that have a part in these outputs."""
    candidates = [p for p in model.parameters() if p.requires_grad]
    roots = [x for x in outputs if x.requires_grad]
    gradients = torch.autograd.grad(roots, candidates, [torch.zeros_like(x) for x in roots], allow_unused=True)
    return [p for p, gradient in zip(candidates, gradients, strict=True) if gradient is not None]


def _check(model: Any, batch: RankingBatch) -> None:
    if not isinstance(model, RankingModel):
        raise TypeError(
            f"capture_segments: `model` must be a RankingModel, got {type(model).__name__}; give the model itself."
        )
    problems = {
        "be in training mode": not model.training,
        "have all parameters on one CUDA device, none of them sharded": any(
            type(p) is not nn.Parameter or p.device.type not in _DEVICES for p in model.parameters()
        ),
        "have units that run their class's forward": any("forward" in x.__dict__ for x in model.modules()),
    }
    for rule, is_broken in problems.items():
        if is_broken:
            raise ValueError(
                f"capture_segments: `model` must {rule}, got one that is not so; capture a new model before it is "
                "sharded or compiled."
            )
    if torch.is_autocast_enabled("cuda"):
        raise ValueError("capture_segments: autocast must be off, got it on; convert the model with gem_precision.")
    if batch.num_samples < 1:
        raise ValueError("capture_segments: `batch` must have samples, got none; give one of the size of a step.")


_DEVICES = ("cuda",)
