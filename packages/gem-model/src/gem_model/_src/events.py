"""History events to sequence tokens: feature embeddings, dense values, age and recency."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gem_kernels.hat_columns import hat_columns
from gem_kernels.join_columns import join_columns
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
    num_inputs, num_zeros = _num_inputs(config, embedding_dim)
    return hat_columns(
        sequence.dense,
        sequence.age,
        sequence.offsets,
        max_seqlen=sequence.max_seqlen,
        age_knots=(config.num_age_buckets, _MAX_LOG_AGE),
        recency_knots=(config.num_recency_buckets, _MAX_LOG_RECENCY),
        width=num_inputs + num_zeros - len(config.event_features) * embedding_dim,
    )


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
        columns = [*(embeddings[name] for name in self._config.event_features), numbers]
        # Joined in the dtype that the layer casts to, if it says: one pass less over the widest rows of the model.
        dtype: torch.dtype | None = getattr(self.hidden, "operand_dtype", None)
        if dtype is None or torch.compiler.is_compiling():
            joined = torch.cat(columns, dim=1)
        else:
            joined = join_columns(columns, dtype)
        return self.output(self.activation(self.hidden(joined)))

    def flops(self, sizes: BatchSizes) -> dict[str, ModuleFlops]:
        """FLOPs by module, without the columns of zeros."""
        rows = sizes.num_events(self._config.name)
        hidden = 2 * rows * self._num_inputs * self.hidden.out_features
        return {"": ModuleFlops(gemm=hidden + linear_flops(self.output, rows))}
