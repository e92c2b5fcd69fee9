"""token_linear against float64: composed on the CPU, interpreted kernels, CUDA."""

import os
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from gem_kernels.token_linear import serves_token_linear, token_linear

interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="runs kernels on CPU tensors: needs TRITON_INTERPRET=1"
)
# (B, n, m, d): full tiles, ragged ones, one token, columns that fill no tile, none.
SHAPES = [(3, 64, 56, 256), (2, 38, 24, 70), (3, 1, 5, 16), (2, 5, 1, 130), (4, 100, 128, 40), (0, 4, 4, 16)]


class Gradients(NamedTuple):
    out: Tensor
    dx: Tensor
    dweight: Tensor
    dbias: Tensor


def draw(shape: tuple[int, int, int, int], dtype: torch.dtype, device: str = "cpu") -> tuple[Tensor, ...]:
    """x, weight, bias and the output's gradient; parameters in float32."""
    batch, num_in, num_out, dim = shape
    generator = torch.Generator().manual_seed(0)
    sizes = ((batch, num_in, dim), (num_out, num_in), (num_out,), (batch, num_out, dim))
    x, weight, bias, grad = (torch.randn(size, generator=generator).to(device) for size in sizes)
    return x.to(dtype), weight / num_in**0.5, bias, grad.to(dtype)


def exact_gradients(x: Tensor, weight: Tensor, bias: Tensor, grad: Tensor) -> Gradients:
    x, weight, bias, grad = (t.double() for t in (x, weight, bias, grad))
    out = torch.einsum("oi,bid->bod", weight, x) + bias[:, None]
    dx = torch.einsum("oi,bod->bid", weight, grad)
    return Gradients(out, dx, torch.einsum("bod,bid->oi", grad, x), grad.sum((0, 2)))


def assert_close(actual: Gradients, expected: Gradients, dtype: torch.dtype, *, exact: bool) -> None:
    """One rounding of out and dx to dtype, or a few of float32; sums of gradients in float32 over exact products."""
    eps = max(torch.finfo(dtype).eps, 1e-6)
    for name, tolerance in (("out", eps), ("dx", eps), ("dweight", 1e-5), ("dbias", 1e-5)):
        value, reference = getattr(actual, name).double(), getattr(expected, name)
        scale = reference.abs().max().item() if reference.numel() else 1.0
        torch.testing.assert_close(value, reference, rtol=tolerance, atol=tolerance * max(scale, 1.0), msg=name)
    assert not exact or actual.dweight.dtype == torch.float32


def through_autograd(x: Tensor, weight: Tensor, bias: Tensor, grad: Tensor, *, exact: bool) -> Gradients:
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
    out = token_linear(*leaves, exact=exact)
    return Gradients(out.detach(), *torch.autograd.grad(out, leaves, grad))


def rounded(weight: Tensor, bias: Tensor, dtype: torch.dtype, *, exact: bool) -> tuple[Tensor, Tensor]:
    return (weight, bias) if exact else (weight.to(dtype), bias.to(dtype))


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_cpu_in_float32(shape, exact):
    x, weight, bias, grad = draw(shape, torch.float32)
    assert not serves_token_linear(x, weight)
    actual = through_autograd(x, weight, bias, grad, exact=exact)
    assert_close(actual, exact_gradients(x, weight, bias, grad), torch.float32, exact=exact)


def test_cpu_in_bfloat16_keeps_or_rounds_the_weight():
    x, weight, bias, _ = draw((3, 64, 16, 32), torch.bfloat16)
    reference = exact_gradients(x, weight, bias, x[:, :16]).out
    kept, rough = (token_linear(x, weight, bias, exact=exact) for exact in (True, False))
    assert kept.dtype == rough.dtype == torch.bfloat16
    # What is left of the first is the rounding of its result.
    assert torch.equal(kept, reference.to(torch.bfloat16)) or (kept - reference).abs().max() < 2**-7
    assert (kept.double() - reference).norm() < (rough.double() - reference).norm()


def test_without_bias_and_second_derivatives():
    x, weight, bias, _ = (t.double() for t in draw((2, 3, 4, 5), torch.float64))
    assert torch.equal(token_linear(x, weight), token_linear(x, weight, torch.zeros_like(bias)))
    leaves = tuple(t.requires_grad_() for t in (x, weight, bias))
    torch.autograd.gradcheck(token_linear, leaves)
    torch.autograd.gradgradcheck(token_linear, leaves)


def test_flops_are_counted():
    from torch.utils.flop_counter import FlopCounterMode

    x, weight, bias, _ = draw((3, 6, 4, 8), torch.float32)
    with FlopCounterMode(display=False) as counter:
        token_linear(x, weight, bias)
    assert counter.get_total_flops() == 2 * 3 * 6 * 4 * 8


@interpreted
@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_interpreted_kernels(shape, exact):
    from gem_kernels._src.token_linear.kernels import launch_backward, launch_forward

    x, weight, bias, grad = draw(shape, torch.float16)
    out, _ = launch_forward(x, weight, bias, exact=exact)
    actual = Gradients(out, *launch_backward(x, grad, weight, exact=exact))
    expected = exact_gradients(x, *rounded(weight, bias, x.dtype, exact=exact), grad)
    assert_close(actual, expected, torch.float16, exact=exact)


@interpreted
def test_interpreted_kernels_read_parts_of_larger_samples():
    from gem_kernels._src.token_linear.kernels import launch_backward, launch_forward

    x, weight, bias, grad = draw((3, 8, 4, 32), torch.float16)
    wide, wide_grad = torch.randn(3, 20, 32).half(), torch.randn(3, 9, 32).half()
    wide[:, 5:13], wide_grad[:, 2:6] = x, grad
    out, part = (launch_forward(t, weight, bias, exact=False)[0] for t in (x, wide[:, 5:13]))
    assert torch.equal(out, part)
    for part, whole in zip(
        launch_backward(wide[:, 5:13], wide_grad[:, 2:6], weight, exact=False),
        launch_backward(x, grad, weight, exact=False),
        strict=True,
    ):
        assert torch.equal(part, whole)


@interpreted
@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("shape", [(3, 64, 56, 256), (2, 38, 24, 70)], ids=str)
@pytest.mark.parametrize("first", [1, 8, 23])
def test_interpreted_kernels_in_two_tensors(shape, first):
    from gem_kernels._src.token_linear.kernels import launch_backward, launch_forward

    x, weight, bias, grad = draw(shape, torch.float16)
    out, rest = launch_forward(x, weight, bias, exact=True, first=first)
    assert torch.equal(torch.cat((out, rest), dim=1), launch_forward(x, weight, bias, exact=True)[0])
    apart = launch_backward(x, grad[:, :first], weight, exact=True, drest=grad[:, first:])
    for one, both in zip(apart, launch_backward(x, grad, weight, exact=True), strict=True):
        assert torch.equal(one, both)


def test_two_tensors_on_the_cpu():
    x, weight, bias, _ = draw((2, 6, 5, 8), torch.float32)
    out, rest = token_linear(x, weight, bias, first=2)
    assert torch.equal(torch.cat((out, rest), dim=1), token_linear(x, weight, bias))


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"x": torch.zeros(2, 3)}, ValueError, r"`x` must have shape \(B, n, d\), got \(2, 3\)"),
        ({"weight": torch.zeros(4, 2)}, ValueError, r"`weight` must have shape \(m, n\) with the n = 3 tokens"),
        ({"bias": torch.zeros(3)}, ValueError, r"`bias` must have shape \(m,\) = \(4,\) like `weight`, got \(3,\)"),
        ({"weight": torch.zeros(4, 3).double()}, TypeError, "`weight` must be torch.float32 like `x` or float32"),
        ({"exact": 1}, TypeError, "`exact` must be a bool"),
        ({"first": 2.0}, TypeError, "`first` must be a Python int, got float"),
        ({"weight": torch.zeros(4, 3, device="meta")}, ValueError, "`weight` must be on the device of `x`, cpu, got"),
        ({"first": 4}, ValueError, "`first` must lie between 0 and the 4 tokens of `weight`, got 4"),
    ],
)
def test_bad_input_is_named(change, error, words):
    given = {"x": torch.zeros(2, 3, 5), "weight": torch.zeros(4, 3), "bias": torch.zeros(4)} | change
    with pytest.raises(error, match=f"token_linear: {words}"):
        token_linear(**given)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("shape", [*SHAPES, (700, 64, 56, 256)], ids=str)
def test_cuda_kernels(shape, exact, dtype):
    x, weight, bias, grad = draw(shape, dtype, "cuda")
    assert serves_token_linear(x, weight)
    actual = through_autograd(x, weight, bias, grad, exact=exact)
    expected = exact_gradients(x, *rounded(weight, bias, dtype, exact=exact), grad)
    assert_close(actual, expected, dtype, exact=exact)
    again = through_autograd(x, weight, bias, grad, exact=exact)
    assert all(torch.equal(a, b) for a, b in zip(actual, again, strict=True))


@pytest.mark.gpu
def test_cuda_kernels_in_two_tensors():
    x, weight, bias, grad = draw((50, 64, 40, 256), torch.bfloat16, "cuda")
    whole = through_autograd(x, weight, bias, grad, exact=True)
    leaves = [t.clone().requires_grad_() for t in (x, weight, bias)]
    parts = token_linear(*leaves, exact=True, first=8)
    assert torch.equal(torch.cat(parts, dim=1), whole.out)
    gradients = torch.autograd.grad(parts, leaves, [grad[:, :8], grad[:, 8:]])
    assert all(torch.equal(a, b) for a, b in zip(gradients, whole[1:], strict=True))


@pytest.mark.gpu
def test_cuda_composes_where_no_kernel_serves():
    x, weight, bias, grad = draw((2, 130, 4, 32), torch.bfloat16, "cuda")
    assert not serves_token_linear(x, weight)
    actual = through_autograd(x, weight, bias, grad, exact=True)
    assert_close(actual, exact_gradients(x, weight, bias, grad), torch.bfloat16, exact=True)
