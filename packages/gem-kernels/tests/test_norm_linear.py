"""rmsnorm_linear and linear_norm against their float64 references: CPU kernels, interpreted Triton kernels, CUDA."""

import os
from dataclasses import dataclass

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from gem_kernels import linear_norm, reference, rmsnorm_linear
from gem_kernels._src.norm_linear.op import (
    linear_norm_backward_op,
    linear_norm_op,
    rmsnorm_linear_backward_op,
    rmsnorm_linear_op,
)
from gem_kernels.testing import assert_matches_oracle, assert_rms, summation_floor

interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="runs kernels on CPU tensors: needs TRITON_INTERPRET=1"
)
ORACLES = {
    "rmsnorm_linear": (reference.rmsnorm_linear, reference.rmsnorm_linear_backward),
    "linear_norm": (reference.linear_norm, reference.linear_norm_backward),
}
FUNCTIONS = {"rmsnorm_linear": rmsnorm_linear, "linear_norm": linear_norm}


@dataclass(frozen=True, kw_only=True)
class Case:
    id: str
    op: str
    rows: int
    in_features: int
    out_features: int
    norm: str | None = None
    bias: bool = False
    norm_weight: bool = False
    norm_bias: bool = False
    contiguous: bool = True
    offset: float = 0.0
    """Added to every input: the mean that a layer norm subtracts."""

    @property
    def options(self):
        return {} if self.norm is None else {"norm": self.norm}

    def inputs(self, dtype, device="cpu"):
        """(x, parameters by name, gradient of the output), drawn on the CPU."""
        generator = torch.Generator().manual_seed(0)

        def draw(*shape, scale=1.0, shift=0.0):
            return (torch.randn(*shape, generator=generator) * scale + shift).to(device=device, dtype=dtype)

        x = draw(self.rows, self.in_features, shift=self.offset)
        normed = self.in_features if self.op == "rmsnorm_linear" else self.out_features
        tensors = {"weight": draw(self.out_features, self.in_features, scale=self.in_features**-0.5)}
        if self.bias:
            tensors["bias"] = draw(self.out_features)
        if self.norm_weight:
            tensors["norm_weight"] = draw(normed, shift=1.0)
        if self.norm_bias:
            tensors["norm_bias"] = draw(normed)
        dout = draw(self.rows, self.out_features)
        if not self.contiguous:
            x = torch.cat([x, torch.full_like(x, float("nan"))], 1)[:, : self.in_features]
            tensors["weight"] = tensors["weight"].T.contiguous().T
            dout = dout.T.contiguous().T
        return x, tensors, dout


def rms(id, rows, in_features, out_features, **options):
    return Case(
        id=f"rmsnorm_linear-{id}",
        op="rmsnorm_linear",
        rows=rows,
        in_features=in_features,
        out_features=out_features,
        **options,
    )


def post(id, rows, in_features, out_features, norm="layer", **options):
    return Case(
        id=f"linear_norm-{id}",
        op="linear_norm",
        rows=rows,
        in_features=in_features,
        out_features=out_features,
        norm=norm,
        **options,
    )


CASES = [
    rms("plain", 70, 64, 48),
    rms("all", 70, 64, 48, bias=True, norm_weight=True),
    rms("odd", 131, 37, 19, bias=True, norm_weight=True),
    rms("two-tiles", 130, 72, 300, bias=True),
    rms("strided", 33, 40, 24, bias=True, norm_weight=True, contiguous=False),
    rms("one-row", 1, 16, 16),
    rms("empty", 0, 16, 8, bias=True, norm_weight=True),
    rms("one-feature", 5, 1, 1, bias=True),
    post("plain", 70, 64, 48),
    post("rms", 70, 64, 48, norm="rms"),
    post("all", 70, 64, 48, bias=True, norm_weight=True, norm_bias=True),
    post("rms-weight", 70, 64, 48, norm="rms", norm_weight=True),
    post("norm-bias", 70, 64, 48, norm_bias=True),
    post("odd", 131, 37, 19, bias=True, norm_weight=True, norm_bias=True),
    post("two-products", 130, 72, 300, bias=True, norm_weight=True, norm_bias=True),
    post("two-products-rms", 130, 64, 512, norm="rms"),
    post("wide", 9, 24, 700, bias=True, norm_weight=True),
    post("wide-rms", 9, 24, 700, norm="rms"),
    post("mean", 40, 32, 300, bias=True, offset=3.0),
    post("strided", 33, 40, 24, bias=True, norm_weight=True, contiguous=False),
    post("one-row", 1, 16, 16),
    post("empty", 0, 16, 8, bias=True, norm_weight=True, norm_bias=True),
]
ids = [case.id for case in CASES]


def oracle(case, inputs, dtype=torch.float64):
    """Output and gradients by name, of the reference in ``dtype`` on the CPU."""
    forward, backward = ORACLES[case.op]
    x, tensors, dout = inputs
    x, dout = (t.detach().to("cpu", dtype) for t in (x, dout))
    tensors = {name: t.detach().to("cpu", dtype) for name, t in tensors.items()}
    gradients = backward(dout, x, **tensors, **case.options)._asdict()
    return {"out": forward(x, **tensors, **case.options)} | {n: g for n, g in gradients.items() if g is not None}


def run_op(case, inputs, function=None):
    """The same through autograd of the public function."""
    x, tensors, dout = inputs
    leaves = {"x": x, **tensors}
    leaves = {name: t.detach().requires_grad_() for name, t in leaves.items()}
    out = (function or FUNCTIONS[case.op])(**leaves, **case.options)
    gradients = torch.autograd.grad(out, tuple(leaves.values()), dout)
    return {"out": out.detach()} | {f"d{n}": g for n, g in zip(leaves, gradients, strict=True)}


def run_fused(case, inputs):
    """The same by the Triton kernels, the fused ones also for float32, on whatever device the tensors are."""
    from gem_kernels._src.norm_linear import backward, matmul

    x, tensors, dout = inputs
    weight, bias, norm_weight, norm_bias = (
        tensors.get(name) for name in ("weight", "bias", "norm_weight", "norm_bias")
    )
    if case.op == "rmsnorm_linear":
        out, rrms = matmul.launch_fused_rmsnorm_linear(x, matmul.fold(weight, norm_weight), bias, 1e-6)
        gradients = backward.launch_rmsnorm_linear_backward(dout, x, weight, norm_weight, rrms, bias is not None)
    else:
        is_layer = case.norm == "layer"
        launch = matmul.launch_fused_linear_norm if case.out_features <= 512 else matmul.launch_linear_norm
        out, normalized, rstd = launch(x, weight, bias, norm_weight, norm_bias, is_layer, 1e-5)
        if norm_weight is None and norm_bias is None:
            assert normalized.numel() == 0
            normalized = out
        sums = any(t is not None for t in (bias, norm_weight, norm_bias))
        gradients = backward.launch_linear_norm_backward(dout, x, weight, norm_weight, normalized, rstd, is_layer, sums)
    names = ("dx", "dweight", "dbias", "dnorm_weight", "dnorm_bias")
    found = dict(zip(names, gradients, strict=False))
    return {"out": out} | {name: g for name, g in found.items() if name == "dx" or name[1:] in tensors}


def assert_all_match(results, case, inputs):
    dtype = inputs[0].dtype
    exact, eager = oracle(case, inputs), oracle(case, inputs, dtype)
    assert results.keys() == exact.keys()
    for name, result in results.items():
        assert result.dtype == dtype, name
        if dtype == torch.float64:
            torch.testing.assert_close(result, exact[name], rtol=1e-11, atol=1e-11)
            continue
        # Sums over rows and features run in another order than in the library.
        floor = summation_floor(exact[name], dtype)
        assert_matches_oracle(name, result, exact[name], eager[name], floor=floor)
        if dtype == torch.bfloat16 and min(case.in_features, case.out_features) > 1:
            assert_rms(name, result, exact[name], ratio=6e-3)


# ---------------------------------------------------------------- values


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=ids)
def test_cpu_matches_reference(case, dtype):
    inputs = case.inputs(dtype)
    results = run_op(case, inputs)
    assert results["out"].is_contiguous()
    assert_all_match(results, case, inputs)


@interpreted
@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=ids)
def test_interpreted_kernels_match_reference(case, dtype):
    inputs = case.inputs(dtype)
    assert_all_match(run_fused(case, inputs), case, inputs)


@interpreted
@pytest.mark.parametrize("case", [case for case in CASES if case.rows > 1], ids=lambda case: case.id)
def test_interpreted_float32_route_matches_reference(case):
    from gem_kernels._src.norm_linear import matmul

    x, tensors, _ = inputs = case.inputs(torch.float32)
    weight, bias, norm_weight, norm_bias = (
        tensors.get(name) for name in ("weight", "bias", "norm_weight", "norm_bias")
    )
    if case.op == "rmsnorm_linear":
        out = matmul.launch_rmsnorm_linear(x, weight, bias, norm_weight, 1e-6)[0]
    else:
        out = matmul.launch_linear_norm(x, weight, bias, norm_weight, norm_bias, case.norm == "layer", 1e-5)[0]
    exact, eager = (oracle(case, inputs, dtype)["out"] for dtype in (torch.float64, torch.float32))
    assert_matches_oracle("out", out, exact, eager, floor=summation_floor(exact, torch.float32))


@interpreted
def test_interpreted_backward_sums_over_more_tiles_than_programs(monkeypatch):
    from gem_kernels._src.norm_linear import rows

    monkeypatch.setattr(rows, "MAX_PROGRAMS", 2)
    case = next(case for case in CASES if case.id == "linear_norm-wide")
    inputs = case.inputs(torch.float32)
    assert_all_match(run_fused(case, inputs), case, inputs)


@pytest.mark.parametrize("case", [case for case in CASES if case.rows == 70], ids=lambda case: case.id)
def test_reference_backward_is_the_gradient_of_the_reference(case):
    inputs = case.inputs(torch.float64)
    expected = run_op(case, inputs, ORACLES[case.op][0])
    for name, actual in oracle(case, inputs).items():
        torch.testing.assert_close(actual, expected[name], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(("op", "norm"), [("rmsnorm_linear", None), ("linear_norm", "layer"), ("linear_norm", "rms")])
def test_gradcheck(op, norm):
    features = {"bias": True, "norm_weight": True, "norm_bias": op == "linear_norm"}
    case = Case(
        id="", op=op, rows=3, in_features=5, out_features=4, norm=norm if op == "linear_norm" else None, **features
    )
    x, tensors, _ = case.inputs(torch.float64)
    names = list(tensors)
    leaves = [t.requires_grad_() for t in (x, *tensors.values())]
    torch.autograd.gradcheck(
        lambda x, *rest: FUNCTIONS[op](x, **dict(zip(names, rest, strict=True)), **case.options), leaves
    )


def test_matches_torch_modules():
    torch.manual_seed(0)
    x = torch.randn(2, 3, 5, 24, dtype=torch.float64)
    linear, norm = torch.nn.Linear(24, 16).double(), torch.nn.LayerNorm(16).double()
    torch.nn.init.normal_(norm.weight)
    actual = linear_norm(x, linear.weight, linear.bias, norm_weight=norm.weight, norm_bias=norm.bias)
    torch.testing.assert_close(actual, norm(linear(x)), rtol=1e-12, atol=1e-12)
    before = torch.nn.RMSNorm(24, eps=1e-6).double()
    torch.nn.init.normal_(before.weight)
    actual = rmsnorm_linear(x, linear.weight, linear.bias, norm_weight=before.weight)
    torch.testing.assert_close(actual, linear(before(x)), rtol=1e-12, atol=1e-12)


# ---------------------------------------------------------------- safety


def assert_rows_are_apart(run, case, value):
    """Write ``value`` into row 3; no other row of the output or of dx may change by a bit."""
    inputs = case.inputs(torch.float32)
    before = run(case, inputs)
    inputs[0][3] = value
    after = run(case, inputs)
    others = torch.arange(case.rows) != 3
    for name in ("out", "dx"):
        assert torch.equal(before[name][others], after[name][others]), name
        assert not torch.equal(before[name][3], after[name][3]), name


LEAKS = [case for case in CASES if case.id in ("rmsnorm_linear-odd", "linear_norm-odd", "linear_norm-wide")]


@pytest.mark.parametrize("value", [3.0, float("nan"), float("inf")])
@pytest.mark.parametrize("case", LEAKS, ids=lambda case: case.id)
def test_no_value_reaches_another_row(case, value):
    assert_rows_are_apart(run_op, case, value)


@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("value", [3.0, float("nan"), float("inf")])
@pytest.mark.parametrize("case", LEAKS, ids=lambda case: case.id)
def test_no_value_reaches_another_row_in_the_kernels(case, value):
    assert_rows_are_apart(run_fused, case, value)


# ---------------------------------------------------------------- as an op

AS_OP = [case for case in CASES if case.id.endswith(("-all", "-plain", "-empty"))]


@pytest.mark.parametrize("case", AS_OP, ids=lambda case: case.id)
def test_opcheck(case):
    x, tensors, dout = case.inputs(torch.float32)
    leaves = [
        None if t is None else t.requires_grad_()
        for t in (x, *(tensors.get(name) for name in ("weight", "bias", "norm_weight", "norm_bias")))
    ]
    x, weight, bias, norm_weight, norm_bias = leaves
    plain = [None if t is None else t.detach() for t in leaves]
    if case.op == "rmsnorm_linear":
        torch.library.opcheck(rmsnorm_linear_op, (x, weight, bias, norm_weight, 1e-6))
        _, rrms = rmsnorm_linear_op(*plain[:4], 1e-6)
        torch.library.opcheck(rmsnorm_linear_backward_op, (dout, plain[0], plain[1], plain[3], rrms, bias is not None))
    else:
        torch.library.opcheck(linear_norm_op, (x, weight, bias, norm_weight, norm_bias, True, 1e-5))
        out, normalized, rstd = linear_norm_op(*plain, True, 1e-5)
        normalized = normalized if case.norm_weight else out
        torch.library.opcheck(
            linear_norm_backward_op, (dout, plain[0], plain[1], plain[3], normalized, rstd, True, case.bias)
        )


@pytest.mark.parametrize("op", FUNCTIONS)
def test_compiles_as_one_graph_and_for_all_batch_sizes(op):
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(FUNCTIONS[op], fullgraph=True, backend=counter)
    make = rms if op == "rmsnorm_linear" else post
    for rows in (5, 9, 40, 77, 130):
        case = make("", rows, 24, 16, bias=True, norm_weight=True)
        inputs = case.inputs(torch.float32)
        expected = run_op(case, inputs)
        for name, actual in run_op(case, inputs, compiled).items():
            assert torch.equal(actual, expected[name]), name
    # One graph for the first batch, one for sizes that vary.
    assert counter.frame_count <= 2


@pytest.mark.parametrize("op", FUNCTIONS)
def test_flops_are_those_of_the_matmuls(op):
    case = (rms if op == "rmsnorm_linear" else post)("", 9, 24, 16, bias=True, norm_weight=True)
    with FlopCounterMode(display=False) as counter:
        run_op(case, case.inputs(torch.float32))
    counts = {str(name): n for name, n in counter.get_flop_counts()["Global"].items()}
    assert counts == {f"gem_kernels.{op}": 2 * 9 * 24 * 16, f"gem_kernels.{op}_backward": 4 * 9 * 24 * 16}


@pytest.mark.parametrize("op", FUNCTIONS)
def test_saves_inputs_and_one_number_per_row_besides_its_output(op):
    x, weight = torch.randn(9, 24, requires_grad=True), torch.randn(16, 24, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        out = FUNCTIONS[op](x, weight)
    known = {t.untyped_storage().data_ptr() for t in (x, weight, out)}
    new = [t for t in saved if t.untyped_storage().data_ptr() not in known]
    assert [tuple(t.shape) for t in new] == [(9,)]


# ---------------------------------------------------------------- bad input

X, W = torch.zeros(6, 8), torch.zeros(4, 8)
BAD = [
    ("both", {"x": [1.0]}, TypeError, "`x` must be a Tensor, got list"),
    ("both", {"x": torch.zeros(6, 8, dtype=torch.int64)}, TypeError, "`x` must be a floating point tensor"),
    ("both", {"x": torch.zeros(6, 0)}, ValueError, r"`x` must have shape \(\.\.\., K\) with K >= 1, got \(6, 0\)"),
    ("both", {"weight": torch.zeros(4, 7)}, ValueError, r"`weight` must have shape \(N, K\) = \(N, 8\)"),
    ("both", {"weight": torch.zeros(8)}, ValueError, r"`weight` must have shape"),
    ("both", {"weight": W.double()}, TypeError, "`weight` must have the dtype of `x`"),
    ("both", {"bias": torch.zeros(8)}, ValueError, r"`bias` must have shape \(4,\), got \(8,\)"),
    ("both", {"eps": -1.0}, ValueError, "`eps` must be >= 0, got -1.0"),
    ("both", {"eps": torch.tensor(1.0)}, TypeError, "`eps` must be a Python float, got Tensor"),
    ("rmsnorm_linear", {"norm_weight": torch.zeros(4)}, ValueError, r"`norm_weight` must have shape \(8,\)"),
    ("linear_norm", {"norm_weight": torch.zeros(8)}, ValueError, r"`norm_weight` must have shape \(4,\)"),
    ("linear_norm", {"norm_bias": torch.zeros(8)}, ValueError, r"`norm_bias` must have shape \(4,\)"),
    ("linear_norm", {"norm": "batch"}, ValueError, "`norm` must be one of layer, rms, got 'batch'"),
]


BAD_CALLS = [(op, *rest) for which, *rest in BAD for op in FUNCTIONS if which in ("both", op)]


@pytest.mark.parametrize(
    ("op", "change", "error", "message"), BAD_CALLS, ids=[f"{o}-{m[:30]}" for o, _, _, m in BAD_CALLS]
)
def test_bad_input_is_named(op, change, error, message):
    with pytest.raises(error, match=f"{op}: .*{message}"):
        FUNCTIONS[op](**{"x": X, "weight": W} | change)


def test_a_norm_too_wide_for_the_kernels_is_named():
    from gem_kernels._src.norm_linear.rows import check_features

    with pytest.raises(ValueError, match="linear_norm: a norm on CUDA must be over at most 16384 features, got 20000"):
        check_features("linear_norm", 20000)


# ---------------------------------------------------------------- CUDA

GPU_CASES = [
    *CASES,
    rms("512", 1000, 512, 512, norm_weight=True),
    rms("1024", 300, 1024, 256, bias=True),
    post("512", 1000, 512, 512, bias=True),
    post("512-rms", 1000, 512, 512, norm="rms", norm_weight=True),
    post("256", 1000, 384, 256, norm_weight=True, norm_bias=True),
    post("1024", 300, 256, 1024, norm_weight=True, norm_bias=True),
    post("16384", 20, 64, 16384, bias=True, norm_weight=True),
]
HALF_AND_FULL = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)


@pytest.mark.gpu
@HALF_AND_FULL
@pytest.mark.parametrize("case", GPU_CASES, ids=[case.id for case in GPU_CASES])
def test_cuda_matches_reference(case, dtype):
    assert_all_match(run_op(case, case.inputs(dtype, "cuda")), case, case.inputs(dtype))


@pytest.mark.gpu
@pytest.mark.parametrize("op", FUNCTIONS)
def test_cuda_repeats_compiles_and_does_not_wait(op):
    case = (rms if op == "rmsnorm_linear" else post)("", 3000, 512, 512, bias=True, norm_weight=True)
    inputs = case.inputs(torch.bfloat16, "cuda")
    expected = run_op(case, inputs)
    for _ in range(10):
        assert all(torch.equal(actual, expected[name]) for name, actual in run_op(case, inputs).items())
    torch.cuda.set_sync_debug_mode("error")
    try:
        run_op(case, inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    compiled = torch.compile(FUNCTIONS[op], fullgraph=True)
    assert all(torch.equal(actual, expected[name]) for name, actual in run_op(case, inputs, compiled).items())


@pytest.mark.gpu
@pytest.mark.parametrize("op", FUNCTIONS)
def test_cuda_batches_of_any_size_share_a_kernel(op, count_variants):
    from gem_kernels._src.norm_linear import matmul, rows

    make = rms if op == "rmsnorm_linear" else post
    run_op(make("", 5, 64, 32), make("", 5, 64, 32).inputs(torch.bfloat16, "cuda"))
    before = count_variants(matmul, rows)
    assert before >= 2
    for count in (1, 16, 17, 160, 4096):
        case = make("", count, 64, 32)
        run_op(case, case.inputs(torch.bfloat16, "cuda"))
    assert count_variants(matmul, rows) == before


@pytest.mark.gpu
@pytest.mark.memory
@pytest.mark.parametrize("op", FUNCTIONS)
def test_cuda_more_elements_than_int32_holds(op):
    rows, features, tail = 2**22 + 1000, 512, 200
    free, _ = torch.cuda.mem_get_info()
    needed = 10 * rows * features
    if free < needed:
        pytest.skip(f"needs {needed >> 30} GiB of free GPU memory, {free >> 30} are free")
    assert rows * features > 2**31
    case = (rms if op == "rmsnorm_linear" else post)("", tail, features, features, norm_weight=True)
    x, tensors, dout = case.inputs(torch.bfloat16)
    big, big_dout = (torch.zeros(rows, features, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    big[-tail:], big_dout[-tail:] = x.cuda(), dout.cuda()
    results = run_op(case, (big, {name: t.cuda() for name, t in tensors.items()}, big_dout))
    results = {name: t[-tail:] if t.shape[0] == rows else t for name, t in results.items()}
    assert_all_match(results, case, (x, tensors, dout))
    del results, big, big_dout
    torch.cuda.empty_cache()
