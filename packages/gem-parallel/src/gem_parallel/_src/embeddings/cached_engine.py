"""Tables in host memory behind fbgemm's cache on the device.

fbgemm remembers at a lookup where in the cache the rows lie, and updates those places in the backward. In between no
other lookup may move a row. This engine makes that hold: it knows whether the cache has changed since a lookup, and if
so looks the rows up again before it updates them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import get_gradient_edge

from gem_parallel._src.embeddings.engine import FbgemmEngine
from gem_parallel._src.embeddings.transfer import to_device

__all__ = ["CachedEngine"]


class _Rows(torch.autograd.Function):
    """Rows whose backward updates them, through the lookup's own graph if the cache is as that lookup left it."""

    @staticmethod
    def forward(
        ctx: Any, anchor: Tensor, engine: CachedEngine, ids: Tensor, counts: Sequence[int], step: int
    ) -> Tensor:
        with torch.enable_grad():
            rows = engine.inner.lookup(ids, counts, None, step)
        # Not the rows themselves, whose memory is the dense part's until backward.
        ctx.edge = get_gradient_edge(rows)
        ctx.engine, ctx.counts, ctx.step = engine, list(counts), step
        ctx.version, ctx.learning_rate = engine.version, engine.learning_rate
        ctx.save_for_backward(ids)
        return rows.detach()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[None, None, None, None, None]:
        engine: CachedEngine = ctx.engine
        (ids,) = ctx.saved_tensors
        edge, ctx.edge = ctx.edge, None
        grad = engine.without_dropped(ids, ctx.counts, grad)
        if engine.version == ctx.version:
            torch.autograd.backward([edge], [grad])
        else:
            engine.update(ids, ctx.counts, grad, ctx.step, ctx.learning_rate)
        return None, None, None, None, None


class CachedEngine:
    """All tables of a dim that share a cache.

    ``weights`` shows the host memory: true until the next lookup, and what is written there the next lookup sees.

    Args:
        inner: Their engine, unpooled.
        num_rows: Rows of each table, without the scratch row.
        learning_rate: Of the inner engine.
        device: Of the cache.
    """

    pools = False

    def __init__(
        self, inner: FbgemmEngine, *, num_rows: Sequence[int], learning_rate: float, device: torch.device
    ) -> None:
        self.inner = inner
        self.num_tables = inner.num_tables
        self.learning_rate = learning_rate
        self.version = 0
        """Changes whenever rows may have moved in the cache."""
        self._scratch = torch.tensor(num_rows, dtype=torch.int64, device=device)
        self._drops = False
        self._anchor = torch.zeros(0, device=device, requires_grad=True)

    def lookup(self, ids: Tensor, counts: Sequence[int], bags: Tensor | None, step: int | None) -> Tensor:
        assert bags is None
        self.version += 1
        if step is None:
            return self.inner.lookup(ids, counts, None, None)
        rows: Tensor = _Rows.apply(self._anchor, self, ids, counts, step)
        return rows

    def update(self, ids: Tensor, counts: Sequence[int], grad: Tensor, step: int, learning_rate: float) -> None:
        self.version += 1
        self.inner.update(ids, counts, grad, step, learning_rate)

    def without_dropped(self, ids: Tensor, counts: Sequence[int], grad: Tensor) -> Tensor:
        """Gradients with zeros for scratch rows, if ids may be dropped.

        A scratch row in the cache cannot be set to zero from outside; one that never learns stays zero.
        """
        if not self._drops:
            return grad
        scratch = torch.repeat_interleave(self._scratch, to_device(counts, ids.device), output_size=ids.numel())
        return torch.where((ids == scratch).unsqueeze(1), 0.0, grad)

    def clear_scratch(self) -> None:
        self._drops = True

    def weights(self) -> list[Tensor]:
        self.version += 1
        self.inner.empty_cache()
        return self.inner.weights()

    def states(self) -> list[dict[str, Tensor]]:
        return self.inner.states()

    def set_learning_rate(self, learning_rate: float) -> None:
        self.learning_rate = learning_rate
        self.inner.set_learning_rate(learning_rate)
