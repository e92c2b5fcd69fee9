"""Hopper's kernels of jagged attention: when they are taken, and that they agree with float64 on the GPU."""

import math
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch

from gem_kernels import jagged_attention, reference
from gem_kernels._src.attention.hopper import units as hopper_units
from gem_kernels._src.attention.hopper.launch import portable_only
from gem_kernels._src.attention.pairing import pair_sequences
from gem_kernels._src.jagged_attention import hopper_launch
from gem_kernels._src.jagged_attention.bias import Bias
from gem_kernels._src.jagged_attention.hopper_stats import launch_stats
from gem_kernels.testing import assert_matches_oracle, attention_inputs, random_lengths, summation_floor


def test_tensors_on_the_cpu_take_the_portable_kernel():
    x = attention_inputs((3,), head_dim=128, dtype=torch.bfloat16)
    pairing = pair_sequences(x.q, x.offsets_q, x.offsets_k, None, x.max_seqlen_q, -1, -1)
    assert not hopper_launch.applies(x.q, x.k, x.v, pairing, Bias())
    assert not hopper_launch.backward_applies(x.q, x.k, x.v, pairing, x.max_seqlen_k, Bias())


@dataclass(frozen=True, kw_only=True)
class SelectionCase:
    id: str
    forward: bool = False
    backward: bool = False
    length_q: int = 128
    length_k: int = 128
    head_dim: int = 128
    dtype: torch.dtype = torch.bfloat16
    bias: bool = False


SELECTION = [
    SelectionCase(id="whole-tiles", forward=True, backward=True),
    SelectionCase(id="float16", forward=True, dtype=torch.float16),
    SelectionCase(id="short-queries", length_q=127),
    SelectionCase(id="short-keys", forward=True, length_k=127),
    SelectionCase(id="narrow-heads", backward=True, head_dim=64),
    SelectionCase(id="head-dim", head_dim=96),
    SelectionCase(id="bias", bias=True),
]


@pytest.mark.parametrize("case", SELECTION, ids=lambda case: case.id)
def test_beyond_what_every_hopper_kernel_asks_these_want_whole_tiles_without_a_bias(case, monkeypatch):
    monkeypatch.setattr(hopper_launch, "serves", lambda q, *_, head_dims: q.shape[2] in head_dims)
    x = attention_inputs((case.length_q,), (case.length_k,), head_dim=case.head_dim, dtype=case.dtype)
    pairing = pair_sequences(x.q, x.offsets_q, x.offsets_k, None, x.max_seqlen_q, -1, -1)
    bias = Bias(position=torch.zeros(x.q.shape[1], 3)) if case.bias else Bias()
    assert hopper_launch.applies(x.q, x.k, x.v, pairing, bias) == case.forward
    backward = hopper_launch.backward_applies(x.q, x.k, x.v, pairing, x.max_seqlen_k, bias)
    assert backward == case.backward


@pytest.fixture
def recorded(monkeypatch):
    """Arguments of the kernels in the order of their launches, by name, and what stands in for their schedules."""
    calls = []

    def record(kernel, programs, arguments, constants, device):
        assert kernel.arg_names[len(arguments) :] == list(constants)
        calls.append(dict(zip(kernel.arg_names, arguments, strict=False), **constants, programs=programs))

    def schedule(rows):
        return torch.zeros(rows, 4, dtype=torch.int32), torch.ones(1, dtype=torch.int32)

    monkeypatch.setattr(hopper_launch, "call", record)
    monkeypatch.setattr(hopper_launch, "multiprocessors", lambda _: 132)
    monkeypatch.setattr(hopper_launch, "query_chunks", lambda *_: schedule(3))
    monkeypatch.setattr(hopper_launch, "make_schedule", lambda _of, _against, total, **_: schedule(total))
    return calls


def check_descriptors(given, tensors, rows, ends_with_sequence=()):
    for name, tensor in tensors.items():
        made = given[f"{name}_desc"]
        assert made.base is tensor
        assert made.shape[-1] == tensor.shape[1] * 128
        if name in ends_with_sequence:
            assert made.block_shape == [1, 1, rows[name], 128]
        else:
            assert made.shape[0] == tensor.shape[0]
            assert made.block_shape == [rows[name], 128]


def test_the_forward_launch_gives_every_argument_of_the_kernel_its_place(recorded):
    x = attention_inputs((130,), (70,), num_heads=4, num_heads_kv=2, head_dim=128, dtype=torch.bfloat16)
    out, lse = torch.empty_like(x.q), torch.empty(130, 4)
    hopper_launch.launch_hopper_forward(out, lse, x.q, x.k, x.v, x.offsets_q, x.offsets_k, 0.5)
    (given,) = recorded
    tiles = {"q": 64, "k": 128, "v": 128, "out": 64}
    check_descriptors(given, {"q": x.q, "k": x.k, "v": x.v, "out": out}, tiles, ("k", "v", "out"))
    assert given["lse_ptr"] is lse
    assert given["chunks_ptr"].shape[0] == 3
    assert given["num_chunks_ptr"].shape == (1,)
    assert (given["num_heads"], given["GROUP"], given["programs"]) == (4, 2, 132)
    assert given["scale_log2"] == pytest.approx(0.5 * math.log2(math.e))


def test_the_backward_launches_give_every_argument_of_the_kernels_its_place(recorded, interpreter, monkeypatch):
    x = attention_inputs((130,), (70,), num_heads=4, num_heads_kv=2, head_dim=128, dtype=torch.bfloat16)
    monkeypatch.setattr(hopper_launch, "is_onepass", lambda *_: False)
    out, lse = torch.zeros_like(x.q), torch.zeros(130, 4)
    saved = (out, lse, x.offsets_q, x.offsets_k)
    dq, dk, dv = hopper_launch.launch_hopper_backward(x.do, None, x.q, x.k, x.v, *saved, 70, 0.5)
    for given in recorded:
        assert given["num_chunks_ptr"].shape == (1,)
        assert (given["GROUP"], given["programs"], given["ds_scale"]) == (2, 132, 0.5)
        assert given["scale_log2"] == pytest.approx(0.5 * math.log2(math.e))
        assert not given["HAS_WINDOW"]
    of_keys, of_queries = recorded
    tiles = {"q": x.q, "do": x.do, "q_end": x.q, "do_end": x.do, "k": x.k, "v": x.v, "dk": dk, "dv": dv}
    check_descriptors(of_keys, tiles, dict.fromkeys(tiles, 64), ("q_end", "do_end", "dk", "dv"))
    assert (of_keys["num_heads_kv"], of_keys["chunks_ptr"].shape[0]) == (2, 70)
    tiles = {"q": x.q, "do": x.do, "k": x.k, "v": x.v, "k_end": x.k, "v_end": x.v, "dq": dq}
    check_descriptors(of_queries, tiles, dict.fromkeys(tiles, 64), ("k_end", "v_end", "dq"))
    assert (of_queries["num_heads"], of_queries["chunks_ptr"].shape[0]) == (4, 130)
    assert of_keys["stats_ptr"] is of_queries["stats_ptr"]
    assert of_keys["stats_ptr"].shape == (8, 144)
    assert of_keys["stride_s"] == of_queries["stride_s"] == 144


@pytest.mark.parametrize(
    ("queries", "dim", "max_seqlen_k", "expected"),
    [(769, 128, 800, True), (768, 128, 800, False), (769, 64, 800, False), (769, 128, 801, False)],
)
def test_one_kernel_is_for_more_than_256_queries_in_the_mean_and_no_far_longer_keys(
    queries, dim, max_seqlen_k, expected
):
    q, k = (torch.empty(rows, 4, dim, device="meta") for rows in (queries, 600))
    assert hopper_launch.is_onepass(q, k, torch.zeros(4), max_seqlen_k) == expected


def test_the_launch_of_one_kernel_gives_every_argument_its_place(recorded, interpreter, monkeypatch):
    units, num_units = torch.zeros(5, 8, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    asked = []

    def record(*args, **options):
        asked.append((args, options))
        return units, num_units, 3

    monkeypatch.setattr(hopper_units, "backward_units", record)
    monkeypatch.setattr(hopper_launch, "is_onepass", lambda *_: True)
    x = attention_inputs((130,), (70,), num_heads=4, num_heads_kv=2, head_dim=128, dtype=torch.bfloat16)
    out, lse = torch.zeros_like(x.q), torch.zeros(130, 4)
    saved = (out, lse, x.offsets_q, x.offsets_k)
    dq, dk, dv = hopper_launch.launch_hopper_backward(x.do, None, x.q, x.k, x.v, *saved, 70, 0.5)
    (given,) = recorded
    tensors = {"q": x.q, "do": x.do, "k": x.k, "v": x.v, "dk": dk, "dv": dv}
    check_descriptors(given, tensors, {"q": 64, "do": 64, "k": 128, "v": 128, "dk": 64, "dv": 64}, tensors)
    assert given["dq_desc"].base.data_ptr() == dq.data_ptr()
    assert given["dq_desc"].shape[-1] == 4 * 128
    assert given["dq_desc"].block_shape == [1, 1, 64, 64]
    assert given["num_heads_kv"] == 2
    assert given["units_ptr"] is units
    assert given["num_units_ptr"] is num_units
    assert asked == [((x.offsets_q, x.offsets_k, 130, 70), {"tile_rows": 128, "rows": 64, "side": 16})]
    assert given["sums_desc"].base.dtype == torch.float32
    assert given["sums_desc"].block_shape == [64, 64]
    assert given["sums_desc"].shape == [3 * 4 * 2 * 64, 64]
    assert given["turns_ptr"].shape == (3 * 4 * 2,)
    assert given["claims_ptr"].shape == (1,)
    assert not given["turns_ptr"].any()
    assert not given["claims_ptr"].any()
    assert (given["stats_ptr"].shape, given["stride_s"]) == ((8, 144), 144)
    assert (given["GROUP"], given["programs"], given["ds_scale"]) == (2, 132, 0.5)
    assert given["scale_log2"] == pytest.approx(0.5 * math.log2(math.e))


@pytest.mark.parametrize("has_dlse", [False, True])
def test_row_statistics_lie_head_by_head(has_dlse, interpreter):
    x = attention_inputs((37,), num_heads=3, head_dim=64)
    out = torch.randn(37, 3, 64, generator=torch.Generator().manual_seed(1))
    lse = x.q.sum(-1)
    lse[4] = -math.inf
    dlse = x.k.sum(-1) if has_dlse else None
    stats = launch_stats(out, x.do, lse, dlse)
    assert stats.shape == (6, 48)
    torch.testing.assert_close(stats[::2, :37].T, torch.where(lse == -math.inf, math.inf, lse * math.log2(math.e)))
    delta = (out * x.do).sum(-1)
    torch.testing.assert_close(stats[1::2, :37].T, delta - dlse if has_dlse else delta, rtol=1e-5, atol=1e-4)


# ---------------------------------------------------------------- on the GPU


@pytest.fixture
def launches(monkeypatch):
    """Names of the launches of Hopper kernels so far."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    names = []

    def count(name):
        launch = getattr(hopper_launch, f"launch_hopper_{name}")

        def counted(*args):
            names.append(name)
            return launch(*args)

        monkeypatch.setattr(hopper_launch, f"launch_hopper_{name}", counted)

    count("forward")
    count("backward")
    return names


@pytest.fixture(params=["onepass", "twice"])
def form(request, monkeypatch):
    """Which form of the backward, whatever the lengths."""
    monkeypatch.setattr(hopper_launch, "is_onepass", lambda *_: request.param == "onepass")
    return request.param


NAMES = ("out", "lse", "dq", "dk", "dv")


def call(x, dlse=None, **options):
    """(out, lse, dq, dk, dv) through autograd."""
    q, k, v = (t.detach().requires_grad_() for t in (x.q, x.k, x.v))
    out, lse = jagged_attention(
        q,
        k,
        v,
        offsets_q=x.offsets_q,
        offsets_k=x.offsets_k,
        max_seqlen_q=x.max_seqlen_q,
        max_seqlen_k=x.max_seqlen_k,
        return_lse=True,
        **options,
    )
    outputs, gradients = ((out,), (x.do,)) if dlse is None else ((out, lse), (x.do, dlse))
    return (out.detach(), lse.detach(), *torch.autograd.grad(outputs, (q, k, v), gradients))


def by_loop(x, dtype, scale, dlse=None, **options):
    """The same of the reference in a dtype."""
    y = x.to(dtype)
    options |= {"offsets_q": y.offsets_q, "offsets_k": y.offsets_k, "scale": scale}
    dlse = None if dlse is None else dlse.to(torch.promote_types(dtype, torch.float32))
    gradients = reference.jagged_attention_backward(y.do, y.q, y.k, y.v, dlse=dlse, **options)
    return (*reference.jagged_attention(y.q, y.k, y.v, **options), *gradients)


def check(x, scale, dlse=None, **options):
    sides = (x.offsets_q,) * 3 + (x.offsets_k,) * 2
    expected = [by_loop(x, dtype, scale, dlse, **options) for dtype in (torch.float64, x.q.dtype)]
    results = call(x, dlse, scale=scale, **options)
    for name, actual, oracle, eager, offsets in zip(NAMES, results, *expected, sides, strict=True):
        floor = summation_floor(oracle, actual.dtype)
        assert_matches_oracle(name, actual, oracle, eager, offsets=offsets, floor=floor)


GPU_LENGTHS = [
    # Many units of work for each program, so that tiles of one follow tiles of another.
    ((5,) * 300 + (130,), (3,) * 301),
    ((200,) * 300, (40, 64, 65, 200, 256, 257) * 50),
    ((64,) * 300 + (128,), (600,) * 301),
    ((256,) * 200, (256,) * 200),
    ((1, 0, 63, 64, 65, 129, 300, 0, 5), (7, 64, 0, 65, 1, 300, 513, 0, 64)),
    ((130,) * 5, (0, 1, 0, 0, 2)),
    ((8192, 3), (100, 8192)),
]


ENDS = """
import torch
from gem_kernels import jagged_attention
from gem_kernels._src.attention.hopper.launch import portable_only
from gem_kernels._src.jagged_attention import hopper_launch
from gem_kernels.testing import attention_inputs

asked = []
hopper_launch.is_onepass = lambda *_: asked.append(1) or True
short = (64,) * 200 + (130,), (256,) * 201
shortest = (5,) * 200 + (130,), (3,) * 200 + (128,)
for lengths in (short, shortest, ((65, 130), (40000, 128))):
    for heads_kv in (4, 2):
        heads = dict(num_heads=4, num_heads_kv=heads_kv, head_dim=128)
        x = attention_inputs(*lengths, **heads, dtype=torch.bfloat16, device="cuda")
        q, k, v = (t.detach().requires_grad_() for t in (x.q, x.k, x.v))
        options = dict(offsets_q=x.offsets_q, offsets_k=x.offsets_k, max_seqlen_q=x.max_seqlen_q)
        out = jagged_attention(q, k, v, max_seqlen_k=x.max_seqlen_k, **options)
        results = torch.autograd.grad(out, (q, k, v), x.do, retain_graph=True)
        torch.cuda.synchronize()
        with portable_only():
            portable = torch.autograd.grad(out, (q, k, v), x.do)
        for a, b in zip(results, portable):
            torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2 * float(b.abs().max()))
assert len(asked) == 6
"""


@pytest.mark.gpu
def test_gpu_onepass_ends_where_sequences_have_one_query_tile_or_many_key_tiles(launches):
    """In a process of its own: a kernel that waits for what never comes would take this one along."""
    try:
        run = subprocess.run([sys.executable, "-c", ENDS], timeout=240, capture_output=True, text=True)
    except subprocess.TimeoutExpired:
        pytest.fail("the kernel stands still")
    assert run.returncode == 0, run.stderr


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", GPU_LENGTHS, ids=[str(i) for i in range(len(GPU_LENGTHS))])
@pytest.mark.parametrize("heads_kv", [4, 2])
@pytest.mark.parametrize(
    ("dtype", "form"),
    [(torch.bfloat16, "onepass"), (torch.bfloat16, "twice"), (torch.float16, "twice")],
    indirect=["form"],
)
def test_gpu_hopper_matches_oracle(lengths, heads_kv, dtype, launches, form, poisoned_empty):
    x = attention_inputs(*lengths, num_heads=4, num_heads_kv=heads_kv, head_dim=128, dtype=dtype, device="cuda")
    check(x, 128**-0.5)
    takes_backward = dtype == torch.bfloat16 and x.max_seqlen_k >= 128
    assert launches == ["forward"] + ["backward"] * takes_backward


@pytest.mark.gpu
def test_gpu_hopper_takes_the_gradient_of_the_lse(launches, form, poisoned_empty):
    lengths = ((1, 63, 64, 65, 129, 300), (7, 64, 65, 1, 300, 513))
    x = attention_inputs(*lengths, num_heads=4, head_dim=128, dtype=torch.bfloat16, device="cuda")
    dlse = torch.randn(x.q.shape[:2], generator=torch.Generator().manual_seed(1)).cuda()
    check(x, 0.1, dlse)
    assert launches == ["forward", "backward"]


@pytest.mark.gpu
def test_gpu_hopper_counts_no_masked_key_where_all_scores_are_far_below_zero(launches, form):
    x = attention_inputs((200, 7), (300, 65), num_heads=2, head_dim=128, dtype=torch.bfloat16, device="cuda")
    x = x._replace(q=x.q.abs() + 1, k=-x.k.abs() - 1)
    out, lse, *gradients = call(x, scale=0.5)
    expected, expected_lse, *expected_gradients = by_loop(x, torch.float64, 0.5)
    assert expected_lse.max() < -64
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=5e-3)
    torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=2e-2)
    for actual, gradient in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(actual.double(), gradient, rtol=4e-2, atol=4e-2 * float(gradient.abs().max()))
    assert launches == ["forward", "backward"]


@pytest.mark.gpu
def test_gpu_hopper_without_keys_gives_zero(launches):
    x = attention_inputs((130, 2), (0, 0), head_dim=128, dtype=torch.bfloat16, device="cuda")
    out, lse, *gradients = call(x)
    assert not any(t.any() for t in (out, *gradients))
    assert (lse == -math.inf).all()
    assert launches == ["forward"]


@pytest.mark.gpu
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3.0])
def test_gpu_hopper_lets_no_sequence_reach_another(value, launches, form):
    lengths_q, lengths_k = (70, 33, 150, 9) * 50, (70, 20, 140, 3) * 50
    x = attention_inputs(lengths_q, lengths_k, num_heads=2, head_dim=128, dtype=torch.bfloat16, device="cuda")
    before = call(x)
    changed = x._replace(q=x.q.clone(), k=x.k.clone(), v=x.v.clone(), do=x.do.clone())
    keep_q, keep_k = torch.ones(x.q.shape[0], dtype=torch.bool), torch.ones(x.k.shape[0], dtype=torch.bool)
    for b in range(1, len(lengths_q), 4):
        rows_q, rows_k = slice(*x.offsets_q[b : b + 2].tolist()), slice(*x.offsets_k[b : b + 2].tolist())
        changed.q[rows_q] = changed.do[rows_q] = value
        changed.k[rows_k] = changed.v[rows_k] = value
        keep_q[rows_q] = keep_k[rows_k] = False
    after = call(changed)
    for a, b, keep in zip(before, after, (keep_q, keep_q, keep_q, keep_k, keep_k), strict=True):
        assert torch.equal(a.cpu()[keep], b.cpu()[keep])
        assert not torch.equal(a.cpu()[~keep], b.cpu()[~keep])


@pytest.mark.gpu
def test_gpu_hopper_reads_views_of_one_projection(launches, form):
    lengths = random_lengths(40, 300, seed=0)
    x = attention_inputs(lengths, num_heads=2, head_dim=128, dtype=torch.bfloat16, device="cuda")
    fused = torch.cat([x.q, x.k, x.v], 1)
    q, k, v = fused.split(2, 1)
    from_views = call(x._replace(q=q, k=k, v=v))
    for a, b in zip(from_views, call(x), strict=True):
        assert torch.equal(a, b)
    assert launches == ["forward", "backward"] * 2


@pytest.mark.gpu
def test_gpu_hopper_agrees_with_the_portable_kernel_and_with_itself(launches, form):
    lengths = random_lengths(300, 700, seed=0)
    x = attention_inputs(lengths, num_heads=4, head_dim=128, dtype=torch.bfloat16, device="cuda")
    results = call(x)
    for _ in range(3):
        for a, b in zip(results, call(x), strict=True):
            assert torch.equal(a, b)
    with portable_only():
        portable = call(x)
    assert launches == ["forward", "backward"] * 4
    for a, b in zip(results, portable, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2 * float(b.abs().max()))


@pytest.mark.gpu
def test_gpu_calls_that_the_hopper_kernels_do_not_serve_take_the_portable_ones(launches):
    lengths = (130, 3)
    x = attention_inputs(lengths, head_dim=128, dtype=torch.bfloat16, device="cuda")
    call(x, position_bias=torch.zeros(x.q.shape[1], 3, device="cuda"))
    for other in ({"head_dim": 96}, {"head_dim": 128, "head_dim_v": 64}, {"head_dim": 128, "contiguous": False}):
        call(attention_inputs(lengths, dtype=torch.bfloat16, device="cuda", **other))
    call(attention_inputs(lengths, head_dim=128, dtype=torch.float32, device="cuda"))
    call(attention_inputs((127, 3), head_dim=128, dtype=torch.bfloat16, device="cuda"))
    assert not launches
