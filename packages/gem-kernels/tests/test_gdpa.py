import gc

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from gem_kernels import gdpa, reference
from gem_kernels._src.attention import launch
from gem_kernels._src.attention.configs import shared_memory_bytes
from gem_kernels._src.gdpa import configs
from gem_kernels._src.gdpa.cpu_activation import CPU_ACTIVATIONS
from gem_kernels._src.gdpa.names import ACTIVATION_NAMES
from gem_kernels._src.gdpa.op import gdpa_backward_op, gdpa_op
from gem_kernels.reference.gdpa import ACTIVATIONS
from gem_kernels.testing import (
    LENGTH_CASES,
    MASK_CASES,
    LengthCase,
    MaskCase,
    assert_matches_oracle,
    assert_rms,
    attention_inputs,
    make_offsets,
    max_error,
    random_lengths,
    summation_floor,
)

FULL = MASK_CASES[0]
MIXED = LengthCase(id="mixed", lengths_q=(3, 0, 40, 1, 17), lengths_k=(20, 5, 0, 33, 1))
PRE_SCALE, POST_SCALE = 0.3, 0.6
# tanh.approx has a relative error of 2^-11; gelu and silu turn it into an absolute error of 2^-11 |x| / 2 per score.
HARDWARE_TANH_ERROR = 2.0**-11


def keywords(x, mask=FULL, activation="gelu"):
    return {
        "offsets_q": x.offsets_q,
        "offsets_k": x.offsets_k,
        "max_seqlen_q": x.max_seqlen_q,
        "max_seqlen_k": x.max_seqlen_k,
        "activation": activation,
        "pre_scale": PRE_SCALE,
        "post_scale": POST_SCALE,
        "causal": mask.causal,
        "window_size": mask.window_size,
    }


def by_reference(x, mask, activation):
    """(out, dq, dk, dv) of the loop, in the dtype of ``x``."""
    options = keywords(x, mask, activation)
    del options["max_seqlen_q"], options["max_seqlen_k"]
    out = reference.gdpa(x.q, x.k, x.v, **options)
    return out, *reference.gdpa_backward(x.do, x.q, x.k, x.v, **options)


def by_op(x, mask, activation):
    """(out, dq, dk, dv) of the public function and autograd."""
    q, k, v = (t.detach().requires_grad_() for t in (x.q, x.k, x.v))
    out = gdpa(q, k, v, **keywords(x, mask, activation))
    return out.detach(), *torch.autograd.grad(out, [q, k, v], x.do)


def by_launch(x, mask, activation):
    """(out, dq, dk, dv) of the Triton kernels on any tensors, CPU ones interpreted."""
    from gem_kernels._src.gdpa.backward import launch_backward
    from gem_kernels._src.gdpa.forward import launch_forward

    left, right = mask.window_size
    right = 0 if mask.causal else right
    args = (x.offsets_q, x.offsets_k, x.max_seqlen_q, x.max_seqlen_k, activation, PRE_SCALE, POST_SCALE, left, right)
    return launch_forward(x.q, x.k, x.v, *args), *launch_backward(x.do, x.q, x.k, x.v, *args)


def check(compute, x, mask=FULL, activation="gelu_approx", *, rms=None, hardware_tanh=False):
    """Output and gradients of ``compute`` against float64, as far off as the loop in the same dtype, twice."""
    results = compute(x, mask, activation)
    oracle = by_reference(x.to(torch.float64), mask, activation)
    eager = by_reference(x, mask, activation)
    offsets = (x.offsets_q, x.offsets_q, x.offsets_k, x.offsets_k)
    for name, a, o, e, offs in zip(("out", "dq", "dk", "dv"), results, oracle, eager, offsets, strict=True):
        floor = summation_floor(o, a.dtype)
        if hardware_tanh and o.numel():
            floor += HARDWARE_TANH_ERROR * max(float(o.abs().max()), 1.0)
        # Gradients sum over keys or queries in another order than the loop.
        assert_matches_oracle(name, a, o, e, offsets=offs, floor=floor, factor=3.0 if name.startswith("d") else 2.0)
        if rms is not None:
            assert_rms(name, a, o, ratio=rms)


def inputs(case, **options):
    return attention_inputs(case.lengths_q, case.lengths_k, **options)


def test_every_table_has_every_activation():
    from gem_kernels._src.tiles.activation import activation_pair

    assert tuple(ACTIVATIONS) == tuple(CPU_ACTIVATIONS) == ACTIVATION_NAMES
    assert len({activation_pair(name, hardware=True) for name in ACTIVATION_NAMES}) == len(ACTIVATION_NAMES)


@pytest.mark.parametrize("activation", ACTIVATION_NAMES)
def test_reference_derivative_is_that_of_its_value(activation):
    x = torch.linspace(-4, 4, 81, dtype=torch.float64).add(0.013).requires_grad_()
    act = ACTIVATIONS[activation]
    (slope,) = torch.autograd.grad(act.value(x).sum(), x)
    assert torch.allclose(slope, act.derivative(x.detach()), atol=1e-12)
    assert float(act.value(torch.zeros(1))) == 0.0


def test_reference_activations_are_torchs():
    x = torch.linspace(-5, 5, 201, dtype=torch.float64)
    functional = torch.nn.functional
    for name, function in {
        "gelu": functional.gelu,
        "gelu_approx": lambda t: functional.gelu(t, approximate="tanh"),
        "leaky_relu": functional.leaky_relu,
        "silu": functional.silu,
        "hardswish": functional.hardswish,
    }.items():
        assert torch.allclose(ACTIVATIONS[name].value(x), function(x), atol=1e-12)
    near = x[x.abs() < 0.8]
    assert max_error(ACTIVATIONS["fast_gelu_taylor_approx"].value(near), functional.gelu(near)) < 3e-4


@pytest.mark.parametrize("mask", [FULL, MASK_CASES[2]], ids=lambda m: m.id)
@pytest.mark.parametrize("activation", ACTIVATION_NAMES)
def test_cpu_op_every_activation(activation, mask):
    check(by_op, inputs(MIXED, num_heads=4, num_heads_kv=2, head_dim=8, head_dim_v=12), mask, activation)


@pytest.mark.parametrize("activation", ACTIVATION_NAMES)
def test_interpreted_kernels_every_activation(activation, interpreter, poisoned_empty):
    x = attention_inputs((3, 20), (17, 6), num_heads=1)
    check(by_launch, x, activation=activation)
    check(by_launch, x, MaskCase(id="w", window_size=(3, 2)), activation)


@pytest.mark.parametrize("mask", MASK_CASES, ids=lambda m: m.id)
@pytest.mark.parametrize("case", LENGTH_CASES, ids=lambda c: c.id)
def test_cpu_op_matches_oracle(case, mask):
    check(by_op, inputs(case, num_heads=4, num_heads_kv=2, head_dim=8, head_dim_v=12), mask)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("contiguous", [True, False])
@pytest.mark.parametrize("offsets_dtype", [torch.int32, torch.int64])
def test_cpu_op_dtypes_and_strides(dtype, contiguous, offsets_dtype):
    x = inputs(MIXED, dtype=dtype, contiguous=contiguous, offsets_dtype=offsets_dtype, num_heads=2)
    check(by_op, x, MASK_CASES[1])


def test_cpu_groups_and_chunks_match_oracle():
    # Long enough for several groups of similar length and several query chunks in each.
    lengths = torch.cat([random_lengths(40, 90, sparsity=0.5, seed=1), torch.tensor([700, 0, 650])])
    x = attention_inputs(lengths, num_heads=2, head_dim=8)
    for mask in (FULL, MASK_CASES[1], MaskCase(id="w", window_size=(20, 10))):
        check(by_op, x, mask)


@pytest.mark.parametrize("mask", MASK_CASES, ids=lambda m: m.id)
@pytest.mark.parametrize("heads_kv", [2, 1])
def test_interpreted_kernels_match_oracle_for_every_mask(mask, heads_kv, interpreter, poisoned_empty):
    x = inputs(MIXED, num_heads=2, num_heads_kv=heads_kv, head_dim_v=24)
    check(by_launch, x, mask)


@pytest.mark.parametrize("case", LENGTH_CASES, ids=lambda c: c.id)
def test_interpreted_kernels_match_oracle_for_every_length_case(case, interpreter, poisoned_empty):
    check(by_launch, inputs(case, num_heads=1, contiguous=False, offsets_dtype=torch.int32), MASK_CASES[1])


def test_interpreted_kernels_in_half_precision(interpreter, poisoned_empty):
    # float16 only: the interpreter of Triton 3.6 to 3.9 multiplies bfloat16 tiles as integers.
    x = attention_inputs((70, 3, 0), (40, 130, 5), num_heads=1, head_dim=24, dtype=torch.float16)
    check(by_launch, x, rms=1e-3)
    check(by_launch, x, MASK_CASES[2])


def test_interpreted_kernels_on_a_searched_grid(interpreter, poisoned_empty, monkeypatch):
    monkeypatch.setattr(launch, "_PADDED_GRID_FACTOR", 0)
    x = attention_inputs((0, 70, 3, 0, 0, 33, 0), (5, 40, 0, 0, 7, 64, 0), num_heads=2, num_heads_kv=1)
    check(by_launch, x)
    check(by_launch, x, MASK_CASES[1])


def test_interpreted_kernels_write_dq_beside_dk_and_dv(interpreter, poisoned_empty, monkeypatch):
    monkeypatch.setattr(launch, "_MIN_PROGRAMS", 1)
    from gem_kernels._src.gdpa import backward_dq

    monkeypatch.setattr(backward_dq, "_gdpa_bwd_dq_kernel", None)  # the second kernel must not be needed
    check(by_launch, attention_inputs((70, 3, 0, 33), (20, 0, 5, 32), num_heads=2, num_heads_kv=1))


def check_no_leak(compute, device):
    """NaN in every row of sample 1 must leave all other rows bit-identical."""
    case = LengthCase(id="leak", lengths_q=(5, 33, 9, 16), lengths_k=(7, 20, 40, 3))
    x = inputs(case, num_heads=1, device=device)
    changed = x._replace(q=x.q.clone(), k=x.k.clone(), v=x.v.clone(), do=x.do.clone())
    rows_q, rows_k = (slice(*offsets[1:3].tolist()) for offsets in (x.offsets_q, x.offsets_k))
    for t, rows in ((changed.q, rows_q), (changed.k, rows_k), (changed.v, rows_k), (changed.do, rows_q)):
        t[rows] = float("nan")
    before = compute(x, FULL, "gelu")
    after = compute(changed, FULL, "gelu")
    for i, (a, b) in enumerate(zip(before, after, strict=True)):
        keep = torch.ones(a.shape[0], dtype=torch.bool, device=device)
        keep[rows_q if i < 2 else rows_k] = False
        assert torch.equal(a[keep], b[keep])
        assert b[~keep].isnan().any()


def test_no_sample_reaches_another_on_cpu():
    check_no_leak(by_op, "cpu")


def test_no_sample_reaches_another_interpreted(interpreter):
    check_no_leak(by_launch, "cpu")


@pytest.mark.gpu
def test_no_sample_reaches_another_on_gpu():
    check_no_leak(by_op, "cuda")


def test_same_bits_on_every_run():
    x = attention_inputs(random_lengths(50, 120, seed=3), random_lengths(50, 80, seed=4))
    for a, b in zip(by_op(x, MASK_CASES[2], "gelu"), by_op(x, MASK_CASES[2], "gelu"), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("mask", [FULL, MASK_CASES[2]], ids=lambda m: m.id)
def test_gradcheck(mask):
    x = inputs(LengthCase(id="g", lengths_q=(0, 1, 4), lengths_k=(2, 3, 5)), dtype=torch.float64, head_dim=3)
    q, k, v = (t.requires_grad_() for t in (x.q, x.k, x.v))
    assert torch.autograd.gradcheck(lambda *qkv: gdpa(*qkv, **keywords(x, mask)), (q, k, v))


@pytest.mark.parametrize("lengths", [(), (0, 0), (1,), (3, 0, 65)])
def test_opcheck(lengths):
    x = attention_inputs(lengths)
    q, k, v = (t.requires_grad_() for t in (x.q, x.k, x.v))
    args = (x.offsets_q, x.offsets_k, x.max_seqlen_q, x.max_seqlen_k, "silu", 0.5, 2.0, -1, 3)
    torch.library.opcheck(gdpa_op, (q, k, v, *args, None, None, False))
    torch.library.opcheck(gdpa_backward_op, (x.do, q.detach(), k.detach(), v.detach(), *args, None, None))


def test_compiles_to_one_graph_for_changing_sizes():
    torch._dynamo.reset()
    graphs = 0

    def backend(module, example_inputs):
        nonlocal graphs
        graphs += 1
        return module.forward

    def loss(x, q, k, v):
        return (gdpa(q, k, v, **keywords(x, MASK_CASES[1])) * x.do).sum()

    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend="aot_eager")
    counting = torch.compile(loss, fullgraph=True, dynamic=True, backend=backend)
    for seed in range(4):
        x = attention_inputs(random_lengths(6 + seed, 30, seed=seed))
        qkv = [t.clone().requires_grad_() for t in (x.q, x.k, x.v)]
        expected = torch.autograd.grad(loss(x, *qkv), qkv)
        for a, b in zip(torch.autograd.grad(compiled(x, *qkv), qkv), expected, strict=True):
            assert torch.equal(a, b)
        counting(x, *qkv)
    assert graphs == 1


def test_autocast_casts_the_inputs_only():
    x = inputs(MIXED)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = gdpa(x.q, x.k, x.v, **keywords(x))
        double = gdpa(*(t.double() for t in (x.q, x.k, x.v)), **keywords(x))
    assert out.dtype == torch.bfloat16
    assert double.dtype == torch.float64
    half = x.to(torch.bfloat16)
    assert torch.equal(out, gdpa(half.q, half.k, half.v, **keywords(x)))


def test_activation_checkpoint_gives_the_same_gradients():
    x = inputs(MIXED)
    q, k, v = (t.requires_grad_() for t in (x.q, x.k, x.v))

    def attend(q, k, v):
        return gdpa(q, k, v, **keywords(x))

    plain = torch.autograd.grad(attend(q, k, v), (q, k, v), x.do)
    recomputed = torch.autograd.grad(checkpoint(attend, q, k, v, use_reentrant=False), (q, k, v), x.do)
    assert all(torch.equal(a, b) for a, b in zip(plain, recomputed, strict=True))


@pytest.mark.parametrize("mask", MASK_CASES, ids=lambda m: m.id)
def test_flop_formula_is_the_true_count(mask):
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
        gdpa(q, k, v, **keywords(x, mask)).sum().backward()
    counts = {str(op).split(".")[-1].rstrip(")>'"): n for op, n in counter.get_flop_counts()["Global"].items()}
    assert counts == {
        "gdpa": 2 * 4 * pairs * (8 + 12),
        "gdpa_backward": 2 * 4 * pairs * (3 * 8 + 2 * 12),
    }


def test_flop_formula_of_fake_tensors_uses_average_lengths():
    with torch._subclasses.FakeTensorMode(), FlopCounterMode(display=False) as counter:
        q = torch.empty(40, 2, 8)
        offsets = torch.empty(5, dtype=torch.int64)
        gdpa(q, q, q, offsets_q=offsets, offsets_k=offsets, max_seqlen_q=10, max_seqlen_k=10)
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
    ("scale-tensor", {"pre_scale": torch.tensor(0.5)}, TypeError, ["pre_scale", "Python float", "Tensor"]),
    ("scale-nan", {"post_scale": float("nan")}, ValueError, ["post_scale", "finite", "nan"]),
    ("activation", {"activation": "softmax"}, ValueError, ["activation", "fast_gelu", "'softmax'"]),
]


@pytest.mark.parametrize(("changes", "error", "words"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_bad_input_is_named(changes, error, words):
    arguments = {"q": BASE.q, "k": BASE.k, "v": BASE.v, **keywords(BASE)} | changes
    with pytest.raises(error, match=r"^gdpa: ") as raised:
        gdpa(arguments.pop("q"), arguments.pop("k"), arguments.pop("v"), **arguments)
    assert all(word in str(raised.value) for word in words), str(raised.value)
    assert "; " in str(raised.value).partition("got ")[2], f"no remedy: {raised.value}"


def test_select_is_pure_and_fits_every_gpu():
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
@pytest.mark.parametrize("mask", MASK_CASES, ids=lambda m: m.id)
@pytest.mark.parametrize("case", LENGTH_CASES, ids=lambda c: c.id)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_gpu_matches_oracle(case, mask, dtype, poisoned_empty):
    x = inputs(case, num_heads=4, num_heads_kv=2, head_dim=64, dtype=dtype, device="cuda", contiguous=False)
    check(by_op, x, mask)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("activation", ACTIVATION_NAMES)
def test_gpu_every_activation(activation, dtype, poisoned_empty):
    x = attention_inputs((70, 300), (130, 40), num_heads=2, head_dim=32, dtype=dtype, device="cuda")
    hardware = activation in ("fast_gelu", "fast_silu")
    check(by_op, x, activation=activation, hardware_tanh=hardware)
    check(by_op, x, MASK_CASES[2], activation, hardware_tanh=hardware)


@pytest.mark.gpu
@pytest.mark.parametrize("dims", [(16, 16), (32, 32), (40, 64), (96, 96), (128, 128), (128, 64), (256, 256)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_gpu_head_dims(dims, dtype, poisoned_empty):
    lengths_q, lengths_k = random_lengths(9, 400, seed=1), random_lengths(9, 300, seed=2)
    x = attention_inputs(lengths_q, lengths_k, head_dim=dims[0], head_dim_v=dims[1], dtype=dtype, device="cuda")
    for mask in (FULL, MASK_CASES[1], MaskCase(id="w", window_size=(100, 30))):
        check(by_op, x, mask, rms=5e-3 if dtype == torch.bfloat16 else None)


@pytest.mark.gpu
@pytest.mark.parametrize("max_k", [8, 32, 100, 128])
def test_gpu_short_keys_write_dq_in_one_kernel(max_k, poisoned_empty):
    lengths_q, lengths_k = random_lengths(80, 300, seed=1), random_lengths(80, max_k, sparsity=0.4, seed=2)
    lengths_k[5] = 0
    x = attention_inputs(lengths_q, lengths_k, num_heads=4, head_dim=128, dtype=torch.bfloat16, device="cuda")
    check(by_op, x)


@pytest.mark.gpu
def test_gpu_same_bits_on_every_run():
    x = attention_inputs(random_lengths(50, 700, seed=3), head_dim=64, dtype=torch.bfloat16, device="cuda")
    for a, b in zip(by_op(x, FULL, "gelu"), by_op(x, FULL, "gelu"), strict=True):
        assert torch.equal(a, b)


@pytest.mark.gpu
@pytest.mark.parametrize("outlier", [0, 3000])
def test_gpu_80000_sequences(outlier):
    lengths = random_lengths(80_000, 8, sparsity=0.5, seed=0) - 1
    lengths[40_000] = max(outlier, int(lengths[40_000]))
    x = attention_inputs(lengths, num_heads=2, head_dim=16, device="cuda")
    results = by_op(x, FULL, "gelu")
    oracle = by_op(x.to("cpu", torch.float64), FULL, "gelu")
    eager = by_op(x.to("cpu"), FULL, "gelu")
    # n roundings of a sum of n terms, all of one sign in the worst case, grow like a random walk.
    units = max(16.0, 2 * max(lengths.tolist()) ** 0.5)
    for name, a, o, e in zip(("out", "dq", "dk", "dv"), results, oracle, eager, strict=True):
        assert_matches_oracle(name, a, o, e, floor=summation_floor(o, a.dtype, units=units))


@pytest.mark.gpu
@pytest.mark.memory
def test_gpu_beyond_2_31_elements():
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
    for a, b in zip(by_launch(big, FULL, "gelu"), by_launch(small, FULL, "gelu"), strict=True):
        assert torch.equal(a, b)


@pytest.mark.gpu
def test_gpu_validate_reads_the_offsets():
    x = attention_inputs((3, 2), device="cuda")
    options = keywords(x) | {"offsets_q": torch.tensor([0, 4, 5], device="cuda")}
    with pytest.raises(ValueError, match="max_seqlen_q"):
        gdpa(x.q, x.k, x.v, **options, validate=True)


@pytest.mark.gpu
def test_gpu_does_not_wait_for_the_device():
    x = attention_inputs((30, 20), device="cuda")
    q, k, v = (t.requires_grad_() for t in (x.q, x.k, x.v))
    gdpa(q, k, v, **keywords(x)).backward(x.do)
    torch.cuda.set_sync_debug_mode("error")
    try:
        gdpa(q, k, v, **keywords(x)).backward(x.do)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_gpu_random_lengths_compile_few_kernels(count_variants):
    from gem_kernels._src.gdpa import backward, backward_dq, forward

    before = count_variants(forward, backward, backward_dq)
    for seed in range(100):
        lengths_q, lengths_k = random_lengths(20, 50 + 9 * seed, seed=seed), random_lengths(20, 900 - 8 * seed, seed=1)
        x = attention_inputs(lengths_q, lengths_k, num_heads=2, head_dim=40, dtype=torch.bfloat16, device="cuda")
        by_op(x, FULL, "gelu")
    # forward, dK/dV and dQ, each for a few tile sizes and both grids
    assert 3 <= count_variants(forward, backward, backward_dq) - before <= 30
