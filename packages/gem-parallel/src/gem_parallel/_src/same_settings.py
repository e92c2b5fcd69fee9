"""Whether all ranks were given the same settings, and which ones differ."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence

from torch.distributed.device_mesh import DeviceMesh

from gem_parallel._src.agree import agree

__all__ = ["check_agreement"]

MAX_TEXT = 400
"""Bytes of a setting that an error quotes."""


def check_agreement(
    owner: str,
    mesh: DeviceMesh,
    settings: Mapping[str, object],
    *,
    remedy: str,
    what: str = "arguments",
    refusal: Exception | None = None,
) -> None:
    """Raise on all ranks of a mesh unless they were given the same settings, by their ``repr``.

    What differs would make collectives of other sizes, or of other numbers, wait for each other. Equal settings cost
    one all-gather of a number each; for others it is then found out which and what they are.

    Args:
        owner: Whose settings they are, for the error.
        mesh: The ranks; all call it.
        settings: Argument -> its value; of a list each entry is compared. The names are equal on all ranks.
        remedy: What the error advises.
        what: What a rank with a ``refusal`` refuses, for the error on the others.
        refusal: This rank's own error, raised after the others were told.

    Raises:
        ValueError: names the first setting that differs, with every rank's.
        RuntimeError: another rank refuses; names it.
    """

    def gather(numbers: Sequence[int]) -> list[list[int]]:
        return agree(owner, what, mesh, refusal, numbers)

    names = list(settings)
    columns = zip(*gather([_digest(settings[name]) for name in names]), strict=True)
    differing = [name for name, column in zip(names, columns, strict=True) if len(set(column)) > 1]
    if not differing:
        return
    # All ranks have read the same numbers, so all come here.
    name, *others = differing
    given = settings[name]
    entries = given if isinstance(given, list) else [given]
    longest = max(row[0] for row in gather([len(entries)]))
    padding = [-1] * (longest - len(entries))
    digests = zip(*gather([*map(_digest, entries), *padding]), strict=True)
    index = next(at for at, column in enumerate(digests) if len(set(column)) > 1)
    text = repr(entries[index]).encode()[:MAX_TEXT] if index < len(entries) else b"no such entry"
    found: dict[str, list[int]] = {}
    gathered = gather(list(text.ljust(MAX_TEXT, b"\0")))
    for rank, row in sorted(zip(mesh.mesh.flatten().tolist(), gathered, strict=True)):
        found.setdefault(bytes(row).rstrip(b"\0").decode(errors="replace"), []).append(rank)
    place = f"{name}[{index}]" if isinstance(given, list) else name
    got = ", ".join(f"{each} on {_ranks(ranks)}" for each, ranks in found.items())
    too = f"; different, too: {', '.join(f'`{other}`' for other in others)}" if others else ""
    raise ValueError(f"{owner}: `{place}` must be equal on all ranks, got {got}{too}; {remedy}")


def _digest(value: object) -> int:
    return int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:8], "little") >> 1


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {list(ranks)}"
