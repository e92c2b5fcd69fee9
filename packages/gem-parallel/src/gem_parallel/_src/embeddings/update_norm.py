"""How far an update moved each table: the optimizer runs inside backward and leaves no gradient to look at."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gem_parallel._src.embeddings.config import FeatureConfig, IdPolicy, TableConfig
from gem_parallel._src.embeddings.grid import Grid
from gem_parallel._src.embeddings.hashing import hash_ids
from gem_parallel._src.embeddings.state import LocalTable

__all__ = ["UpdateMeter"]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Before:
    """Rows of one table, or column shard of one, that this rank keeps and the batch names."""

    name: str
    piece: int
    rows: Tensor
    """(K,) int64 positions in this rank's part."""
    values: Tensor
    """(K, dim) float32 as they were."""


class _Backward:
    """Whether the backward of one lookup has come to its outputs."""

    __slots__ = ("begun", "possible")

    def __init__(self) -> None:
        self.begun, self.possible = False, True

    def __call__(self, grad: Tensor) -> None:
        self.begun = True


class UpdateMeter:
    """Keeps the rows that a training batch names as they were before its update.

    A row that any rank's batch names is updated on the rank that keeps it, so the ranks tell each other the ids. This
    does not go through the exchange of the lookup: it sees what happened to the weights, whichever way it took.
    """

    def __init__(
        self,
        tables: Sequence[TableConfig],
        features: Sequence[FeatureConfig],
        *,
        id_policy: IdPolicy,
        grid: Grid | None,
        device: torch.device,
    ) -> None:
        self._tables = {table.name: table for table in tables}
        self._features = {feature.name: feature for feature in features}
        self._id_policy = id_policy
        self._grid, self._device = grid, device
        self._before: list[_Before] | None = None
        self._backward = _Backward()

    def start(self, ids: Mapping[str, Tensor], tables: Sequence[LocalTable]) -> None:
        """Before a training lookup of ``ids`` (feature -> (N,) int64); all ranks call it."""
        rows = self._everyones(self._named(ids))
        before = []
        for table in tables:
            if table.shard.kind == "replicated" and self._grid is not None and self._grid.rank > 0:
                # Equal on all ranks; counted once.
                continue
            name = table.shard.config.name
            mine = rows[name][(rows[name] >= table.first_row) & (rows[name] < table.last_row)] - table.first_row
            # A table may lie in host memory.
            mine = mine.to(table.weight.device)
            values = table.weight.index_select(0, mine).float()
            before.append(_Before(name=name, piece=table.shard.piece, rows=mine, values=values))
        self._before = before
        self._backward = _Backward()

    def watch(self, outputs: Iterable[Tensor]) -> None:
        """The outputs of the lookup that ``start`` was called before."""
        differentiable = [each for each in outputs if each.requires_grad]
        for each in differentiable:
            each.register_hook(self._backward)
        self._backward.possible = bool(differentiable)

    def norms(self, tables: Sequence[LocalTable]) -> dict[str, float]:
        """Table -> 2-norm of the change since ``start``; all ranks call it.

        Raises:
            RuntimeError: no training lookup has started yet, or its backward has begun on no rank.
        """
        if self._before is None:
            raise RuntimeError("last_update_norm: a training lookup must come first, got none; call it after backward")
        weights = {(table.shard.config.name, table.shard.piece): table.weight for table in tables}
        total = dict.fromkeys(self._tables, torch.zeros((), dtype=torch.float64, device=self._device))
        for each in self._before:
            change = weights[each.name, each.piece].index_select(0, each.rows).float() - each.values
            total[each.name] = total[each.name] + change.double().square().sum().to(self._device)
        # Ranks see backward of their own outputs only, and a rank whose batch named no feature has none.
        state = torch.tensor([self._backward.begun, self._backward.possible], dtype=torch.float64)
        squares = torch.cat([torch.stack(list(total.values())), state.to(self._device)])
        if self._grid is not None:
            self._grid.everyone.all_reduce(squares, what="last_update_norm: the sum over ranks").wait()
        *norms, begun, possible = squares.sqrt().tolist()
        if possible and not begun:
            raise RuntimeError(
                "last_update_norm: backward of the last training lookup must have run, got a lookup without one; "
                "call it after backward, and before start_lookup or lookup of the next batch"
            )
        return dict(zip(total, norms, strict=True))

    def _named(self, ids: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Table -> distinct rows that this rank's batch names."""
        found: dict[str, list[Tensor]] = {name: [] for name in self._tables}
        for name, values in ids.items():
            table = self._tables[self._features[name].table]
            if table.hashed:
                values = hash_ids(values, table.num_rows)
            elif self._id_policy == "clamp":
                values = values.clamp(0, table.num_rows - 1)
            else:
                # In one process on CUDA ids may be refused after this.
                values = values[(values >= 0) & (values < table.num_rows)]
            found[table.name].append(values)
        empty = torch.zeros(0, dtype=torch.int64, device=self._device)
        return {name: torch.cat([empty, *parts]).unique() for name, parts in found.items()}

    def _everyones(self, named: dict[str, Tensor]) -> dict[str, Tensor]:
        """The same for the batches of all ranks together."""
        if self._grid is None:
            return named
        everyone = self._grid.everyone
        counts = torch.tensor([rows.numel() for rows in named.values()], device=self._device)
        table = counts.new_empty(everyone.size * counts.numel())
        everyone.all_gather(table, counts, what="lookup: the exchange of named rows' counts").wait()
        per_rank: list[list[int]] = table.view(everyone.size, -1).tolist()
        longest = max(sum(each) for each in per_rank)
        sent = counts.new_zeros(longest)
        mine = torch.cat(list(named.values()))
        sent[: mine.numel()] = mine
        received = counts.new_empty(everyone.size * longest)
        if longest:
            everyone.all_gather(received, sent, what="lookup: the exchange of named rows").wait()
        found: dict[str, list[Tensor]] = {name: [] for name in named}
        for rows, sizes in zip(received.view(everyone.size, longest), per_rank, strict=True):
            for name, part in zip(named, rows[: sum(sizes)].split(sizes), strict=True):
                found[name].append(part)
        return {name: torch.cat(parts).unique() for name, parts in found.items()}
