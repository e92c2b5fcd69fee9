"""Collectives over one group of ranks, whose failures name the ranks that are missing."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import Any, NoReturn

import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import PrefixStore, _get_default_store

from gem_parallel._src.collectives.base import all_gather_single

__all__ = ["REPORT_S", "Link", "Transfer"]

REPORT_S = 15.0
"""Seconds that the ranks of a failed transfer wait for each other's word before they name who is missing."""


class Transfer:
    """A collective under way."""

    def __init__(self, link: Link, work: dist.Work | None, what: str) -> None:
        self._link, self._work, self._what = link, work, what

    def wait(self) -> None:
        """Wait for it; on CUDA the current stream waits, not the host.

        Raises:
            RuntimeError: it failed, or on the CPU did not end within the link's time; names the missing ranks.
        """
        if self._work is None:
            return
        started = time.monotonic()
        try:
            if self._link.timeout_s is None or self._link.on_device:
                self._work.wait()
            else:
                self._work.wait(timedelta(seconds=self._link.timeout_s))
        except RuntimeError as error:
            self._link.fail(self._what, time.monotonic() - started, error)


class Link:
    """One process group.

    Args:
        process_group: The ranks.
        timeout_s: Seconds that the host waits for one collective, besides the group's own timeout.
        on_device: Whether collectives run on a CUDA stream, for which the host does not wait.
    """

    def __init__(self, process_group: dist.ProcessGroup, *, timeout_s: float | None, on_device: bool) -> None:
        self.process_group = process_group
        self.timeout_s = timeout_s
        self.on_device = on_device
        self.rank = process_group.rank()
        self.size = process_group.size()
        self._ranks = dist.get_process_group_ranks(process_group)

    def all_to_all(
        self,
        received: Tensor,
        sent: Tensor,
        receive_splits: list[int] | None = None,
        send_splits: list[int] | None = None,
        *,
        what: str,
    ) -> Transfer:
        """Start an all-to-all of rows; ``what`` names it in an error."""
        return self._start(dist.all_to_all_single, what, received, sent, receive_splits, send_splits)

    def all_gather(self, received: Tensor, sent: Tensor, *, what: str) -> Transfer:
        """Start an all-gather along the first dim."""
        return self._start(all_gather_single, what, received, sent)

    def all_reduce(self, tensor: Tensor, *, what: str) -> Transfer:
        """Start adding a tensor over the ranks, in place."""
        return self._start(dist.all_reduce, what, tensor)

    def _start(self, collective: Any, what: str, *arguments: Any) -> Transfer:
        try:
            return Transfer(self, collective(*arguments, group=self.process_group, async_op=True), what)
        except RuntimeError as error:
            self.fail(what, 0.0, error)

    def fail(self, what: str, after_s: float, error: Exception) -> NoReturn:
        """Tell the other ranks of the failure, hear who else saw it, and raise with those who are silent.

        Every live rank of the group meets the failure in its next transfer, so who says nothing is dead or stuck, or
        has not come to a transfer yet.
        """
        others = [rank for rank in self._ranks if rank != self._ranks[self.rank]]
        text = (
            f"{what} between ranks {self._ranks} failed on rank {self._ranks[self.rank]} after {after_s:.1f} s "
            f"({type(error).__name__}: {str(error).splitlines()[0] if str(error) else 'no text'})"
        )
        try:
            silent = self._silent(others)
        except RuntimeError as unreachable:
            raise RuntimeError(
                f"{text}; the store of the process group, which rank 0 keeps unless torchrun does, cannot be reached "
                f"either: {unreachable}"
            ) from error
        if silent:
            names = ", ".join(str(rank) for rank in silent)
            verb = "rank" if len(silent) == 1 else "ranks"
            raise RuntimeError(
                f"{text}; {verb} {names} said nothing for {REPORT_S:g} s: dead, stuck, or not yet at a transfer; "
                "see its log and restart from the last checkpoint"
            ) from error
        raise RuntimeError(f"{text}; all of them report a failure, see each one's log") from error

    def _silent(self, others: list[int]) -> list[int]:
        store = PrefixStore(f"gem_parallel/faults/{self.process_group.group_name}", _get_default_store())
        store.set(str(self._ranks[self.rank]), "failed")
        deadline = time.monotonic() + REPORT_S
        while others and time.monotonic() < deadline:
            others = [rank for rank in others if not store.check([str(rank)])]
            if others:
                time.sleep(0.1)
        return others
