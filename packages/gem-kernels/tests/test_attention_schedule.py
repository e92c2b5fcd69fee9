"""One schedule for the layers of a batch: what it keeps, what it refuses, and that no result depends on it."""

import threading

import torch

from gem_kernels._src.attention.reuse import Store, once, reusing


class Made:
    """A function of offsets and numbers that counts its calls."""

    def __init__(self):
        self.calls = 0

    def __call__(self, *args, **kwargs):
        self.calls += 1
        return (self.calls, len(args), len(kwargs))


def test_once_makes_what_depends_on_the_offsets_once():
    offsets_q, offsets_k, make = torch.tensor([0, 2, 5]), torch.tensor([0, 1, 3]), Made()
    q = torch.zeros(5, 4, 8)
    store = Store(offsets_q, offsets_k)
    with reusing(store):
        first = once(make, q, offsets_q, offsets_k, 64, rows=2)
        assert once(make, torch.ones(5, 4, 8), offsets_q.detach(), offsets_k[:], 64, rows=2) is first
        assert len(store) == make.calls == 1
        for args, kwargs in (
            ((q, offsets_k, offsets_q, 64), {"rows": 2}),
            ((q, offsets_q, offsets_k, 65), {"rows": 2}),
            ((q, offsets_q, offsets_k, 64), {"rows": 3}),
            ((q[:, :2], offsets_q, offsets_k, 64), {"rows": 2}),
        ):
            assert once(make, *args, **kwargs) is not first
        assert len(store) == make.calls == 5


def test_once_keeps_nothing_of_other_offsets_or_without_a_store():
    offsets, make = torch.tensor([0, 2, 5]), Made()
    store = Store(offsets)
    with reusing(store):
        for other in (offsets.clone(), offsets.int(), offsets[:2], torch.tensor([0, 9, 2, 9, 5])[::2]):
            once(make, other)
        with reusing(None):
            once(make, offsets)
        assert len(store) == 0
        once(make, offsets)
    once(make, offsets)
    assert make.calls == 7
    assert len(store) == 1


def test_a_store_in_scope_is_of_one_thread():
    offsets, make = torch.tensor([0, 2]), Made()
    store = Store(offsets)
    with reusing(store):
        thread = threading.Thread(target=lambda: once(make, offsets))
        thread.start()
        thread.join()
    assert make.calls == 1
    assert len(store) == 0
