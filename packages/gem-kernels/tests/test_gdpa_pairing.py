"""gdpa with targets, with seeds that all sequences share, and with several query sequences per key sequence."""

from dataclasses import dataclass
from typing import NamedTuple

import pytest
import torch
from packed_ops import assert_one_graph
from torch.utils.flop_counter import FlopCounterMode

from gem_kernels import gdpa, reference
from gem_kernels._src.attention import launch
from gem_kernels._src.gdpa.op import gdpa_backward_op, gdpa_op
from gem_kernels.reference.gdpa import _pairs
from gem_kernels.testing import (
    MASK_CASES,
    MaskCase,
    assert_matches_oracle,
    assert_rms,
    attention_inputs,
    make_offsets,
    random_lengths,
    summation_floor,
)

PRE_SCALE, POST_SCALE = 0.3, 0.6
FULL, CAUSAL, WINDOW = MASK_CASES[:3]
MASKS = [case for case in MASK_CASES if case.id in ("full", "causal", "window", "causal-window", "left-only")]


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """Lengths of both sides and how they pair."""

    id: str
    lengths_k: tuple[int, ...]
    lengths_q: tuple[int, ...] | None = None
    """None: as ``lengths_k``."""
    num_targets: tuple[int, ...] | None = None
    num_seeds: int | None = None
    """Seeds in place of query sequences."""
    request_index: tuple[int, ...] | None = None


CASES = [
    Case(id="targets", lengths_k=(0, 1, 37, 64, 65, 130, 5, 1), num_targets=(0, 1, 5, 64, 1, 70, 0, 0)),
    Case(id="targets-none", lengths_k=(3, 40), num_targets=(0, 0)),
    Case(id="targets-only", lengths_k=(40, 3, 0), num_targets=(40, 3, 0)),
    Case(id="targets-one-sequence", lengths_k=(90,), num_targets=(33,)),
    Case(id="targets-all-empty", lengths_k=(0, 0), num_targets=(0, 0)),
    Case(id="targets-no-sequences", lengths_k=(), num_targets=()),
    Case(id="seeds", lengths_k=(0, 3, 64, 65, 130, 1), num_seeds=5),
    Case(id="seeds-tile-edge", lengths_k=(40, 0, 7), num_seeds=65),
    Case(id="seeds-one-sequence", lengths_k=(70,), num_seeds=1),
    Case(id="seeds-all-empty", lengths_k=(0, 0, 0), num_seeds=4),
    Case(id="seeds-no-sequences", lengths_k=(), num_seeds=4),
    Case(id="seeds-zero", lengths_k=(3, 5), num_seeds=0),
    Case(
        id="requests",
        lengths_q=(3, 0, 7, 1, 40, 2, 65),
        lengths_k=(64, 5, 0, 33, 130, 1),
        request_index=(0, 0, 0, 2, 2, 4, 4),
    ),
    Case(id="requests-single-rows", lengths_q=(1,) * 40, lengths_k=(30, 70, 2), request_index=(0,) * 37 + (2,) * 3),
    Case(id="requests-one", lengths_q=(5, 6), lengths_k=(9,), request_index=(0, 0)),
    Case(id="requests-one-to-one", lengths_q=(5, 6), lengths_k=(9, 4), request_index=(0, 1)),
    Case(id="requests-all-empty", lengths_q=(0, 0), lengths_k=(0,), request_index=(0, 0)),
    Case(id="requests-zero-kv", lengths_q=(4, 2), lengths_k=(0, 0), request_index=(1, 1)),
    Case(id="requests-no-queries", lengths_q=(), lengths_k=(3, 70), request_index=()),
    Case(id="seeds-requests", lengths_k=(64, 5, 0, 33), num_seeds=6, request_index=(0, 0, 2, 3, 3, 3)),
]
TARGETS, SEEDS, REQUESTS, SEEDS_REQUESTS = (
    next(case for case in CASES if case.id == name) for name in ("targets", "seeds", "requests", "seeds-requests")
)
MAIN = [TARGETS, SEEDS, REQUESTS, SEEDS_REQUESTS]


class Inputs(NamedTuple):
    """Tensors of a case and the options that describe it."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    do: torch.Tensor
    pairing: dict
    max_seqlen_q: int
    max_seqlen_k: int

    def cast(self, dtype):
        return self._replace(q=self.q.to(dtype), k=self.k.to(dtype), v=self.v.to(dtype), do=self.do.to(dtype))


def make_inputs(case, *, device="cpu", index_dtype=torch.int64, num_heads=2, **options):
    lengths_q = case.lengths_k if case.lengths_q is None else case.lengths_q
    num_queries = len(case.lengths_k) if case.request_index is None else len(case.request_index)
    if case.num_seeds is not None:
        lengths_q = (case.num_seeds,)
    x = attention_inputs(
        lengths_q, case.lengths_k, device=device, offsets_dtype=index_dtype, num_heads=num_heads, **options
    )
    do = x.do
    if case.num_seeds is not None:
        do = attention_inputs((case.num_seeds,) * num_queries, device=device, num_heads=num_heads, seed=1, **options).do
        if x.v.shape[2] != do.shape[2]:
            do = do[..., : x.v.shape[2]]
    pairing = {"offsets_q": None if case.num_seeds is not None else x.offsets_q, "offsets_k": x.offsets_k}
    for name in ("num_targets", "request_index"):
        value = getattr(case, name)
        if value is not None:
            pairing[name] = torch.tensor(value, dtype=index_dtype, device=device)
    return Inputs(x.q, x.k, x.v, do, pairing, x.max_seqlen_q, x.max_seqlen_k)


def scales(activation):
    return {"activation": activation, "pre_scale": PRE_SCALE, "post_scale": POST_SCALE}


def window(mask):
    return {"causal": mask.causal, "window_size": mask.window_size}


def by_reference(x, mask, activation):
    options = x.pairing | scales(activation) | window(mask)
    return reference.gdpa(x.q, x.k, x.v, **options), *reference.gdpa_backward(x.do, x.q, x.k, x.v, **options)


def attend(x, mask, activation, q, k, v, **options):
    lengths = {"max_seqlen_q": x.max_seqlen_q, "max_seqlen_k": x.max_seqlen_k}
    return gdpa(q, k, v, **x.pairing, **lengths, **scales(activation), **window(mask), **options)


def by_op(x, mask, activation):
    q, k, v = (t.detach().requires_grad_() for t in (x.q, x.k, x.v))
    out = attend(x, mask, activation, q, k, v)
    return out.detach(), *torch.autograd.grad(out, [q, k, v], x.do)


def by_launch(x, mask, activation):
    """The Triton kernels on any tensors, CPU ones interpreted."""
    from gem_kernels._src.gdpa.backward import launch_backward
    from gem_kernels._src.gdpa.forward import launch_forward

    left, right = mask.window_size
    right = 0 if mask.causal else right
    offsets = (x.pairing["offsets_q"], x.pairing["offsets_k"])
    args = (*offsets, x.max_seqlen_q, x.max_seqlen_k, activation, PRE_SCALE, POST_SCALE, left, right)
    indices = {name: x.pairing.get(name) for name in ("num_targets", "request_index")}
    out = launch_forward(x.q, x.k, x.v, *args, **indices)
    return out, *launch_backward(x.do, x.q, x.k, x.v, *args, **indices)


def check(compute, x, mask=FULL, activation="gelu_approx", *, rms=None):
    """Output and gradients of ``compute`` against float64, as far off as the loop in the same dtype."""
    results = compute(x, mask, activation)
    oracle = by_reference(x.cast(torch.float64), mask, activation)
    eager = by_reference(x, mask, activation)
    for name, a, o, e in zip(("out", "dq", "dk", "dv"), results, oracle, eager, strict=True):
        assert a.dtype == x.q.dtype
        # Gradients sum over keys, queries or the batch in another order than the loop.
        factor = 3.0 if name.startswith("d") else 2.0
        assert_matches_oracle(name, a, o, e, floor=summation_floor(o, a.dtype), factor=factor)
        if rms is not None:
            assert_rms(name, a, o, ratio=rms)


def ids(x):
    return x.id


@pytest.mark.parametrize("mask", MASKS, ids=ids)
@pytest.mark.parametrize("case", CASES, ids=ids)
def test_cpu_op_matches_oracle(case, mask):
    check(by_op, make_inputs(case, num_heads=4, num_heads_kv=2, head_dim=8, head_dim_v=12), mask)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("case", MAIN, ids=ids)
def test_cpu_op_dtypes_strides_and_int32(case, dtype):
    x = make_inputs(case, dtype=dtype, contiguous=False, index_dtype=torch.int32)
    check(by_op, x)
    check(by_op, x, CAUSAL)


def test_cpu_groups_and_chunks_match_oracle():
    # Long enough for several groups of similar length and several query chunks in each.
    lengths = (*random_lengths(30, 90, sparsity=0.5, seed=1).tolist(), 700, 0, 650)
    requests = tuple(sorted(torch.randint(0, 33, (60,), generator=torch.Generator().manual_seed(0)).tolist()))
    queries = tuple(random_lengths(60, 40, seed=2).tolist())
    for case in (
        Case(id="t", lengths_k=lengths, num_targets=tuple(n // 3 for n in lengths)),
        Case(id="s", lengths_k=lengths, num_seeds=9),
        Case(id="r", lengths_q=queries, lengths_k=lengths, request_index=requests),
    ):
        x = make_inputs(case, head_dim=8)
        for mask in (FULL, CAUSAL, MaskCase(id="w", window_size=(20, 10))):
            check(by_op, x, mask)


@pytest.mark.parametrize("mask", [FULL, CAUSAL], ids=ids)
@pytest.mark.parametrize("case", CASES, ids=ids)
def test_interpreted_kernels_match_oracle(case, mask, interpreter, poisoned_empty):
    check(by_launch, make_inputs(case, num_heads=2 if case in MAIN else 1, num_heads_kv=1, head_dim_v=24), mask)


@pytest.mark.parametrize("mask", [m for m in MASK_CASES if m not in (FULL, CAUSAL)], ids=ids)
@pytest.mark.parametrize("kind", ["num_targets", "num_seeds", "request_index"])
def test_interpreted_kernels_match_oracle_for_every_mask(kind, mask, interpreter, poisoned_empty):
    case = {
        "num_targets": Case(id="t", lengths_k=(0, 37, 70), num_targets=(0, 5, 40)),
        "num_seeds": Case(id="s", lengths_k=(0, 33, 70), num_seeds=5),
        "request_index": Case(id="r", lengths_q=(3, 40, 1), lengths_k=(35, 0, 40), request_index=(0, 0, 2)),
    }[kind]
    check(by_launch, make_inputs(case, num_heads=1, index_dtype=torch.int32, contiguous=False), mask)


def test_interpreted_kernels_on_a_searched_grid(interpreter, poisoned_empty, monkeypatch):
    monkeypatch.setattr(launch, "_PADDED_GRID_FACTOR", 0)
    for case in (
        Case(id="t", lengths_k=(0, 37, 0, 70), num_targets=(0, 5, 0, 40)),
        Case(id="s", lengths_k=(0, 33, 0, 40), num_seeds=5),
        Case(id="r", lengths_q=(3, 0, 40, 1), lengths_k=(35, 0, 40), request_index=(0, 0, 0, 2)),
    ):
        check(by_launch, make_inputs(case, num_heads=1), CAUSAL)


def test_interpreted_seeds_sum_over_parts_of_the_batch(interpreter, poisoned_empty, monkeypatch):
    from gem_kernels._src.gdpa import backward_dq

    case = Case(id="s", lengths_k=(3, 0, 40, 7, 1), num_seeds=40)
    for programs in (1, 12):
        monkeypatch.setattr(backward_dq, "_SEED_PROGRAMS", programs)
        check(by_launch, make_inputs(case, num_heads=2), CAUSAL)


def test_interpreted_requests_write_dq_beside_dk_and_dv(interpreter, poisoned_empty, monkeypatch):
    from gem_kernels._src.gdpa import backward_dq

    monkeypatch.setattr(launch, "_MIN_PROGRAMS", 1)
    monkeypatch.setattr(backward_dq, "_gdpa_bwd_dq_kernel", None)  # the second kernel must not be needed
    case = Case(id="r", lengths_q=(3, 50, 1, 2), lengths_k=(20, 7, 0), request_index=(0, 0, 2, 2))
    check(by_launch, make_inputs(case))


def test_merged_requests_compute_full_tiles(interpreter, monkeypatch):
    """Without a window the query sequences of a request are one sequence to the kernels: no index reaches them."""
    from gem_kernels._src.attention.pairing import pair_sequences

    x = make_inputs(REQUESTS)
    offsets = (x.pairing["offsets_q"], x.pairing["offsets_k"], x.pairing["request_index"])
    merged = pair_sequences(x.q, *offsets, x.max_seqlen_q, -1, -1)
    assert merged.request_index is None
    assert merged.offsets_q.tolist() == [0, 10, 10, 51, 51, 118, 118]
    assert pair_sequences(x.q, *offsets, x.max_seqlen_q, 0, -1).request_index is not None
    windowed = pair_sequences(x.q, *offsets, x.max_seqlen_q, -1, 0)
    assert windowed.request_starts().tolist() == [0, 3, 3, 5, 5, 7, 7]


def test_hstu_attention_is_a_call_of_gdpa():
    """SiLU attention of HSTU, by its own dense definition: clamped positions, 1 / N behind the activation."""
    x = make_inputs(TARGETS, dtype=torch.float64)
    lengths, targets = torch.tensor(TARGETS.lengths_k), torch.tensor(TARGETS.num_targets)
    n = int(lengths.max())
    out = gdpa(
        x.q, x.k, x.v, **x.pairing, max_seqlen_q=n, max_seqlen_k=n, activation="silu", pre_scale=0.25,
        post_scale=1 / n, causal=True,
    )  # fmt: skip
    start = 0
    for length, num_targets in zip(lengths.tolist(), targets.tolist(), strict=True):
        rows = slice(start, start + length)
        position = torch.arange(length).clamp(max=length - num_targets)
        visible = (position[:, None] > position[None, :]) | torch.eye(length, dtype=torch.bool)
        scores = torch.einsum("ihd,jhd->hij", x.q[rows], x.k[rows]) * 0.25
        weights = torch.nn.functional.silu(scores) / n * visible
        assert torch.allclose(out[rows], torch.einsum("hij,jhd->ihd", weights, x.v[rows]), atol=1e-12)
        start += length


def check_targets_are_alone(compute, device):
    """Other numbers in one target leave every other row of the output bit-identical."""
    x = make_inputs(Case(id="t", lengths_k=(70, 20), num_targets=(40, 3)), num_heads=1, device=device)
    q, k, v = x.q.clone(), x.k.clone(), x.v.clone()
    for t in (q, k, v):
        t[45] = 3.0
    for mask in (FULL, CAUSAL, WINDOW):
        before = compute(x, mask, "gelu")[0]
        after = compute(x._replace(q=q, k=k, v=v), mask, "gelu")[0]
        keep = torch.arange(90, device=device) != 45
        assert torch.equal(before[keep], after[keep])
        assert not torch.equal(before[45], after[45])


def test_targets_are_alone_on_cpu():
    check_targets_are_alone(by_op, "cpu")


def test_targets_are_alone_interpreted(interpreter):
    check_targets_are_alone(by_launch, "cpu")


LEAKS = [
    Case(id="targets", lengths_k=(5, 33, 9, 40), num_targets=(2, 30, 9, 0)),
    Case(id="seeds", lengths_k=(5, 33, 9, 40), num_seeds=7),
    Case(id="requests", lengths_q=(4, 9, 2, 35), lengths_k=(5, 33, 40), request_index=(0, 1, 1, 2)),
]


def check_no_leak(compute, case, device):
    """NaN in every row of key sequence 1 and of its queries must leave all other rows bit-identical."""
    x = make_inputs(case, num_heads=1, device=device)
    requests = list(case.request_index or range(len(case.lengths_k)))
    first, count = requests.index(1), requests.count(1)
    offsets_q = x.pairing["offsets_q"]
    if offsets_q is None:
        offsets_q = make_offsets([case.num_seeds] * len(requests))
    rows_q = slice(int(offsets_q[first]), int(offsets_q[first + count]))
    rows_k = slice(*x.pairing["offsets_k"][1:3].tolist())
    changed = x._replace(q=x.q.clone(), k=x.k.clone(), v=x.v.clone(), do=x.do.clone())
    seeds = case.num_seeds is not None
    for t, rows in ((changed.k, rows_k), (changed.v, rows_k), (changed.do, rows_q)):
        t[rows] = float("nan")
    if not seeds:
        changed.q[rows_q] = float("nan")
    for mask in (FULL, CAUSAL):
        before, after = compute(x, mask, "gelu"), compute(changed, mask, "gelu")
        for name, a, b in zip(("out", "dq", "dk", "dv"), before, after, strict=True):
            if name == "dq" and seeds:
                continue  # the sum over the batch
            keep = torch.ones(a.shape[0], dtype=torch.bool, device=device)
            keep[rows_q if name in ("out", "dq") else rows_k] = False
            assert torch.equal(a[keep], b[keep]), name
            assert b[~keep].isnan().any(), name


@pytest.mark.parametrize("case", LEAKS, ids=ids)
def test_no_sample_reaches_another_on_cpu(case):
    check_no_leak(by_op, case, "cpu")


@pytest.mark.parametrize("case", LEAKS, ids=ids)
def test_no_sample_reaches_another_interpreted(case, interpreter):
    check_no_leak(by_launch, case, "cpu")


SMALL = [
    Case(id="targets", lengths_k=(0, 1, 5), num_targets=(0, 1, 2)),
    Case(id="seeds", lengths_k=(0, 1, 4), num_seeds=2),
    Case(id="requests", lengths_q=(1, 2, 0, 2), lengths_k=(3, 2, 2), request_index=(0, 0, 1, 2)),
    Case(id="seeds-requests", lengths_k=(3, 2), num_seeds=2, request_index=(0, 0, 1)),
]


@pytest.mark.parametrize("mask", [FULL, MaskCase(id="w", causal=True, window_size=(1, -1))], ids=ids)
@pytest.mark.parametrize("case", SMALL, ids=ids)
def test_gradcheck(case, mask):
    x = make_inputs(case, dtype=torch.float64, head_dim=3)
    q, k, v = (t.requires_grad_() for t in (x.q, x.k, x.v))
    assert torch.autograd.gradcheck(lambda *qkv: attend(x, mask, "gelu", *qkv), (q, k, v))


@pytest.mark.parametrize("case", SMALL, ids=ids)
def test_opcheck(case):
    x = make_inputs(case)
    q, k, v = (t.requires_grad_() for t in (x.q, x.k, x.v))
    offsets = (x.pairing["offsets_q"], x.pairing["offsets_k"])
    indices = (x.pairing.get("num_targets"), x.pairing.get("request_index"))
    for right in (-1, 0):
        args = (*offsets, x.max_seqlen_q, x.max_seqlen_k, "silu", 0.5, 2.0, -1, right, *indices)
        torch.library.opcheck(gdpa_op, (q, k, v, *args, False))
        torch.library.opcheck(gdpa_backward_op, (x.do, q.detach(), k.detach(), v.detach(), *args))


@pytest.mark.parametrize("kind", ["targets", "seeds", "requests"])
def test_compiles_to_one_graph_for_changing_sizes(kind):
    def loss(x, q, k, v):
        return (attend(x, CAUSAL, "silu", q, k, v) * x.do).sum()

    def batch(seed):
        lengths = tuple(random_lengths(6 + seed, 30, seed=seed).tolist())
        case = {
            "targets": Case(id="t", lengths_k=lengths, num_targets=tuple(n // 2 for n in lengths)),
            "seeds": Case(id="s", lengths_k=lengths, num_seeds=5),
            "requests": Case(id="r", lengths_q=(3, 2 + seed) * 2, lengths_k=lengths, request_index=(0, 0, 3, 4)),
        }[kind]
        return make_inputs(case)

    assert_one_graph(loss, map(batch, range(3)))


@pytest.mark.parametrize("mask", MASKS, ids=ids)
@pytest.mark.parametrize("case", CASES, ids=ids)
def test_flop_formula_is_the_true_count(case, mask):
    x = make_inputs(case, num_heads=4, num_heads_kv=2, head_dim=8, head_dim_v=12)
    left, right = mask.window_size
    indices = (x.pairing.get("request_index"), x.pairing.get("num_targets"))
    sides = _pairs(x.q, x.pairing["offsets_q"], x.pairing["offsets_k"], *indices, left, 0 if mask.causal else right)
    pairs = sum(int(side.mask.sum()) for side in sides)
    q, k, v = (t.requires_grad_() for t in (x.q, x.k, x.v))
    with FlopCounterMode(display=False) as counter:
        attend(x, mask, "gelu", q, k, v).sum().backward()
    counts = {str(op).split(".")[-1].rstrip(")>'"): n for op, n in counter.get_flop_counts()["Global"].items()}
    assert counts == {"gdpa": 2 * 4 * pairs * (8 + 12), "gdpa_backward": 2 * 4 * pairs * (3 * 8 + 2 * 12)}


def test_flop_formula_of_fake_tensors_uses_average_lengths():
    lengths = {"max_seqlen_q": 10, "max_seqlen_k": 10}
    with torch._subclasses.FakeTensorMode(), FlopCounterMode(display=False) as counter:
        k = torch.empty(40, 2, 8)
        offsets = torch.empty(5, dtype=torch.int64)
        gdpa(torch.empty(3, 2, 8), k, k, offsets_q=None, offsets_k=offsets, **lengths)
    assert counter.get_total_flops() == 4 * 2 * 8 * (4 * 3 * 10)
    with torch._subclasses.FakeTensorMode(), FlopCounterMode(display=False) as counter:
        k, q = torch.empty(40, 2, 8), torch.empty(12, 2, 8)
        offsets_k, offsets_q = torch.empty(5, dtype=torch.int64), torch.empty(7, dtype=torch.int64)
        index = torch.empty(6, dtype=torch.int64)
        gdpa(q, k, k, offsets_q=offsets_q, offsets_k=offsets_k, **lengths, request_index=index)
    assert counter.get_total_flops() == 4 * 2 * 8 * (6 * 2 * 10)


BASE = make_inputs(Case(id="b", lengths_k=(3, 2), num_targets=(1, 0)))
INDEX = torch.tensor([0, 1])
NO_KEYS = {"k": BASE.k[:0], "v": BASE.v[:0], "offsets_k": torch.tensor([0])}
FEWER_KEYS = {"k": BASE.k[:4], "v": BASE.v[:4], "offsets_k": torch.tensor([0, 2, 4])}


def targets(index):
    return {"num_targets": index}


def requests(index):
    return {"num_targets": None, "request_index": index}


BAD = [
    ("targets-type", targets([1, 0]), TypeError, ["num_targets", "(B,)", "list"]),
    ("targets-dtype", targets(torch.tensor([1.0, 0.0])), TypeError, ["num_targets", "int64", "float32"]),
    ("targets-count", targets(torch.tensor([1])), ValueError, ["num_targets", "(B,) = (2,)", "(1,)"]),
    ("targets-rank", targets(INDEX[None]), ValueError, ["num_targets", "(B,)", "(1, 2)"]),
    ("targets-negative", targets(torch.tensor([0, -1])), ValueError, ["num_targets", "0", "sequence 1", "-1"]),
    ("targets-many", targets(torch.tensor([4, 0])), ValueError, ["num_targets", "3 tokens (sequence 0)", "4"]),
    ("targets-cross", {"offsets_k": torch.tensor([0, 2, 5])}, ValueError, ["num_targets", "3 and 2", "entry 1"]),
    ("targets-rows", FEWER_KEYS, ValueError, ["num_targets", "self-attention", "5", "4"]),
    ("targets-seeds", {"offsets_q": None}, ValueError, ["num_targets", "offsets_q", "None"]),
    ("targets-requests", {"request_index": INDEX}, ValueError, ["num_targets", "request_index", "both"]),
    ("seeds", {"offsets_q": None, **targets(None)}, ValueError, ["max_seqlen_q", "offsets_q", "5", "got 3"]),
    ("order", requests(torch.tensor([1, 0])), ValueError, ["request_index", "not decrease", "1 then 0", "sort"]),
    ("high", requests(torch.tensor([0, 2])), ValueError, ["request_index", "2 key sequences", "got 2"]),
    ("low", requests(torch.tensor([-1, 0])), ValueError, ["request_index", "2 key sequences", "got -1"]),
    ("count", requests(torch.tensor([0])), ValueError, ["request_index", "(2,)", "(1,)"]),
    ("no-keys", requests(INDEX) | NO_KEYS, ValueError, ["request_index", "empty", "2 entries"]),
    ("requests-dtype", requests(INDEX.bool()), TypeError, ["request_index", "int64", "bool"]),
    ("requests-type", requests((0, 1)), TypeError, ["request_index", "Tensor", "tuple"]),
]


@pytest.mark.parametrize(("changes", "error", "words"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_bad_input_is_named(changes, error, words):
    lengths = {"max_seqlen_q": BASE.max_seqlen_q, "max_seqlen_k": BASE.max_seqlen_k}
    arguments = {"q": BASE.q, "k": BASE.k, "v": BASE.v, **BASE.pairing, **lengths} | changes
    with pytest.raises(error, match=r"^gdpa: ") as raised:
        gdpa(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)
    assert all(word in str(raised.value) for word in words), str(raised.value)


# On a GPU: the same cases through the public function.


@pytest.mark.gpu
@pytest.mark.parametrize("mask", MASKS, ids=ids)
@pytest.mark.parametrize("case", CASES, ids=ids)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gpu_matches_oracle(case, mask, dtype, poisoned_empty):
    x = make_inputs(case, num_heads=4, num_heads_kv=2, head_dim=64, dtype=dtype, device="cuda")
    check(by_op, x, mask, rms=5e-3 if dtype == torch.bfloat16 else None)


LARGE = [
    Case(
        id="targets",
        lengths_k=tuple(random_lengths(9, 500, seed=1).tolist()),
        num_targets=tuple(random_lengths(9, 200, sparsity=0.2, seed=2).tolist()),
    ),
    Case(id="seeds", lengths_k=tuple(random_lengths(40, 300, sparsity=0.3, seed=1).tolist()), num_seeds=150),
    Case(
        id="requests",
        lengths_q=tuple(random_lengths(60, 40, seed=1).tolist()),
        lengths_k=tuple(random_lengths(6, 400, seed=2).tolist()),
        request_index=tuple(i // 12 for i in range(60)),
    ),
]
assert all(n >= t for n, t in zip(LARGE[0].lengths_k, LARGE[0].num_targets, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("dims", [(40, 64), (128, 128), (256, 256)])
@pytest.mark.parametrize("case", LARGE, ids=ids)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_gpu_long_sequences_and_head_dims(case, dims, dtype, poisoned_empty):
    x = make_inputs(case, head_dim=dims[0], dtype=dtype, device="cuda")
    for mask in (FULL, CAUSAL, MaskCase(id="w", window_size=(100, 30))):
        check(by_op, x, mask, rms=5e-3 if dtype == torch.bfloat16 else None)


@pytest.mark.gpu
def test_gpu_targets_are_alone():
    check_targets_are_alone(by_op, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("case", LEAKS, ids=ids)
def test_gpu_no_sample_reaches_another(case):
    check_no_leak(by_op, case, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("case", LARGE, ids=ids)
def test_gpu_same_bits_on_every_run(case):
    x = make_inputs(case, head_dim=64, dtype=torch.bfloat16, device="cuda")
    for mask in (FULL, CAUSAL):
        assert all(torch.equal(a, b) for a, b in zip(by_op(x, mask, "silu"), by_op(x, mask, "silu"), strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("case", MAIN, ids=ids)
def test_gpu_does_not_wait_for_the_device(case):
    x = make_inputs(case, device="cuda")
    for mask in (FULL, CAUSAL):
        by_op(x, mask, "silu")
        torch.cuda.set_sync_debug_mode("error")
        try:
            by_op(x, mask, "silu")
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
@pytest.mark.parametrize("changes", [{"num_targets": [0, 4]}, {"num_targets": None, "request_index": [1, 0]}])
def test_gpu_validate_reads_the_indices(changes):
    x = make_inputs(Case(id="b", lengths_k=(3, 2), num_targets=(1, 0)), device="cuda")
    tensors = {name: value and torch.tensor(value, device="cuda") for name, value in changes.items()}
    x = x._replace(pairing=x.pairing | tensors)
    with pytest.raises(ValueError, match=r"num_targets|request_index"):
        attend(x, FULL, "gelu", x.q, x.k, x.v, validate=True)
