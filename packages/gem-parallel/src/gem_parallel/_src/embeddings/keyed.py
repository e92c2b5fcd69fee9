"""A batch whose features are joined already."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from gem_parallel._src.embeddings.config import check_flag
from gem_parallel._src.embeddings.ids import check_packed, describe_offsets, describe_places

__all__ = ["KeyedJaggedIds"]


class KeyedJaggedIds:
    """Ids of several features as one tensor, feature after feature, as in torchrec's ``KeyedJaggedTensor``.

    All features have the same number of bags B. ``ShardedEmbeddings.exchange`` takes it in place of a mapping, and
    ``lookup_joined`` gives the rows as one tensor. The tensors are kept, not copied, and must not be changed before the
    lookup returns.

    Args:
        keys: The F features in the order of their ids; distinct, at least one.
        values: (N,) int64 ids: those of the first key's bags, then the second key's, and so on.
        offsets: (F * B + 1,) int64 from 0 to N: where each bag begins in ``values``. ``offsets`` or ``lengths``.
        lengths: (F * B,) int64 or int32 number of ids of each bag; offsets are summed from it, by a few operators.
        validate: On CUDA, also check what offsets or lengths say, which waits for the device. On CPU they always are.

    Raises:
        TypeError: a wrong type or dtype.
        ValueError: keys that repeat or are none, a wrong shape, a number of bags that keys do not divide, tensors on
            different devices, both or neither of offsets and lengths, or such as do not describe bags of the values.
            What ids say, and on CUDA what offsets say, is checked by ``exchange``.
    """

    __slots__ = ("keys", "num_bags", "offsets", "values")

    def __init__(
        self,
        keys: Sequence[str],
        values: Tensor,
        *,
        offsets: Tensor | None = None,
        lengths: Tensor | None = None,
        validate: bool = False,
    ) -> None:
        self.keys = _checked_keys(keys)
        check_flag("KeyedJaggedIds", "validate", validate)
        check_packed("KeyedJaggedIds: `values`", values)
        if (offsets is None) is (lengths is None):
            given = "neither" if offsets is None else "both"
            raise ValueError(f"KeyedJaggedIds: `offsets` or `lengths` must be given, got {given}; give one of them")
        if offsets is None:
            assert lengths is not None
            check_packed("KeyedJaggedIds: `lengths`", lengths, (torch.int64, torch.int32))
            offsets = torch.zeros(lengths.numel() + 1, dtype=torch.int64, device=lengths.device)
            torch.cumsum(lengths, 0, out=offsets[1:])
        else:
            check_packed("KeyedJaggedIds: `offsets`", offsets)
        if offsets.device != values.device:
            raise ValueError(
                f"KeyedJaggedIds: `values` and {'`offsets`' if lengths is None else '`lengths`'} must be on one "
                f"device, got {values.device} and {offsets.device}; move one"
            )
        self.num_bags, rest = divmod(offsets.numel() - 1, len(self.keys))
        if rest or offsets.numel() == 0:
            rule = (
                "`offsets` must hold keys x bags + 1 numbers"
                if lengths is None
                else "`lengths` must hold keys x bags numbers"
            )
            count = offsets.numel() if lengths is None else lengths.numel()
            raise ValueError(
                f"KeyedJaggedIds: {rule}, as many bags for each of the {len(self.keys)} keys, got {count}; features "
                "with other numbers of bags go to exchange as a mapping of (values, offsets)"
            )
        self.values, self.offsets = values, offsets
        if validate or values.device.type == "cpu":
            if lengths is None:
                self._check_offsets()
            else:
                _check_lengths(lengths, values.numel())

    def _check_offsets(self) -> None:
        """Raise, in the words of ``exchange``, unless the offsets describe bags of the values; reads one bool."""
        offsets, num_values = self.offsets, self.values.numel()
        if bool((offsets[0] == 0) & (offsets[-1] == num_values) & (offsets[1:] >= offsets[:-1]).all()):
            return
        for key, (values, own) in self._split("KeyedJaggedIds").items():
            if falls := int((own[1:] < own[:-1]).sum()):
                raise ValueError(f"KeyedJaggedIds: {describe_places(key, falls, own, values.numel())}")

    def split(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Each key's own (values, offsets), values as views. On CUDA the host waits for the device.

        Raises:
            ValueError: the keys' ids do not follow one another from 0 to N.
        """
        return self._split("exchange")

    def _split(self, owner: str) -> dict[str, tuple[Tensor, Tensor]]:
        if self.num_bags:
            starts = self.offsets[:: self.num_bags].tolist()
        else:
            starts = [*self.offsets.tolist() * len(self.keys), int(self.offsets[0])]
        num_values = self.values.numel()
        found = {}
        for at, key in enumerate(self.keys):
            start, end = starts[at], starts[at + 1]
            last = at == len(self.keys) - 1
            if (at == 0 and start != 0) or not start <= end <= num_values or (last and end != num_values):
                got = f"{start} to {end} where {len(self.keys)} joined keys have {num_values} values"
                raise ValueError(f"{owner}: {describe_offsets(key, got)}")
            bags = self.offsets[at * self.num_bags : (at + 1) * self.num_bags + 1]
            found[key] = self.values[start:end], bags - start if start else bags
        return found

    def __repr__(self) -> str:
        shown = ", ".join(self.keys[:3]) + (", ..." if len(self.keys) > 3 else "")
        return f"KeyedJaggedIds([{shown}], {self.values.numel()} ids, {self.num_bags} bags per key)"


def _checked_keys(keys: object) -> tuple[str, ...]:
    if isinstance(keys, str) or not isinstance(keys, Sequence):
        raise TypeError(
            f"KeyedJaggedIds: `keys` must be a sequence of feature names, got {type(keys).__name__}; pass a list"
        )
    found = tuple(keys)
    if set(map(type, found)) - {str}:
        wrong = next(each for each in found if type(each) is not str)
        raise TypeError(f"KeyedJaggedIds: `keys` must be str, got {type(wrong).__name__}; pass names")
    if not found:
        raise ValueError("KeyedJaggedIds: `keys` must name at least one feature, got none; for no features pass {}")
    if len(set(found)) < len(found):
        twice = next(key for key in found if found.count(key) > 1)
        raise ValueError(
            f"KeyedJaggedIds: `keys` must be distinct, got {twice!r} {found.count(twice)} times; rename one"
        )
    return found


def _check_lengths(lengths: Tensor, num_values: int) -> None:
    if lengths.numel() and int(lengths.min()) < 0:
        at = int(lengths.argmin())
        raise ValueError(
            f"KeyedJaggedIds: `lengths` must be at least 0, got {int(lengths[at])} at place {at}; use 0 for an empty "
            "bag"
        )
    if (total := int(lengths.sum())) != num_values:
        raise ValueError(
            f"KeyedJaggedIds: `lengths` must sum to the number of values, {num_values}, got {total}; pass the values "
            "of these bags"
        )
