"""token_products against float64: composed on the CPU, interpreted kernels, CUDA."""

import os

import pytest
import torch
from torch import Tensor

from gem_kernels.token_products import token_products

interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="runs kernels on CPU tensors: needs TRITON_INTERPRET=1"
)
# (B, n, d, k): full tiles, ragged ones, one token, no sample, no token.
SHAPES = [(3, 64, 256, 16), (2, 38, 70, 8), (3, 1, 16, 5), (2, 100, 40, 33), (0, 4, 16, 4), (2, 0, 16, 4)]


def draw(shape: tuple[int, int, int, int], dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, Tensor, Tensor]:
    """x, y and the output's gradient."""
    batch, tokens, dim, rank = shape
    generator = torch.Generator().manual_seed(0)
    sizes = ((batch, tokens, dim), (batch, tokens, rank), (batch, tokens, rank))
    x, y, grad = (torch.randn(size, generator=generator).to(device) for size in sizes)
    return x.to(dtype), (y / max(tokens, 1)).to(dtype), grad.to(dtype)


def expected(x: Tensor, y: Tensor, grad: Tensor) -> list[Tensor]:
    leaves = [t.double().requires_grad_() for t in (x, y)]
    out = torch.einsum("bid,bjd,bjk->bik", leaves[0], leaves[0], leaves[1])
    return [out.detach(), *torch.autograd.grad(out, leaves, grad.double())]


def assert_close(actual: list[Tensor], exact: list[Tensor], tolerance: float) -> None:
    for value, reference in zip(actual, exact, strict=True):
        scale = reference.abs().max().item() if reference.numel() else 1.0
        torch.testing.assert_close(value.double(), reference, rtol=0, atol=tolerance * scale)


def through_autograd(x: Tensor, y: Tensor, grad: Tensor) -> list[Tensor]:
    leaves = [t.clone().requires_grad_() for t in (x, y)]
    out = token_products(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_cpu(shape):
    inputs = draw(shape, torch.float32)
    assert_close(through_autograd(*inputs), expected(*inputs), 1e-5)


def test_second_derivatives_on_the_cpu():
    x, y, _ = draw((2, 3, 4, 2), torch.float64)
    torch.autograd.gradgradcheck(token_products, (x.requires_grad_(), y.requires_grad_()))


@interpreted
@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_interpreted_kernels(shape):
    from gem_kernels._src.token_products.kernels import launch_backward, launch_forward

    x, y, grad = draw(shape, torch.float16)
    assert_close([launch_forward(x, y), *launch_backward(x, y, grad)], expected(x, y, grad), 2**-9)


@interpreted
def test_interpreted_kernels_take_strided_tensors():
    from gem_kernels._src.token_products.kernels import launch_backward, launch_forward

    x, y, grad = (t.transpose(1, 2).contiguous().transpose(1, 2) for t in draw((2, 6, 20, 4), torch.float16))
    assert_close([launch_forward(x, y), *launch_backward(x, y, grad)], expected(x, y, grad), 2**-9)


@pytest.mark.parametrize(
    ("x", "y", "error", "words"),
    [
        (torch.zeros(2, 3), torch.zeros(2, 3), ValueError, r"`x` must have shape \(B, n, d\), got \(2, 3\)"),
        (torch.zeros(2, 3, 4), torch.zeros(2, 4, 4), ValueError, r"`y` must have shape \(B, n, k\)"),
        (torch.zeros(2, 3, 4), torch.zeros(2, 3, 4).double(), TypeError, "`y` must"),
        (torch.zeros(2, 3, 4).int(), torch.zeros(2, 3, 4), TypeError, "`x` must"),
    ],
)
def test_bad_input_is_named(x, y, error, words):
    with pytest.raises(error, match=f"token_products: {words}"):
        token_products(x, y)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (700, 64, 256, 16), (9, 128, 1024, 64)], ids=str)
def test_cuda_kernels(shape, dtype):
    inputs = draw(shape, dtype, "cuda")
    actual = through_autograd(*inputs)
    # The inner product is rounded, as torch's two products round it, and so are the results.
    assert_close(actual, expected(*inputs), 4 * torch.finfo(dtype).eps)
    assert all(torch.equal(a, b) for a, b in zip(actual, through_autograd(*inputs), strict=True))
