"""The additive bias of jagged_attention: both tables, their buckets and their gradients."""

import math
from typing import NamedTuple

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from gem_kernels import jagged_attention, reference
from gem_kernels._src.attention import launch
from gem_kernels._src.jagged_attention.bias import Bias, time_buckets
from gem_kernels._src.jagged_attention.op import jagged_attention_bias_backward_op, jagged_attention_op
from gem_kernels.testing import (
    LENGTH_CASES,
    MASK_CASES,
    LengthCase,
    assert_matches_oracle,
    attention_inputs,
    random_lengths,
    summation_floor,
)

FULL = MASK_CASES[0]
MIXED = LengthCase(id="mixed", lengths_q=(3, 0, 40, 1, 17), lengths_k=(20, 5, 0, 33, 1))
LONG = LengthCase(id="long", lengths_q=(70, 3, 0), lengths_k=(40, 130, 5))
PARTS = {"position": (True, False), "time": (False, True), "both": (True, True)}


class Tables(NamedTuple):
    """Bias arguments, by the names of the public function."""

    position_bias: Tensor | None
    time_bias: Tensor | None
    times_q: Tensor | None
    times_k: Tensor | None
    time_buckets_per_octave: int


def make_tables(x, part="both", *, radius=6, num_buckets=9, per_octave=1, dtype=None, times=torch.int64, seed=7):
    """Tables for the heads of ``x`` and rising times within its sequences, with gaps of seconds to days."""
    generator = torch.Generator().manual_seed(seed)
    has_position, has_time = PARTS[part]

    def table(columns):
        values = torch.randn(x.q.shape[1], columns, generator=generator, dtype=torch.float64)
        return values.to(device=x.q.device, dtype=dtype or x.q.dtype)

    def draw(rows):
        steps = torch.exp(8 * torch.rand(rows, generator=generator, dtype=torch.float64)).long()
        start = 1_700_000_000 if not times.is_floating_point else 0
        return (start + steps.cumsum(0)).to(device=x.q.device, dtype=times)

    return Tables(
        table(2 * radius + 1) if has_position else None,
        table(num_buckets) if has_time else None,
        draw(x.q.shape[0]) if has_time else None,
        draw(x.k.shape[0]) if has_time else None,
        per_octave,
    )


def options(x, mask):
    return {"offsets_q": x.offsets_q, "offsets_k": x.offsets_k, "causal": mask.causal, "window_size": mask.window_size}


def keywords(x, mask=FULL):
    return options(x, mask) | {"max_seqlen_q": x.max_seqlen_q, "max_seqlen_k": x.max_seqlen_k}


def cast(tables, dtype):
    position, time = (None if t is None else t.to(dtype) for t in tables[:2])
    return tables._replace(position_bias=position, time_bias=time)


def by_reference(x, tables, dlse, mask):
    bias = tables._asdict()
    out, lse = reference.jagged_attention(x.q, x.k, x.v, **options(x, mask), **bias)
    return out, lse, *reference.jagged_attention_backward(x.do, x.q, x.k, x.v, dlse=dlse, **options(x, mask), **bias)


def by_op(x, tables, dlse, mask):
    q, k, v = (t.detach().requires_grad_() for t in (x.q, x.k, x.v))
    learned = {
        name: getattr(tables, name).detach().requires_grad_()
        for name in ("position_bias", "time_bias")
        if getattr(tables, name) is not None
    }
    out, lse = jagged_attention(q, k, v, return_lse=True, **keywords(x, mask), **(tables._asdict() | learned))
    inputs = [q, k, v, *learned.values()]
    return out.detach(), lse.detach(), *torch.autograd.grad([out, lse], inputs, [x.do, dlse.to(lse.dtype)])


def by_launch(x, tables, dlse, mask):
    """The Triton kernels on any tensors, CPU ones interpreted."""
    from gem_kernels._src.jagged_attention.backward import launch_backward
    from gem_kernels._src.jagged_attention.forward import launch_forward
    from gem_kernels._src.jagged_attention.tables import launch_table_gradients

    left, right = mask.window_size
    right = 0 if mask.causal else right
    bias = Bias(*tables)
    args = (x.offsets_q, x.offsets_k, x.max_seqlen_q, x.max_seqlen_k, x.q.shape[2] ** -0.5, left, right, bias)
    out, lse = launch_forward(x.q, x.k, x.v, *args)
    gradients = launch_backward(x.do, dlse, x.q, x.k, x.v, out, lse, *args)
    learned = launch_table_gradients(x.do, dlse, x.q, x.k, x.v, out, lse, *args)
    return out, lse, *gradients, *(t for t in learned if t is not None)


def names(tables):
    return [
        "out",
        "lse",
        "dq",
        "dk",
        "dv",
        *(f"d{n}" for n, t in zip(Tables._fields, tables[:2], strict=False) if t is not None),
    ]


def check(compute, x, tables, mask=FULL):
    """Every result of ``compute`` against float64, as far off as the loop in the same dtype, twice or three times."""
    dlse = torch.linspace(-1, 1, x.q.shape[0] * x.q.shape[1], device=x.q.device).view(x.q.shape[:2])
    results = compute(x, tables, dlse, mask)
    oracle = by_reference(x.to(torch.float64), cast(tables, torch.float64), dlse.double(), mask)
    eager = by_reference(x, tables, dlse, mask)
    for name, a, o, e in zip(names(tables), results, oracle, eager, strict=True):
        # A table entry sums over up to all pairs of the batch.
        units = 64.0 if name.endswith("_bias") else 16.0
        floor = summation_floor(o, a.dtype, units=units)
        assert_matches_oracle(name, a, o, e, floor=floor, factor=3.0 if name.startswith("d") else 2.0)


def inputs(case, **kwargs):
    return attention_inputs(case.lengths_q, case.lengths_k, **kwargs)


@pytest.mark.parametrize("mask", MASK_CASES, ids=lambda m: m.id)
def test_cpu_op_matches_oracle_for_every_mask(mask):
    x = inputs(MIXED, num_heads=4, num_heads_kv=2, head_dim=8, head_dim_v=12)
    check(by_op, x, make_tables(x), mask)


@pytest.mark.parametrize("part", ["position", "time"])
def test_cpu_op_with_one_part(part):
    x = inputs(MIXED, num_heads=4, num_heads_kv=1, head_dim=8)
    check(by_op, x, make_tables(x, part))


@pytest.mark.parametrize("case", LENGTH_CASES, ids=lambda c: c.id)
def test_cpu_op_matches_oracle_for_every_length_case(case):
    x = inputs(case, num_heads=2, head_dim=8)
    for mask in (FULL, MASK_CASES[1]):
        check(by_op, x, make_tables(x, per_octave=2, num_buckets=25), mask)


@pytest.mark.parametrize("times", [torch.int32, torch.int64, torch.float32, torch.float64])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_cpu_op_dtypes(dtype, times):
    x = inputs(MIXED, dtype=dtype, num_heads=2, contiguous=False)
    check(by_op, x, make_tables(x, times=times, dtype=torch.float64 if dtype == torch.float64 else torch.float32))


def test_cpu_groups_and_chunks_match_oracle():
    lengths = torch.cat([random_lengths(30, 60, sparsity=0.5, seed=1), torch.tensor([400, 0, 350])])
    x = attention_inputs(lengths, num_heads=2, head_dim=8)
    for mask in (FULL, MASK_CASES[2]):
        check(by_op, x, make_tables(x, radius=40, num_buckets=20), mask)


@pytest.mark.parametrize("mask", MASK_CASES, ids=lambda m: m.id)
def test_interpreted_kernels_match_oracle_for_every_mask(mask, interpreter, poisoned_empty):
    x = inputs(MIXED, num_heads=2, num_heads_kv=1, head_dim_v=24)
    check(by_launch, x, make_tables(x), mask)


@pytest.mark.parametrize("case", LENGTH_CASES, ids=lambda c: c.id)
def test_interpreted_kernels_match_oracle_for_every_length_case(case, interpreter, poisoned_empty):
    x = inputs(case, num_heads=1, contiguous=False, offsets_dtype=torch.int32)
    check(by_launch, x, make_tables(x), MASK_CASES[1])


@pytest.mark.parametrize("part", ["position", "both"])
@pytest.mark.parametrize("radius", [0, 1, 31, 32, 500])
def test_interpreted_tables_of_every_reach(radius, part, interpreter, poisoned_empty):
    x = inputs(LONG, num_heads=1)
    check(by_launch, x, make_tables(x, part, radius=radius, num_buckets=1 + radius % 100, per_octave=4))


@pytest.mark.parametrize("times", [torch.int32, torch.int64, torch.float32, torch.float64])
def test_interpreted_times_of_every_dtype(times, interpreter, poisoned_empty):
    x = inputs(MIXED, num_heads=1)
    check(by_launch, x, make_tables(x, "time", times=times))


@pytest.mark.parametrize("head_dim", [24, 72])
def test_interpreted_kernels_in_half_precision(head_dim, interpreter, poisoned_empty):
    # float16 only: the interpreter of Triton 3.6 to 3.9 multiplies bfloat16 tiles as integers.
    x = inputs(LONG, num_heads=1, head_dim=head_dim, dtype=torch.float16)
    check(by_launch, x, make_tables(x, radius=40, dtype=torch.float32), MASK_CASES[1])


def test_interpreted_kernels_on_a_searched_grid(interpreter, poisoned_empty, monkeypatch):
    monkeypatch.setattr(launch, "_PADDED_GRID_FACTOR", 0)
    x = attention_inputs((0, 40, 3, 0, 0, 33, 0), (5, 40, 0, 0, 7, 20, 0), num_heads=1)
    check(by_launch, x, make_tables(x), MASK_CASES[1])


def test_interpreted_kernels_write_dq_beside_dk_and_dv(interpreter, poisoned_empty, monkeypatch):
    monkeypatch.setattr(launch, "_MIN_PROGRAMS", 1)
    from gem_kernels._src.jagged_attention import backward_dq

    monkeypatch.setattr(backward_dq, "_jagged_attention_bwd_dq_kernel", None)  # the second kernel must not be needed
    x = attention_inputs((40, 3, 0, 33), (20, 0, 5, 32), num_heads=2, num_heads_kv=1)
    check(by_launch, x, make_tables(x))


def test_interpreted_programs_share_the_tiles(interpreter, poisoned_empty, monkeypatch):
    from gem_kernels._src.jagged_attention import tables

    monkeypatch.setattr(tables, "_NUM_PROGRAMS", 2)
    monkeypatch.setattr(tables, "_CHUNKS", 2)  # several groups of distances
    x = attention_inputs((40, 3, 0, 33, 1), (20, 0, 5, 40, 40), num_heads=1)
    for radius in (6, 30):
        check(by_launch, x, make_tables(x, radius=radius))


def test_zero_tables_change_no_bit_of_the_scores():
    x = inputs(MIXED)
    tables = make_tables(x)
    zero = tables._replace(position_bias=tables.position_bias * 0, time_bias=tables.time_bias * 0)
    with_bias = jagged_attention(x.q, x.k, x.v, **keywords(x), **zero._asdict())
    assert torch.equal(with_bias, jagged_attention(x.q, x.k, x.v, **keywords(x)))


def test_bias_is_what_a_dense_softmax_adds():
    x = attention_inputs((5,), (7,), num_heads=2, dtype=torch.float64)
    tables = make_tables(x, radius=2, num_buckets=4)
    scores = torch.einsum("ihd,jhd->hij", x.q, x.k) / 4
    for h in range(2):
        for i in range(5):
            for j in range(7):
                gap = max(abs(int(tables.times_q[i]) - int(tables.times_k[j])), 1)
                bucket = min(int(math.log2(gap)), 3)
                scores[h, i, j] += tables.position_bias[h, max(-2, min(2, j - i)) + 2] + tables.time_bias[h, bucket]
    expected = torch.einsum("hij,jhd->ihd", scores.softmax(-1), x.v)
    assert torch.allclose(jagged_attention(x.q, x.k, x.v, **keywords(x), **tables._asdict()), expected)


@pytest.mark.parametrize("per_octave", [1, 2, 4, 8])
def test_bucket_borders_are_exact(per_octave):
    borders = torch.tensor([2**n + 2**n * r // per_octave for n in range(4, 24) for r in range(per_octave)])
    expected = torch.arange(4 * per_octave, 24 * per_octave)
    zero = torch.zeros(1, dtype=torch.int64)
    for sign in (1, -1):
        assert torch.equal(time_buckets(sign * borders, zero, per_octave, 1000).flatten().long(), expected)
        # One second before a border is still the bucket before it: all these gaps are exact in float32.
        before = time_buckets(sign * (borders - 1), zero, per_octave, 1000).flatten().long()
        assert torch.equal(before, expected - 1)


def test_buckets_of_unusual_gaps():
    times = torch.tensor([0.0, 0.3, 1.0, -1.9, 2.0, 1e30, float("inf"), float("nan")])
    assert time_buckets(times, torch.zeros(1), 1, 20).flatten().tolist() == [0, 0, 0, 0, 1, 19, 19, 19]
    # Unix times beyond what float32 tells apart.
    times = torch.tensor([1_700_000_000, 1_700_000_001, 1_700_000_003, -1_700_000_000])
    assert time_buckets(times, times[:1], 1, 40).flatten().tolist() == [0, 0, 1, 31]
    int32 = torch.tensor([2**31 - 1, -(2**31)], dtype=torch.int32)
    assert time_buckets(int32, int32[1:], 1, 40).flatten().tolist() == [32, 0]


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
def test_interpreted_buckets_are_those_of_the_cpu(interpreter):
    times = torch.tensor([0.0, 0.3, 1.0, -1.9, 2.0, 3.0, 2.0**24 + 2, 1e30, float("inf"), float("nan")])
    x = attention_inputs((times.numel(),), (1,), num_heads=1)
    tables = make_tables(x, "time", num_buckets=60, per_octave=2)._replace(times_q=times, times_k=torch.zeros(1))
    check(by_launch, x, tables)


@pytest.mark.parametrize("mask", [FULL, MASK_CASES[2]], ids=lambda m: m.id)
@pytest.mark.parametrize("part", PARTS)
def test_gradcheck(part, mask):
    x = attention_inputs((1, 4), (3, 5), dtype=torch.float64, head_dim=3, num_heads=2, num_heads_kv=1)
    tables = make_tables(x, part, radius=2, num_buckets=5)
    learned = [name for name in ("position_bias", "time_bias") if getattr(tables, name) is not None]

    def attend(q, k, v, *values):
        bias = tables._asdict() | dict(zip(learned, values, strict=True))
        return jagged_attention(q, k, v, return_lse=True, **keywords(x, mask), **bias)

    leaves = [t.requires_grad_() for t in (x.q, x.k, x.v, *(getattr(tables, name) for name in learned))]
    assert torch.autograd.gradcheck(attend, leaves)


@pytest.mark.parametrize(("part", "lengths"), [("position", (0, 0)), ("time", ()), ("both", (3, 0, 65))])
def test_opcheck(part, lengths):
    x = attention_inputs(lengths)
    tables = make_tables(x, part)
    q, k, v = (t.requires_grad_() for t in (x.q, x.k, x.v))
    for table in tables[:2]:
        if table is not None:
            table.requires_grad_()
    sizes = (x.max_seqlen_q, x.max_seqlen_k, 0.25, -1, 3)
    args = (q, k, v, x.offsets_q, x.offsets_k, *sizes, False, *tables)
    torch.library.opcheck(jagged_attention_op, args)
    out, lse = jagged_attention_op(*args)
    saved = [t.detach() for t in (q, k, v, out, lse)]
    bias = [t.detach() if isinstance(t, Tensor) else t for t in tables]
    for dlse in (None, torch.ones_like(lse)):
        torch.library.opcheck(
            jagged_attention_bias_backward_op, (x.do, dlse, *saved, x.offsets_q, x.offsets_k, *sizes, *bias)
        )


def test_compiles_to_one_graph():
    torch._dynamo.reset()

    def loss(x, tables, q, position, time):
        bias = tables._replace(position_bias=position, time_bias=time)
        return (jagged_attention(q, x.k, x.v, **keywords(x), **bias._asdict()) * x.do).sum()

    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend="aot_eager")
    for seed in range(2):
        x = attention_inputs(random_lengths(6 + seed, 30, seed=seed))
        tables = make_tables(x)
        leaves = [t.clone().requires_grad_() for t in (x.q, *tables[:2])]
        expected = torch.autograd.grad(loss(x, tables, *leaves), leaves)
        for a, b in zip(torch.autograd.grad(compiled(x, tables, *leaves), leaves), expected, strict=True):
            assert torch.equal(a, b)


def test_frozen_tables_cost_no_second_pass():
    x = inputs(MIXED)
    q = x.q.requires_grad_()
    calls = []

    class Count(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            calls.append(str(func))
            return func(*args, **(kwargs or {}))

    for learned in (False, True):
        calls.clear()
        bias = make_tables(x)._asdict()
        bias["time_bias"].requires_grad_(learned)
        with Count():
            jagged_attention(q, x.k, x.v, **keywords(x), **bias).sum().backward()
        assert any("bias_backward" in call for call in calls) == learned


def test_bias_adds_no_flops():
    x = inputs(MIXED)
    q = x.q.requires_grad_()
    counts = []
    for tables in ({}, make_tables(x)._asdict()):
        for table in (tables.get("position_bias"), tables.get("time_bias")):
            if table is not None:
                table.requires_grad_()
        with FlopCounterMode(display=False) as counter:
            jagged_attention(q, x.k, x.v, **keywords(x), **tables).sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def check_no_leak(compute, device):
    """NaN and absurd times in sample 1 leave all rows of the others bit-identical; tables sum over all samples."""
    x = inputs(LengthCase(id="leak", lengths_q=(5, 33, 9), lengths_k=(7, 20, 40)), num_heads=1, device=device)
    tables = make_tables(x, times=torch.float32)
    changed = x._replace(q=x.q.clone(), k=x.k.clone(), v=x.v.clone(), do=x.do.clone())
    other = tables._replace(times_q=tables.times_q.clone(), times_k=tables.times_k.clone())
    rows_q, rows_k = (slice(*offsets[1:3].tolist()) for offsets in (x.offsets_q, x.offsets_k))
    for t, rows in ((changed.q, rows_q), (changed.k, rows_k), (changed.v, rows_k), (changed.do, rows_q)):
        t[rows] = float("nan")
    other.times_q[rows_q], other.times_k[rows_k] = -1e30, float("nan")
    dlse = torch.ones(x.q.shape[:2], device=device)
    for i, (a, b) in enumerate(
        zip(compute(x, tables, dlse, FULL)[:5], compute(changed, other, dlse, FULL)[:5], strict=True)
    ):
        keep = torch.ones(a.shape[0], dtype=torch.bool, device=device)
        keep[rows_q if i < 3 else rows_k] = False
        assert torch.equal(a[keep], b[keep])
        assert b[~keep].isnan().any()


def test_no_sample_reaches_another_on_cpu():
    check_no_leak(by_op, "cpu")


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")
def test_no_sample_reaches_another_interpreted(interpreter):
    check_no_leak(by_launch, "cpu")


BASE = attention_inputs((3, 2), (4, 1), num_heads=4, num_heads_kv=2)
BIAS = make_tables(BASE, radius=2, num_buckets=3)
BAD = [
    ("position-rank", {"position_bias": torch.zeros(5)}, ValueError, ["position_bias", "(H, 2 * P + 1)", "(5,)"]),
    ("position-heads", {"position_bias": torch.zeros(2, 5)}, ValueError, ["position_bias", "4 heads", "(2, 5)"]),
    ("position-even", {"position_bias": torch.zeros(4, 6)}, ValueError, ["position_bias", "odd", "got 6"]),
    ("position-int", {"position_bias": torch.zeros(4, 5).long()}, TypeError, ["position_bias", "floating", "int64"]),
    ("position-type", {"position_bias": 0.5}, TypeError, ["position_bias", "Tensor", "float"]),
    ("time-empty", {"time_bias": torch.zeros(4, 0)}, ValueError, ["time_bias", "(H, num_time_buckets)", "(4, 0)"]),
    ("time-wide", {"time_bias": torch.zeros(4, 129)}, ValueError, ["time_bias", "at most 128", "got 129"]),
    ("time-device", {"time_bias": torch.zeros(4, 3, device="meta")}, ValueError, ["time_bias", "cpu", "meta"]),
    ("no-times", {"times_k": None}, ValueError, ["times_k", "time_bias", "None"]),
    ("no-table", {"time_bias": None}, ValueError, ["times_q", "time_bias", "table"]),
    ("times-shape", {"times_q": torch.zeros(4).long()}, ValueError, ["times_q", "(5,)", "(4,)"]),
    ("times-dtype", {"times_q": torch.zeros(5).half()}, TypeError, ["times_q", "seconds", "float16"]),
    ("times-differ", {"times_k": torch.zeros(5)}, TypeError, ["times_k", "int64", "float32"]),
    ("times-type", {"times_k": 3}, TypeError, ["times_k", "Tensor", "int"]),
    ("octave", {"time_buckets_per_octave": 3}, ValueError, ["time_buckets_per_octave", "1, 2, 4 or 8", "got 3"]),
]


@pytest.mark.parametrize(("changes", "error", "words"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_bad_input_is_named(changes, error, words):
    with pytest.raises(error, match=r"^jagged_attention: ") as raised:
        jagged_attention(BASE.q, BASE.k, BASE.v, **(keywords(BASE) | BIAS._asdict() | changes))
    assert all(word in str(raised.value) for word in words), str(raised.value)


# On a GPU: the same cases through the public function.


@pytest.mark.gpu
@pytest.mark.parametrize("mask", MASK_CASES, ids=lambda m: m.id)
@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gpu_matches_oracle_for_every_mask(part, mask, dtype, poisoned_empty):
    x = inputs(MIXED, num_heads=4, num_heads_kv=2, head_dim=64, dtype=dtype, device="cuda", contiguous=False)
    check(by_op, x, make_tables(x, part, dtype=torch.float32), mask)


@pytest.mark.gpu
@pytest.mark.parametrize("case", LENGTH_CASES, ids=lambda c: c.id)
def test_gpu_matches_oracle_for_every_length_case(case, poisoned_empty):
    x = inputs(case, num_heads=2, head_dim=32, dtype=torch.float16, device="cuda", offsets_dtype=torch.int32)
    check(by_op, x, make_tables(x, per_octave=2, num_buckets=25, dtype=torch.float32), MASK_CASES[1])


@pytest.mark.gpu
@pytest.mark.parametrize("dims", [(32, 32), (64, 64), (96, 96), (128, 128), (128, 64), (256, 256)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gpu_head_dims(dims, dtype, poisoned_empty):
    lengths_q, lengths_k = random_lengths(9, 400, seed=1), random_lengths(9, 300, seed=2)
    x = attention_inputs(lengths_q, lengths_k, head_dim=dims[0], head_dim_v=dims[1], dtype=dtype, device="cuda")
    for radius in (0, 20, 700):
        check(by_op, x, make_tables(x, radius=radius, num_buckets=20, dtype=torch.float32), MASK_CASES[1])


@pytest.mark.gpu
@pytest.mark.parametrize("times", [torch.int32, torch.int64, torch.float32, torch.float64])
def test_gpu_times_of_every_dtype(times, poisoned_empty):
    x = attention_inputs(random_lengths(9, 200, seed=1), head_dim=64, dtype=torch.bfloat16, device="cuda")
    check(by_op, x, make_tables(x, "time", times=times, num_buckets=24, dtype=torch.float32))


@pytest.mark.gpu
def test_gpu_buckets_are_those_of_the_cpu():
    borders = torch.tensor([2**n + d for n in range(1, 40) for d in (-1, 0, 1)])
    x = attention_inputs((borders.numel(),), (1,), num_heads=1, device="cuda")
    times = {"times_q": borders.cuda(), "times_k": torch.zeros(1, dtype=torch.int64, device="cuda")}
    for per_octave in (1, 8):
        tables = make_tables(x, "time", num_buckets=40 * per_octave, per_octave=per_octave)._replace(**times)
        check(by_op, x, tables)


@pytest.mark.gpu
def test_gpu_short_keys_write_dq_in_one_kernel(poisoned_empty):
    lengths_q, lengths_k = random_lengths(80, 300, seed=1), random_lengths(80, 100, sparsity=0.4, seed=2)
    x = attention_inputs(lengths_q, lengths_k, num_heads=4, head_dim=128, dtype=torch.bfloat16, device="cuda")
    check(by_op, x, make_tables(x, dtype=torch.float32))


@pytest.mark.gpu
def test_gpu_same_bits_on_every_run():
    x = attention_inputs(random_lengths(50, 700, seed=3), head_dim=64, dtype=torch.bfloat16, device="cuda")
    tables = make_tables(x, radius=100, num_buckets=30, dtype=torch.float32)
    dlse = torch.ones(x.q.shape[:2], device="cuda")
    for a, b in zip(by_op(x, tables, dlse, FULL), by_op(x, tables, dlse, FULL), strict=True):
        assert torch.equal(a, b)


@pytest.mark.gpu
def test_gpu_no_sample_reaches_another():
    check_no_leak(by_op, "cuda")


@pytest.mark.gpu
def test_gpu_does_not_wait_for_the_device():
    x = attention_inputs((30, 20), device="cuda")
    tables = make_tables(x)
    dlse = torch.ones(x.q.shape[:2], device="cuda")
    by_op(x, tables, dlse, FULL)
    torch.cuda.set_sync_debug_mode("error")
    try:
        by_op(x, tables, dlse, FULL)
    finally:
        torch.cuda.set_sync_debug_mode("default")
