"""Tables of one dim as one table: a lookup is one call, whatever their features' bags.

fbgemm's pooling wants equally many bags of every feature of a call. Laid one after the other, tables are ranges of one
table's rows, and the bags of all features are bags of one feature: no padding, no call per table, and equal ids of all
features of a table meet in one update.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from gem_parallel._src.embeddings.config import MAX_LOCAL_ROWS, SparseOptimizerConfig, TableMemory
from gem_parallel._src.embeddings.engine import DEVICE_MEMORY, FbgemmEngine
from gem_parallel._src.embeddings.transfer import to_device

__all__ = ["CombinedEngine", "split_tables"]


def split_tables(num_rows: Sequence[int]) -> list[int]:
    """Tables per engine: as many in a row as one engine can index."""
    counts: list[int] = []
    room = 0
    for rows in num_rows:
        if rows + 1 > room:
            counts.append(0)
            room = MAX_LOCAL_ROWS + 1
        counts[-1] += 1
        room -= rows + 1
    return counts


class CombinedEngine:
    """Several tables in one of fbgemm's, summed over bags; a table's scratch row follows its rows.

    Args:
        num_rows: Rows of each table, without the scratch row.
        dim: Columns.
        optimizer: The update.
        weight_dtype: float32 or float16.
        device: Where the tables live.
        memory: In which memory.
    """

    pools = True

    def __init__(
        self,
        *,
        num_rows: Sequence[int],
        dim: int,
        optimizer: SparseOptimizerConfig,
        weight_dtype: torch.dtype,
        device: torch.device,
        memory: TableMemory = DEVICE_MEMORY,
    ) -> None:
        self.num_tables = len(num_rows)
        self.dim = dim
        self.bases = list(accumulate((rows + 1 for rows in num_rows), initial=0))
        """(T + 1,) where each table begins, and the number of rows of all."""
        self._inner = FbgemmEngine(
            # The last scratch row is the inner engine's own.
            num_rows=[self.bases[-1] - 1],
            dim=dim,
            optimizer=optimizer,
            weight_dtype=weight_dtype,
            device=device,
            pools=True,
            memory=memory,
        )
        self.max_bags = self._inner.max_bags
        self._num_rows = list(num_rows)
        self._device = device
        self._starts = torch.tensor(self.bases[:-1], dtype=torch.int64, device=device)
        self._scratch = torch.tensor([end - 1 for end in self.bases[1:]], dtype=torch.int64, device=device)
        self._all = self._inner.whole_weight()

    def lookup(self, ids: Tensor, counts: Sequence[int], bags: Tensor | None, step: int | None) -> Tensor:
        return self._inner.lookup(self._rows(ids, counts), [ids.numel()], bags, step)

    def pooled(self, rows: Tensor, bags: Tensor | None, step: int | None) -> Tensor:
        """As ``lookup``, of rows counted from the first table's first; with a step, gradients are enabled already."""
        if step is None:
            with torch.no_grad():
                return self._inner.pooled(rows, bags, 1)
        return self._inner.pooled(rows, bags, step)

    def update(self, ids: Tensor, counts: Sequence[int], grad: Tensor, step: int, learning_rate: float) -> None:
        self._inner.update(self._rows(ids, counts), [ids.numel()], grad, step, learning_rate)

    def _rows(self, ids: Tensor, counts: Sequence[int]) -> Tensor:
        present = [table for table, count in enumerate(counts) if count]
        if len(present) == 1:
            base = self.bases[present[0]]
            return ids + base if base else ids
        shifts = torch.repeat_interleave(self._starts, to_device(counts, self._device), output_size=ids.numel())
        return ids + shifts

    def clear_scratch(self) -> None:
        self._all.index_fill_(0, self._scratch, 0.0)

    def weights(self) -> list[Tensor]:
        return [self._all[base : base + rows] for base, rows in zip(self.bases, self._num_rows, strict=False)]

    def states(self) -> list[dict[str, Tensor]]:
        # The inner engine leaves out its last row, which is a scratch row here, too.
        (states,) = self._inner.states()
        return [
            {name: state[base : base + rows] for name, state in states.items()}
            for base, rows in zip(self.bases, self._num_rows, strict=False)
        ]

    def set_learning_rate(self, learning_rate: float) -> None:
        self._inner.set_learning_rate(learning_rate)
