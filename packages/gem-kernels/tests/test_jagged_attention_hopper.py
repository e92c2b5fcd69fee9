"""Hopper's forward of jagged attention: when it is taken, and that it agrees with float64 on the GPU."""

import math
from dataclasses import dataclass

import pytest
import torch

from gem_kernels import jagged_attention, reference
from gem_kernels._src.attention.hopper.launch import portable_only
from gem_kernels._src.attention.pairing import pair_sequences
from gem_kernels._src.jagged_attention import hopper_launch
from gem_kernels._src.jagged_attention.bias import Bias
from gem_kernels.testing import assert_matches_oracle, attention_inputs, random_lengths, summation_floor


def test_tensors_on_the_cpu_take_the_portable_kernel():
    x = attention_inputs((3,), head_dim=128, dtype=torch.bfloat16)
    pairing = pair_sequences(x.q, x.offsets_q, x.offsets_k, None, x.max_seqlen_q, -1, -1)
    assert not hopper_launch.applies(x.q, x.k, x.v, pairing, -1, -1, Bias())


@dataclass(frozen=True, kw_only=True)
class SelectionCase:
    id: str
    applies: bool
    length_q: int = 128
    head_dim: int = 128
    bias: bool = False


SELECTION = [
    SelectionCase(id="a-whole-tile", applies=True),
    SelectionCase(id="short-queries", applies=False, length_q=127),
    SelectionCase(id="head-dim", applies=False, head_dim=64),
    SelectionCase(id="bias", applies=False, bias=True),
]


@pytest.mark.parametrize("case", SELECTION, ids=lambda case: case.id)
def test_beyond_what_every_hopper_kernel_asks_it_wants_whole_tiles_of_128_channels_without_a_bias(case, monkeypatch):
    monkeypatch.setattr(hopper_launch, "serves", lambda q, *_, head_dims: q.shape[2] in head_dims)
    x = attention_inputs((case.length_q,), (3,), head_dim=case.head_dim, dtype=torch.bfloat16)
    pairing = pair_sequences(x.q, x.offsets_q, x.offsets_k, None, x.max_seqlen_q, -1, -1)
    bias = Bias(position=torch.zeros(x.q.shape[1], 3)) if case.bias else Bias()
    assert hopper_launch.applies(x.q, x.k, x.v, pairing, -1, -1, bias) == case.applies


def test_the_launch_gives_every_argument_of_the_kernel_its_place(monkeypatch):
    given = {}

    def record(kernel, programs, arguments, constants, device):
        assert kernel.arg_names[len(arguments) :] == list(constants)
        given.update(zip(kernel.arg_names, arguments, strict=False), **constants, programs=programs)

    chunks, num_chunks = torch.zeros(3, 4, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    monkeypatch.setattr(hopper_launch, "call", record)
    monkeypatch.setattr(hopper_launch, "multiprocessors", lambda _: 132)
    monkeypatch.setattr(hopper_launch, "query_chunks", lambda *_: (chunks, num_chunks))
    x = attention_inputs((130,), (70,), num_heads=4, num_heads_kv=2, head_dim=128, dtype=torch.bfloat16)
    out, lse = torch.empty_like(x.q), torch.empty(130, 4)
    hopper_launch.launch_hopper_forward(out, lse, x.q, x.k, x.v, x.offsets_q, x.offsets_k, 0.5)
    for name, tensor in (("q", x.q), ("k", x.k), ("v", x.v), ("out", out)):
        assert given[f"{name}_desc"].base is tensor
        assert given[f"{name}_desc"].shape == [tensor.shape[0], tensor.shape[1] * 128]
    assert given["out_ptr"] is out
    assert given["lse_ptr"] is lse
    assert given["stride_ot"] == 512
    assert given["chunks_ptr"] is chunks
    assert given["num_chunks_ptr"] is num_chunks
    assert (given["num_heads"], given["GROUP"], given["programs"]) == (4, 2, 132)
    assert given["scale_log2"] == pytest.approx(0.5 * math.log2(math.e))


# ---------------------------------------------------------------- on the GPU


@pytest.fixture
def launches(monkeypatch):
    """One entry for each launch of the Hopper kernel so far."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    calls = []
    launch = hopper_launch.launch_hopper_forward

    def counted(*args):
        calls.append("forward")
        return launch(*args)

    monkeypatch.setattr(hopper_launch, "launch_hopper_forward", counted)
    return calls


def call(x, **options):
    """(out, lse, dq, dk, dv) through autograd; the backward is the portable one."""
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
    return (out.detach(), lse.detach(), *torch.autograd.grad(out, (q, k, v), x.do))


def by_loop(x, dtype, scale):
    """(out, lse) of the reference in a dtype."""
    y = x.to(dtype)
    return reference.jagged_attention(y.q, y.k, y.v, offsets_q=y.offsets_q, offsets_k=y.offsets_k, scale=scale)


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


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", GPU_LENGTHS, ids=[str(i) for i in range(len(GPU_LENGTHS))])
@pytest.mark.parametrize("heads_kv", [4, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gpu_hopper_matches_oracle(lengths, heads_kv, dtype, launches, poisoned_empty):
    x = attention_inputs(*lengths, num_heads=4, num_heads_kv=heads_kv, head_dim=128, dtype=dtype, device="cuda")
    scale = 128**-0.5
    results = zip(
        ("out", "lse"),
        call(x, scale=scale)[:2],
        by_loop(x, torch.float64, scale),
        by_loop(x, dtype, scale),
        strict=True,
    )
    for name, actual, oracle, eager in results:
        floor = summation_floor(oracle, actual.dtype)
        assert_matches_oracle(name, actual, oracle, eager, offsets=x.offsets_q, floor=floor)
    assert launches == ["forward"]


@pytest.mark.gpu
def test_gpu_hopper_counts_no_masked_key_where_all_scores_are_far_below_zero(launches):
    x = attention_inputs((200, 7), (300, 65), num_heads=2, head_dim=128, dtype=torch.bfloat16, device="cuda")
    x = x._replace(q=x.q.abs() + 1, k=-x.k.abs() - 1)
    out, lse, *_ = call(x, scale=0.5)
    expected, expected_lse = by_loop(x, torch.float64, 0.5)
    assert expected_lse.max() < -64
    torch.testing.assert_close(lse.double(), expected_lse, rtol=0, atol=5e-3)
    torch.testing.assert_close(out.double(), expected, rtol=2e-2, atol=2e-2)
    assert launches == ["forward"]


@pytest.mark.gpu
def test_gpu_hopper_without_keys_gives_zero(launches):
    x = attention_inputs((130, 2), (0, 0), head_dim=128, dtype=torch.bfloat16, device="cuda")
    out, lse, *gradients = call(x)
    assert not any(t.any() for t in (out, *gradients))
    assert (lse == -math.inf).all()
    assert launches == ["forward"]


@pytest.mark.gpu
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3.0])
def test_gpu_hopper_lets_no_sequence_reach_another(value, launches):
    lengths_q, lengths_k = (70, 33, 150, 9) * 50, (70, 20, 40, 3) * 50
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
def test_gpu_hopper_reads_views_of_one_projection(launches):
    lengths = random_lengths(40, 300, seed=0)
    x = attention_inputs(lengths, num_heads=2, head_dim=128, dtype=torch.bfloat16, device="cuda")
    fused = torch.cat([x.q, x.k, x.v], 1)
    q, k, v = fused.split(2, 1)
    from_views = call(x._replace(q=q, k=k, v=v))
    for a, b in zip(from_views, call(x), strict=True):
        assert torch.equal(a, b)
    assert launches == ["forward"] * 2


@pytest.mark.gpu
def test_gpu_hopper_agrees_with_the_portable_kernel_and_with_itself(launches):
    lengths = random_lengths(300, 700, seed=0)
    x = attention_inputs(lengths, num_heads=4, head_dim=128, dtype=torch.bfloat16, device="cuda")
    results = call(x)
    for _ in range(3):
        for a, b in zip(results, call(x), strict=True):
            assert torch.equal(a, b)
    with portable_only():
        portable = call(x)
    assert launches == ["forward"] * 4
    for a, b in zip(results, portable, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2 * float(b.abs().max()))


@pytest.mark.gpu
def test_gpu_calls_that_the_hopper_kernel_does_not_serve_take_the_portable_one(launches):
    x = attention_inputs((130, 3), head_dim=128, dtype=torch.bfloat16, device="cuda")
    call(x, window_size=(5, 5))
    call(x, causal=True)
    call(x, position_bias=torch.zeros(x.q.shape[1], 3, device="cuda"))
    for other in ({"head_dim": 96}, {"head_dim": 128, "head_dim_v": 64}, {"head_dim": 128, "contiguous": False}):
        call(attention_inputs((130, 3), dtype=torch.bfloat16, device="cuda", **other))
    for other in ({"head_dim": 64}, {"head_dim": 128, "dtype": torch.float32}):
        call(attention_inputs((130, 3), **{"dtype": torch.bfloat16, "device": "cuda", **other}))
    call(attention_inputs((127, 3), head_dim=128, dtype=torch.bfloat16, device="cuda"))
    assert not launches
