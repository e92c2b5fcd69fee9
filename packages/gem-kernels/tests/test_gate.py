"""gate and column_sums against float64: composed on the CPU, interpreted kernels, CUDA."""

import os

import pytest
import torch

from gem_kernels.column_sums import MIN_ROWS, column_sums
from gem_kernels.gate import gate

interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="runs kernels on CPU tensors: needs TRITON_INTERPRET=1"
)
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def draw(count, shape, dtype, device="cpu"):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator).to(device, dtype) for _ in range(count)]


def gated(x, z, grad):
    leaves = [t.detach().clone().requires_grad_() for t in (x, z)]
    out = gate(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def expected(x, z, grad):
    return gated(*(t.cpu().double() for t in (x, z, grad)))


def assert_close(actual, exact, eps):
    for value, reference in zip(actual, exact, strict=True):
        torch.testing.assert_close(value.cpu().double(), reference, rtol=eps, atol=eps)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 5, 7), (0,), (2, 4096)], ids=str)
def test_gate_on_the_cpu(shape, dtype):
    x, z, grad = draw(3, shape, dtype)
    assert_close(gated(x, z, grad), expected(x, z, grad), 4 * torch.finfo(dtype).eps)


def test_gate_has_second_derivatives_on_the_cpu():
    x, z = draw(2, (3, 4), torch.float64)
    torch.autograd.gradgradcheck(gate, (x.requires_grad_(), z.requires_grad_()))


@interpreted
@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("shape", [(3, 5, 7), (0,), (2, 3000)], ids=str)
def test_interpreted_gate(shape):
    from gem_kernels._src.gate.kernels import launch_backward, launch_forward

    x, z, grad = draw(3, shape, torch.float16)
    assert_close([launch_forward(x, z), *launch_backward(grad, x, z)], expected(x, z, grad), 2**-10)


@interpreted
@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("shape", [(70, 256), (1, 5), (0, 3), (3, 0), (2000, 130)], ids=str)
def test_interpreted_sums(shape):
    from gem_kernels._src.column_sums.kernels import launch

    (x,) = draw(1, shape, torch.float16)
    torch.testing.assert_close(launch(x).double(), x.double().sum(0), rtol=1e-5, atol=1e-4)
    strided = x.t().contiguous().t()
    assert torch.equal(launch(strided), launch(x))


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float64], ids=str)
def test_sums_on_the_cpu(dtype):
    (x,) = draw(1, (70, 6), dtype)
    sums = column_sums(x)
    assert sums.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(sums.double(), x.detach().double().sum(0), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("function", "args", "error", "words"),
    [
        (gate, (torch.zeros(2), torch.zeros(3)), ValueError, r"gate: `z` must have the shape of `x`, \(2,\)"),
        (gate, (torch.zeros(2), torch.zeros(2).double()), TypeError, "gate: `z` must"),
        (gate, (torch.zeros(2).int(), torch.zeros(2)), TypeError, "gate: `x` must"),
        (column_sums, (torch.zeros(2),), ValueError, r"column_sums: `x` must have shape \(M, N\), got \(2,\)"),
        (column_sums, (torch.zeros(2, 2).int(),), TypeError, "column_sums: `x` must"),
        (column_sums, (torch.zeros(2, 2, requires_grad=True),), ValueError, "column_sums: `x` gets no gradient"),
    ],
)
def test_bad_input_is_named(function, args, error, words):
    with pytest.raises(error, match=words):
        function(*args)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(3, 5, 7), (0,), (300, 64, 256)], ids=str)
def test_cuda_gate(shape, dtype):
    x, z, grad = draw(3, shape, dtype, "cuda")
    # Of three roundings in float32, at numbers up to 5.
    assert_close(
        gated(x, z, grad), expected(x, z, grad), max(2 * torch.finfo(dtype).eps, 16 * torch.finfo(torch.float32).eps)
    )


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "shape", [(MIN_ROWS, 256), (MIN_ROWS + 7, 1000), (MIN_ROWS - 1, 3), (9 * MIN_ROWS, 5)], ids=str
)
def test_cuda_sums(shape, dtype):
    (x,) = draw(1, shape, dtype, "cuda")
    sums = column_sums(x)
    torch.testing.assert_close(sums.double(), x.double().sum(0), rtol=1e-5, atol=1e-6 * shape[0])
    assert torch.equal(sums, column_sums(x))
