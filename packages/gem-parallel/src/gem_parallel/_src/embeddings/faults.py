"""The errors of a bad batch, in words."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NoReturn

from gem_parallel._src.embeddings.config import FeatureConfig, IdPolicy, TableConfig
from gem_parallel._src.embeddings.exchange import RankReport
from gem_parallel._src.embeddings.ids import BatchReport

__all__ = ["raise_local", "raise_ranks"]


def _malformed(feature: FeatureConfig, count: int) -> str:
    return (
        f"feature {feature.name!r}: offsets must start at 0, never fall and end at the number of its values, got "
        f"{count} places in the batch where they do not; build them as a 0 and the running sum of bag lengths"
    )


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
    report: BatchReport, features: Sequence[FeatureConfig], tables: Sequence[TableConfig], policy: IdPolicy
) -> None:
    """Raise if this process's batch is bad."""
    if report.malformed:
        raise ValueError(f"exchange: {_malformed(features[report.malformed_feature], report.malformed)}")
    if policy == "error" and report.first_feature >= 0:
        feature = features[report.first_feature]
        count = report.out_of_range[report.first_feature]
        raise IndexError(f"exchange: {_out_of_range(feature, tables, report.first_id, count, None)}")


def raise_ranks(
    faults: Sequence[RankReport], rank: int, features: Sequence[FeatureConfig], tables: Sequence[TableConfig]
) -> NoReturn:
    """Raise the same kind of error on every rank, for the first rank with a fault."""
    fault = faults[0]
    where = f"exchange: rank {fault.rank}: "
    others = f" (ranks with faults: {', '.join(str(each.rank) for each in faults)})"
    if fault.refused:
        raise RuntimeError(
            f"{where}refused its batch and raised its own error; rank {rank} stops with it, see rank {fault.rank}'s log"
            f"{others}"
        )
    if fault.malformed:
        raise ValueError(f"{where}{_malformed(features[fault.malformed_feature], fault.malformed)}{others}")
    feature = features[fault.first_feature]
    text = _out_of_range(feature, tables, fault.first_id, fault.num_out_of_range, fault.num_out_of_range)
    raise IndexError(f"{where}{text}{others}")
