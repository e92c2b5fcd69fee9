"""What is made from the offsets of a batch alone, made once for all calls that share a store.

An op enters the store of the schedule that it was given (``reusing``); what its launchers make inside by ``once`` is
kept there for the next layer and for the backward. Without a store ``once`` is a plain call.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from typing import Any, ParamSpec, TypeVar

import torch
from torch import Tensor

P = ParamSpec("P")
T = TypeVar("T")


def same_memory(a: Tensor, b: Tensor) -> bool:
    """Whether the two are one tensor, or views of the same entries."""
    return a is b or (
        a.device == b.device
        and a.dtype == b.dtype
        and a.shape == b.shape
        and a.stride() == b.stride()
        and a.data_ptr() == b.data_ptr()
    )


def _version(x: Tensor | None) -> int:
    """How often torch has written x in place."""
    return 0 if x is None else x._version


class Store:
    """Results by what they were made with. Holds the offsets, whose memory no other tensor can then take.

    No inference tensors: torch does not count what is written to them.
    """

    def __init__(self, *offsets: Tensor | None) -> None:
        self._offsets = offsets
        self._versions = tuple(map(_version, offsets))
        self._made: dict[Hashable, Any] = {}

    def is_of(self, offsets: Sequence[Tensor | None]) -> bool:
        """Whether these are the tensors of the store, in its order."""
        return len(offsets) == len(self._offsets) and all(
            a is b or (a is not None and b is not None and same_memory(a, b))
            for a, b in zip(offsets, self._offsets, strict=True)
        )

    def is_stale(self) -> bool:
        """Whether the offsets have been written in place since."""
        return tuple(map(_version, self._offsets)) != self._versions

    def __len__(self) -> int:
        return len(self._made)

    def once(self, make: Callable[..., T], args: tuple[Any, ...], kwargs: dict[str, Any]) -> T:
        """``make(*args, **kwargs)``, from the store where the same was made before."""
        names = tuple(map(self._name, args))
        if any(name is None for name in names):
            return make(*args, **kwargs)
        key = (make, names, tuple(kwargs.items()), self._stream())
        if key not in self._made:
            self._made[key] = make(*args, **kwargs)
        made: T = self._made[key]
        return made

    def _name(self, argument: Any) -> Hashable:
        """What a result depends on: which offsets, the shape of other tensors, the value of the rest; None: unknown."""
        if not isinstance(argument, Tensor):
            return ("value", argument)
        if argument.is_floating_point():
            return ("shape", argument.shape, argument.device)
        places = enumerate(self._offsets)
        return next((i for i, x in places if x is not None and same_memory(argument, x)), None)

    def _stream(self) -> int:
        """The stream that the results are made on: another would not wait for it."""
        device = next(x.device for x in self._offsets if x is not None)
        return torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0


class _Scope(threading.local):
    store: Store | None = None


_scope = _Scope()


def current_store() -> Store | None:
    """The store in scope in this thread."""
    return _scope.store


@contextlib.contextmanager
def reusing(store: Store | None) -> Iterator[None]:
    """Calls of ``once`` inside the block keep what they make in ``store``."""
    before, _scope.store = _scope.store, store
    try:
        yield
    finally:
        _scope.store = before


def once(make: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """``make(*args, **kwargs)``, of integer tensors' values and of other tensors' shapes and devices only.

    Kept by the store in scope if all integer tensors are offsets of it.
    """
    store = _scope.store
    return make(*args, **kwargs) if store is None else store.once(make, args, kwargs)
