"""Seeds that all sequences of jagged_attention share, and query sequences that share a request's keys."""

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from gem_kernels import jagged_attention, reference
from gem_kernels._src.attention import launch
from gem_kernels._src.attention.window import normalize_window
from gem_kernels._src.jagged_attention.bias import Bias
from gem_kernels._src.jagged_attention.op import (
    jagged_attention_backward_op,
    jagged_attention_bias_backward_op,
    jagged_attention_op,
)
from gem_kernels.testing import (
    MASK_CASES,
    AttentionInputs,
    MaskCase,
    assert_matches_oracle,
    attention_inputs,
    random_lengths,
    summation_floor,
)

FULL = MASK_CASES[0]
MASKS = [FULL, MASK_CASES[1], MASK_CASES[2]]


@dataclass(frozen=True, kw_only=True)
class Case:
    """Lengths of a batch whose query and key sequences are not simply pairs."""

    id: str
    lengths_k: tuple[int, ...]
    lengths_q: tuple[int, ...] | None = None
    """None: seeds."""
    seeds: int = 0
    request_index: tuple[int, ...] | None = None

    def inputs(self, **options) -> tuple[AttentionInputs, Tensor | None]:
        """Inputs with the gradient of every output row, and the request index; offsets_q is None for seeds."""
        num_queries = len(self.lengths_k if self.request_index is None else self.request_index)
        lengths_q = (self.seeds,) * num_queries if self.lengths_q is None else self.lengths_q
        rows = attention_inputs(lengths_q, self.lengths_k, **options)
        index = None
        if self.request_index is not None:
            index = torch.tensor(self.request_index, dtype=torch.int64, device=rows.q.device)
        if self.lengths_q is None:
            seeds = attention_inputs((self.seeds,), (0,), **options)
            rows = rows._replace(q=seeds.q, offsets_q=None, max_seqlen_q=self.seeds)
        return rows, index


CASES = [
    Case(id="seeds", seeds=5, lengths_k=(20, 0, 33, 1)),
    Case(id="many-seeds", seeds=70, lengths_k=(3, 40)),
    Case(id="one-seed", seeds=1, lengths_k=(40,)),
    Case(id="no-seed", seeds=0, lengths_k=(4, 3)),
    Case(id="seeds-no-keys", seeds=4, lengths_k=(0, 0)),
    Case(id="seeds-no-sequences", seeds=4, lengths_k=()),
    Case(id="requests", lengths_q=(3, 1, 0, 40, 2, 1), lengths_k=(20, 33, 5, 0), request_index=(0, 0, 0, 1, 3, 3)),
    Case(id="candidates", lengths_q=(1,) * 10, lengths_k=(35, 7), request_index=(0,) * 8 + (1,) * 2),
    Case(id="request-alone", lengths_q=(5, 0), lengths_k=(33,), request_index=(0, 0)),
    Case(id="requests-without-queries", lengths_q=(), lengths_k=(3, 4), request_index=()),
    Case(id="empty-requests", lengths_q=(0, 0), lengths_k=(3, 0), request_index=(0, 1)),
    Case(id="seeds-of-requests", seeds=3, lengths_k=(20, 9, 0), request_index=(0, 0, 1, 1, 2)),
]
SEEDS, REQUESTS, BOTH = CASES[0], CASES[6], CASES[-1]


def make_bias(x, rows, *, position=True, time=True, radius=6):
    """Tables and times by the names of the public function; ``rows`` of the output."""
    generator = torch.Generator().manual_seed(3)

    def draw(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(x.q.device, torch.float32)

    heads = x.q.shape[1]
    return {
        "position_bias": draw(heads, 2 * radius + 1) if position else None,
        "time_bias": draw(heads, 7) if time else None,
        "times_q": (draw(rows) * 50) if time else None,
        "times_k": (draw(x.k.shape[0]) * 50) if time else None,
    }


def keywords(x, index, mask, bias=None):
    return {
        "offsets_q": x.offsets_q,
        "offsets_k": x.offsets_k,
        "request_index": index,
        "causal": mask.causal,
        "window_size": mask.window_size,
    } | (bias or {})


def with_lengths(x, options):
    return options | {"max_seqlen_q": x.max_seqlen_q, "max_seqlen_k": x.max_seqlen_k}


def by_reference(x, dlse, options):
    out, lse = reference.jagged_attention(x.q, x.k, x.v, **options)
    return out, lse, *reference.jagged_attention_backward(x.do, x.q, x.k, x.v, dlse=dlse, **options)


def by_op(x, dlse, options):
    q, k, v = (t.detach().requires_grad_() for t in (x.q, x.k, x.v))
    learned = {
        name: options[name].detach().requires_grad_()
        for name in ("position_bias", "time_bias")
        if options.get(name) is not None
    }
    out, lse = jagged_attention(q, k, v, return_lse=True, **with_lengths(x, options | learned))
    leaves = [q, k, v, *learned.values()]
    return out.detach(), lse.detach(), *torch.autograd.grad([out, lse], leaves, [x.do, dlse.to(lse.dtype)])


def by_launch(x, dlse, options):
    """The Triton kernels on any tensors, CPU ones interpreted."""
    from gem_kernels._src.jagged_attention.backward import launch_backward
    from gem_kernels._src.jagged_attention.forward import launch_forward
    from gem_kernels._src.jagged_attention.tables import launch_table_gradients

    left, right = normalize_window(options["causal"], options["window_size"])
    bias = Bias(*(options.get(name) for name in ("position_bias", "time_bias", "times_q", "times_k")))
    lengths = (x.offsets_q, x.offsets_k, x.max_seqlen_q, x.max_seqlen_k)
    args = (*lengths, x.q.shape[2] ** -0.5, left, right, bias, options["request_index"])
    out, lse = launch_forward(x.q, x.k, x.v, *args)
    gradients = launch_backward(x.do, dlse, x.q, x.k, x.v, out, lse, *args)
    if not bias.is_set:
        return out, lse, *gradients
    learned = launch_table_gradients(x.do, dlse, x.q, x.k, x.v, out, lse, *args)
    return out, lse, *gradients, *(t for t in learned if t is not None)


def check(compute, case, mask=FULL, *, bias=False, **inputs):
    x, index = case.inputs(**inputs)
    tables = make_bias(x, x.do.shape[0]) if bias else {}
    options = keywords(x, index, mask, tables)
    dlse = torch.linspace(-1, 1, x.do.shape[0] * x.do.shape[1], device=x.q.device).view(x.do.shape[:2])
    results = compute(x, dlse, options)
    double = options | {name: tables[name].double() for name in ("position_bias", "time_bias") if bias}
    wide = x._replace(**{name: getattr(x, name).double() for name in ("q", "k", "v", "do")})
    oracle = by_reference(wide, dlse.double(), double)
    eager = by_reference(x, dlse, options)
    names = ("out", "lse", "dq", "dk", "dv", "dposition_bias", "dtime_bias")
    for name, a, o, e in zip(names[: len(oracle)], results, oracle, eager, strict=True):
        floor = summation_floor(o, a.dtype, units=64.0 if name.endswith("_bias") else 16.0)
        assert_matches_oracle(name, a, o, e, floor=floor, factor=3.0 if name.startswith("d") else 2.0)


@pytest.mark.parametrize("mask", MASKS, ids=lambda m: m.id)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_cpu_op_matches_oracle(case, mask):
    for bias in (False, True):
        check(by_op, case, mask, bias=bias, num_heads=4, num_heads_kv=2, head_dim=8, head_dim_v=12)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", [SEEDS, REQUESTS, BOTH], ids=lambda c: c.id)
def test_cpu_op_dtypes_and_strides(case, dtype):
    check(by_op, case, MASK_CASES[1], dtype=dtype, contiguous=False, offsets_dtype=torch.int32)


@pytest.mark.parametrize("mask", [FULL, MASK_CASES[1]], ids=lambda m: m.id)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
def test_interpreted_kernels_match_oracle(case, mask, interpreter, poisoned_empty):
    check(by_launch, case, mask, num_heads=2, num_heads_kv=1, head_dim_v=24)


@pytest.mark.parametrize("case", [*CASES[:3], *CASES[6:9], BOTH], ids=lambda c: c.id)
def test_interpreted_kernels_match_oracle_with_a_bias(case, interpreter, poisoned_empty):
    check(by_launch, case, bias=True, num_heads=1)
    mask = MaskCase(id="causal-window", causal=True, window_size=(9, -1))
    check(by_launch, case, mask, bias=True, num_heads=2, num_heads_kv=1)


@pytest.mark.parametrize("case", [SEEDS, REQUESTS, BOTH], ids=lambda c: c.id)
def test_interpreted_kernels_on_a_searched_grid(case, interpreter, poisoned_empty, monkeypatch):
    monkeypatch.setattr(launch, "_PADDED_GRID_FACTOR", 0)
    check(by_launch, case, MASK_CASES[1], contiguous=False)


@pytest.mark.parametrize("bias", [False, True])
def test_interpreted_kernels_write_dq_of_requests_beside_dk_and_dv(bias, interpreter, poisoned_empty, monkeypatch):
    from gem_kernels._src.jagged_attention import backward_dq

    monkeypatch.setattr(launch, "_MIN_PROGRAMS", 1)
    monkeypatch.setattr(backward_dq, "_jagged_attention_bwd_dq_kernel", None)  # the second kernel must not be needed
    case = Case(id="short", lengths_q=(3, 0, 40, 2), lengths_k=(20, 32, 5, 0), request_index=(0, 0, 1, 3))
    check(by_launch, case, bias=bias)


def test_interpreted_seeds_in_several_parts(interpreter, poisoned_empty, monkeypatch):
    from gem_kernels._src.jagged_attention import backward_dq

    monkeypatch.setattr(backward_dq, "_SEED_PROGRAMS", 4)  # two heads, so two parts of three and two sequences
    check(by_launch, Case(id="parts", seeds=3, lengths_k=(20, 0, 33, 1, 7)))


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("case", [SEEDS, REQUESTS, BOTH], ids=lambda c: c.id)
def test_equals_repeated_rows(case, bias):
    """Seeds are one copy per sequence, a request its keys once per query sequence; gradients sum over the copies."""
    x, index = case.inputs(dtype=torch.float64)
    num_queries = x.offsets_k.shape[0] - 1 if index is None else index.shape[0]
    tables = make_bias(x, x.do.shape[0]) if bias else {}
    learned = [tables[name].double().requires_grad_() for name in ("position_bias", "time_bias") if bias]
    tables = tables | dict(zip(("position_bias", "time_bias"), learned, strict=False))
    leaves = [t.requires_grad_() for t in (x.q, x.k, x.v)] + learned
    out = jagged_attention(*leaves[:3], **with_lengths(x, keywords(x, index, MASK_CASES[1], tables)))
    shared = torch.autograd.grad(out, leaves, x.do)

    q = x.q if x.offsets_q is not None else x.q.repeat(num_queries, 1, 1)
    offsets_q = x.offsets_q if x.offsets_q is not None else torch.arange(num_queries + 1) * x.q.shape[0]
    requests = torch.arange(num_queries) if index is None else index
    rows = torch.cat([torch.arange(*x.offsets_k[r : r + 2].tolist()) for r in requests.tolist()])
    lengths_k = torch.diff(x.offsets_k)[requests]
    offsets_k = torch.cat([lengths_k.new_zeros(1), lengths_k.cumsum(0)])
    if bias:
        tables = tables | {"times_k": tables["times_k"][rows]}
    plain = jagged_attention(
        q, x.k[rows], x.v[rows], offsets_q=offsets_q, offsets_k=offsets_k, max_seqlen_q=x.max_seqlen_q,
        max_seqlen_k=x.max_seqlen_k, causal=True, **tables,
    )  # fmt: skip
    assert torch.allclose(out, plain)
    for a, b in zip(shared, torch.autograd.grad(plain, leaves, x.do), strict=True):
        assert torch.allclose(a, b)


@pytest.mark.parametrize("mask", [FULL, MASK_CASES[1]], ids=lambda m: m.id)
@pytest.mark.parametrize("case", [SEEDS, REQUESTS, BOTH], ids=lambda c: c.id)
def test_gradcheck(case, mask):
    small = Case(
        id="small",
        lengths_k=(3, 1, 4)[: len(case.lengths_k)],
        lengths_q=None if case.lengths_q is None else (2, 0, 1, 3),
        seeds=2,
        request_index=None if case.request_index is None else (0, 0, 1, 2),
    )
    x, index = small.inputs(dtype=torch.float64, head_dim=3)
    tables = make_bias(x, x.do.shape[0], radius=1)
    leaves = [t.double().requires_grad_() for t in (x.q, x.k, x.v, tables["position_bias"], tables["time_bias"])]

    def attend(q, k, v, position, time):
        bias = tables | {"position_bias": position, "time_bias": time}
        return jagged_attention(q, k, v, **with_lengths(x, keywords(x, index, mask, bias)))

    assert torch.autograd.gradcheck(attend, leaves)


@pytest.mark.parametrize("case", [SEEDS, REQUESTS, BOTH, *CASES[3:6]], ids=lambda c: c.id)
def test_opcheck(case):
    x, index = case.inputs()
    tables = tuple(make_bias(x, x.do.shape[0]).values())
    q, k, v = (t.requires_grad_() for t in (x.q, x.k, x.v))
    sizes = (x.max_seqlen_q, x.max_seqlen_k, 0.25, -1, 3)
    args = (q, k, v, x.offsets_q, x.offsets_k, *sizes, False, *tables, 1, index)
    torch.library.opcheck(jagged_attention_op, args)
    out, lse = jagged_attention_op(*args)
    saved = [t.detach() for t in (q, k, v, out, lse)]
    args = (x.do, torch.ones_like(lse), *saved, x.offsets_q, x.offsets_k, *sizes, *tables, 1, index)
    torch.library.opcheck(jagged_attention_backward_op, args)
    torch.library.opcheck(jagged_attention_bias_backward_op, args)


def test_compiles_to_one_graph():
    torch._dynamo.reset()

    def loss(x, index, q):
        return (jagged_attention(q, x.k, x.v, **with_lengths(x, keywords(x, index, FULL))) * x.do).sum()

    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend="aot_eager")
    for case in (BOTH, Case(id="other", seeds=4, lengths_k=(5, 30), request_index=(0, 1, 1))):
        x, index = case.inputs()
        q = x.q.clone().requires_grad_()
        (expected,) = torch.autograd.grad(loss(x, index, q), q)
        assert torch.equal(torch.autograd.grad(compiled(x, index, q), q)[0], expected)


@pytest.mark.parametrize("case", [SEEDS, REQUESTS, BOTH], ids=lambda c: c.id)
def test_flop_formula_counts_every_pair(case):
    x, index = case.inputs()
    q = x.q.requires_grad_()
    requests = range(len(case.lengths_k)) if case.request_index is None else case.request_index
    lengths_q = [case.seeds] * len(requests) if case.lengths_q is None else case.lengths_q
    pairs = sum(n * case.lengths_k[r] for n, r in zip(lengths_q, requests, strict=True))
    with FlopCounterMode(display=False) as counter:
        jagged_attention(q, x.k, x.v, **with_lengths(x, keywords(x, index, FULL))).sum().backward()
    assert counter.get_total_flops() == 7 * 2 * pairs * 2 * 16


@pytest.mark.gpu
def test_gpu_same_bits_on_every_run():
    lengths = tuple(random_lengths(30, 90, seed=3).tolist())
    index = tuple(sorted(i % 30 for i in range(50)))
    for case in (
        Case(id="s", seeds=8, lengths_k=lengths),
        Case(id="r", lengths_q=(3,) * 50, lengths_k=lengths, request_index=index),
    ):
        x, requests = case.inputs(device="cuda")
        options = keywords(x, requests, MASK_CASES[1], make_bias(x, x.do.shape[0]))
        dlse = torch.ones(x.do.shape[:2], device="cuda")
        for a, b in zip(by_op(x, dlse, options), by_op(x, dlse, options), strict=True):
            assert torch.equal(a, b)


def check_no_leak(compute, device):
    """NaN in the keys of request 1 reaches the rows that read them and no other."""
    case = Case(id="leak", lengths_q=(5, 3, 33, 2), lengths_k=(7, 20, 40), request_index=(0, 1, 1, 2))
    x, index = case.inputs(num_heads=1, device=device)
    changed = x._replace(k=x.k.clone(), v=x.v.clone())
    keys, rows = slice(7, 27), slice(5, 41)
    changed.k[keys] = changed.v[keys] = float("nan")
    dlse = torch.ones(x.do.shape[:2], device=device)
    options = keywords(x, index, FULL)
    for i, (a, b) in enumerate(zip(compute(x, dlse, options), compute(changed, dlse, options), strict=True)):
        keep = torch.ones(a.shape[0], dtype=torch.bool, device=device)
        keep[rows if i < 3 else keys] = False
        assert torch.equal(a[keep], b[keep])
        assert b[~keep].isnan().any()


def test_no_request_reaches_another_on_cpu():
    check_no_leak(by_op, "cpu")


@pytest.mark.filterwarnings("ignore:invalid value encountered:RuntimeWarning")
@pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning")
def test_no_request_reaches_another_interpreted(interpreter):
    check_no_leak(by_launch, "cpu")


BASE, _ = Case(id="base", lengths_q=(3, 2), lengths_k=(4, 1), request_index=(0, 1)).inputs()
INDEX = torch.tensor([0, 1])
BAD = [
    ("shape", {"request_index": INDEX[:1]}, ValueError, ["request_index", "(B,) = (2,)", "(1,)"]),
    ("dtype", {"request_index": INDEX.float()}, TypeError, ["request_index", "int32 or int64", "float32"]),
    ("type", {"request_index": [0, 1]}, TypeError, ["request_index", "Tensor", "list"]),
    ("order", {"request_index": INDEX.flip(0)}, ValueError, ["request_index", "not decrease", "1 then 0"]),
    ("range", {"request_index": INDEX + 1}, ValueError, ["request_index", "2 key sequences", "got 2"]),
    ("negative", {"request_index": INDEX - 1}, ValueError, ["request_index", "2 key sequences", "got -1"]),
    ("seeds", {"offsets_q": None}, ValueError, ["max_seqlen_q", "rows of `q`", "5", "got 3"]),
    (
        "seed-times",
        {"offsets_q": None, "max_seqlen_q": 5, "time_bias": torch.zeros(2, 3)}
        | {"times_q": torch.zeros(5), "times_k": torch.zeros(5)},
        ValueError,
        ["times_q", "(10,)", "the output", "(5,)"],
    ),
]


@pytest.mark.parametrize(("changes", "error", "words"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_bad_input_is_named(changes, error, words):
    arguments = with_lengths(BASE, keywords(BASE, INDEX, FULL)) | changes
    with pytest.raises(error, match=r"^jagged_attention: ") as raised:
        jagged_attention(BASE.q, BASE.k, BASE.v, **arguments)
    assert all(word in str(raised.value) for word in words), str(raised.value)


# On a GPU: the same cases through the public function.


@pytest.mark.gpu
@pytest.mark.parametrize("mask", MASKS, ids=lambda m: m.id)
@pytest.mark.parametrize("case", CASES, ids=lambda c: c.id)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gpu_matches_oracle(case, mask, dtype, poisoned_empty):
    for bias in (False, True):
        check(by_op, case, mask, bias=bias, num_heads=4, num_heads_kv=2, head_dim=64, dtype=dtype, device="cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [32, 64, 96, 128, 256])
@pytest.mark.parametrize("bias", [False, True])
def test_gpu_head_dims(dim, bias, poisoned_empty):
    lengths_k = tuple(random_lengths(12, 300, seed=2).tolist())
    index = tuple(sorted(i % 12 for i in range(40)))
    for case in (
        Case(id="seeds", seeds=40, lengths_k=lengths_k),
        Case(id="requests", lengths_q=(3,) * 40, lengths_k=lengths_k, request_index=index),
        Case(id="both", seeds=8, lengths_k=lengths_k, request_index=index),
    ):
        for mask in (FULL, MaskCase(id="w", window_size=(100, 30))):
            check(by_op, case, mask, bias=bias, head_dim=dim, dtype=torch.bfloat16, device="cuda")


@pytest.mark.gpu
def test_gpu_no_request_reaches_another():
    check_no_leak(by_op, "cuda")


@pytest.mark.gpu
def test_gpu_validate_reads_the_request_index():
    x, _ = REQUESTS.inputs(device="cuda")
    index = torch.tensor((0, 0, 1, 0, 3, 3), device="cuda")
    with pytest.raises(ValueError, match="not decrease"):
        jagged_attention(x.q, x.k, x.v, validate=True, **with_lengths(x, keywords(x, index, FULL)))


@pytest.mark.gpu
@pytest.mark.parametrize("case", [SEEDS, REQUESTS, BOTH], ids=lambda c: c.id)
def test_gpu_does_not_wait_for_the_device(case):
    x, index = case.inputs(device="cuda")
    dlse = torch.ones(x.do.shape[:2], device="cuda")
    for bias in ({}, make_bias(x, x.do.shape[0])):
        options = keywords(x, index, FULL, bias)
        by_op(x, dlse, options)
        torch.cuda.set_sync_debug_mode("error")
        try:
            by_op(x, dlse, options)
        finally:
            torch.cuda.set_sync_debug_mode("default")
