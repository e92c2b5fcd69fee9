"""What gdpa and jagged_attention promise alike: results, masks, gradients, compilation, counts, errors."""

import gc

import pytest
import torch
from packed_ops import FULL, MIXED, OPS, assert_one_graph, inputs
from torch.utils.flop_counter import FlopCounterMode

from gem_kernels import reference
from gem_kernels._src.attention import launch
from gem_kernels._src.attention.configs import shared_memory_bytes
from gem_kernels.testing import (
    LENGTH_CASES,
    MASK_CASES,
    LengthCase,
    MaskCase,
    assert_matches_oracle,
    attention_inputs,
    make_offsets,
    random_lengths,
)


@pytest.fixture(params=OPS, ids=lambda op: op.name)
def op(request):
    """Each of the two ops."""
    return request.param


@pytest.mark.parametrize("mask", MASK_CASES, ids=lambda m: m.id)
@pytest.mark.parametrize("case", LENGTH_CASES, ids=lambda c: c.id)
def test_cpu_op_matches_oracle(op, case, mask):
    op.check(op.by_op, inputs(case, num_heads=4, num_heads_kv=2, head_dim=8, head_dim_v=12), mask)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("offsets_dtype", [torch.int32, torch.int64])
def test_cpu_op_dtypes_and_strides(op, dtype, contiguous, offsets_dtype):
    x = inputs(MIXED, dtype=dtype, contiguous=contiguous, offsets_dtype=offsets_dtype, num_heads=2)
    op.check(op.by_op, x, MASK_CASES[1])


def test_cpu_groups_and_chunks_match_oracle(op):
    # Long enough for several groups of similar length and several query chunks in each.
    lengths = torch.cat([random_lengths(40, 90, sparsity=0.5, seed=1), torch.tensor([700, 0, 650])])
    x = attention_inputs(lengths, num_heads=2, head_dim=8)
    for mask in (FULL, MASK_CASES[1], MaskCase(id="w", window_size=(20, 10))):
        op.check(op.by_op, x, mask)


@pytest.mark.parametrize("mask", MASK_CASES, ids=lambda m: m.id)
@pytest.mark.parametrize("heads_kv", [2, 1])
def test_interpreted_kernels_match_oracle_for_every_mask(op, mask, heads_kv, interpreter, poisoned_empty):
    x = inputs(MIXED, num_heads=2, num_heads_kv=heads_kv, head_dim_v=24)
    op.check(op.by_launch, x, mask)


@pytest.mark.parametrize("case", LENGTH_CASES, ids=lambda c: c.id)
def test_interpreted_kernels_match_oracle_for_every_length_case(op, case, interpreter, poisoned_empty):
    x = inputs(case, num_heads=1, contiguous=False, offsets_dtype=torch.int32)
    for mask in (FULL, MASK_CASES[1]):
        op.check(op.by_launch, x, mask)


def test_interpreted_kernels_in_half_precision(op, interpreter, poisoned_empty):
    # float16 only: the interpreter of Triton 3.6 to 3.9 multiplies bfloat16 tiles as integers.
    x = attention_inputs((70, 3, 0), (40, 130, 5), num_heads=1, head_dim=24, dtype=torch.float16)
    op.check(op.by_launch, x, rms=1e-3)
    op.check(op.by_launch, x, MASK_CASES[2])


def test_interpreted_kernels_on_a_searched_grid(op, interpreter, poisoned_empty, monkeypatch):
    monkeypatch.setattr(launch, "_PADDED_GRID_FACTOR", 0)
    x = attention_inputs((0, 70, 3, 0, 0, 33, 0), (5, 40, 0, 0, 7, 64, 0), num_heads=2, num_heads_kv=1)
    op.check(op.by_launch, x)
    op.check(op.by_launch, x, MASK_CASES[1])


def test_interpreted_kernels_write_dq_beside_dk_and_dv(op, interpreter, poisoned_empty, monkeypatch):
    monkeypatch.setattr(launch, "_MIN_PROGRAMS", 1)
    # The second kernel must not be needed.
    monkeypatch.setattr(op.module("backward_dq"), f"_{op.name}_bwd_dq_kernel", None)
    op.check(op.by_launch, attention_inputs((70, 3, 0, 33), (20, 0, 5, 32), num_heads=2, num_heads_kv=1))


def check_no_leak(op, compute, mask, device):
    """NaN in every row of sample 1 must leave all other rows bit-identical."""
    case = LengthCase(id="leak", lengths_q=(5, 33, 9, 16), lengths_k=(7, 20, 40, 3))
    x = inputs(case, num_heads=1, device=device)
    changed = x._replace(q=x.q.clone(), k=x.k.clone(), v=x.v.clone(), do=x.do.clone())
    rows_q, rows_k = (slice(*offsets[1:3].tolist()) for offsets in (x.offsets_q, x.offsets_k))
    for t, rows in ((changed.q, rows_q), (changed.k, rows_k), (changed.v, rows_k), (changed.do, rows_q)):
        t[rows] = float("nan")
    for name, a, b in zip(op.names, compute(x, mask), compute(changed, mask), strict=True):
        keep = torch.ones(a.shape[0], dtype=torch.bool, device=device)
        keep[rows_k if name in ("dk", "dv") else rows_q] = False
        assert torch.equal(a[keep], b[keep])
        assert b[~keep].isnan().any()


@pytest.mark.parametrize("mask", MASK_CASES, ids=lambda m: m.id)
def test_no_sample_reaches_another_on_cpu(op, mask):
    check_no_leak(op, op.by_op, mask, "cpu")


@pytest.mark.parametrize("mask", MASK_CASES[:4], ids=lambda m: m.id)
def test_no_sample_reaches_another_interpreted(op, mask, interpreter):
    check_no_leak(op, op.by_launch, mask, "cpu")


@pytest.mark.parametrize("mask", [FULL, MASK_CASES[2]], ids=lambda m: m.id)
def test_gradcheck(op, mask):
    x = inputs(LengthCase(id="g", lengths_q=(0, 1, 4), lengths_k=(2, 3, 5)), dtype=torch.float64, head_dim=3)
    q, k, v = (t.requires_grad_() for t in (x.q, x.k, x.v))
    assert torch.autograd.gradcheck(lambda *qkv: op.function(*qkv, **op.keywords(x, mask)), (q, k, v))


def test_compiles_to_one_graph_for_changing_sizes(op):
    def loss(x, q, k, v):
        return (op.function(q, k, v, **op.keywords(x, MASK_CASES[1])) * x.do).sum()

    assert_one_graph(loss, (attention_inputs(random_lengths(6 + seed, 30, seed=seed)) for seed in range(4)))


def test_autocast_casts_the_inputs_only(op):
    x = inputs(MIXED)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = op.function(x.q, x.k, x.v, **op.keywords(x))
        double = op.function(*(t.double() for t in (x.q, x.k, x.v)), **op.keywords(x))
    assert out.dtype == torch.bfloat16
    assert double.dtype == torch.float64
    half = x.to(torch.bfloat16)
    assert torch.equal(out, op.function(half.q, half.k, half.v, **op.keywords(x)))


@pytest.mark.parametrize("mask", MASK_CASES, ids=lambda m: m.id)
def test_flop_formula_is_the_true_count(op, mask):
    x = inputs(MIXED, num_heads=4, num_heads_kv=2, head_dim=8, head_dim_v=12)
    pairs = 0
    for len_q, len_k in zip(MIXED.lengths_q, MIXED.lengths_k, strict=True):
        for i in range(len_q):
            for j in range(len_k):
                left, right = mask.window_size
                right = 0 if mask.causal else right
                pairs += (left < 0 or j >= i - left) and (right < 0 or j <= i + right)
    q, k, v = (t.requires_grad_() for t in (x.q, x.k, x.v))
    with FlopCounterMode(display=False) as counter:
        op.function(q, k, v, **op.keywords(x, mask)).sum().backward()
    counts = {str(each).split(".")[-1].rstrip(")>'"): n for each, n in counter.get_flop_counts()["Global"].items()}
    assert counts == {
        op.name: 2 * 4 * pairs * (8 + 12),
        f"{op.name}_backward": 2 * 4 * pairs * (3 * 8 + 2 * 12),
    }


def test_flop_formula_of_fake_tensors_uses_average_lengths(op):
    with torch._subclasses.FakeTensorMode(), FlopCounterMode(display=False) as counter:
        q = torch.empty(40, 2, 8)
        offsets = torch.empty(5, dtype=torch.int64)
        op.function(q, q, q, offsets_q=offsets, offsets_k=offsets, max_seqlen_q=10, max_seqlen_k=10)
    assert counter.get_total_flops() == 4 * 2 * 8 * (4 * 10 * 10)


BASE = attention_inputs((3, 2), (4, 1), num_heads=4, num_heads_kv=2)
BAD = [
    ("rank", {"q": BASE.q[:, 0]}, ValueError, ["q", "(T, H, D)", "(5, 16)"]),
    ("dtype", {"k": BASE.k.double()}, TypeError, ["k", "float32", "float64"]),
    ("integer", {"q": BASE.q.long()}, TypeError, ["q", "floating point", "int64"]),
    ("rows", {"v": BASE.v[:3]}, ValueError, ["v", "5", "3"]),
    ("head-dim", {"k": BASE.k[..., :8]}, ValueError, ["k", "16", "8"]),
    ("group", {"q": BASE.q[:, :3]}, ValueError, ["divide", "2", "3"]),
    ("heads", {"v": BASE.v[:, :1]}, ValueError, ["v", "heads", "2", "1"]),
    ("offsets-rank", {"offsets_q": BASE.offsets_q[None]}, ValueError, ["offsets_q", "(B + 1,)"]),
    ("offsets-dtype", {"offsets_k": BASE.offsets_k.float()}, TypeError, ["offsets_k", "int64", "float32"]),
    ("offsets-count", {"offsets_k": make_offsets([5])}, ValueError, ["offsets_k", "(3,)", "(2,)"]),
    ("offsets-start", {"offsets_q": torch.tensor([1, 3, 5])}, ValueError, ["offsets_q", "start at 0", "1"]),
    ("offsets-end", {"offsets_k": torch.tensor([0, 4, 6])}, ValueError, ["offsets_k", "5", "6"]),
    ("offsets-order", {"offsets_q": torch.tensor([0, 6, 5])}, ValueError, ["offsets_q", "not decrease", "6", "5"]),
    ("max-seqlen", {"max_seqlen_k": 3}, ValueError, ["max_seqlen_k", "4 tokens (sequence 0)", "got 3"]),
    ("max-seqlen-total", {"max_seqlen_k": 1}, ValueError, ["max_seqlen_k", "offsets_k", "5 rows", "2 sequences"]),
    ("max-seqlen-tensor", {"max_seqlen_q": torch.tensor(3)}, TypeError, ["max_seqlen_q", "Python int", "Tensor"]),
    ("max-seqlen-negative", {"max_seqlen_q": -1}, ValueError, ["max_seqlen_q", ">= 0", "-1"]),
    ("window", {"window_size": (-2, 0)}, ValueError, ["window_size", "-1", "(-2, 0)"]),
    ("window-type", {"window_size": 5}, TypeError, ["window_size", "(left, right)", "5"]),
]


@pytest.mark.parametrize(("changes", "error", "words"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_bad_input_is_named(op, changes, error, words):
    arguments = {"q": BASE.q, "k": BASE.k, "v": BASE.v, **op.keywords(BASE)} | changes
    with pytest.raises(error, match=rf"^{op.name}: ") as raised:
        op.function(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)
    assert all(word in str(raised.value) for word in words), str(raised.value)
    assert "; " in str(raised.value).partition("got ")[2], f"no remedy: {raised.value}"


def test_select_is_pure_and_fits_every_gpu(op):
    configs = op.module("configs")
    for capability in ((8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)):
        for dtype in (torch.float16, torch.bfloat16, torch.float32):
            for dim in (8, 16, 32, 64, 96, 128, 192, 256):
                for kernel in ("forward", "dq", "dkdv"):
                    config = configs.select(kernel, dim, dtype, capability)
                    assert config == configs.select(kernel, dim, dtype, capability)
                    # One stage of both streamed tiles and the resident one is a lower bound of what is needed.
                    width = 1 << (dim - 1).bit_length()
                    tiles = (config.block_m + 2 * config.block_n) * width * dtype.itemsize
                    assert tiles <= shared_memory_bytes(capability)
    with pytest.raises(ValueError, match="head_dim"):
        configs.select("forward", 300, torch.bfloat16, (9, 0))


# On a GPU: the same cases through the public function.


@pytest.mark.gpu
@pytest.mark.parametrize("mask", [FULL, MASK_CASES[2]], ids=lambda m: m.id)
def test_no_sample_reaches_another_on_gpu(op, mask):
    check_no_leak(op, op.by_op, mask, "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("mask", MASK_CASES, ids=lambda m: m.id)
@pytest.mark.parametrize("case", LENGTH_CASES, ids=lambda c: c.id)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_gpu_matches_oracle(op, case, mask, dtype, poisoned_empty):
    x = inputs(case, num_heads=4, num_heads_kv=2, head_dim=64, dtype=dtype, device="cuda", contiguous=False)
    op.check(op.by_op, x, mask)


@pytest.mark.gpu
@pytest.mark.parametrize("dims", [(16, 16), (32, 32), (40, 64), (96, 96), (128, 128), (128, 64), (256, 256)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_gpu_head_dims(op, dims, dtype, poisoned_empty):
    lengths_q, lengths_k = random_lengths(9, 400, seed=1), random_lengths(9, 300, seed=2)
    x = attention_inputs(lengths_q, lengths_k, head_dim=dims[0], head_dim_v=dims[1], dtype=dtype, device="cuda")
    for mask in (FULL, MASK_CASES[1], MaskCase(id="w", window_size=(100, 30))):
        op.check(op.by_op, x, mask, rms=5e-3 if dtype == torch.bfloat16 else None)


@pytest.mark.gpu
@pytest.mark.parametrize("max_k", [8, 32, 100, 128])
def test_gpu_short_keys_write_dq_in_one_kernel(op, max_k, poisoned_empty):
    lengths_q, lengths_k = random_lengths(80, 300, seed=1), random_lengths(80, max_k, sparsity=0.4, seed=2)
    lengths_k[5] = 0
    x = attention_inputs(lengths_q, lengths_k, num_heads=4, head_dim=128, dtype=torch.bfloat16, device="cuda")
    op.check(op.by_op, x)


@pytest.mark.gpu
def test_gpu_same_bits_on_every_run(op):
    x = attention_inputs(random_lengths(50, 700, seed=3), head_dim=64, dtype=torch.bfloat16, device="cuda")
    for a, b in zip(op.by_op(x, FULL), op.by_op(x, FULL), strict=True):
        assert torch.equal(a, b)


@pytest.mark.gpu
@pytest.mark.memory
def test_gpu_beyond_2_31_elements(op):
    rows, width = 2200, 1 << 20
    gc.collect()
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 3 * rows * width * 2:
        pytest.skip("needs 14 GB of free GPU memory")
    buffer = torch.empty(rows, width, dtype=torch.bfloat16, device="cuda")
    small = attention_inputs((1000, 1200), head_dim=64, dtype=torch.bfloat16, device="cuda")
    views = []
    for i, t in enumerate((small.q, small.k, small.v, small.do)):
        view = buffer[:, i * 4096 : i * 4096 + 128].view(rows, 2, 64)
        views.append(view.copy_(t))
    assert views[0].stride(0) * rows > 2**31
    big = small._replace(q=views[0], k=views[1], v=views[2], do=views[3])
    for a, b in zip(op.by_launch(big, FULL), op.by_launch(small, FULL), strict=True):
        assert torch.equal(a, b)


@pytest.mark.gpu
@pytest.mark.memory
def test_gpu_packed_rows_beyond_2_31_elements(op):
    """The last two of many sequences, whose rows of every input, output and gradient lie beyond 32 bits."""
    rows, width, tail = 2**22 + 1000, 4 * 128, (512, 300)
    gc.collect()
    torch.cuda.empty_cache()
    if torch.cuda.mem_get_info()[0] < 14 * rows * width * 2:
        pytest.skip("needs 60 GB of free GPU memory")
    assert rows * width > 2**31
    small = attention_inputs(tail, num_heads=4, head_dim=128, dtype=torch.bfloat16)
    first = rows - sum(tail)
    offsets = torch.cat([torch.arange(0, first, 512), first + torch.tensor([0, *tail]).cumsum(0)]).cuda()
    big = small._replace(offsets_q=offsets, offsets_k=offsets)
    for name in ("q", "k", "v", "do"):
        x = torch.zeros(rows, 4, 128, dtype=torch.bfloat16, device="cuda")
        x[first:] = getattr(small, name)
        big = big._replace(**{name: x})

    q, k, v = (t.requires_grad_() for t in (big.q, big.k, big.v))
    out = op.function(q, k, v, **op.keywords(big))
    results = [t[first:].clone() for t in (out.detach(), *torch.autograd.grad(out, (q, k, v), big.do))]
    del big, x, q, k, v, out
    torch.cuda.empty_cache()

    def by_loop(x):
        options = {name: value for name, value in op.keywords(x).items() if not name.startswith("max_seqlen")}
        out = getattr(reference, op.name)(x.q, x.k, x.v, **options)
        gradients = getattr(reference, f"{op.name}_backward")(x.do, x.q, x.k, x.v, **options)
        return out[0] if op.name == "jagged_attention" else out, *gradients[:3]

    for name, a, o, e in zip(
        ("out", "dq", "dk", "dv"), results, by_loop(small.to(torch.float64)), by_loop(small), strict=True
    ):
        floor = op.floor(name, small, o, a.dtype)
        assert_matches_oracle(name, a, o, e, factor=2.0 if name == "out" else 3.0, floor=floor)


@pytest.mark.gpu
def test_gpu_validate_reads_the_offsets(op):
    x = attention_inputs((3, 2), device="cuda")
    options = op.keywords(x) | {"offsets_q": torch.tensor([0, 4, 5], device="cuda")}
    with pytest.raises(ValueError, match="max_seqlen_q"):
        op.function(x.q, x.k, x.v, **options, validate=True)


@pytest.mark.gpu
def test_gpu_does_not_wait_for_the_device(op):
    x = attention_inputs((30, 20), device="cuda")
    q, k, v = (t.requires_grad_() for t in (x.q, x.k, x.v))
    op.function(q, k, v, **op.keywords(x)).backward(x.do)
    torch.cuda.set_sync_debug_mode("error")
    try:
        op.function(q, k, v, **op.keywords(x)).backward(x.do)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_gpu_random_lengths_compile_few_kernels(op, count_variants):
    names = ("forward", "backward", "backward_dkdv", "backward_dq")
    modules = [op.module(name) for name in (names if op.name == "jagged_attention" else names[:2] + names[3:])]
    before = count_variants(*modules)
    for seed in range(100):
        lengths_q, lengths_k = random_lengths(20, 50 + 9 * seed, seed=seed), random_lengths(20, 900 - 8 * seed, seed=1)
        x = attention_inputs(lengths_q, lengths_k, num_heads=2, head_dim=40, dtype=torch.bfloat16, device="cuda")
        op.by_op(x, FULL)
    # forward, dK/dV and dQ, each for a few tile sizes and both grids
    assert 3 <= count_variants(*modules) - before <= 30
