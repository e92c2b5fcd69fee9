"""CUDA graphs of functions that run one after the other, one forward and one backward each.

`torch.cuda.make_graphed_callables` does as much. It keeps the autograd graphs of its last warm-up and of what it has
captured, and with them nodes of parameters that belong to other streams than those of later passes, of which autograd
warns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

Tensors = tuple[Tensor, ...]

_WARM_UP = 2
"""Runs before the capture, on its stream: kernels are compiled and libraries take their memory."""


class Graphs:
    """A function's two graphs, and the memory that they read and write."""

    def __init__(self, function: Callable[..., Tensors], inputs: Tensors, parameters: Sequence[nn.Parameter]) -> None:
        self._function = function
        self.inputs = inputs
        self.parameters = tuple(parameters)
        self.outputs: Tensors = ()
        self.output_gradients: Tensors = ()
        self.input_gradients: tuple[Tensor | None, ...] = ()
        self.forward = torch.cuda.CUDAGraph()
        self.backward = torch.cuda.CUDAGraph()

    def run(self) -> None:
        """Both directions, without a graph."""
        self._start_backward(self._function(*self.inputs))
        self._go_back()
        self._forget()

    def capture_forward(self, pool: Any, stream: torch.cuda.Stream) -> None:
        """The memory of what backward needs is taken until `capture_backward`."""
        with torch.cuda.graph(self.forward, pool=pool, stream=stream):
            outputs = self._function(*self.inputs)
        self._start_backward(outputs)

    def capture_backward(self, pool: Any, stream: torch.cuda.Stream) -> None:
        with torch.cuda.graph(self.backward, pool=pool, stream=stream):
            self._go_back()
        self._forget()

    def __call__(self, *inputs: Tensor) -> Tensors:
        """The function of other values, from its graphs."""
        outputs: Tensors = _Replay.apply(self, *inputs, *self.parameters)
        return outputs

    def _start_backward(self, outputs: Tensors) -> None:
        self.outputs = outputs
        self.output_gradients = tuple(torch.zeros_like(x) for x in outputs)

    def _go_back(self) -> None:
        leaves = [x for x in (*self.inputs, *self.parameters) if x.requires_grad]
        roots = [(x, g) for x, g in zip(self.outputs, self.output_gradients, strict=True) if x.requires_grad]
        found = iter(torch.autograd.grad([x for x, _ in roots], leaves, [g for _, g in roots]))
        self.input_gradients = tuple(next(found) if x.requires_grad else None for x in (*self.inputs, *self.parameters))

    def _forget(self) -> None:
        # Without their autograd graph: a parameter's node in it belongs to the stream of the capture.
        self.outputs = tuple(x.detach() for x in self.outputs)


class _Replay(torch.autograd.Function):
    """Copies into the graphs' memory, and hands out what lies there until the next replay."""

    @staticmethod
    def forward(ctx: Any, graphs: Graphs, *inputs: Tensor) -> Tensors:
        ctx.graphs = graphs
        _fill(graphs.inputs, inputs[: len(graphs.inputs)])
        graphs.forward.replay()
        # A tensor each, of which autograd takes possession.
        return tuple(x.detach() for x in graphs.outputs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        graphs = ctx.graphs
        _fill(graphs.output_gradients, gradients)
        graphs.backward.replay()
        return None, *(None if x is None else x.detach() for x in graphs.input_gradients)


def _fill(memory: Tensors, values: Tensors) -> None:
    for mine, given in zip(memory, values, strict=True):
        if mine.data_ptr() != given.data_ptr():
            mine.copy_(given)


def capture_graphs(
    functions: Mapping[str, Callable[..., Tensors]],
    inputs: Mapping[str, Tensors],
    parameters: Mapping[str, Sequence[nn.Parameter]],
) -> dict[str, Callable[..., Tensors]]:
    """Captures functions that run in this order, and go back in the other.

    Args:
        functions: Name -> function of tensors.
        inputs: Name -> its inputs, which become the memory that its graph reads. Those that need gradients say so.
        parameters: Name -> parameters that have a part in the function's outputs.

    Returns:
        Name -> the function from graphs. It must be called as often forward as backward, with as large inputs.
    """
    found = {name: Graphs(function, inputs[name], parameters[name]) for name, function in functions.items()}
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for graphs in found.values():
            for _ in range(_WARM_UP):
                graphs.run()
    torch.cuda.current_stream().wait_stream(stream)
    # One pool for all, whose memory is reused only in the order in which the graphs will run.
    pool = torch.cuda.graph_pool_handle()
    for graphs in found.values():
        graphs.capture_forward(pool, stream)
    for graphs in reversed(found.values()):
        graphs.capture_backward(pool, stream)
    return dict(found)
