"""Schedules through torch: checkpoints, torch.compile, registered ops, autocast and the end of a store's life."""

import gc
import weakref
from typing import Any, NamedTuple

import pytest
import torch
from packed_ops import assert_one_graph, sizes
from schedule_calls import CALLS, X, make_schedule, run, store_of
from torch.utils.flop_counter import FlopCounterMode

import gem_kernels
from gem_kernels import AttentionSchedule, gdpa
from gem_kernels.testing import attention_inputs


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
