"""One schedule for the layers of a batch: what it keeps, what it refuses, and that no result depends on it."""

import importlib
import threading

import pytest
import torch
from packed_ops import sizes
from schedule_calls import CALLS, REQUESTS, X, make_schedule, run, store_of

import gem_kernels
from gem_kernels import gdpa, gdpa_norm_block, jagged_attention
from gem_kernels._src.attention.reuse import Store, once, reusing
from gem_kernels.testing import attention_inputs


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


# ---------------------------------------------------------------- the public object


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.id)
def test_a_schedule_changes_no_bit(call):
    schedule = make_schedule(**call.schedule)
    expected = run(call, None)
    for _ in range(2):
        for a, b in zip(run(call, schedule), expected, strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.id)
def test_values_are_read_when_it_is_made_and_not_by_the_layers(call, monkeypatch):
    reads = []
    for module in ("validate", "attention.schedule"):
        for name in ("check_offset_values", "check_request_values"):
            check = getattr(gem_kernels._src.validate, name)

            def counting(op, *args, check=check):
                reads.append(op)
                check(op, *args)

            monkeypatch.setattr(f"gem_kernels._src.{module}.{name}", counting)
    schedule = make_schedule(**call.schedule)
    assert set(reads) == {"AttentionSchedule"}
    reads.clear()
    run(call, schedule)
    assert reads == []
    run(call, None)
    assert reads


def test_targets_are_checked_with_a_schedule_too():
    x = attention_inputs((3, 0, 40), dtype=torch.float32, num_heads=2, head_dim=8)
    schedule = make_schedule(x)
    call = {**sizes(x), "schedule": schedule}
    with pytest.raises(ValueError, match="`num_targets` must be between 0 and the length of its sequence, 3 tokens"):
        gdpa(x.q, x.k, x.v, **call, num_targets=torch.tensor([4, 0, 0]))
    targets = torch.tensor([1, 0, 7])
    expected = gdpa(x.q, x.k, x.v, **sizes(x), num_targets=targets)
    assert torch.equal(gdpa(x.q, x.k, x.v, **call, num_targets=targets), expected)


REFUSED = [
    (
        "other-values",
        {"offsets_k": torch.tensor([0, 20, 26, 26, 58, 59])},
        {},
        "made of `offsets_k` .* the same tensor",
    ),
    (
        "a-copy",
        {"offsets_q": X.offsets_q.clone()},
        {},
        "made of `offsets_q` .* the same tensor, got one made of another",
    ),
    (
        "other-values-read",
        {"offsets_k": torch.tensor([0, 20, 26, 26, 58, 59])},
        {"validate": True},
        "made of `offsets_k` of the call, with its values, got 25 and, in the schedule, 26 at entry 2",
    ),
    (
        "other-sequences",
        {"offsets_q": torch.tensor([0, 44, 61]), "offsets_k": torch.tensor([0, 26, 59]), "max_seqlen_q": 44},
        {},
        r"made of `offsets_q` of the call, of shape \(6,\), got one made of shape \(3,\)",
    ),
    ("requests", {"request_index": REQUESTS}, {}, "made of `request_index` of the call, got one made with it"),
    ("no-requests", {}, {"request_index": REQUESTS}, "made of `request_index` of the call, got one made without it"),
    (
        "seeds",
        {"offsets_q": None, "max_seqlen_q": 61},
        {},
        "made of `offsets_q` of the call, got one made without it",
    ),
    ("bound", {"max_seqlen_k": 34}, {}, "`max_seqlen_k` must be at least that of `schedule`, 34, got 33"),
    (
        "rows",
        {"offsets_q": torch.tensor([0, 3, 3, 43, 44, 60]), "total_q": 60},
        {},
        "for the rows of `q`, 61, got one .* 60",
    ),
    (
        "key-rows",
        {"offsets_k": torch.tensor([0, 20, 25, 25, 58, 58]), "total_k": 58},
        {},
        "for the rows of `k`, 59, got one .* 58",
    ),
]


@pytest.mark.parametrize("op", [jagged_attention, gdpa], ids=lambda op: op.__name__)
@pytest.mark.parametrize(("changes", "options", "message"), [c[1:] for c in REFUSED], ids=[c[0] for c in REFUSED])
def test_a_schedule_of_other_offsets_is_refused(op, changes, options, message):
    schedule = make_schedule(**changes)
    with pytest.raises(ValueError, match=f"{op.__name__}: .*{message}"):
        op(X.q, X.k, X.v, **sizes(X), schedule=schedule, **options)


def test_equal_values_are_accepted_where_they_are_read():
    schedule = make_schedule(offsets_q=X.offsets_q.clone(), offsets_k=X.offsets_k.int())
    expected = gdpa(X.q, X.k, X.v, **sizes(X))
    assert torch.equal(gdpa(X.q, X.k, X.v, **sizes(X), schedule=schedule, validate=True), expected)


def test_views_of_the_same_offsets_are_the_same_offsets():
    schedule = make_schedule()
    options = sizes(X) | {"offsets_q": X.offsets_q.detach(), "offsets_k": X.offsets_k[:]}
    gdpa(X.q, X.k, X.v, **options, schedule=schedule)


@pytest.mark.parametrize("op", [jagged_attention, gdpa, gdpa_norm_block], ids=lambda op: op.__name__)
def test_offsets_that_were_written_since_are_refused(op):
    offsets_k = X.offsets_k.clone()
    schedule = make_schedule(offsets_k=offsets_k)
    options = sizes(X) | {"offsets_k": offsets_k}
    op(X.q, X.k, X.v, **options, schedule=schedule)
    offsets_k[1] = 19
    with pytest.raises(ValueError, match=f"{op.__name__}: `schedule` must be made of offsets that keep their values"):
        op(X.q, X.k, X.v, **options, schedule=schedule)
    op(X.q, X.k, X.v, **options, schedule=make_schedule(offsets_k=offsets_k))


@pytest.mark.parametrize("op", [jagged_attention, gdpa, gdpa_norm_block], ids=lambda op: op.__name__)
def test_writes_that_torch_does_not_count_are_seen(op):
    with torch.inference_mode():
        offsets_k = X.offsets_k.clone()
        options = sizes(X) | {"offsets_k": offsets_k, "schedule": make_schedule(offsets_k=offsets_k)}
        before = op(X.q, X.k, X.v, **options)
        offsets_k[1] = 19
        after = op(X.q, X.k, X.v, **options)
        assert torch.equal(after, op(X.q, X.k, X.v, **(options | {"schedule": None})))
        assert not torch.equal(after, before)
        offsets_k[1] = 26
        with pytest.raises(ValueError, match=r"`offsets_k` must not decrease, got 26 then 25"):
            op(X.q, X.k, X.v, **options)
    # Of other tensors writes count there too.
    schedule = make_schedule(offsets_k=(written := X.offsets_k.clone()))
    with torch.inference_mode():
        written[1] = 19
        with pytest.raises(ValueError, match="offsets that keep their values"):
            op(X.q, X.k, X.v, **(sizes(X) | {"offsets_k": written}), schedule=schedule)


@pytest.mark.parametrize("op", [jagged_attention, gdpa, gdpa_norm_block], ids=lambda op: op.__name__)
def test_anything_else_is_no_schedule(op):
    with pytest.raises(TypeError, match=f"{op.__name__}: `schedule` must be an AttentionSchedule or None, got Tensor"):
        op(X.q, X.k, X.v, **sizes(X), schedule=make_schedule().token)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"offsets_k": [0, 1]}, TypeError, "`offsets_k` must be a Tensor"),
        ({"offsets_q": X.offsets_q.float()}, TypeError, "`offsets_q` must be int32 or int64"),
        ({"offsets_q": X.offsets_q[:-1]}, ValueError, r"`offsets_k` must have shape \(B \+ 1,\) = \(5,\)"),
        ({"offsets_k": X.offsets_k.to("meta")}, ValueError, "`offsets_q` must be on the device of the values, meta"),
        ({"total_q": 60}, ValueError, "`offsets_q` must end at the number of packed rows, 60, got 61"),
        ({"total_k": -1}, ValueError, "`total_k` must be >= 0 rows, got -1"),
        ({"total_k": torch.tensor(59)}, TypeError, "`total_k` must be a Python int"),
        ({"max_seqlen_q": 39}, ValueError, "`max_seqlen_q` must be at least the longest sequence, 40"),
        ({"max_seqlen_k": 2.0}, TypeError, "`max_seqlen_k` must be a Python int"),
        ({"request_index": torch.tensor([0, 2, 1, 3, 4])}, ValueError, "`request_index` must not decrease"),
        ({"request_index": torch.tensor([0, 1])}, ValueError, r"`request_index` must have shape \(B,\) = \(5,\)"),
        ({"validate": 1}, TypeError, "`validate` must be a bool"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_schedule_checks_what_it_is_made_of(changes, error, message):
    with pytest.raises(error, match=f"AttentionSchedule: {message}"):
        make_schedule(**changes)


def test_it_says_what_it_is_of():
    text = "AttentionSchedule(num_sequences=5, total_q=61, total_k=59, max_seqlen_q=40, max_seqlen_k=33, device=cpu)"
    assert repr(make_schedule()) == text


# ---------------------------------------------------------------- what it keeps


def portable(op, schedule, x, window):
    """Forward and backward of an op's portable kernels as its launchers run them, in the store of a schedule."""
    forward, backward = (importlib.import_module(f"gem_kernels._src.{op}.{name}") for name in ("forward", "backward"))
    sides = tuple(sizes(x).values())
    with reusing(None if schedule is None else store_of(schedule)):
        if op == "gdpa":
            options = (*sides, "silu", 1.0, 1.0, *window)
            out = forward.launch_forward(x.q, x.k, x.v, *options)
            return out, *backward.launch_backward(x.do, x.q, x.k, x.v, *options)
        options = (*sides, 1.0, *window)
        out, lse = forward.launch_forward(x.q, x.k, x.v, *options)
        return out, *backward.launch_backward(x.do, None, x.q, x.k, x.v, out, lse, *options)


@pytest.mark.parametrize("op", ["gdpa", "jagged_attention"])
def test_interpreted_kernels_search_in_offsets_that_are_made_once(op, interpreter):
    # One sequence far longer than the others: programs find theirs by bisection.
    lengths = (1,) * 30 + (250,)
    x = attention_inputs(lengths, lengths, num_heads=1, head_dim=16, dtype=torch.float32)
    schedule = make_schedule(x)
    expected = portable(op, None, x, (8, 0))
    actual = portable(op, schedule, x, (8, 0))
    kept = len(store_of(schedule))
    assert kept > 0
    for _ in range(2):
        for a, b in zip(actual, expected, strict=True):
            assert torch.equal(a, b)
        actual = portable(op, schedule, x, (8, 0))
    assert len(store_of(schedule)) == kept


def test_interpreted_chunks_of_hopper_are_made_once(interpreter, monkeypatch):
    from gem_kernels._src.attention.hopper import schedule as hopper_schedule

    launches = []
    launch = hopper_schedule.call

    def counting(*args):
        launches.append(args)
        launch(*args)

    monkeypatch.setattr(hopper_schedule, "call", counting)
    schedule = make_schedule()
    options = {"tile_rows": 16, "resident_keys": 8, "max_tiles": 2}
    with reusing(store_of(schedule)):
        made = [
            once(hopper_schedule.make_schedule, X.offsets_q, X.offsets_k, X.q.shape[0], **options)
            for _layer in range(8)
        ]
        once(hopper_schedule.make_schedule, X.offsets_k, X.offsets_q, X.k.shape[0], **options)
    assert len(launches) == 2
    alone = hopper_schedule.make_schedule(X.offsets_q, X.offsets_k, X.q.shape[0], **options)
    count = int(alone.num_chunks)
    assert torch.equal(made[-1].chunks[:count], alone.chunks[:count])
