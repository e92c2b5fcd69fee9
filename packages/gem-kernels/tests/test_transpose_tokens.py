"""transpose_tokens against torch's transpose, bit by bit: CPU, interpreted kernel, CUDA."""

import os

import pytest
import torch

from gem_kernels._src.transpose_tokens.op import transpose_tokens_op
from gem_kernels.transpose_tokens import transpose_tokens

interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="runs kernels on CPU tensors: needs TRITON_INTERPRET=1"
)
SHAPES = [(3, 38, 70), (2, 64, 64), (1, 1, 5), (4, 5, 1), (2, 130, 3), (0, 4, 4), (2, 0, 4)]
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def inputs(shape, dtype=torch.float32, device="cpu"):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(device=device, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_cpu_is_torchs_transpose(shape, dtype):
    x = inputs(shape, dtype)
    out = transpose_tokens(x)
    assert out.is_contiguous()
    assert torch.equal(out, x.transpose(1, 2))
    assert torch.equal(transpose_tokens(out), x)


@interpreted
@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_interpreted_kernel_is_torchs_transpose(shape, dtype):
    from gem_kernels._src.transpose_tokens.kernel import launch

    x = inputs(shape, dtype)
    assert torch.equal(launch(x), x.transpose(1, 2))
    assert torch.equal(launch(x.transpose(1, 2)), x)


def test_gradient_and_opcheck():
    x = inputs((2, 3, 5), torch.float64).requires_grad_()
    torch.autograd.gradcheck(transpose_tokens, (x,))
    torch.library.opcheck(transpose_tokens_op, (inputs((2, 3, 5)).requires_grad_(),))


def test_bad_input_is_named():
    with pytest.raises(ValueError, match=r"transpose_tokens: `x` must have shape \(B, M, N\), got \(2, 3\)"):
        transpose_tokens(torch.zeros(2, 3))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [*SHAPES, (300, 64, 256), (300, 256, 38)], ids=str)
def test_cuda_is_torchs_transpose(shape, dtype):
    x = inputs(shape, dtype, "cuda").requires_grad_()
    out = transpose_tokens(x)
    assert torch.equal(out, x.transpose(1, 2))
    grad = torch.randn_like(out)
    assert torch.equal(torch.autograd.grad(out, x, grad)[0], grad.transpose(1, 2))
    assert torch.equal(transpose_tokens_op(x), out)
