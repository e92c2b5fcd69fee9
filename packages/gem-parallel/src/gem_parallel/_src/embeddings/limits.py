"""How many ids one lookup can take, checked before any work.

fbgemm's CUDA kernels count the ids and the bags of a call with 32 bits, and so does the sort in its backward; rows and
elements of tables are 64-bit numbers there. torch's sort on CUDA, which the exchange between ranks deduplicates with,
has the same limit. A call cannot be cut in two: equal ids of both parts would be two updates instead of one.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["MAX_BAGS", "MAX_IDS", "check_num_bags", "check_num_ids", "check_num_received"]

MAX_IDS = 2**31 - 2
"""Ids of one dim in one batch of a rank: fbgemm's running sum over them wants fewer than 2^31 - 1."""

MAX_BAGS = 2**31 - 2
"""Bags likewise; offsets are one more."""


def check_num_ids(dim: int, names: Sequence[str], num_ids: int) -> None:
    """Raise unless the ids of all features of a dim fit in one lookup.

    Raises:
        ValueError: too many.
    """
    _check_batch(dim, names, "ids", num_ids, MAX_IDS, "fbgemm's kernels and the sort count them with 32 bits")


def check_num_bags(dim: int, names: Sequence[str], num_bags: int, most: int = MAX_BAGS) -> None:
    """Raise unless the bags of all pooled features of a dim fit in one lookup.

    Raises:
        ValueError: too many.
    """
    _check_batch(dim, names, "bags", num_bags, most, "fbgemm's backward has no larger numbers for them")


def _check_batch(dim: int, names: Sequence[str], what: str, count: int, most: int, why: str) -> None:
    if count <= most:
        return
    shown = ", ".join(repr(name) for name in names[:3])
    features = f"feature {shown}" if len(names) == 1 else f"features {shown}{', ...' if len(names) > 3 else ''}"
    together = "" if len(names) == 1 else " together"
    raise ValueError(
        f"exchange: {features} of tables of dim {dim} must have at most {most} {what}{together} in one batch of a rank "
        f"({why}), got {count}; split the batch, or spread it over more ranks"
    )


def check_num_received(dim: int, rank: int, num_rows: int) -> None:
    """Raise unless the rows that all ranks ask this one for fit in one lookup.

    Raises:
        ValueError: too many.
    """
    if num_rows > MAX_IDS:
        raise ValueError(
            f"exchange: the ranks must ask one rank for at most {MAX_IDS} rows of tables of dim {dim} in one batch "
            f"(fbgemm's kernels count them with 32 bits), got {num_rows} for rank {rank}; use smaller batches, or "
            "place the tables row_wise over more ranks"
        )
