"""The errors of a bad batch, in words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NoReturn

from gem_parallel._src.embeddings.config import FeatureConfig, IdPolicy, TableConfig
from gem_parallel._src.embeddings.exchange import RankReport
from gem_parallel._src.embeddings.ids import BatchReport, GroupIds, describe_places

__all__ = ["raise_local", "raise_ranks", "raise_rates"]


def _malformed(feature: FeatureConfig, count: int, own: Sequence[GroupIds]) -> str:
    """In words, with the first place if this process has the offsets; reads them, after the batch has failed."""
    found = next((each for ids in own for each in ids.features if each.slot.config.name == feature.name), None)
    if found is None:
        return describe_places(feature.name, count, None, 0)
    return describe_places(feature.name, count, found.offsets, found.end - found.start)


def _out_of_range(
    feature: FeatureConfig, tables: Sequence[TableConfig], value: int, count: int, total: int | None
) -> str:
    num_rows = next(table.num_rows for table in tables if table.name == feature.table)
    amount = f"{count} such ids in the batch" if total is None else f"{count} such ids in the rank's batch"
    return (
        f"feature {feature.name!r}: ids of table {feature.table!r} must lie in [0, {num_rows}) (num_rows={num_rows}), "
        f"got {value} ({amount}); "
        "map ids to rows before, or set id_policy='drop' or 'clamp'"
    )


def raise_local(
    report: BatchReport,
    batch: Sequence[GroupIds],
    features: Sequence[FeatureConfig],
    tables: Sequence[TableConfig],
    policy: IdPolicy,
) -> None:
    """Raise if this process's batch is bad."""
    if report.malformed:
        raise ValueError(f"exchange: {_malformed(features[report.malformed_feature], report.malformed, batch)}")
    if policy == "error" and report.first_feature >= 0:
        feature = features[report.first_feature]
        count = report.out_of_range[report.first_feature]
        raise IndexError(f"exchange: {_out_of_range(feature, tables, report.first_id, count, None)}")


def raise_ranks(
    faults: Sequence[RankReport],
    rank: int,
    batch: Sequence[GroupIds],
    features: Sequence[FeatureConfig],
    tables: Sequence[TableConfig],
) -> NoReturn:
    """Raise the same kind of error on every rank, for the first rank with a fault; ``batch`` is that of ``rank``."""
    fault = faults[0]
    where = f"exchange: rank {fault.rank}: "
    others = f" (ranks with faults: {', '.join(str(each.rank) for each in faults)})"
    if fault.refused:
        raise RuntimeError(
            f"{where}refused its batch and raised its own error; rank {rank} stops with it, see rank {fault.rank}'s log"
            f"{others}"
        )
    if fault.malformed:
        own = batch if fault.rank == rank else ()
        raise ValueError(f"{where}{_malformed(features[fault.malformed_feature], fault.malformed, own)}{others}")
    feature = features[fault.first_feature]
    text = _out_of_range(feature, tables, fault.first_id, fault.num_out_of_range, fault.num_out_of_range)
    raise IndexError(f"{where}{text}{others}")


def raise_rates(rates: Mapping[int, float]) -> NoReturn:
    """Raise for learning rates that differ, on every rank; ``rates`` are those that this one heard of."""
    by_rate: dict[float, list[int]] = {}
    for rank, rate in rates.items():
        by_rate.setdefault(rate, []).append(rank)
    got = ", ".join(
        f"{rate:g} on {f'rank {ranks[0]}' if len(ranks) == 1 else f'ranks {ranks}'}" for rate, ranks in by_rate.items()
    )
    more = "" if len(by_rate) > 1 else ", and others among the ranks that hold a copy of the tables with one of these"
    raise ValueError(
        f"exchange: learning rates must be equal on all ranks, got {got}{more}; call set_learning_rate with the same "
        "value on every rank"
    )
