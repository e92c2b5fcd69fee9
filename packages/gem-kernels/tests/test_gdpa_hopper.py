"""Hopper's kernels of GDPA: their factors, when they are taken, and that they agree with float64 on the GPU."""

import pytest
import torch

from gem_kernels import gdpa, reference
from gem_kernels._src.attention.hopper import units as hopper_units
from gem_kernels._src.attention.hopper.launch import portable_only
from gem_kernels._src.attention.hopper.units import backward_units, sequences_in_turn
from gem_kernels._src.attention.pairing import pair_sequences
from gem_kernels._src.gdpa import hopper_activation, hopper_launch
from gem_kernels.reference.gdpa import _activation as plain_activation
from gem_kernels.testing import assert_matches_oracle, attention_inputs, random_lengths, summation_floor


def test_factors_taken_out_of_fast_gelu_are_those_of_its_scales(monkeypatch):
    for name in ("_SLOPE", "_CUBIC", "_LINEAR", "_THIRD"):
        monkeypatch.setattr(hopper_activation, name, getattr(hopper_activation, name).value)
    monkeypatch.setattr(hopper_activation, "_tanh", torch.tanh)
    act = hopper_activation.scaled_activation("fast_gelu")
    x = torch.linspace(-8, 8, 1001, dtype=torch.float64, requires_grad=True)
    expected = torch.nn.functional.gelu(x, approximate="tanh")
    torch.testing.assert_close(act.value_scale * act.value.fn(x), expected)
    (slope,) = torch.autograd.grad(expected.sum(), x)
    torch.testing.assert_close(act.derivative_scale * act.derivative.fn(x), slope)


UNIT_LENGTHS = [
    ((5,), (3,)),
    ((0, 0, 3, 129), (1, 0, 0, 0)),
    ((5,) * 300, (3,) * 300),
    ((200,) * 90, (40, 64, 65, 256, 257, 900) * 15),
    ((3000, 1), (256, 5000)),
]


@pytest.mark.parametrize("side", [1, 4])
@pytest.mark.parametrize("lengths", UNIT_LENGTHS, ids=[str(i) for i in range(len(UNIT_LENGTHS))])
def test_units_own_every_key_once_and_wait_for_units_before_them(lengths, side, interpreter):
    lengths_q, lengths_k = lengths
    x = attention_inputs(lengths_q, lengths_k, num_heads=1, head_dim=8)
    totals = sum(lengths_q), sum(lengths_k)
    made = backward_units(x.offsets_q, x.offsets_k, *totals, tile_rows=128, rows=64, side=side)
    units = made.units[: int(made.num_units)].tolist()
    starts = list(zip(x.offsets_q.tolist(), x.offsets_k.tolist(), strict=True))
    expected = []
    for b, (len_q, len_k) in enumerate(zip(lengths_q, lengths_k, strict=True)):
        count = max(-(-len_k // 128), 1)
        first_q, first_k = starts[b]
        of_batch = [first_q // 64 + b, int(count == 2)]
        expected += [
            [first_k + 128 * i, min(len_k - 128 * i, 128), first_q, len_q, i, int(i == count - 1), *of_batch]
            for i in range(count)
        ]
    assert sorted(units) == sorted(expected)
    assert len(made.units) >= len(units)
    of_sequence = {}
    for unit in units:
        # One after the other, which nobody who waits depends on the other way round.
        assert unit[4] == of_sequence.setdefault(unit[6], 0)
        of_sequence[unit[6]] += 1
    # No two query tiles have the same place.
    taken = [first_q // 64 + b + i for b, (first_q, _) in enumerate(starts[:-1]) for i in range(-(-lengths_q[b] // 64))]
    assert len(set(taken)) == len(taken)
    assert max(taken, default=0) < made.num_places


@pytest.mark.parametrize(
    ("length", "expected"), [(5, 16), (256, 16), (512, 8), (1023, 4), (1024, 4), (2048, 2), (4096, 1), (100_000, 1)]
)
def test_fewer_sequences_take_turns_the_longer_they_are(length, expected):
    assert sequences_in_turn(3 * length, 3, 4, rows=64) == expected


def test_tensors_on_the_cpu_take_the_portable_kernel():
    x = attention_inputs((3,), head_dim=128, dtype=torch.bfloat16)
    pairing = pair_sequences(x.q, x.offsets_q, x.offsets_k, None, x.max_seqlen_q, -1, -1)
    assert not hopper_launch.applies(x.q, x.k, x.v, pairing, None, -1, -1)


@pytest.mark.parametrize(
    ("dtype", "activation", "in_pairs", "scale"),
    [
        (torch.bfloat16, "fast_gelu", True, 0.3 * 0.25 * 0.5),
        (torch.float16, "fast_gelu", False, 0.3 * 0.5),
        (torch.bfloat16, "silu", False, 0.3),
    ],
)
def test_the_forward_leaves_every_factor_that_the_kernel_omits_to_the_output(
    dtype, activation, in_pairs, scale, monkeypatch
):
    given = {}

    def record(kernel, programs, arguments, constants, device):
        assert kernel.arg_names[len(arguments) :] == list(constants)
        given.update(zip(kernel.arg_names, arguments, strict=False), **constants)

    chunks = torch.zeros(3, 4, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    monkeypatch.setattr(hopper_launch, "call", record)
    monkeypatch.setattr(hopper_launch, "multiprocessors", lambda _: 132)
    monkeypatch.setattr(hopper_launch, "query_chunks", lambda *_: chunks)
    x = attention_inputs((130,), (70,), num_heads=4, num_heads_kv=2, head_dim=128, dtype=dtype)
    out = torch.empty_like(x.q)
    hopper_launch.launch_hopper_forward(out, x.q, x.k, x.v, x.offsets_q, x.offsets_k, activation, 0.25, 0.3)
    assert given["out_ptr"] is out
    assert (given["num_heads"], given["GROUP"]) == (4, 2)
    assert (given["IN_PAIRS"], given["HAS_PRE_SCALE"]) == (in_pairs, not in_pairs)
    assert given["pre_scale"] == 0.25
    assert given["post_scale"] == pytest.approx(scale)


@pytest.mark.parametrize(
    ("dtype", "activation", "num_heads_kv", "max_seqlen_k", "in_pairs"),
    [
        (torch.bfloat16, "fast_gelu", 4, 256, True),
        (torch.bfloat16, "fast_gelu", 2, 257, True),
        (torch.float16, "fast_gelu", 4, 70, False),
        (torch.bfloat16, "silu", 4, 70, False),
    ],
)
def test_the_backward_takes_pairs_where_it_has_run_and_leaves_their_factors_to_the_gradients(
    dtype, activation, num_heads_kv, max_seqlen_k, in_pairs, monkeypatch
):
    launches = []

    def record(kernel, programs, arguments, constants, device):
        assert kernel.arg_names[len(arguments) :] == list(constants)
        launches.append({**dict(zip(kernel.arg_names, arguments, strict=False)), **constants})

    made = torch.zeros(3, 4, dtype=torch.int32), torch.ones(1, dtype=torch.int32)
    monkeypatch.setattr(hopper_launch, "call", record)
    monkeypatch.setattr(hopper_launch, "multiprocessors", lambda _: 132)
    for name in ("query_chunks", "make_schedule"):
        monkeypatch.setattr(hopper_launch, name, lambda *_, **__: made)
    monkeypatch.setattr(hopper_units, "backward_units", lambda *_, **__: (*made, 3))
    x = attention_inputs((130,), (70,), num_heads=4, num_heads_kv=num_heads_kv, head_dim=128, dtype=dtype)
    offsets = x.offsets_q, x.offsets_k
    grads = hopper_launch.launch_hopper_backward(x.do, x.q, x.k, x.v, *offsets, max_seqlen_k, activation, 0.25, 0.3)
    assert len(launches) == (1 if in_pairs else 2)
    given = {name: value for launch in launches for name, value in launch.items()}
    places = [given[f"{name}_desc"].base.data_ptr() for name in ("dq", "dk", "dv")]
    assert places == [grad.data_ptr() for grad in grads]
    assert given["pre_scale"] == 0.25
    if in_pairs:
        assert (given["num_heads_kv"], given["GROUP"]) == (num_heads_kv, 4 // num_heads_kv)
        assert given["dq_desc"].shape[-1] == 4 * 128
        # Two units of a sequence hand dq on in its own memory.
        assert given["sums_desc"].base.shape == ((3 * 4 * 2 if max_seqlen_k > 256 else 1) * 64, 64)
        assert given["turns_ptr"].shape == (3 * 4 * 2,)
        assert not given["turns_ptr"].any()
        assert not given["claims_ptr"].any()
        assert given["out_scale"] == pytest.approx(0.3 * 0.25 * 0.5)
    else:
        assert (given["HAS_PRE_SCALE"], given["GROUP"]) == (True, 4 // num_heads_kv)


@pytest.mark.parametrize("pre_scale", [0.125, 1.0, 128**-0.5])
def test_fast_gelu_in_pairs_is_as_exact_as_bfloat16_by_eager(pre_scale):
    def rounded(x):
        return x.to(torch.bfloat16).double()

    # Near 0, where most scores are, and beyond the range of tanh.
    scores = torch.cat([torch.linspace(-x, x, 100_001, dtype=torch.float64) for x in (2, 10)]) / pre_scale
    slope, cubic = (v.value for v in (hopper_activation._SLOPE, hopper_activation._CUBIC))
    a, b, c = (
        rounded(torch.tensor(v, dtype=torch.float64))
        for v in (slope * pre_scale, cubic * pre_scale**3, 3 * cubic * pre_scale**3)
    )
    # The steps of the kernels, each with the rounding of its instruction.
    x = rounded(scores)
    square = rounded(x * x)
    t = rounded(torch.tanh(rounded(rounded(square * b + a) * x)))
    value = rounded(x * t + x) * (0.5 * pre_scale)
    z = rounded(rounded(square * c + a) * x)
    derivative = rounded(rounded(rounded(1 - t * t) * z + t) + 1) * 0.5
    act = plain_activation("fast_gelu")
    exact = (scores * pre_scale).requires_grad_()
    expected = torch.nn.functional.gelu(exact, approximate="tanh")
    (expected_derivative,) = torch.autograd.grad(expected.sum(), exact)
    by_eager = scores.to(torch.bfloat16) * pre_scale
    for actual, eager, oracle in (
        (value, act.value(by_eager), expected.detach()),
        (derivative, act.derivative(by_eager), expected_derivative),
    ):
        error, eager_error = ((x.double() - oracle).square().mean().sqrt() for x in (actual, eager))
        assert error < 1.2 * eager_error


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


def call(x, **options):
    """(out, dq, dk, dv) through autograd."""
    q, k, v = (t.detach().requires_grad_() for t in (x.q, x.k, x.v))
    out = gdpa(
        q,
        k,
        v,
        offsets_q=x.offsets_q,
        offsets_k=x.offsets_k,
        max_seqlen_q=x.max_seqlen_q,
        max_seqlen_k=x.max_seqlen_k,
        **options,
    )
    return (out.detach(), *torch.autograd.grad(out, (q, k, v), x.do))


NAMES = ("out", "dq", "dk", "dv")


def check(x, **options):
    def by_loop(dtype):
        y = x.to(dtype)
        offsets = {"offsets_q": y.offsets_q, "offsets_k": y.offsets_k}
        out = reference.gdpa(y.q, y.k, y.v, **offsets, **options)
        return (out, *reference.gdpa_backward(y.do, y.q, y.k, y.v, **offsets, **options))

    sides = (x.offsets_q, x.offsets_q, x.offsets_k, x.offsets_k)
    results = zip(NAMES, call(x, **options), by_loop(torch.float64), by_loop(x.q.dtype), sides, strict=True)
    for name, actual, oracle, eager, offsets in results:
        assert_matches_oracle(name, actual, oracle, eager, offsets=offsets, floor=summation_floor(oracle, actual.dtype))


GPU_LENGTHS = [
    # Many units of work for each program, so that tiles of one follow tiles of another.
    ((5,) * 300, (3,) * 300),
    ((200,) * 300, (40, 64, 65, 200, 256, 257) * 50),
    ((64,) * 300, (600,) * 300),
    ((256,) * 200, (256,) * 200),
    ((1, 0, 63, 64, 65, 129, 300, 0, 5), (7, 64, 0, 65, 1, 300, 513, 0, 64)),
    ((130,) * 5, (0, 1, 0, 0, 2)),
    ((8192, 3), (100, 8192)),
    # The first of two units leaves its part of dq in the memory of dq.
    ((1, 63, 64, 65, 129, 300, 0, 700) * 20, (129, 130, 191, 192, 193, 255, 256, 200) * 20),
]


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", GPU_LENGTHS, ids=[str(i) for i in range(len(GPU_LENGTHS))])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gpu_hopper_matches_oracle(lengths, head_dim, dtype, launches, poisoned_empty):
    x = attention_inputs(*lengths, num_heads=4, num_heads_kv=2, head_dim=head_dim, dtype=dtype, device="cuda")
    check(x, activation="fast_gelu", pre_scale=head_dim**-0.5, post_scale=0.3)
    check(x, activation="silu", pre_scale=1.0)
    assert launches == ["forward", "backward"] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("pre_scale", [1.0, 128**-0.5])
@pytest.mark.parametrize("lengths", GPU_LENGTHS, ids=[str(i) for i in range(len(GPU_LENGTHS))])
def test_gpu_hopper_in_pairs_matches_oracle(lengths, pre_scale, launches, poisoned_empty):
    x = attention_inputs(*lengths, num_heads=4, head_dim=128, dtype=torch.bfloat16, device="cuda")
    x = x._replace(q=x.q * (0.1 / pre_scale))
    check(x, activation="fast_gelu", pre_scale=pre_scale, post_scale=0.3)
    assert launches == ["forward", "backward"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("std", [3.0, 20.0])
def test_gpu_hopper_matches_oracle_where_tanh_saturates(std, dtype, launches):
    x = attention_inputs((64, 300, 5), (40, 257, 3), num_heads=4, head_dim=128, dtype=dtype, device="cuda")
    check(x._replace(q=std * x.q), activation="fast_gelu", pre_scale=128**-0.5)


@pytest.mark.gpu
@pytest.mark.parametrize("lengths", [((130, 2), (0, 0)), ((0, 0), (130, 2))], ids=["no-keys", "no-queries"])
def test_gpu_hopper_without_one_side_gives_zero(lengths, launches):
    x = attention_inputs(*lengths, head_dim=128, dtype=torch.bfloat16, device="cuda")
    assert not any(t.any() for t in call(x, activation="gelu"))


@pytest.mark.gpu
@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3.0])
@pytest.mark.parametrize("keys", [(70, 20, 40, 3), (200, 129, 256, 130), (130, 640, 300, 3)], ids=["1", "2", "many"])
def test_gpu_hopper_lets_no_sequence_reach_another(keys, value, launches):
    lengths_q, lengths_k = (70, 33, 150, 9) * 50, keys * 50
    x = attention_inputs(lengths_q, lengths_k, num_heads=2, head_dim=128, dtype=torch.bfloat16, device="cuda")
    before = call(x, activation="fast_gelu")
    changed = x._replace(q=x.q.clone(), k=x.k.clone(), v=x.v.clone(), do=x.do.clone())
    keep_q, keep_k = torch.ones(x.q.shape[0], dtype=torch.bool), torch.ones(x.k.shape[0], dtype=torch.bool)
    for b in range(1, len(lengths_q), 4):
        rows_q, rows_k = slice(*x.offsets_q[b : b + 2].tolist()), slice(*x.offsets_k[b : b + 2].tolist())
        changed.q[rows_q] = changed.do[rows_q] = value
        changed.k[rows_k] = changed.v[rows_k] = value
        keep_q[rows_q] = keep_k[rows_k] = False
    after = call(changed, activation="fast_gelu")
    for a, b, keep in zip(before, after, (keep_q, keep_q, keep_k, keep_k), strict=True):
        assert torch.equal(a.cpu()[keep], b.cpu()[keep])
        assert not torch.equal(a.cpu()[~keep], b.cpu()[~keep])


@pytest.mark.gpu
def test_gpu_hopper_reads_views_of_one_projection(launches):
    lengths = random_lengths(40, 300, seed=0)
    x = attention_inputs(lengths, num_heads=2, head_dim=128, dtype=torch.bfloat16, device="cuda")
    fused = torch.cat([x.q, x.k, x.v], 1)
    q, k, v = fused.split(2, 1)
    from_views = call(x._replace(q=q, k=k, v=v), activation="gelu")
    for a, b in zip(from_views, call(x, activation="gelu"), strict=True):
        assert torch.equal(a, b)
    assert launches == ["forward", "backward"] * 2


@pytest.mark.gpu
def test_gpu_hopper_agrees_with_the_portable_kernel_and_with_itself(launches):
    lengths = random_lengths(300, 700, seed=0)
    x = attention_inputs(lengths, num_heads=4, head_dim=128, dtype=torch.bfloat16, device="cuda")
    options = {"activation": "fast_gelu", "pre_scale": 0.1}
    results = call(x, **options)
    for a, b in zip(results, call(x, **options), strict=True):
        assert torch.equal(a, b)
    with portable_only():
        portable = call(x, **options)
    assert launches == ["forward", "backward"] * 2
    for a, b in zip(results, portable, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-2, atol=2e-2 * float(b.abs().max()))


@pytest.mark.gpu
def test_gpu_calls_that_the_hopper_kernel_cannot_serve_take_the_portable_one(launches):
    x = attention_inputs((70, 3), head_dim=128, dtype=torch.bfloat16, device="cuda")
    call(x, activation="gelu", window_size=(5, 5))
    call(x, activation="gelu", causal=True)
    for other in ({"head_dim": 96}, {"head_dim": 128, "head_dim_v": 64}, {"head_dim": 128, "contiguous": False}):
        call(attention_inputs((70, 3), dtype=torch.bfloat16, device="cuda", **other), activation="gelu")
    assert not launches
