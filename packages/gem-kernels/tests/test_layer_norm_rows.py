"""layer_norm_rows and its backward against autograd of torch's layer norm in float64: CPU, interpreter, CUDA."""

import os
from dataclasses import dataclass

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from gem_kernels._src.eager import launches_directly
from gem_kernels._src.layer_norm_rows.op import layer_norm_rows_backward_op, layer_norm_rows_op
from gem_kernels.layer_norm_rows import layer_norm_rows, layer_norm_rows_backward
from gem_kernels.testing import assert_matches_oracle, summation_floor

interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="runs kernels on CPU tensors: needs TRITON_INTERPRET=1"
)


@dataclass(frozen=True, kw_only=True)
class Case:
    id: str
    rows: int = 37
    features: int = 32
    readers: int = 1
    direct: bool = False
    contiguous: bool = True

    def inputs(self, dtype, device="cpu"):
        """(rows, gradients of the normalised rows, gradient of the rows themselves or None)."""
        generator = torch.Generator().manual_seed(0)
        width = self.features if self.contiguous else 2 * self.features

        def draw(shift=0.0):
            x = shift + torch.randn(self.rows, width, generator=generator)
            return x.to(device=device, dtype=dtype)[:, : self.features]

        return draw(0.5), [draw() for _ in range(self.readers)], draw() if self.direct else None


CASES = [
    Case(id="one"),
    Case(id="direct", direct=True),
    Case(id="three", readers=3, direct=True, features=64),
    Case(id="four", readers=4),
    Case(id="odd", readers=2, direct=True, features=24, rows=65),
    Case(id="strided", readers=2, direct=True, contiguous=False),
    Case(id="one-row", rows=1, readers=2),
    Case(id="no-rows", rows=0, readers=2, direct=True),
]


def oracle(x, grads, direct, dtype=torch.float64):
    """(normalised rows, gradient of the rows), by autograd."""
    x = x.detach().to("cpu", dtype).requires_grad_()
    normalized = functional.layer_norm(x, x.shape[1:])
    total = sum(grad.to("cpu", dtype) for grad in grads)
    dx = torch.autograd.grad(normalized, x, total)[0]
    return normalized.detach(), dx if direct is None else dx + direct.to("cpu", dtype)


def assert_all_match(results, inputs):
    dtype = inputs[0].dtype
    exact, eager = oracle(*inputs), oracle(*inputs, dtype)
    for name, actual, wanted, plain in zip(("normalized", "dx"), results, exact, eager, strict=True):
        assert actual.dtype == dtype, name
        assert actual.is_contiguous(), name
        if dtype == torch.float64:
            torch.testing.assert_close(actual, wanted, rtol=1e-10, atol=1e-10)
        else:
            assert_matches_oracle(name, actual, wanted, plain, floor=summation_floor(wanted, dtype))


def run(x, grads, direct):
    normalized, mean, rstd = layer_norm_rows(x)
    assert mean.shape == rstd.shape == x.shape[:1]
    return normalized, layer_norm_rows_backward(grads, x, mean, rstd, direct=direct)


def run_kernels(x, grads, direct):
    from gem_kernels._src.layer_norm_rows.kernels import launch_backward, launch_forward

    normalized, mean, rstd = launch_forward(x, 1e-5)
    return normalized, launch_backward(grads, x, mean, rstd, direct)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_cpu_matches_autograd(case, dtype):
    inputs = case.inputs(dtype)
    assert_all_match(run(*inputs), inputs)


@interpreted
@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_interpreted_kernels_match_autograd(case, dtype):
    inputs = case.inputs(dtype)
    assert_all_match(run_kernels(*inputs), inputs)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@pytest.mark.parametrize("function", [run, pytest.param(run_kernels, marks=interpreted)])
def test_no_row_changes_another(function):
    x, grads, direct = CASES[2].inputs(torch.float32)
    before = function(x, grads, direct)
    x[5] = float("nan")
    for a, b in zip(before, function(x, grads, direct), strict=True):
        assert b[5].isnan().all()
        assert torch.equal(torch.cat((a[:5], a[6:])), torch.cat((b[:5], b[6:])))


def test_only_plain_tensors_on_cuda_are_launched_directly():
    assert not launches_directly(torch.zeros(1))
    with FakeTensorMode():
        assert not launches_directly(torch.zeros(1, device="cuda"))


def test_opcheck():
    x, grads, direct = CASES[2].inputs(torch.float32)
    torch.library.opcheck(layer_norm_rows_op, (x, 1e-5))
    _, mean, rstd = layer_norm_rows(x)
    torch.library.opcheck(layer_norm_rows_backward_op, (grads, x, mean, rstd, direct))
    torch.library.opcheck(layer_norm_rows_backward_op, (grads, x, mean, rstd, None))


X = torch.zeros(3, 8)
BAD = [
    (lambda: layer_norm_rows(X[None]), ValueError, r"layer_norm_rows: `x` must have shape \(M, N\), got \(1, 3, 8\)"),
    (lambda: layer_norm_rows(X, eps=-1.0), ValueError, "`eps` must be >= 0, got -1.0"),
    (lambda: backward([]), ValueError, "`grads` must hold 1 to 4 tensors, got 0"),
    (lambda: backward([X] * 5), ValueError, "`grads` must hold 1 to 4 tensors, got 5; add some first"),
    (lambda: backward([X, X[:2]]), ValueError, r"`grads\[1\]` must have the shape of `x`, \(3, 8\), got \(2, 8\)"),
    (lambda: backward([X.double()]), TypeError, r"`grads\[0\]` must have the dtype of `x`"),
    (lambda: backward([X], mean=X[:, 0:2]), ValueError, r"`mean` must have shape \(M,\) = \(3,\), got \(3, 2\)"),
    (lambda: backward([X], direct=X[:, :4]), ValueError, r"`direct` must have the shape of `x`"),
    (lambda: backward([X], mean=X[:, 0].to("meta")), ValueError, "`mean` must be on the device of `x`, cpu, got meta"),
    (lambda: backward([X], mean=X[:, 0].double()), TypeError, "`mean` must be torch.float32, got torch.float64"),
]


def backward(grads, mean=X[:, 0], direct=None):
    return layer_norm_rows_backward(grads, X, mean, X[:, 0], direct=direct)


@pytest.mark.parametrize(("call", "error", "message"), BAD, ids=[message[:40] for *_, message in BAD])
def test_bad_input_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call()


GPU_CASES = [*CASES, Case(id="usual", rows=5000, features=256, readers=3, direct=True), Case(id="wide", features=3000)]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("case", GPU_CASES, ids=lambda case: case.id)
def test_cuda_matches_autograd(case, dtype):
    inputs = case.inputs(dtype, "cuda")
    results = run(*inputs)
    assert_all_match([x.cpu() for x in results], case.inputs(dtype))
    assert all(torch.equal(a, b) for a, b in zip(results, run(*inputs), strict=True))
    x, grads, direct = inputs
    ops = layer_norm_rows_op(x, 1e-5)
    assert torch.equal(ops[0], results[0])
    assert torch.equal(layer_norm_rows_backward_op(grads, x, *ops[1:], direct), results[1])
