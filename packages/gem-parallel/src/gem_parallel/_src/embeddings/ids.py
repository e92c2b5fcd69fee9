"""One batch's ids as flat tensors, checked on the device they are on.

All checks of values (ids within the table, offsets that describe bags) end in one small int64 vector, so that a CUDA
batch costs one small copy to the host. Shapes, types and names are known to the host and checked there.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gem_parallel._src.embeddings.config import FeatureConfig, IdPolicy
from gem_parallel._src.embeddings.hashing import hash_ids, to_int64
from gem_parallel._src.embeddings.layout import FeatureSlot, Group
from gem_parallel._src.embeddings.limits import check_num_ids
from gem_parallel._src.embeddings.transfer import to_device

__all__ = [
    "NUM_SUMMARY",
    "BatchIds",
    "BatchReport",
    "FeatureIds",
    "GroupIds",
    "check_device",
    "check_packed",
    "describe_offsets",
    "describe_places",
    "flatten_ids",
    "join_bags",
    "summarise",
]

NUM_SUMMARY = 4
"""Leading numbers of ``BatchIds.summary``."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FeatureIds:
    """Where one feature of the batch lies in its group's flat ids."""

    slot: FeatureSlot
    start: int
    end: int
    offsets: Tensor
    """(num_bags + 1,) int64, from 0 to end - start."""

    @property
    def num_bags(self) -> int:
        return self.offsets.numel() - 1

    @property
    def pooled(self) -> bool:
        return self.slot.config.pooling != "none"

    @property
    def num_outputs(self) -> int:
        return self.num_bags if self.pooled else self.end - self.start


@dataclass(frozen=True, kw_only=True, slots=True)
class GroupIds:
    """The batch's ids for the tables of one dim."""

    group: Group
    values: Tensor
    """(N,) int64 global rows, by table (or column shard of one), then feature; out of range only if dropped."""
    features: tuple[FeatureIds, ...]
    counts: tuple[int, ...]
    """Ids per table; they sum to N."""
    tables: Tensor | None = None
    """(N,) int64 table of each id, where it is known already."""
    dropped: Tensor | None = None
    """(N,) bool, with ``tables``; None if no id is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchIds:
    """A batch, after the id policy."""

    groups: tuple[GroupIds, ...]
    summary: Tensor
    """(4 + F,) int64: (number, first feature) of places where offsets do not describe bags, then (feature, id) of the
    first offending id in the order of tables, -1 where there is none, then the number of out-of-range ids of each
    configured feature."""


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchReport:
    """``BatchIds.summary`` on the host."""

    malformed: int
    malformed_feature: int
    first_feature: int
    first_id: int
    out_of_range: tuple[int, ...]


def check_device(what: str, tensor: Tensor, device: torch.device) -> None:
    """Raise unless a tensor of the batch is where the tables are."""
    if tensor.device != device:
        raise ValueError(
            f"exchange: {what} must be on the tables' device {device}, got {tensor.device}; move the batch first"
        )


def check_packed(what: str, tensor: object, dtypes: tuple[torch.dtype, ...] = (torch.int64,)) -> None:
    """Raise unless ``tensor`` is a dense one with one dim and one of ``dtypes``."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{what} must be a Tensor, got {type(tensor).__name__}; pass torch.tensor")
    if tensor.dtype not in dtypes:
        names = " or ".join(str(dtype).removeprefix("torch.") for dtype in dtypes)
        raise TypeError(f"{what} must be {names}, got {tensor.dtype}; {to_int64(tensor.dtype)}")
    if tensor.layout is not torch.strided:
        raise TypeError(f"{what} must be a dense tensor, got one of layout {tensor.layout}; use .to_dense()")
    if tensor.dim() != 1:
        raise ValueError(f"{what} must have one dim, got shape {tuple(tensor.shape)}; flatten it")


def describe_offsets(feature: str, got: str) -> str:
    """What is wrong with offsets that do not describe bags, of a mapping and of joined ids."""
    return (
        f"feature {feature!r}: offsets must start at 0, never fall and end at the number of its values, got {got}; "
        "build them as a 0 and the running sum of bag lengths"
    )


def describe_places(feature: str, count: int, offsets: Tensor | None, num_values: int) -> str:
    """``describe_offsets`` of offsets that go wrong at ``count`` places, with the first if they are here to be read."""
    places = "1 place" if count == 1 else f"{count} places"
    first = "" if offsets is None else _first_place(feature, offsets.tolist(), num_values)
    return describe_offsets(feature, f"{places} in the batch where they do not{first}")


def _first_place(feature: str, offsets: Sequence[int], num_values: int) -> str:
    if offsets[0] != 0:
        return f" ({feature!r} starts at {offsets[0]})"
    for bag, (start, end) in enumerate(itertools.pairwise(offsets)):
        if end < start:
            return f" ({feature!r} has {start}, then {end} at bag {bag})"
    return f" ({feature!r} ends at {offsets[-1]} for {num_values} values)"


def check_feature(name: str, pair: object, device: torch.device) -> tuple[Tensor, Tensor]:
    """What the host can check: a pair of one-dimensional int64 tensors on the module's device."""
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        size = f" of {len(pair)}" if isinstance(pair, tuple | list) else ""
        raise TypeError(
            f"exchange: `ids[{name!r}]` must be a pair (values, offsets), got {type(pair).__name__}{size}; pass both "
            "as a tuple"
        )
    for argument, tensor in zip(("values", "offsets"), pair, strict=True):
        check_packed(f"exchange: {argument} of feature {name!r}", tensor)
        check_device(f"{argument} of feature {name!r}", tensor, device)
    values, offsets = pair
    if offsets.numel() == 0:
        raise ValueError(
            f"exchange: offsets of feature {name!r} must hold num_bags + 1 values, the first 0, got an empty tensor; "
            "pass zeros for empty bags"
        )
    return values, offsets


def flatten_ids(
    ids: Mapping[str, tuple[Tensor, Tensor]],
    groups: Sequence[Group],
    features: Sequence[FeatureConfig],
    *,
    policy: IdPolicy,
    device: torch.device,
) -> BatchIds:
    """Check a batch, lay it out by group and table, and apply ``drop`` or ``clamp``.

    Raises:
        TypeError, ValueError: an unknown feature, a tensor of the wrong type, shape or device, or too many ids.
    """
    if not isinstance(ids, Mapping):
        raise TypeError(
            f"exchange: `ids` must be a mapping from feature to (values, offsets), got {type(ids).__name__}; "
            "for an empty batch pass {}"
        )
    known = {feature.name for feature in features}
    unknown = [name for name in ids if name not in known]
    if unknown:
        raise ValueError(
            f"exchange: `ids` must name configured features only, got {unknown[0]!r}; "
            f"the features are {', '.join(sorted(known)) or 'none'}"
        )
    hashed = {
        slot.config.name: group.tables[slot.table].config.num_rows
        for group in groups
        for slot in group.features
        if group.tables[slot.table].config.hashed
    }
    pairs = {name: check_feature(name, pair, device) for name, pair in ids.items()}
    for group in groups:
        names = [slot.config.name for slot in group.features if slot.config.name in pairs]
        check_num_ids(group.dim, names, sum(pairs[name][0].numel() for name in names))
    for name, (values, offsets) in pairs.items():
        if name in hashed:
            pairs[name] = hash_ids(values, hashed[name]), offsets
    flat = [_flatten_group(pairs, group, device) for group in groups]
    summary = torch.zeros(NUM_SUMMARY + len(features), dtype=torch.int64, device=device)
    summary[1:NUM_SUMMARY] = -1
    checked = [_check_values(group_ids, summary, policy) for group_ids in flat]
    return BatchIds(groups=tuple(checked), summary=summary)


def _flatten_group(pairs: Mapping[str, tuple[Tensor, Tensor]], group: Group, device: torch.device) -> GroupIds:
    values, features = [], []
    counts = [0] * len(group.tables)
    start = 0
    for slot in group.features:
        if slot.config.name not in pairs:
            continue
        ids, offsets = pairs[slot.config.name]
        end = start + ids.numel()
        features.append(FeatureIds(slot=slot, start=start, end=end, offsets=offsets))
        values.append(ids)
        counts[slot.table] += ids.numel()
        start = end
    if not values:
        none = torch.empty(0, dtype=torch.int64, device=device)
        return GroupIds(group=group, values=none, features=(), counts=tuple(counts))
    flat = values[0].contiguous() if len(values) == 1 else torch.cat(values)
    return GroupIds(group=group, values=flat, features=tuple(features), counts=tuple(counts))


def _check_values(group_ids: GroupIds, summary: Tensor, policy: IdPolicy) -> GroupIds:
    """Add the group's faults to ``summary``; return the ids after the policy."""
    features, values, device = group_ids.features, group_ids.values, summary.device
    if not features:
        return group_ids
    sizes = [feature.end - feature.start for feature in features]
    offsets = torch.cat([feature.offsets for feature in features]) if len(features) > 1 else features[0].offsets
    # offsets of all features in one run: each must start at 0, end at its number of ids and never fall
    lengths = torch.tensor([feature.offsets.numel() for feature in features])
    last = lengths.cumsum(0) - 1
    first = last + 1 - lengths
    # A feature is reported once, for the first column shard of its table.
    reported = [int(feature.slot.piece == 0) for feature in features]
    numbers = [*first.tolist(), *last.tolist(), *sizes, *_rows_of(group_ids), *reported]
    table = to_device(numbers, device).view(5, -1)
    falls = torch.cat([offsets.new_zeros(1, dtype=torch.bool), offsets[1:] < offsets[:-1]])
    # where one feature ends and the next begins the run falls by right
    falls.index_fill_(0, table[0], False)
    running = falls.cumsum(0)
    faults = running[table[1]] - running[table[0]]
    faults = (faults + (offsets[table[0]] != 0) + (offsets[table[1]] != table[2])) * table[4]
    slots = to_device([feature.slot.index for feature in features], device)
    malformed = faults.sum()
    # Indices are vectors of one: a scalar one would make the host wait for the device.
    worst = slots[(faults > 0).to(torch.int8).argmax().view(1)]
    summary[1:2] = torch.where((malformed > 0) & (summary[1:2] < 0), worst, summary[1:2])
    summary[0] += malformed
    if values.numel() == 0:
        return group_ids
    limit = torch.repeat_interleave(table[3], table[2], output_size=values.numel())
    bad = (values < 0) | (values >= limit)
    ends = table[2].cumsum(0)
    running = torch.cat([bad.new_zeros(1, dtype=torch.int64), bad.cumsum(0)])
    per_feature = running[ends] - running[ends - table[2]]
    summary.index_add_(0, slots + NUM_SUMMARY, per_feature * table[4])
    position = bad.to(torch.int8).argmax().view(1)
    faulty = per_feature.sum() > 0
    where = torch.searchsorted(ends, position, right=True)
    found = torch.cat([slots[where], values[position]])
    # The first group with a fault keeps its place.
    summary[2:4] = torch.where(faulty & (summary[2] < 0), found, summary[2:4])
    if policy == "clamp":
        values = torch.minimum(values.clamp(min=0), limit - 1)
    elif policy == "drop":
        # num_rows is the scratch row of one rank's table, and marks a dropped id before an exchange
        values = torch.where(bad, limit, values)
    return GroupIds(group=group_ids.group, values=values, features=features, counts=group_ids.counts)


def join_bags(features: Sequence[FeatureIds]) -> Tensor | None:
    """Offsets of the bags of a group's features, one after the other, into the group's ids; None if all are unpooled.

    An unpooled feature has bags of one id. Between two features there is one empty bag more. The offsets are good ones.
    """
    if not any(feature.pooled for feature in features):
        return None
    if len(features) == 1:
        return features[0].offsets
    longest = max((feature.num_outputs for feature in features if not feature.pooled), default=None)
    device = features[0].offsets.device
    counting = torch.empty(0) if longest is None else torch.arange(longest + 1, device=device)
    parts = [feature.offsets if feature.pooled else counting[: feature.num_outputs + 1] for feature in features]
    # From one feature's end to the next one's 0 the run falls, which makes the empty bag.
    lengths = torch.cat(parts).diff().clamp_(min=0)
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def _rows_of(group_ids: GroupIds) -> list[int]:
    tables = group_ids.group.tables
    return [tables[feature.slot.table].config.num_rows for feature in group_ids.features]


def summarise(vector: Sequence[int]) -> BatchReport:
    """Read ``BatchIds.summary``."""
    return BatchReport(
        malformed=vector[0],
        malformed_feature=vector[1],
        first_feature=vector[2],
        first_id=vector[3],
        out_of_range=tuple(vector[NUM_SUMMARY:]),
    )
