"""What joined batches need on either side of a lookup that takes features one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from gem_parallel._src.embeddings.config import FeatureConfig, TableConfig
from gem_parallel._src.embeddings.exchange import Exchanger
from gem_parallel._src.embeddings.ids import check_device
from gem_parallel._src.embeddings.keyed import KeyedJaggedIds
from gem_parallel._src.embeddings.pending import Pending

__all__ = ["check_one_dim", "join_rows", "joined_keys", "split_joined"]


def split_joined(
    ids: KeyedJaggedIds, exchanger: Exchanger | None, device: torch.device
) -> dict[str, tuple[Tensor, Tensor]]:
    """Cut a batch into features; the other ranks are told if that fails."""
    try:
        for name, tensor in (("values", ids.values), ("offsets", ids.offsets)):
            check_device(f"`{name}` of joined ids", tensor, device)
        return ids.split()
    except Exception:
        if exchanger is not None:
            exchanger.refuse()
        raise


def joined_keys(pending: Pending) -> tuple[str, ...]:
    """Keys of a batch that came joined.

    Raises:
        ValueError: it came as a mapping.
    """
    if pending.keys is None:
        raise ValueError(
            "lookup_joined: `pending` must be of KeyedJaggedIds, got a batch that came as a mapping; call lookup"
        )
    return pending.keys


def check_one_dim(keys: Sequence[str], features: Sequence[FeatureConfig], tables: Sequence[TableConfig]) -> None:
    """Refuse keys whose rows are no one tensor.

    Raises:
        ValueError: their tables have several dims.
    """
    table_of = {feature.name: feature.table for feature in features}
    dim_of = {table.name: table.dim for table in tables}
    dims: dict[int, str] = {}
    for key in keys:
        dims.setdefault(dim_of[table_of[key]], key)
    if len(dims) > 1:
        shown = ", ".join(f"{dim} ({key!r})" for dim, key in sorted(dims.items()))
        raise ValueError(
            f"lookup_joined: the tables of all keys must have one dim, got {shown}; call lookup, or keep the "
            "features of each dim in a ShardedEmbeddings of their own"
        )


def join_rows(keys: Sequence[str], found: Mapping[str, Tensor]) -> Tensor:
    """The keys' rows as one tensor, differentiable if one of them is."""
    with torch.set_grad_enabled(any(each.requires_grad for each in found.values())):
        return torch.cat([found[key] for key in keys])
