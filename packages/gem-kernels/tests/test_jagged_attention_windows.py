"""Windows in Hopper's kernels of jagged attention: their units of work, when they are taken, and float64 on the GPU."""

import math

import pytest
import torch
from test_jagged_attention_hopper import call, check

from gem_kernels import jagged_attention
from gem_kernels._src.attention.hopper.launch import portable_only
from gem_kernels._src.attention.hopper.window_schedule import make_window_schedule
from gem_kernels._src.attention.pairing import pair_sequences
from gem_kernels._src.jagged_attention import hopper_launch
from gem_kernels._src.jagged_attention.bias import Bias
from gem_kernels.testing import attention_inputs, random_lengths

FAR = 2**30


@pytest.mark.parametrize("window", [(128, 128), (0, 0), (5, 200), (FAR, 0), (33, FAR)])
def test_units_of_work_hold_what_their_rows_may_meet(window, interpreter):
    left, right = window
    lengths, others = (5, 300, 0, 70, 128, 513), (300, 0, 128, 257, 129, 513)
    x = attention_inputs(lengths, others, head_dim=16)
    made = make_window_schedule(x.offsets_q, x.offsets_k, x.q.shape[0], tile_rows=128, left=left, right=right)
    count = int(made.num_chunks)
    expected = []
    for b, (length, other) in enumerate(zip(lengths, others, strict=True)):
        first, first_other = int(x.offsets_q[b]), int(x.offsets_k[b])
        for row in range(0, length, 128):
            rows = min(length - row, 128)
            low, high = min(max(row - left, 0), other), min(row + rows + right, other)
            expected.append([first + row, rows, first_other + low, max(high - low, 0), row - low])
    units = torch.cat([made.chunks, made.shifts[:, None]], 1)[:count].tolist()
    assert sorted(units) == sorted(expected)
    # Sequences whose tiles have most to do first.
    work = {int(x.offsets_q[b]): min(lengths[b], 128) * min(others[b], left + right + 128) for b in range(6)}
    in_order = [work[unit[0]] for unit in units if unit[0] in work and unit[4] == 0]
    assert in_order == sorted(in_order, reverse=True)


@pytest.mark.parametrize("num_sequences", [1, 700])
def test_all_units_are_there_however_many_sequences(num_sequences, interpreter):
    lengths = random_lengths(num_sequences, 300, sparsity=0.3, seed=num_sequences)
    x = attention_inputs(lengths, num_heads=1, head_dim=16)
    made = make_window_schedule(x.offsets_q, x.offsets_k, x.q.shape[0], tile_rows=128, left=64, right=64)
    units = made.chunks[: int(made.num_chunks)]
    assert len(units) == int(((lengths + 127) // 128).sum())
    assert int(units[:, 1].sum()) == x.q.shape[0]
    assert len(units[:, 0].unique()) == len(units)


@pytest.mark.parametrize("window", [(128, 128), (-1, 0), (7, -1)])
def test_a_window_reaches_the_kernels(window, interpreter, monkeypatch):
    calls = []
    monkeypatch.setattr(hopper_launch, "call", lambda kernel, programs, arguments, constants, device: calls.append(
        dict(zip(kernel.arg_names, arguments, strict=False), **constants)
    ))  # fmt: skip
    monkeypatch.setattr(hopper_launch, "multiprocessors", lambda _: 132)
    monkeypatch.setattr(hopper_launch, "serves", lambda *_args, **_options: True)
    heads = {"num_heads": 2, "head_dim": 128}
    x = attention_inputs((300, 5), (200, 70), **heads, dtype=torch.bfloat16)
    pairing = pair_sequences(x.q, x.offsets_q, x.offsets_k, None, 300, *window)
    assert hopper_launch.applies(x.q, x.k, x.v, pairing, Bias())
    assert hopper_launch.backward_applies(x.q, x.k, x.v, pairing, 200, Bias())
    out, lse = torch.zeros_like(x.q), torch.zeros(305, 2)
    sides = (0.5, *window)
    offsets = (x.offsets_q, x.offsets_k)
    hopper_launch.launch_hopper_window_forward(out, lse, x.q, x.k, x.v, *offsets, *sides)
    places = tuple(torch.empty_like(t) for t in (x.q, x.k, x.v))
    found = hopper_launch.launch_hopper_backward(x.do, None, x.q, x.k, x.v, out, lse, *offsets, 200, *sides, places)
    assert all(a is b for a, b in zip(found, places, strict=True))
    left, right = (FAR if side < 0 else side for side in window)
    forward, of_keys, of_queries = calls
    # A key's window is that of its queries seen from the other end.
    assert (of_keys["left"], of_keys["right"]) == (right, left)
    tiles = {"tile_rows": 128}
    for given, offsets, rows in (
        (forward, (x.offsets_q, x.offsets_k), 305),
        (of_keys, (x.offsets_k, x.offsets_q), 270),
        (of_queries, (x.offsets_q, x.offsets_k), 305),
    ):
        made = make_window_schedule(*offsets, rows, **tiles, left=given["left"], right=given["right"])
        count = int(made.num_chunks)
        assert int(given["num_chunks_ptr"]) == count
        assert torch.equal(given["chunks_ptr"][:count], made.chunks[:count])
        assert torch.equal(given["shifts_ptr"][:count], made.shifts[:count])
    assert (forward["left"], forward["right"]) == (of_queries["left"], of_queries["right"]) == (left, right)
    assert of_keys["HAS_WINDOW"]
    assert of_queries["HAS_WINDOW"]


# ---------------------------------------------------------------- on the GPU


@pytest.fixture
def launches(monkeypatch):
    """Directions and windows of the launches of Hopper's kernels so far."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    found = []

    def count(name, direction):
        launch = getattr(hopper_launch, name)

        def counted(*args):
            found.append((direction, *args[8:10]))
            return launch(*args)

        monkeypatch.setattr(hopper_launch, name, counted)

    count("launch_hopper_window_forward", "forward")
    count("_launch_twice", "backward")
    return found


VARIANTS = [(128, 4, torch.bfloat16), (128, 2, torch.bfloat16), (128, 4, torch.float16), (64, 2, torch.bfloat16)]
LENGTHS = (1, 0, 63, 64, 65, 222, 300, 129, 512, 5, 128, 127, 256, 192, 193, 700)


@pytest.mark.gpu
@pytest.mark.parametrize(("dim", "heads_kv", "dtype"), VARIANTS)
@pytest.mark.parametrize(
    ("lengths_k", "window"),
    [
        (LENGTHS, (128, 128)),
        (LENGTHS, (0, 0)),
        (LENGTHS, (-1, 0)),
        (LENGTHS, (200, -1)),
        (LENGTHS[3:] + LENGTHS[:3], (70, 30)),
        (LENGTHS[-5:] + LENGTHS[:-5], (3, 130)),
    ],
)
def test_gpu_windows_match_oracle(lengths_k, window, dim, heads_kv, dtype, launches, poisoned_empty):
    heads = {"num_heads": 4, "num_heads_kv": heads_kv, "head_dim": dim}
    x = attention_inputs(LENGTHS, lengths_k, **heads, dtype=dtype, device="cuda")
    check(x, dim**-0.5, window_size=window)
    assert launches == [("forward", *window)] * (dim == 128) + [("backward", *window)] * (dtype == torch.bfloat16)


@pytest.mark.gpu
def test_gpu_narrow_heads_take_the_backward_without_a_window(launches, poisoned_empty):
    heads = {"num_heads": 4, "num_heads_kv": 2, "head_dim": 64}
    x = attention_inputs(LENGTHS, LENGTHS[3:] + LENGTHS[:3], **heads, dtype=torch.bfloat16, device="cuda")
    check(x, 0.125)
    assert launches == [("backward", -1, -1)]


@pytest.mark.gpu
def test_gpu_windows_take_the_gradient_of_the_lse(launches, poisoned_empty):
    x = attention_inputs(LENGTHS, num_heads=2, head_dim=128, dtype=torch.bfloat16, device="cuda")
    dlse = torch.randn(x.q.shape[:2], generator=torch.Generator().manual_seed(1)).cuda()
    check(x, 0.1, dlse, window_size=(100, 7))
    assert launches == [("forward", 100, 7), ("backward", 100, 7)]


@pytest.mark.gpu
def test_gpu_windows_repeat_and_agree_with_the_portable_kernels(launches):
    lengths = random_lengths(700, 512, seed=0)
    x = attention_inputs(lengths, num_heads=8, head_dim=128, dtype=torch.bfloat16, device="cuda")
    results = call(x, window_size=(128, 128))
    for a, b in zip(results, call(x, window_size=(128, 128)), strict=True):
        assert torch.equal(a, b)
    assert len(launches) == 4
    with portable_only():
        portable = call(x, window_size=(128, 128))
    assert len(launches) == 4
    for a, b in zip(results, portable, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2 * float(b.abs().max()))


@pytest.mark.gpu
@pytest.mark.parametrize("value", [math.nan, math.inf, 3.0])
def test_gpu_windows_let_no_sequence_reach_another(value, launches):
    lengths = (70, 33, 150, 9, 300) * 30
    x = attention_inputs(lengths, num_heads=2, head_dim=128, dtype=torch.bfloat16, device="cuda")
    before = call(x, window_size=(40, 70))
    changed = x._replace(q=x.q.clone(), k=x.k.clone(), v=x.v.clone(), do=x.do.clone())
    keep = torch.ones(x.q.shape[0], dtype=torch.bool)
    for b in range(1, len(lengths), 4):
        rows = slice(*x.offsets_q[b : b + 2].tolist())
        for t in (changed.q, changed.k, changed.v, changed.do):
            t[rows] = value
        keep[rows] = False
    for a, b in zip(before, call(changed, window_size=(40, 70)), strict=True):
        assert torch.equal(a.cpu()[keep], b.cpu()[keep])
    assert len(launches) == 4


@pytest.mark.gpu
def test_gpu_gradients_of_one_product_are_one_tensor(launches):
    from gem_kernels.join_columns import split_thirds

    x = attention_inputs(LENGTHS, num_heads=2, head_dim=128, dtype=torch.bfloat16, device="cuda")
    rows = torch.cat([t.flatten(1) for t in (x.q, x.k, x.v)], dim=1).requires_grad_()
    q, k, v = (t.view(-1, 2, 128) for t in split_thirds(rows))
    sides = {"offsets_q": x.offsets_q, "offsets_k": x.offsets_k, "max_seqlen_q": 700, "max_seqlen_k": 700}
    out = jagged_attention(q, k, v, **sides, window_size=(128, 128))
    (joined,) = torch.autograd.grad(out, rows, x.do)
    expected = call(x, window_size=(128, 128))[2:]
    assert torch.equal(joined, torch.cat([t.flatten(1) for t in expected], dim=1))
    assert len(launches) == 4
