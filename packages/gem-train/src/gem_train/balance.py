"""Samples of a step spread over the ranks by what they cost, and what the heaviest rank is heavy of."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from gem_train.data.batch import Batch, Sequence
from gem_train.protocols import Batch as BatchView
from gem_train.world import World

if TYPE_CHECKING:
    from gem_parallel.balance import BalanceReport

__all__ = ["BalanceMode", "SampleBalancer", "balance_record"]

BalanceMode = Literal["reader", "exchange", "none"]
_ONE = torch.zeros(1, dtype=torch.int64)


class SampleBalancer:
    """Evens out the ranks' work of a step, or measures how uneven it is.

    With "exchange", every batch's costs are gathered, all ranks compute the same assignment (largest differencing), and
    one all-to-all over host memory moves the samples before they go to the device. Which samples form a global batch
    does not change, so neither does the loss, up to the order of sums. With "reader" and "none" nothing moves, and the
    imbalance is measured when asked for.
    """

    def __init__(
        self,
        cost: Callable[[Mapping[str, Tensor]], Tensor],
        world: World,
        *,
        mode: BalanceMode,
        multi_valued: Collection[str] = (),
    ) -> None:
        """Binds the ranks.

        Args:
            cost: Sequence -> (B,) lengths to (B,) costs, such as a `gem_parallel.LengthCost`.
            world: The ranks.
            mode: Who spreads the samples.
            multi_valued: Features whose bags may hold any number of ids; those of all others hold one.
        """
        self.mode: BalanceMode = mode
        self._cost = cost
        self._world = world
        self._multi_valued = frozenset(multi_valued)
        self._report: BalanceReport | None = None

    def __call__(self, batch: BatchView) -> BatchView:
        """The samples that this rank computes in place of those that it read. All ranks call it.

        Args:
            batch: As read, on the host.

        Raises:
            ValueError: if a feature has bags that do not hold one id each and is not in `multi_valued`.
        """
        if self.mode != "exchange":
            return batch
        from gem_parallel.balance import balance_samples  # with several ranks only: it brings the tables' engines

        packed = _Packed(batch, self._multi_valued)
        assignment = balance_samples(packed.lengths, self._cost, self._world.control)
        self._report = assignment.report
        moved = assignment.move(packed.rows, packed.jagged)
        return packed.unpack(moved.rows, moved.jagged)

    def report(self, batch: BatchView) -> BalanceReport:
        """Costs of the ranks for a batch that was given to the model. All ranks call it.

        Args:
            batch: The batch, on the host; with "exchange" the latest one.
        """
        if self._report is None:
            from gem_parallel.balance import balance_samples

            lengths = {name: sequence.offsets.diff() for name, sequence in batch.sequences.items()}
            return balance_samples(lengths, self._cost, self._world.control, method="none").report
        return self._report


def balance_record(mode: BalanceMode, report: BalanceReport, sequences: Collection[str]) -> dict[str, Any]:
    """A report as JSON values for metrics.jsonl.

    Args:
        mode: Who spread the samples.
        report: Of one step.
        sequences: Names of the sequences whose lengths say why a sample is dear.
    """
    return {
        "mode": mode,
        "ratio_as_read": report.ratio_before,
        "ratio": report.ratio_after,
        "moved": report.num_moved,
        "heaviest_rank": report.heaviest_rank,
        "heaviest_samples": report.counts_after[report.heaviest_rank],
        "dearest": [
            {"lengths": {name: each.lengths[name] for name in sequences}, "share": each.share}
            for each in report.heaviest
        ],
    }


class _Packed:
    """A batch as few tensors with one row per sample or per event; the ranks pack alike."""

    def __init__(self, batch: BatchView, multi_valued: frozenset[str]) -> None:
        self._batch = batch
        self._tasks = list(batch.labels)
        self._context = [name for name in batch.ids if name.partition(".")[0] not in batch.sequences]
        self._events = {
            sequence: [name for name in batch.ids if name.partition(".")[0] == sequence] for sequence in batch.sequences
        }
        self._multi = multi_valued
        for name, (values, offsets) in batch.ids.items():
            if name not in multi_valued and len(values) != len(offsets) - 1:
                raise ValueError(
                    f"SampleBalancer: bags of feature {name!r} must hold one id each, got {len(values)} ids in "
                    f"{len(offsets) - 1} bags; name it in `multi_valued`"
                )
        count = batch.num_samples
        labels = [batch.labels[task].reshape(count, 1) for task in self._tasks]
        single = [batch.ids[name][0].reshape(count, 1) for name in self._context if name not in multi_valued]
        self.rows = {
            "numbers": torch.cat([batch.dense, *labels], dim=1),
            "ids": torch.cat([batch.sample_index.reshape(count, 1), *single], dim=1),
        }
        self.jagged: dict[str, tuple[Tensor, Tensor]] = {
            name: batch.ids[name] for name in self._context if name in multi_valued
        }
        for sequence, names in self._events.items():
            view = batch.sequences[sequence]
            offsets = view.offsets
            # The sequence's own name carries its lengths to the cost.
            self.jagged[sequence] = (torch.cat([view.dense, view.age[:, None]], dim=1), offsets)
            if names:
                self.jagged[f"{sequence} ids"] = (self._event_ids(names), offsets)
            for name in names:
                if name in multi_valued:
                    # Each sample's ids are one run: from the first id of its first event to the last of its last.
                    values, bags = batch.ids[name]
                    self.jagged[name] = (values, bags[offsets])
        self.lengths = {name: offsets.diff() for name, (_, offsets) in self.jagged.items()}

    def _event_ids(self, names: list[str]) -> Tensor:
        """(T, features): the id of each event, or how many it has."""
        columns = [
            self._batch.ids[name][1].diff() if name in self._multi else self._batch.ids[name][0] for name in names
        ]
        return torch.stack(columns, dim=1)

    def unpack(self, rows: Mapping[str, Tensor], jagged: Mapping[str, tuple[Tensor, Tensor]]) -> Batch:
        """The batch of the samples that arrived."""
        numbers, integers = rows["numbers"], rows["ids"]
        count = len(numbers)
        num_dense = numbers.shape[1] - len(self._tasks)
        single = iter(integers.unbind(1)[1:])
        ids: dict[str, tuple[Tensor, Tensor]] = {}
        for name in self._context:
            ids[name] = jagged[name] if name in self._multi else (next(single).contiguous(), torch.arange(count + 1))
        sequences = {}
        for sequence, names in self._events.items():
            events, offsets = jagged[sequence]
            columns = jagged[f"{sequence} ids"][0] if names else events
            for position, name in enumerate(names):
                column = columns[:, position].contiguous()
                if name in self._multi:
                    ids[name] = (jagged[name][0], torch.cat([_ONE, column.cumsum(0)]))
                else:
                    ids[name] = (column, torch.arange(len(column) + 1))
            longest = int(offsets.diff().max()) if count else 0
            sequences[sequence] = Sequence(offsets, longest, events[:, :-1].contiguous(), events[:, -1].contiguous())
        return Batch(
            num_samples=count,
            ids={name: ids[name] for name in self._batch.ids},
            dense=numbers[:, :num_dense].contiguous(),
            sequences=sequences,
            labels={task: numbers[:, num_dense + k].contiguous() for k, task in enumerate(self._tasks)},
            sample_index=integers[:, 0].contiguous(),
        )
