"""Schedules on a GPU: no result depends on one, and work lists are made once."""

import pytest
import torch
from packed_ops import sizes
from schedule_calls import make_schedule, store_of

from gem_kernels import gdpa, gdpa_norm_block, jagged_attention
from gem_kernels.testing import attention_inputs


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
