"""A forward pass cut where sizes stop depending on lengths: segments over samples between parts over events.

The number of samples alone fixes all sizes of a segment, so that a CUDA graph can stand for it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from gem_model._src.events import event_numbers
from gem_model._src.jagged import Jagged
from gem_model._src.layer import HybridLayer
from gem_model.protocols import RankingBatch

if TYPE_CHECKING:
    from gem_model.model import RankingModel

Tensors = tuple[Tensor, ...]
Function = Callable[..., Tensors]
Call = Callable[..., Tensors]
"""call(name, *inputs): the outputs of that segment."""


def functions(model: RankingModel) -> dict[str, Function]:
    """Name -> segment, in the order in which they run."""
    config = model.config
    names = config.context_features

    def context(*inputs: Tensor) -> Tensors:
        *embeddings, dense = inputs
        x: Tensor = model.context_tokens(dict(zip(names, embeddings, strict=True)), dense)
        return (x,)

    found: dict[str, Function] = {"context": context}
    for index, layer in enumerate(_layers(model)):
        for name in layer.towers:
            found[f"{index}.before.{name}"] = layer.tower(name).before_events
        found[f"{index}.after"] = layer.after_events
    for name in model.readout.towers:
        found[f"readout.before.{name}"] = model.readout.tower(name).before_events

    def answers(x: Tensor, *summaries: Tensor) -> Tensors:
        logits = model.heads(model.readout.after_events(x, *summaries))
        return tuple(logits[task] for task in config.tasks)

    found["answers"] = answers
    return found


def _layers(model: RankingModel) -> list[HybridLayer]:
    layers = []
    for layer in model.layers:
        assert isinstance(layer, HybridLayer)
        layers.append(layer)
    return layers


def run(model: RankingModel, batch: RankingBatch, embeddings: Mapping[str, Tensor], call: Call) -> dict[str, Tensor]:
    """The model's forward pass, with its segments called by name."""
    config = model.config
    (x,) = call("context", *(embeddings[name] for name in config.context_features), batch.dense)
    sequences = {}
    for tower in config.sequences:
        events = {name: embeddings[name] for name in tower.event_features}
        sequence = batch.sequences[tower.name]
        tokens = model.event_tokens[tower.name](events, event_numbers(tower, sequence, config.embedding_dim))
        sequences[tower.name] = Jagged(tokens, sequence.offsets, sequence.max_seqlen)
    for index, layer in enumerate(_layers(model)):
        found: list[Tensor] = []
        for name, s in sequences.items():
            weights = call(f"{index}.before.{name}", x)
            pooled, recent, values = layer.tower(name).over_events(s, *weights)
            found += [pooled] if recent is None else [pooled, recent]
            sequences[name] = s._replace(values=values)
        (x,) = call(f"{index}.after", x, *found)
    found = []
    for name, s in sequences.items():
        (queries,) = call(f"readout.before.{name}", x)
        pooled, recent = model.readout.over_events(name, s, queries)
        found += [pooled] if recent is None else [pooled, recent]
    return dict(zip(config.tasks, call("answers", x, *found), strict=True))


class _Ticket:
    """Whether the backward of a forward pass has run."""

    __slots__ = ("__weakref__", "done")

    def __init__(self) -> None:
        self.done = False


class _Return(torch.autograd.Function):
    """Hands the ticket back when backward is through; nothing else."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ticket: _Ticket) -> Tensor:
        ctx.ticket = ticket
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        ctx.ticket.done = True
        return grads[0], None


class Captured:
    """Segments whose buffers hold one forward pass at a time, in place of the functions they were captured from.

    Tied to one model's memory: a copy of the model has none, and neither has one that was pickled.
    """

    def __init__(
        self,
        calls: Mapping[str, Callable[..., Any]] | None = None,
        parameters: Sequence[nn.Parameter] = (),
        num_samples: int = -1,
    ) -> None:
        self._calls, self._parameters, self._num_samples = calls or {}, tuple(parameters), num_samples
        self._ticket: weakref.ref[_Ticket] | None = None

    def fit(self, model: nn.Module, batch: RankingBatch) -> bool:
        """Whether they compute this call: its sizes, its mode, and nobody who still needs what their buffers hold."""
        return (
            batch.num_samples == self._num_samples
            and model.training
            and torch.is_grad_enabled()
            and not torch.compiler.is_compiling()
            and not torch.is_autocast_enabled("cuda")
            # A mode that counts or records ops would see none.
            and torch._C._len_torch_dispatch_stack() == 0
            # The next backward overwrites the gradients of the last, in place of adding to them.
            and all(parameter.grad is None for parameter in self._parameters)
            and not self._in_use()
        )

    def _in_use(self) -> bool:
        ticket = None if self._ticket is None else self._ticket()
        return ticket is not None and not ticket.done

    def __call__(self, model: RankingModel, batch: RankingBatch, embeddings: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """As `run`."""
        ticket = _Ticket()
        self._ticket = weakref.ref(ticket)

        def call(name: str, *inputs: Tensor) -> Tensors:
            outputs: Tensors = self._calls[name](*inputs)
            if name != "context":
                return outputs
            (x,) = outputs
            return (_Return.apply(x, ticket),)

        return run(model, batch, embeddings, call)

    def __deepcopy__(self, memo: dict[int, Any]) -> Captured:
        return Captured()

    def __reduce__(self) -> tuple[type[Captured], tuple[()]]:
        return Captured, ()
