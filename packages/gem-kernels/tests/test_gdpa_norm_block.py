"""gdpa_norm_block against its float64 reference and against its parts: CPU kernel, interpreted Triton kernels, CUDA."""

import os
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from torch.nn import functional
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

from gem_kernels import gdpa, gdpa_norm_block
from gem_kernels._src.gdpa_norm_block.arguments import Options, Parameters
from gem_kernels._src.gdpa_norm_block.op import gdpa_norm_block_backward_op, gdpa_norm_block_op
from gem_kernels._src.gdpa_norm_block.selection import has_few_keys
from gem_kernels.reference import gdpa_norm_block as reference
from gem_kernels.reference import gdpa_norm_block_backward as reference_backward
from gem_kernels.testing import assert_matches_oracle, assert_rms, attention_inputs, summation_floor

interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="runs kernels on CPU tensors: needs TRITON_INTERPRET=1"
)
WEIGHTS = ("norm_weight", "norm_bias", "rms_weight")


@dataclass(frozen=True, kw_only=True)
class Case:
    id: str
    lengths_q: tuple[int, ...] = (0, 1, 33, 20, 7)
    lengths_k: tuple[int, ...] = (8, 16, 8, 0, 5)
    num_heads: int = 2
    num_heads_kv: int = 2
    head_dim: int = 16
    activation: str = "gelu"
    pre_scale: float = 0.3
    post_scale: float = 1.0
    weights: tuple[str, ...] = ()
    query_residual: bool = True
    residual: bool = True
    contiguous: bool = True

    @property
    def options(self):
        return {
            "activation": self.activation,
            "pre_scale": self.pre_scale,
            "post_scale": self.post_scale,
            "query_residual": self.query_residual,
            "residual": self.residual,
        }

    def inputs(self, dtype, device="cpu"):
        """(packed tensors, weights by name)."""
        x = attention_inputs(
            self.lengths_q,
            self.lengths_k,
            num_heads=self.num_heads,
            num_heads_kv=self.num_heads_kv,
            head_dim=self.head_dim,
            dtype=dtype,
            device=device,
            contiguous=self.contiguous,
        )
        generator = torch.Generator().manual_seed(1)
        features = self.num_heads * self.head_dim
        weights = {name: 1.0 + 0.5 * torch.randn(features, generator=generator) for name in self.weights}
        return x, {name: w.to(device=device, dtype=dtype) for name, w in weights.items()}


CASES = [
    Case(id="plain"),
    Case(id="all-weights", weights=WEIGHTS),
    Case(id="norm-bias", weights=("norm_bias",)),
    Case(id="rms-weight", weights=("rms_weight",), activation="silu"),
    Case(id="no-query-residual", query_residual=False, weights=("norm_weight",)),
    Case(id="no-residual", residual=False, post_scale=0.5),
    Case(id="no-residuals", query_residual=False, residual=False, weights=WEIGHTS),
    # No activation with a kink: which side of it a score falls on depends on a rounding of the norm before.
    Case(id="grouped", num_heads=4, num_heads_kv=2, activation="silu", weights=WEIGHTS),
    Case(id="odd-features", num_heads=3, num_heads_kv=3, head_dim=24, weights=WEIGHTS),
    Case(id="strided", contiguous=False, weights=WEIGHTS),
    Case(id="one-head", num_heads=1, num_heads_kv=1),
    Case(id="empty", lengths_q=(0, 0), lengths_k=(3, 0), weights=WEIGHTS),
    Case(id="no-keys", lengths_q=(3, 2), lengths_k=(0, 0), weights=WEIGHTS),
    Case(id="no-sequences", lengths_q=(), lengths_k=()),
]
ids = [case.id for case in CASES]


def names(case):
    return ("out", "dq", "dk", "dv", *(f"d{name}" for name in WEIGHTS if name in case.weights))


def oracle(case, inputs, dtype=torch.float64):
    x, weights = inputs
    x = x.to("cpu", dtype)
    options = {"offsets_q": x.offsets_q, "offsets_k": x.offsets_k, **case.options}
    options |= {name: w.detach().to("cpu", dtype) for name, w in weights.items()}
    gradients = reference_backward(x.do, x.q, x.k, x.v, **options)
    return reference(x.q, x.k, x.v, **options), *(g for g in gradients if g is not None)


def run_op(case, inputs, function=gdpa_norm_block, **options):
    x, weights = inputs
    leaves = [t.detach().requires_grad_() for t in (x.q, x.k, x.v, *weights.values())]
    out = function(
        *leaves[:3],
        offsets_q=x.offsets_q,
        offsets_k=x.offsets_k,
        max_seqlen_q=x.max_seqlen_q,
        max_seqlen_k=x.max_seqlen_k,
        **dict(zip(weights, leaves[3:], strict=True)),
        **case.options,
        **options,
    )
    return (out.detach(), *torch.autograd.grad(out, leaves, x.do))


def op_options(case, x):
    return Options(
        x.max_seqlen_q,
        x.max_seqlen_k,
        case.activation,
        case.pre_scale,
        case.post_scale,
        case.query_residual,
        case.residual,
        1e-5,
    )


def run_kernels(case, inputs, keep=False):
    from gem_kernels._src.gdpa_norm_block.launch import launch_backward, launch_forward

    x, weights = inputs
    tensors = (x.q, x.k, x.v, x.offsets_q, x.offsets_k, Parameters(*(weights.get(name) for name in WEIGHTS)))
    out, statistics, kept = launch_forward(*tensors, op_options(case, x), keep=keep)
    gradients = launch_backward(x.do, *tensors, statistics, op_options(case, x), kept)._asdict()
    absent = {f"d{name}" for name in WEIGHTS if name not in weights}
    assert all(gradients[name].numel() == 0 for name in absent)
    return out, *(g for name, g in gradients.items() if name not in absent)


def assert_all_match(results, case, inputs):
    dtype = inputs[0].q.dtype
    exact, eager = oracle(case, inputs), oracle(case, inputs, dtype)
    for name, actual, wanted, plain in zip(names(case), results, exact, eager, strict=True):
        assert actual.dtype == dtype, name
        assert actual.is_contiguous(), name
        if dtype == torch.float64:
            torch.testing.assert_close(actual, wanted, rtol=1e-10, atol=1e-10)
            continue
        # Sums over keys, heads and rows run in another order than in the library.
        assert_matches_oracle(name, actual, wanted, plain, floor=summation_floor(wanted, dtype))
        if dtype == torch.bfloat16 and inputs[0].offsets_k[-1] > 0:
            # Three roundings lie on the way, of the attention's input, of its output and of the result.
            assert_rms(name, actual, wanted, ratio=1.2e-2)


# ---------------------------------------------------------------- values


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=ids)
def test_cpu_matches_reference(case, dtype):
    inputs = case.inputs(dtype)
    assert_all_match(run_op(case, inputs), case, inputs)


@interpreted
@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=ids)
def test_interpreted_kernels_match_reference(case, dtype):
    inputs = case.inputs(dtype)
    assert_all_match(run_kernels(case, inputs), case, inputs)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=ids)
def test_cpu_matches_reference_from_kept_rows(case, dtype):
    inputs = case.inputs(dtype)
    assert_all_match(run_op(case, inputs, recompute=False), case, inputs)


@interpreted
@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("case", CASES, ids=ids)
def test_interpreted_kernels_match_reference_from_kept_rows(case):
    inputs = case.inputs(torch.float16)
    assert_all_match(run_kernels(case, inputs, keep=True), case, inputs)


@interpreted
def test_interpreted_backward_sums_over_more_tiles_than_programs(monkeypatch):
    from gem_kernels._src.gdpa_norm_block import launch
    from gem_kernels._src.norm_linear import rows
    from gem_kernels._src.norm_linear.configs import RowConfig

    monkeypatch.setattr(rows, "MAX_PROGRAMS", 3)
    monkeypatch.setattr(launch, "select_backward_rows", lambda features: RowConfig(rows=4, block_n=32, num_warps=4))
    case = CASES[1]
    inputs = case.inputs(torch.float32)
    assert_all_match(run_kernels(case, inputs), case, inputs)


FEW_KEYS = [
    *(case for case in CASES if not case.weights and case.num_heads == case.num_heads_kv),
    Case(id="no-residuals-plain", query_residual=False, residual=False, activation="silu"),
    Case(id="odd-heads", num_heads=3, num_heads_kv=3, head_dim=24, contiguous=False),
    # More rows than a tile, more keys than the narrowest; a sequence alone without keys, and one without rows.
    Case(
        id="tiles",
        lengths_q=(65, 0, 130, 1, 64),
        lengths_k=(32, 9, 1, 0, 17),
        num_heads=4,
        num_heads_kv=4,
        head_dim=64,
        post_scale=0.25,
    ),
]


@pytest.fixture
def few_keys_rule(monkeypatch):
    """Batches of any size fall under the rule."""
    from gem_kernels._src.gdpa_norm_block import selection

    monkeypatch.setattr(selection, "MIN_PROGRAMS", 0)


@pytest.fixture
def few_keys(monkeypatch):
    """Batches of any size take the kernels for few keys; counts their launches."""
    from gem_kernels._src.gdpa_norm_block import few_keys, launch, selection

    calls = []
    monkeypatch.setattr(selection, "MIN_PROGRAMS", 0)
    for name in ("launch_few_keys_forward", "launch_few_keys_backward"):
        function = getattr(few_keys, name)
        monkeypatch.setattr(launch, name, lambda *args, f=function: calls.append(f.__name__) or f(*args))
    return calls


@interpreted
@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("case", FEW_KEYS, ids=lambda case: case.id)
def test_interpreted_kernels_of_few_keys_match_reference(case, few_keys):
    inputs = case.inputs(torch.float16)
    assert_all_match(run_kernels(case, inputs), case, inputs)
    assert few_keys == ["launch_few_keys_forward", "launch_few_keys_backward"] * (case.id != "no-sequences")


def test_kernels_of_few_keys_are_chosen_by_sizes_alone():
    none = Parameters(None, None, None)
    q, k = torch.empty(0, 4, 64, dtype=torch.bfloat16), torch.empty(0, 4, 64, dtype=torch.bfloat16)
    options = Options(512, 16, "gelu", 1.0, 1.0, True, True, 1e-5)
    assert has_few_keys(q, k, none, options, 32)
    assert not has_few_keys(q, k, none, options, 31)
    assert not has_few_keys(q, k, none, options._replace(max_seqlen_k=33), 32)
    assert not has_few_keys(q, k, none._replace(rms_weight=torch.ones(256)), options, 32)
    assert not has_few_keys(q, k[:, :2], none, options, 32)
    assert not has_few_keys(q.float(), k.float(), none, options, 32)
    assert not has_few_keys(q.repeat(1, 4, 1), k.repeat(1, 4, 1), none, options, 32)


@pytest.mark.parametrize("case", [CASES[1], CASES[6], CASES[7]], ids=lambda case: case.id)
def test_reference_backward_is_the_gradient_of_the_reference(case):
    inputs = case.inputs(torch.float64)

    def forward(q, k, v, *, max_seqlen_q, max_seqlen_k, **options):
        return reference(q, k, v, **options)

    for actual, wanted in zip(oracle(case, inputs), run_op(case, inputs, forward), strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("case", [CASES[1], CASES[6]], ids=lambda case: case.id)
def test_is_its_parts(case):
    def parts(q, k, v, *, norm_weight, norm_bias, rms_weight, query_residual, residual, **options):
        features = (q.shape[1] * q.shape[2],)
        normed = functional.layer_norm(q.flatten(1), features, norm_weight, norm_bias, 1e-5)
        total = gdpa(normed.view(q.shape), k, v, **options).flatten(1)
        total = total + normed if query_residual else total
        out = functional.rms_norm(total, features, rms_weight, 1e-5).view(q.shape)
        return out + q if residual else out

    inputs = case.inputs(torch.float64)
    for actual, wanted in zip(run_op(case, inputs), run_op(case, inputs, parts), strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-10, atol=1e-10)


def test_gradcheck():
    case = Case(id="", lengths_q=(0, 3, 2), lengths_k=(2, 4, 0), head_dim=3, activation="silu", weights=WEIGHTS)
    x, weights = case.inputs(torch.float64)
    leaves = [t.requires_grad_() for t in (x.q, x.k, x.v, *weights.values())]

    def block(q, k, v, *rest):
        return gdpa_norm_block(
            q,
            k,
            v,
            offsets_q=x.offsets_q,
            offsets_k=x.offsets_k,
            max_seqlen_q=3,
            max_seqlen_k=4,
            **dict(zip(weights, rest, strict=True)),
            **case.options,
        )

    torch.autograd.gradcheck(block, leaves)


# ---------------------------------------------------------------- safety


def assert_no_leak(run, value, dtype=torch.float32):
    """Write ``value`` into sequence 2, queries, keys and values; nothing of another sequence may change by a bit."""
    case = Case(id="", weights=())
    x, weights = inputs = case.inputs(dtype)
    before = run(case, inputs)
    inside_q, inside_k = slice(*x.offsets_q[2:4].tolist()), slice(*x.offsets_k[2:4].tolist())
    for t, rows in ((x.q, inside_q), (x.k, inside_k), (x.v, inside_k)):
        t[rows] = value
    after = run(case, (x, weights))
    for name, rows, a, b in zip(names(case), (inside_q, inside_q, inside_k, inside_k), before, after, strict=True):
        outside = torch.ones(a.shape[0], dtype=torch.bool)
        outside[rows] = False
        assert torch.equal(a[outside], b[outside]), name
        assert not torch.equal(a[rows], b[rows]), name


@pytest.mark.parametrize("value", [3.0, float("nan")])
def test_no_value_reaches_another_sequence(value):
    assert_no_leak(run_op, value)


@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("value", [3.0, float("nan")])
def test_no_value_reaches_another_sequence_in_the_kernels(value):
    assert_no_leak(run_kernels, value)


@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("value", [3.0, float("nan")])
def test_no_value_reaches_another_sequence_in_the_kernels_of_few_keys(value, few_keys):
    assert_no_leak(run_kernels, value, torch.float16)
    assert few_keys


@pytest.mark.parametrize("recompute", [True, False])
def test_keeps_its_inputs_and_three_numbers_per_row_and_two_rows_on_request(recompute):
    case = CASES[1]
    x, weights = case.inputs(torch.float32)
    leaves = {"q": x.q, "k": x.k, "v": x.v, **weights}
    leaves = {name: t.requires_grad_() for name, t in leaves.items()}
    saved = []
    sides = {"offsets_q": x.offsets_q, "offsets_k": x.offsets_k, "max_seqlen_q": 33, "max_seqlen_k": 16}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        gdpa_norm_block(**leaves, **sides, recompute=recompute, **case.options)
    known = {t.untyped_storage().data_ptr() for t in (*leaves.values(), x.offsets_q, x.offsets_k)}
    new = [tuple(t.shape) for t in saved if t.untyped_storage().data_ptr() not in known]
    assert new == [(x.q.shape[0],)] * 3 + [tuple(x.q.shape)] * (0 if recompute else 2)


def test_inference_keeps_nothing(monkeypatch):
    from gem_kernels import gdpa_norm_block as module_function

    seen = []
    op = module_function.__globals__["gdpa_norm_block_op"]
    monkeypatch.setitem(
        module_function.__globals__, "gdpa_norm_block_op", lambda *args: seen.append(op(*args)) or seen[-1]
    )
    case = CASES[0]
    x, _ = case.inputs(torch.float32)
    sides = {"offsets_q": x.offsets_q, "offsets_k": x.offsets_k, "max_seqlen_q": 33, "max_seqlen_k": 16}
    with torch.no_grad():
        gdpa_norm_block(x.q, x.k, x.v, **sides, recompute=False)
    gdpa_norm_block(x.q, x.k, x.v, **sides, recompute=False)
    assert [out[4].shape[0] for out in seen] == [0, x.q.shape[0]]


def test_few_keys_keep_nothing(few_keys_rule):
    case = CASES[0]
    x, _ = case.inputs(torch.bfloat16)
    saved = []
    sides = {"offsets_q": x.offsets_q, "offsets_k": x.offsets_k, "max_seqlen_q": 33, "max_seqlen_k": 16}
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        out = gdpa_norm_block(x.q.requires_grad_(), x.k, x.v, **sides, recompute=False, **case.options)
    assert sum(t.numel() for t in saved if t.shape[0] == x.q.shape[0] and t.dim() == 3) == x.q.numel()
    out.backward(x.do)
    assert torch.equal(x.q.grad, run_op(case, case.inputs(torch.bfloat16))[1])


# ---------------------------------------------------------------- as an op


@pytest.mark.parametrize("case", [CASES[0], CASES[1], CASES[11]], ids=lambda case: case.id)
def test_opcheck(case):
    x, weights = case.inputs(torch.float32)
    tensors = [x.q, x.k, x.v, x.offsets_q, x.offsets_k, *(weights.get(name) for name in WEIGHTS)]
    plain = list(tensors)
    tensors = [t.clone().requires_grad_() if t is not None and t.is_floating_point() else t for t in tensors]
    options = op_options(case, x)
    for recompute in (True, False):
        torch.library.opcheck(gdpa_norm_block_op, (*tensors, *options, False, None, recompute))
    _, *statistics, normed, total = gdpa_norm_block_op(*plain, *options, False, None, False)
    for kept in ((None, None), (normed, total)):
        torch.library.opcheck(gdpa_norm_block_backward_op, (x.do, *plain, *statistics, *options, None, *kept))


def test_compiles_as_one_graph_and_checkpoints():
    torch._dynamo.reset()
    case = CASES[1]
    inputs = case.inputs(torch.float32)
    compiled = torch.compile(gdpa_norm_block, fullgraph=True, backend="aot_eager")
    keeping = torch.compile(partial(gdpa_norm_block, recompute=False), fullgraph=True, backend="aot_eager")

    def recomputed(q, k, v, **options):
        return checkpoint(lambda q, k, v: gdpa_norm_block(q, k, v, **options), q, k, v, use_reentrant=False)

    expected = run_op(case, inputs)
    for function in (compiled, keeping, recomputed):
        for actual, wanted in zip(run_op(case, inputs, function), expected, strict=True):
            assert torch.equal(actual, wanted)


def test_autocast_casts_the_operands():
    case = CASES[1]
    x, weights = case.inputs(torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, *gradients = run_op(case, (x._replace(do=x.do.bfloat16()), weights))
    assert all(gradient.dtype == torch.float32 for gradient in gradients)
    half = x.to(torch.bfloat16), {name: w.bfloat16() for name, w in weights.items()}
    assert torch.equal(out, run_op(case, half)[0])


def test_flops_are_those_of_the_attention():
    case = Case(id="", num_heads=4, num_heads_kv=2)
    pairs = sum(a * b for a, b in zip(case.lengths_q, case.lengths_k, strict=True))
    with FlopCounterMode(display=False) as counter:
        run_op(case, case.inputs(torch.float32))
    counts = {str(op): n for op, n in counter.get_flop_counts()["Global"].items()}
    forward = 4 * pairs * 4 * 16
    assert counts == {
        "gem_kernels.gdpa_norm_block": forward,
        "gem_kernels.gdpa_norm_block_backward": forward * 5 // 2,
    }


# ---------------------------------------------------------------- bad input

X = torch.zeros(6, 2, 16)
OFFSETS = torch.tensor([0, 2, 6])
GOOD = {"q": X, "k": X, "v": X, "offsets_q": OFFSETS, "offsets_k": OFFSETS, "max_seqlen_q": 4, "max_seqlen_k": 4}
BAD = [
    ({"q": torch.zeros(6, 32)}, ValueError, r"`q` must have shape \(T, H, D\)"),
    ({"v": torch.zeros(6, 2, 8)}, ValueError, "`v` must have the head dim of `q`, 16, which .* got 8"),
    ({"k": X.double()}, TypeError, "`k` must have the dtype of `q`"),
    ({"norm_weight": torch.zeros(16)}, ValueError, r"`norm_weight` must have shape \(H \* D,\) = \(32,\), got \(16,\)"),
    ({"norm_bias": [1.0]}, TypeError, "`norm_bias` must be a Tensor or None, got list"),
    ({"rms_weight": torch.zeros(32).double()}, TypeError, "`rms_weight` must have the dtype of `q`"),
    ({"activation": "tanh"}, ValueError, "`activation` must be one of .*, got 'tanh'"),
    ({"recompute": 1}, TypeError, "`recompute` must be a bool, got int"),
    ({"eps": -1.0}, ValueError, "`eps` must be >= 0, got -1.0"),
    ({"pre_scale": float("nan")}, ValueError, "`pre_scale` must be finite, got nan"),
    ({"offsets_q": torch.tensor([0, 2, 5])}, ValueError, "`offsets_q` must end at the number of packed rows, 6, got 5"),
    ({"max_seqlen_k": 3}, ValueError, "`max_seqlen_k` must be at least the longest sequence"),
]


@pytest.mark.parametrize(("change", "error", "message"), BAD, ids=[message[:40] for *_, message in BAD])
def test_bad_input_is_named(change, error, message):
    with pytest.raises(error, match=f"gdpa_norm_block: .*{message}"):
        gdpa_norm_block(**(GOOD | change))


# ---------------------------------------------------------------- CUDA

GPU_CASES = [
    *CASES,
    Case(
        id="production",
        lengths_q=(700, 0, 1, 300),
        lengths_k=(128, 128, 64, 100),
        num_heads=4,
        num_heads_kv=4,
        head_dim=128,
        activation="gelu_approx",
        pre_scale=0.1,
        weights=WEIGHTS,
    ),
    Case(id="wide", lengths_q=(40, 9), lengths_k=(64, 8), num_heads=8, num_heads_kv=8, head_dim=256, pre_scale=0.05),
]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("case", GPU_CASES, ids=[case.id for case in GPU_CASES])
def test_cuda_matches_reference(case, dtype):
    assert_all_match(run_op(case, case.inputs(dtype, "cuda")), case, case.inputs(dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", FEW_KEYS, ids=lambda case: case.id)
def test_cuda_few_keys_matches_reference(case, dtype, few_keys):
    results = [run_op(case, case.inputs(dtype, "cuda")) for _ in range(2)]
    assert_all_match(results[0], case, case.inputs(dtype))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
    assert few_keys == ["launch_few_keys_forward", "launch_few_keys_backward"] * 2 * (case.id != "no-sequences")


@pytest.mark.gpu
def test_cuda_repeats_compiles_and_does_not_wait():
    case = GPU_CASES[-2]
    inputs = case.inputs(torch.bfloat16, "cuda")
    expected = run_op(case, inputs)
    compiled = torch.compile(gdpa_norm_block, fullgraph=True)
    for function in (gdpa_norm_block, compiled):
        for actual, wanted in zip(run_op(case, inputs, function), expected, strict=True):
            assert torch.equal(actual, wanted)
    torch.cuda.set_sync_debug_mode("error")
    try:
        run_op(case, inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu
def test_cuda_batches_of_any_size_share_a_kernel(count_variants):
    from gem_kernels._src.gdpa_norm_block import rows

    run_op(CASES[0], CASES[0].inputs(torch.bfloat16, "cuda"))
    before = count_variants(rows)
    assert before >= 4
    for length in (1, 16, 17, 160, 2000):
        case = Case(id="", lengths_q=(length,), lengths_k=(8,))
        run_op(case, case.inputs(torch.bfloat16, "cuda"))
    assert count_variants(rows) == before


@pytest.mark.gpu
@pytest.mark.memory
def test_cuda_more_elements_than_int32_holds():
    rows, tail, heads, dim = 2**22 + 1000, 200, 4, 128
    free, _ = torch.cuda.mem_get_info()
    needed = 12 * rows * heads * dim * 2
    if free < needed:
        pytest.skip(f"needs {needed >> 30} GiB of free GPU memory, {free >> 30} are free")
    assert rows * heads * dim > 2**31
    case = Case(id="", lengths_q=(tail,), lengths_k=(64,), num_heads=heads, num_heads_kv=heads, head_dim=dim)
    small, _ = case.inputs(torch.bfloat16)
    q, do = (torch.zeros(rows, heads, dim, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    q[-tail:], do[-tail:] = small.q.cuda(), small.do.cuda()
    big = small.to("cuda")._replace(
        q=q,
        do=do,
        offsets_q=torch.tensor([0, rows - tail, rows], device="cuda"),
        offsets_k=torch.tensor([0, 0, 64], device="cuda"),
        max_seqlen_q=rows,
    )
    out, dq, dk, dv = run_op(case, (big, {}))
    assert_all_match((out[-tail:].contiguous(), dq[-tail:].contiguous(), dk, dv), case, (small, {}))
    del out, dq, big, q, do
    torch.cuda.empty_cache()
