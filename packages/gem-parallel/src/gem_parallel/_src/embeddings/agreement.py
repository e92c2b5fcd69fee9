"""Whether all ranks were given the same settings, and which ones differ."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch.distributed.device_mesh import DeviceMesh

from gem_parallel._src.collectives.base import all_gather_single

__all__ = ["check_agreement"]

MAX_TEXT = 400
"""Bytes of a setting that an error quotes."""


def check_agreement(mesh: DeviceMesh, device: torch.device, settings: Mapping[str, Sequence[object]]) -> None:
    """Raise on all ranks of a mesh unless they were given the same settings, by their ``repr``.

    What differs would make collectives of other sizes, or of other numbers, wait for each other. Equal settings cost
    one all-gather of a number each; for others it is then found out which and what they are.

    Args:
        mesh: The ranks; all call it.
        device: Of the collectives.
        settings: Argument -> its entries; of an option its one value. The names are equal on all ranks.

    Raises:
        ValueError: names the first setting that differs, with every rank's.
    """
    names = list(settings)
    columns = list(zip(*_gather(mesh, device, [_digest(settings[name]) for name in names]), strict=True))
    differing = [name for name, column in zip(names, columns, strict=True) if len(set(column)) > 1]
    if not differing:
        return
    # All ranks have read the same numbers, so all come here.
    name, *others = differing
    entries = settings[name]
    longest = max(row[0] for row in _gather(mesh, device, [len(entries)]))
    padding = [-1] * (longest - len(entries))
    digests = zip(*_gather(mesh, device, [*map(_digest, entries), *padding]), strict=True)
    index = next(at for at, column in enumerate(digests) if len(set(column)) > 1)
    text = repr(entries[index]).encode()[:MAX_TEXT] if index < len(entries) else b"no such entry"
    found: dict[str, list[int]] = {}
    gathered = _gather(mesh, device, list(text.ljust(MAX_TEXT, b"\0")))
    for rank, row in sorted(zip(mesh.mesh.flatten().tolist(), gathered, strict=True)):
        found.setdefault(bytes(row).rstrip(b"\0").decode(errors="replace"), []).append(rank)
    place = f"{name}[{index}]" if longest > 1 or name in ("tables", "features") else name
    got = ", ".join(f"{each} on {_ranks(ranks)}" for each, ranks in found.items())
    too = f"; different, too: {', '.join(f'`{other}`' for other in others)}" if others else ""
    raise ValueError(
        f"ShardedEmbeddings: `{place}` must be equal on all ranks, got {got}{too}; "
        "make tables, features and options from the same values on every rank"
    )


def _digest(value: object) -> int:
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:8], "little") >> 1


def _gather(mesh: DeviceMesh, device: torch.device, numbers: Sequence[int]) -> list[list[int]]:
    """Every rank's numbers, in the order of ``mesh.mesh.flatten()``."""
    found = torch.tensor(numbers, dtype=torch.int64, device=device)
    for axis in reversed(range(mesh.ndim)):
        group = mesh.get_group(axis)
        whole = found.new_empty(group.size() * found.numel())
        all_gather_single(whole, found, group=group)
        found = whole
    rows: list[list[int]] = found.view(mesh.size(), -1).tolist()
    return rows


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {list(ranks)}"
