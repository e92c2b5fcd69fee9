"""Whether the ranks of a job run the same kernels: each writes a hash into the shared cache, and they are compared."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

import torch.distributed as dist

from gem_kernels._src.tuning.choices import write_whole

_POLL_SECONDS = 0.2


class RanksDifferError(RuntimeError):
    """Ranks of one job would run other kernels, whose results differ in their last bits."""


def number_in(environment: Mapping[str, str], name: str) -> int | None:
    """A number that the launcher gives its processes; None outside a job."""
    value = environment.get(name)
    if value is None:
        return None
    if not value.isdigit():
        raise ValueError(f"warm: `{name}` must be a number, got {value!r}; start the ranks with torchrun, or unset it.")
    return int(value)


def check_equal(digests: Mapping[int, str], what: str) -> None:
    """Raise unless all ranks, of which rank 0 is one, have the same digest.

    Raises:
        RanksDifferError: naming the ranks that differ.
    """
    others = [rank for rank in sorted(digests) if digests[rank] != digests[0]]
    if others:
        named = ", ".join(f"rank {rank} {digests[rank]}" for rank in others)
        raise RanksDifferError(
            f"{what}: all ranks must have the hash of rank 0, {digests[0]}, got {named}; give them one "
            "TRITON_CACHE_DIR, one GEM_KERNELS_TUNING and the same GPUs and versions."
        )


def gather(digest: str, group: dist.ProcessGroup | None = None) -> list[str]:
    """The digests of all ranks of a process group, in order."""
    digests = [""] * dist.get_world_size(group)
    dist.all_gather_object(digests, digest, group=group)
    return digests


def _path(marker: Path, rank: int) -> Path:
    return marker.with_suffix(f".rank{rank}")


def forget_digests(marker: Path, rank: str) -> None:
    """Remove what a rank has written in an earlier job; "*" is every rank."""
    for path in marker.parent.glob(f"{marker.stem}.rank{rank}"):
        path.unlink(missing_ok=True)


def _wait_for(marker: Path, other: int, rank: int, deadline: float) -> str:
    path = _path(marker, other)
    while True:
        try:
            return path.read_text()
        except FileNotFoundError:
            pass
        if time.monotonic() > deadline:
            raise TimeoutError(
                f"warm: rank {rank} waited in vain for rank {other} to write {path.name} in {path.parent}; start all "
                "ranks of the job, with one TRITON_CACHE_DIR and one list of cases."
            )
        time.sleep(_POLL_SECONDS)


def compare(digest: str, marker: Path, rank: int, *, world_size: int | None, timeout: float) -> None:
    """Compare the digests of all ranks: in the process group if there is one, else through files beside the marker.

    Without a process group a rank compares with rank 0, and rank 0 with all others if it knows how many there are. A
    rank that is done before another begins may read what that one wrote in an earlier job. Then the other reads what
    this one has just written, if every rank has called ``forget_digests`` first: at least one finds a difference.

    Raises:
        RanksDifferError: naming the ranks that differ.
        TimeoutError: if a rank has not written its digest after ``timeout`` seconds.
    """
    if dist.is_available() and dist.is_initialized():
        check_equal(dict(enumerate(gather(digest))), "warm")
        return
    write_whole(_path(marker, rank), digest)
    deadline = time.monotonic() + timeout
    others = range(1, world_size or 1) if rank == 0 else (0,)
    digests = {other: _wait_for(marker, other, rank, deadline) for other in others}
    check_equal({**digests, rank: digest}, "warm")
