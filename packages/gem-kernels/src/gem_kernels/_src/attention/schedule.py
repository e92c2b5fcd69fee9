"""The schedule of a batch as users hold it, and as the ops find what it keeps.

An op takes tensors, so a schedule travels as one: its token, a tensor of one byte that nobody reads, made by an op of
its own so that ``torch.compile`` may trace the making. The store hangs on the token as a Python attribute. Where
something copies the token, the copy has none, and the op makes what it needs itself: a schedule never changes a result.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gem_kernels._src.attention.reuse import Store, current_store, same_memory
from gem_kernels._src.validate import (
    check_bool,
    check_capacity,
    check_int,
    check_max_seqlen,
    check_offset_values,
    check_offsets,
    check_pairing,
    check_request_values,
    reads_values,
)

_NAME = "AttentionSchedule"


class AttentionSchedule:
    """What the attention ops derive from the offsets of one batch, made once for all layers, forward and backward.

    Passed as ``schedule=`` to :func:`gem_kernels.jagged_attention`, :func:`gem_kernels.gdpa`,
    :func:`gem_kernels.gdpa_norm_block` and the modules, with the offsets that it was made of; the results are the same
    bit by bit as without. It keeps the work lists of the kernels (chunks of queries and keys, ordered by work, on the
    device; one set for each tile size, number of heads and stream that asks for one, made at the first use), and that
    the values of the offsets have been checked. Nothing waits for the device.

    Args:
        offsets_q: (B + 1,) int32 or int64, from 0 to ``total_q``; None for seeds that every sequence shares.
        offsets_k: (B + 1,), from 0 to ``total_k``, on the same device; (R + 1,) with ``request_index``.
        total_q: Rows of q: S with seeds.
        total_k: Rows of k and v.
        max_seqlen_q: Longest query sequence in tokens; an upper bound is allowed.
        max_seqlen_k: Longest key sequence in tokens; an upper bound is allowed.
        request_index: (B,) int32 or int64, as of the ops.
        validate: On CUDA, check the values of the offsets and of ``request_index`` now, which waits for the device. On
            CPU they always are. Layers that are given the schedule do not check them again, unless told to.

    Raises:
        ValueError: on a shape, device, offset, request or number that does not fit.
        TypeError: on a dtype or argument type that does not fit.

    The tensors must keep their values: an op refuses a schedule whose offsets have been written in place since. Torch
    does not count the writes to tensors made under ``torch.inference_mode``: of those nothing is kept, and every layer
    makes and checks what it needs. Of writes through ``.data`` or by another library nobody knows; make a new schedule.
    Make one for every batch, of the very tensors that the layers get: copies are refused, unless a call has
    ``validate=True``, which compares values. It may be made inside or outside of ``torch.compile``, where an op does
    not refuse a schedule of other tensors, but ignores it.

    Example:
        >>> schedule = AttentionSchedule(
        ...     offsets, offsets, total_q=len(x), total_k=len(x), max_seqlen_q=n, max_seqlen_k=n
        ... )
        >>> for layer in layers:
        ...     x = layer(x, offsets, n, schedule=schedule)
    """

    def __init__(
        self,
        offsets_q: Tensor | None,
        offsets_k: Tensor,
        *,
        total_q: int,
        total_k: int,
        max_seqlen_q: int,
        max_seqlen_k: int,
        request_index: Tensor | None = None,
        validate: bool = False,
    ) -> None:
        check_offsets(_NAME, "offsets_k", offsets_k, offsets_k)
        if offsets_q is not None:
            check_offsets(_NAME, "offsets_q", offsets_q, offsets_k)
        check_pairing(_NAME, offsets_q, offsets_k, request_index, offsets_k)
        for name, total in (("total_q", total_q), ("total_k", total_k)):
            check_int(_NAME, name, total, "pass len(q) or len(k)")
            if total < 0:
                raise ValueError(f"{_NAME}: `{name}` must be >= 0 rows, got {total}; pass len(q) or len(k).")
        check_max_seqlen(_NAME, "max_seqlen_q", max_seqlen_q)
        check_max_seqlen(_NAME, "max_seqlen_k", max_seqlen_k)
        check_bool(_NAME, validate=validate)
        self.offsets_q = offsets_q
        self.offsets_k = offsets_k
        self.total_q = total_q
        self.total_k = total_k
        self.max_seqlen_q = max_seqlen_q
        self.max_seqlen_k = max_seqlen_k
        self.request_index = request_index
        self.token: Tensor = schedule_token(
            offsets_q, offsets_k, request_index, total_q, total_k, max_seqlen_q, max_seqlen_k, validate
        )
        """(1,) uint8 on the device of the offsets: what the ops take; its value means nothing."""

    def __repr__(self) -> str:
        return (
            f"AttentionSchedule(num_sequences={self.offsets_k.shape[0] - 1}, total_q={self.total_q}, "
            f"total_k={self.total_k}, max_seqlen_q={self.max_seqlen_q}, max_seqlen_k={self.max_seqlen_k}, "
            f"device={self.offsets_k.device})"
        )


@torch.library.custom_op("gem_kernels::attention_schedule", mutates_args=())
def schedule_token(
    offsets_q: Tensor | None,
    offsets_k: Tensor,
    request_index: Tensor | None,
    total_q: int,
    total_k: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    validate: bool,
) -> Tensor:
    """The token of a schedule, (1,) uint8 that is not filled in; checks values on CPU, or where told to."""
    read = offsets_k.device.type == "cpu" or reads_values(validate)
    for side, offsets, total, max_seqlen in (
        ("q", offsets_q, total_q, max_seqlen_q),
        ("k", offsets_k, total_k, max_seqlen_k),
    ):
        if offsets is None:
            continue
        names = (f"offsets_{side}", f"max_seqlen_{side}")
        check_capacity(_NAME, *names, max_seqlen, offsets.shape[0] - 1, total)
        if read:
            check_offset_values(_NAME, names[0], offsets, total, names[1], max_seqlen)
    if read and request_index is not None:
        check_request_values(_NAME, request_index, offsets_k.shape[0] - 1)
    token = offsets_k.new_empty(1, dtype=torch.uint8)
    tensors = (offsets_q, offsets_k, request_index)
    if not any(x is not None and x.is_inference() for x in tensors):
        token.gem_kernels_store = Store(*tensors)  # type: ignore[attr-defined]
    return token


@schedule_token.register_fake
def _schedule_token_fake(
    offsets_q: Tensor | None,
    offsets_k: Tensor,
    request_index: Tensor | None,
    total_q: int,
    total_k: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
    validate: bool,
) -> Tensor:
    return offsets_k.new_empty(1, dtype=torch.uint8)


def check_schedule(
    op: str,
    schedule: AttentionSchedule,
    q: Tensor,
    k: Tensor,
    offsets_q: Tensor | None,
    offsets_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    request_index: Tensor | None,
    *,
    validate: bool,
) -> Tensor:
    """The token of a schedule that was made for this call; reads values only if ``validate``.

    Raises:
        TypeError: if it is no schedule.
        ValueError: if it was made for other numbers of rows or shorter bounds, or of other offsets. Offsets in other
            memory are other ones, unless ``validate`` finds their values equal.
    """
    if not isinstance(schedule, AttentionSchedule):
        raise TypeError(
            f"{op}: `schedule` must be an AttentionSchedule or None, got {type(schedule).__name__}; "
            "make one of the offsets of the batch."
        )
    for name, rows, total in (("q", q.shape[0], schedule.total_q), ("k", k.shape[0], schedule.total_k)):
        if rows != total:
            raise ValueError(
                f"{op}: `schedule` must be made for the rows of `{name}`, {rows}, got one for {total}; "
                "make one for this batch."
            )
    for name, given, own in (
        ("offsets_q", offsets_q, schedule.offsets_q),
        ("offsets_k", offsets_k, schedule.offsets_k),
        ("request_index", request_index, schedule.request_index),
    ):
        if given is not own:
            _check_same(op, name, given, own, validate)
    for name, bound, least in (
        ("max_seqlen_q", max_seqlen_q, schedule.max_seqlen_q),
        ("max_seqlen_k", max_seqlen_k, schedule.max_seqlen_k),
    ):
        if bound < least:
            raise ValueError(
                f"{op}: `{name}` must be at least that of `schedule`, {least}, got {bound}; pass the same to both."
            )
    return schedule.token


def _check_same(op: str, name: str, given: Tensor | None, own: Tensor | None, validate: bool) -> None:
    problem = None
    if given is None or own is None:
        problem = f"got one made {'without' if own is None else 'with'} it"
    elif given.device != own.device:
        problem = f"on {given.device}, got one made of one on {own.device}"
    elif given.shape != own.shape:
        problem = f"of shape {tuple(given.shape)}, got one made of shape {tuple(own.shape)}"
    elif torch.compiler.is_compiling() or same_memory(given, own):
        # Traced tensors have no memory to compare: the op looks at it, and does not use the schedule of another.
        return
    elif not validate:
        problem = "the same tensor, got one made of another, whose values nobody compared (`validate=True` does)"
    elif not torch.equal(given.long(), own.long()):
        entry = int((given.long() != own.long()).nonzero()[0])
        problem = f"with its values, got {int(given[entry])} and, in the schedule, {int(own[entry])} at entry {entry}"
    if problem:
        raise ValueError(f"{op}: `schedule` must be made of `{name}` of the call, {problem}; make one for this batch.")


def find_store(
    op: str, token: Tensor | None, offsets_q: Tensor | None, offsets_k: Tensor, request_index: Tensor | None
) -> Store | None:
    """The store behind a token, or that of the op around this one, if it is of these very tensors.

    Raises:
        ValueError: if they have been written since the schedule was made.
    """
    store: Store | None = getattr(token, "gem_kernels_store", None) if token is not None else current_store()
    if store is None or not store.is_of((offsets_q, offsets_k, request_index)):
        return None
    if store.is_stale():
        raise ValueError(
            f"{op}: `schedule` must be made of offsets that keep their values, got one whose offsets have been written "
            "in place since; make a new one."
        )
    return store
