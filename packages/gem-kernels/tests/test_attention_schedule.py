"""One schedule for the layers of a batch: what it keeps, what it refuses, and that no result depends on it."""

import gc
import importlib
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from packed_ops import assert_one_graph, sizes
from torch.utils.flop_counter import FlopCounterMode

import gem_kernels
from gem_kernels import AttentionSchedule, gdpa, gdpa_norm_block, jagged_attention
from gem_kernels._src.attention.reuse import Store, once, reusing
from gem_kernels.modules import GDPA, JaggedAttention
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


X = attention_inputs(
    (3, 0, 40, 1, 17), (20, 5, 0, 33, 1), num_heads=4, num_heads_kv=2, head_dim=16, dtype=torch.float32
)
REQUESTS = torch.tensor([0, 0, 1, 3, 4])


def make_schedule(x=X, **changes):
    """A schedule of the inputs, changed where a test says so."""
    arguments = {
        "offsets_q": x.offsets_q,
        "offsets_k": x.offsets_k,
        "total_q": x.q.shape[0],
        "total_k": x.k.shape[0],
        "max_seqlen_q": x.max_seqlen_q,
        "max_seqlen_k": x.max_seqlen_k,
    }
    return AttentionSchedule(**(arguments | changes))


def store_of(schedule):
    return schedule.token.gem_kernels_store


@dataclass(frozen=True, kw_only=True)
class Call:
    """One way of calling an op with a schedule."""

    id: str
    op: Callable[..., torch.Tensor]
    options: dict[str, Any] = field(default_factory=dict)
    schedule: dict[str, Any] = field(default_factory=dict)


SEEDS = {"offsets_q": None, "max_seqlen_q": 77}
CALLS = [
    Call(id="jagged_attention", op=jagged_attention),
    Call(id="jagged_attention-window", op=jagged_attention, options={"window_size": (5, 3)}),
    Call(id="jagged_attention-bias", op=jagged_attention, options={"position_bias": torch.randn(4, 9)}),
    Call(
        id="jagged_attention-requests",
        op=jagged_attention,
        options={"request_index": REQUESTS},
        schedule={"request_index": REQUESTS},
    ),
    Call(id="jagged_attention-module", op=JaggedAttention(causal=True)),
    Call(id="gdpa", op=gdpa),
    Call(id="gdpa-causal", op=gdpa, options={"activation": "silu", "causal": True}),
    Call(id="gdpa-requests", op=gdpa, options={"request_index": REQUESTS}, schedule={"request_index": REQUESTS}),
    Call(id="gdpa-seeds", op=gdpa, options=SEEDS, schedule={**SEEDS, "total_q": 61}),
    Call(id="gdpa-module", op=GDPA()),
    Call(id="gdpa_norm_block", op=gdpa_norm_block),
    Call(id="gdpa_norm_block-module", op=GDPA(), options={"norm_block": True}),
]


def run(call, schedule, x=X, loss_factor=1.0):
    """Output and gradients."""
    leaves = [t.detach().clone().requires_grad_() for t in (x.q, x.k, x.v)]
    out = call.op(*leaves, **(sizes(x) | call.options), schedule=schedule)
    return out, *torch.autograd.grad((out * loss_factor).square().sum(), leaves)


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


# ---------------------------------------------------------------- through torch


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("call", CALLS[:1] + CALLS[5:6], ids=lambda call: call.id)
def test_activation_checkpointing(call, reentrant):
    schedule = make_schedule()

    def layer(q, k, v):
        return call.op(q, k, v, **sizes(X), schedule=schedule)

    leaves = [t.detach().clone().requires_grad_() for t in (X.q, X.k, X.v)]
    out = torch.utils.checkpoint.checkpoint(layer, *leaves, use_reentrant=reentrant)
    gradients = torch.autograd.grad(out.square().sum(), leaves) if not reentrant else None
    if gradients is None:
        out.square().sum().backward()
        gradients = [x.grad for x in leaves]
    for a, b in zip((out, *gradients), run(call, None), strict=True):
        assert torch.equal(a, b)


def random_inputs(seed):
    lengths = torch.Generator().manual_seed(seed)
    count = 3 + seed
    q, k = (tuple(torch.randint(0, 30, (count,), generator=lengths).tolist()) for _ in range(2))
    return attention_inputs(q, k, num_heads=2, head_dim=8, dtype=torch.float32, seed=seed)


class Batch(NamedTuple):
    """Inputs and their schedule, as a training step hands them to its layers."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    sizes: dict[str, Any]
    schedule: AttentionSchedule


@pytest.mark.parametrize("inside", [False, True], ids=["made-outside", "made-inside"])
@pytest.mark.parametrize("call", [CALLS[0], CALLS[5], CALLS[10]], ids=lambda call: call.id)
def test_one_graph_for_all_batches(call, inside):
    def loss(batch, q, k, v):
        schedule = batch.schedule
        if inside:
            schedule = AttentionSchedule(**batch.sizes, total_q=q.shape[0], total_k=k.shape[0])
        y = call.op(q, k, v, **batch.sizes, schedule=schedule)
        return call.op(y.sin(), k, v, **batch.sizes, schedule=schedule).square().sum()

    inputs = [random_inputs(seed) for seed in range(4)]
    assert_one_graph(loss, [Batch(x.q, x.k, x.v, sizes(x), make_schedule(x)) for x in inputs])


def test_a_compiled_layer_finds_the_store(monkeypatch):
    found = []
    find = gem_kernels._src.gdpa.op.find_store

    def finding(*args):
        found.append(find(*args))
        return found[-1]

    monkeypatch.setattr("gem_kernels._src.gdpa.op.find_store", finding)
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda q, k, v, schedule: gdpa(q, k, v, **sizes(X), schedule=schedule).square().sum(),
        fullgraph=True,
        backend="aot_eager",
    )
    schedule, other = make_schedule(), make_schedule(offsets_k=torch.tensor([0, 20, 26, 26, 58, 59]))
    leaves = [t.clone().requires_grad_() for t in (X.q, X.k, X.v)]
    expected = torch.autograd.grad(gdpa(*leaves, **sizes(X)).square().sum(), leaves)
    found.clear()
    compiled(*leaves, schedule).backward()
    assert found == [store_of(schedule)]
    found.clear()
    for x in leaves:
        x.grad = None
    # A traced call does not know which memory it will get; the op does, and leaves the schedule of another batch aside.
    compiled(*leaves, other).backward()
    assert found == [None]
    for x, dx in zip(leaves, expected, strict=True):
        assert torch.equal(x.grad, dx)


def test_ops_with_a_token_are_registered_right():
    schedule = make_schedule()
    lengths = (X.offsets_q, X.offsets_k, X.max_seqlen_q, X.max_seqlen_k)
    qkv = [t.clone().requires_grad_() for t in (X.q, X.k, X.v)]
    torch.library.opcheck(
        torch.ops.gem_kernels.gdpa, (*qkv, *lengths, "silu", 1.0, 1.0, -1, -1, None, None, False, schedule.token)
    )
    torch.library.opcheck(
        torch.ops.gem_kernels.jagged_attention,
        (*qkv, *lengths, 1.0, -1, -1, False, None, None, None, None, 1, None, schedule.token),
    )
    args = (X.offsets_q, X.offsets_k, None, X.q.shape[0], X.k.shape[0], X.max_seqlen_q, X.max_seqlen_k, False)
    # The numbers in a token mean nothing and differ between two.
    names = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(torch.ops.gem_kernels.attention_schedule, args, test_utils=names)


@pytest.mark.parametrize("call", [x for x in CALLS if not isinstance(x.op, torch.nn.Module)], ids=lambda call: call.id)
def test_flops_are_the_same(call):
    counted = []
    for schedule in (None, make_schedule(**call.schedule)):
        with FlopCounterMode(display=False) as counter:
            run(call, schedule)
        counted.append(counter.get_total_flops())
    assert counted[0] == counted[1] > 0


def test_under_autocast():
    schedule = make_schedule()
    for call in (CALLS[0], CALLS[5]):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            out, *gradients = run(call, schedule)
            expected = run(call, None)
        assert out.dtype == torch.bfloat16
        for a, b in zip((out, *gradients), expected, strict=True):
            assert torch.equal(a, b)


def test_the_store_lives_as_long_as_a_backward_may_ask_for_it():
    schedule = make_schedule()
    store = weakref.ref(store_of(schedule))
    leaves = [t.clone().requires_grad_() for t in (X.q, X.k, X.v)]
    loss = gdpa(*leaves, **sizes(X), schedule=schedule).sum()
    del schedule
    gc.collect()
    assert store() is not None
    loss.backward()
    del loss
    gc.collect()
    assert store() is None


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


# ---------------------------------------------------------------- CUDA


def cuda_inputs(head_dim, dtype=torch.bfloat16):
    lengths_q, lengths_k = (700, 0, 1, 129, 64, 300), (65, 900, 128, 0, 200, 300)
    return attention_inputs(
        lengths_q, lengths_k, num_heads=4, num_heads_kv=2, head_dim=head_dim, dtype=dtype, device="cuda"
    )


CUDA_CALLS = [
    (gdpa, 64, {}),
    (gdpa, 128, {"activation": "fast_gelu"}),
    (gdpa, 128, {"causal": True}),
    (jagged_attention, 128, {}),
    (jagged_attention, 64, {"window_size": (100, 0)}),
    (gdpa_norm_block, 128, {}),
]


def layers(op, options, x, schedule, count=3):
    """Output and gradients of a few layers, one behind the other."""
    leaves = [t.detach().clone().requires_grad_() for t in (x.q, x.k, x.v)]
    y, *others = leaves
    for _ in range(count):
        y = op(y, *others, **(sizes(x) | options), schedule=schedule)
    return y, *torch.autograd.grad(y, leaves, x.do)


@pytest.fixture
def count_lists(monkeypatch):
    """How many work lists Hopper's kernels have made."""
    from gem_kernels._src.attention.hopper import schedule as hopper_schedule

    made = []
    call = hopper_schedule.call

    def counting(*args):
        made.append(args)
        call(*args)

    monkeypatch.setattr(hopper_schedule, "call", counting)
    return made


@pytest.mark.gpu
@pytest.mark.parametrize(("op", "head_dim", "options"), CUDA_CALLS)
def test_cuda_a_schedule_changes_no_bit_and_lists_are_made_once(op, head_dim, options, count_lists):
    x = cuda_inputs(head_dim)
    expected = layers(op, options, x, None)
    without = len(count_lists)
    count_lists.clear()
    schedule = make_schedule(x)
    for a, b in zip(layers(op, options, x, schedule), expected, strict=True):
        assert torch.equal(a, b)
    first = len(count_lists)
    for a, b in zip(layers(op, options, x, schedule), expected, strict=True):
        assert torch.equal(a, b)
    assert len(count_lists) == first
    if without:
        assert 0 < 3 * first <= without


@pytest.mark.gpu
@pytest.mark.parametrize(("op", "head_dim", "options"), [CUDA_CALLS[i] for i in (0, 3, 5)])
def test_cuda_compiled_layers_make_lists_once(op, head_dim, options, count_lists):
    x = cuda_inputs(head_dim)
    plain = layers(op, options, x, None, count=2)
    fixed = sizes(x) | options

    def two_layers(q, k, v, schedule):
        return op(op(q, k, v, **fixed, schedule=schedule), k, v, **fixed, schedule=schedule)

    torch._dynamo.reset()
    compiled = torch.compile(two_layers, fullgraph=True)
    leaves = [t.detach().clone().requires_grad_() for t in (x.q, x.k, x.v)]
    for _ in range(2):
        count_lists.clear()
        y = compiled(*leaves, make_schedule(x))
        for a, b in zip((y, *torch.autograd.grad(y, leaves, x.do)), plain, strict=True):
            assert torch.equal(a, b)
        with_schedule = len(count_lists)
    count_lists.clear()
    layers(op, options, x, None, count=2)
    assert 2 * with_schedule <= len(count_lists)


@pytest.mark.gpu
def test_cuda_each_stream_makes_its_own():
    x = cuda_inputs(64)
    schedule = make_schedule(x)
    first = gdpa(x.q, x.k, x.v, **sizes(x), schedule=schedule)
    kept = len(store_of(schedule))
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        second = gdpa(x.q, x.k, x.v, **sizes(x), schedule=schedule)
    torch.cuda.current_stream().wait_stream(side)
    assert torch.equal(first, second)
    assert len(store_of(schedule)) == 2 * kept


@pytest.mark.gpu
def test_cuda_values_are_read_where_told_to():
    x = cuda_inputs(64)
    wrong = x.offsets_k.clone()
    wrong[-1] -= 1
    make_schedule(x, offsets_k=wrong)
    with pytest.raises(ValueError, match="AttentionSchedule: `offsets_k` must end at the number of packed rows"):
        make_schedule(x, offsets_k=wrong, validate=True)
    on_the_host = make_schedule(x, offsets_q=x.offsets_q.cpu(), offsets_k=x.offsets_k.cpu())
    with pytest.raises(
        ValueError, match="gdpa: `schedule` must be made of `offsets_q` of the call, on cuda:0, got one"
    ):
        gdpa(x.q, x.k, x.v, **sizes(x), schedule=on_the_host)


@pytest.mark.gpu
def test_cuda_nothing_waits_for_the_device():
    x = cuda_inputs(128)
    layers(gdpa, {}, x, make_schedule(x))
    torch.cuda.set_sync_debug_mode("error")
    try:
        layers(gdpa, {}, x, make_schedule(x))
        layers(jagged_attention, {}, x, make_schedule(x))
    finally:
        torch.cuda.set_sync_debug_mode("default")
