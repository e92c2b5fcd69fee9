"""History events to sequence tokens: feature embeddings, dense values, age and recency."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gem_model._src.blocks import activation_module
from gem_model.config import SequenceTowerConfig
from gem_model.flops import BatchSizes, ModuleFlops, linear_flops
from gem_model.protocols import SequenceView

_MAX_LOG_AGE = 20.0
"""log(1 + 485 million seconds), 15 years; the last knot stands for all that is older."""
_MAX_LOG_RECENCY = math.log(8192.0)
"""The last knot stands for all events that 8,191 or more follow."""
_COLUMNS = 8
"""The input of the first layer has a multiple of so many: rows of 16 bytes in bfloat16, without which its products run
at a fifth of their rate on CUDA."""


def hat_encoding(x: Tensor, num_knots: int, largest: float) -> Tensor:
    """Weights of linear interpolation between equidistant knots 0 to ``largest``.

    A linear layer over them is a learned piecewise linear function of x, constant beyond the last knot. As products
    with a matrix they need no table lookup, whose backward scatters.

    Args:
        x: (T,), >= 0.
        num_knots: Columns of the result, >= 2.
        largest: Position of the last knot.

    Returns:
        (T, num_knots), rows sum to 1.
    """
    position = x.clamp(0.0, largest) * ((num_knots - 1) / largest)
    knots = torch.arange(num_knots, device=x.device, dtype=x.dtype)
    return (position[:, None] - knots).abs_().neg_().add_(1.0).clamp_(min=0.0)


def recency(offsets: Tensor, num_events: int) -> Tensor:
    """(T,) float32: how many later events the same sequence holds."""
    last = torch.repeat_interleave(offsets[1:], torch.diff(offsets), output_size=num_events)
    return (last - 1 - torch.arange(num_events, device=offsets.device)).float()


def _num_inputs(config: SequenceTowerConfig, embedding_dim: int) -> tuple[int, int]:
    """Columns that say something of an event, and columns of zeros behind them."""
    numbers = config.num_event_dense + config.num_age_buckets + config.num_recency_buckets
    num_inputs = len(config.event_features) * embedding_dim + numbers
    return num_inputs, -num_inputs % _COLUMNS


def event_numbers(config: SequenceTowerConfig, sequence: SequenceView, embedding_dim: int) -> Tensor:
    """Dense values, age and recency of each event, and zeros that fill up the row, (T, numbers) float32.

    Made outside of the module that has the weights: a sharded module may round its inputs, and a rounded age of
    years would lose hours.
    """
    later = torch.log1p(recency(sequence.offsets, sequence.age.shape[0]))
    columns = [
        sequence.dense.float(),
        hat_encoding(torch.log1p(sequence.age.float()), config.num_age_buckets, _MAX_LOG_AGE),
        hat_encoding(later, config.num_recency_buckets, _MAX_LOG_RECENCY),
    ]
    _, num_zeros = _num_inputs(config, embedding_dim)
    if num_zeros:
        columns.append(later.new_zeros(later.shape[0], num_zeros))
    return torch.cat(columns, dim=1)


class EventTokens(nn.Module):
    """An MLP over all that is known of one event."""

    def __init__(self, config: SequenceTowerConfig, embedding_dim: int, activation: str) -> None:
        super().__init__()
        self._config = config
        self._num_inputs, num_zeros = _num_inputs(config, embedding_dim)
        self.hidden = nn.Linear(self._num_inputs, config.event_hidden)
        if num_zeros:
            # Drawn without them: they change no weight.
            self.hidden.weight = nn.Parameter(F.pad(self.hidden.weight.detach(), (0, num_zeros)))
            self.hidden.in_features += num_zeros
        self.activation = activation_module(activation)
        self.output = nn.Linear(config.event_hidden, config.dim)

    def forward(self, embeddings: Mapping[str, Tensor], numbers: Tensor) -> Tensor:
        """Embeddings (T, E) by name and the result of `event_numbers` -> tokens (T, d)."""
        columns = [embeddings[name] for name in self._config.event_features]
        return self.output(self.activation(self.hidden(torch.cat([*columns, numbers], dim=1))))

    def flops(self, sizes: BatchSizes) -> dict[str, ModuleFlops]:
        """FLOPs by module, without the columns of zeros."""
        rows = sizes.num_events(self._config.name)
        hidden = 2 * rows * self._num_inputs * self.hidden.out_features
        return {"": ModuleFlops(gemm=hidden + linear_flops(self.output, rows))}
