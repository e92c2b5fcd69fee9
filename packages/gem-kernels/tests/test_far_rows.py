"""Rows or heads that lie 2**29 elements apart: the interpreted kernels compute every address in 64 bits.

The tensors are views into a file with a hole, which is larger than a 32-bit index can say and takes a few pages on the
disk. They begin in its middle: an address that wraps around reads zeros of the hole, and the result is wrong where it
would otherwise be a crash.
"""

import pytest
import torch

from gem_kernels import mx
from gem_kernels.testing import attention_inputs

DTYPE = torch.float16
FAR = 2**29
"""Elements from one row or head to the next; the fifth is beyond 32 bits, within a sequence and from its start."""
MIDDLE = 2**31
LENGTHS = (5, 0, 6)
NUM_HEADS, HEAD_DIM = 6, 16


@pytest.fixture
def hole(tmp_path, interpreter):
    """Zeros that nobody has written."""
    size = MIDDLE + sum(LENGTHS) * FAR
    return torch.from_file(str(tmp_path / "hole"), shared=True, size=size, dtype=DTYPE)


def far(hole, x, dim, number):
    """A copy of ``x`` with stride ``FAR`` along ``dim``; those of other numbers lie in between."""
    strides = list(torch.empty(*x.shape[:dim], 1, *x.shape[dim + 1 :], device="meta").stride())
    strides[dim] = FAR
    return hole.as_strided(x.shape, strides, MIDDLE + number * 2**12).copy_(x)


def run_jagged_attention(x):
    from gem_kernels._src.jagged_attention.backward import launch_backward
    from gem_kernels._src.jagged_attention.forward import launch_forward

    args = (x.offsets_q, x.offsets_k, x.max_seqlen_q, x.max_seqlen_k, 0.25, -1, -1)
    out, lse = launch_forward(x.q, x.k, x.v, *args)
    return out, lse, *launch_backward(x.do, torch.ones_like(lse), x.q, x.k, x.v, out, lse, *args)


def run_jagged_attention_with_bias(x):
    from gem_kernels._src.jagged_attention.backward import launch_backward
    from gem_kernels._src.jagged_attention.bias import Bias
    from gem_kernels._src.jagged_attention.forward import launch_forward
    from gem_kernels._src.jagged_attention.tables import launch_table_gradients

    generator = torch.Generator().manual_seed(1)
    position, time = (torch.randn(NUM_HEADS, columns, generator=generator).to(DTYPE) for columns in (7, 9))
    times = torch.arange(x.q.shape[0]) * 50
    args = (x.offsets_q, x.offsets_k, x.max_seqlen_q, x.max_seqlen_k, 0.25, -1, -1, Bias(position, time, times, times))
    out, lse = launch_forward(x.q, x.k, x.v, *args)
    gradients = (x.do, torch.ones_like(lse), x.q, x.k, x.v, out, lse, *args)
    return out, lse, *launch_backward(*gradients), *launch_table_gradients(*gradients)


def run_gdpa(x):
    from gem_kernels._src.gdpa.backward import launch_backward
    from gem_kernels._src.gdpa.forward import launch_forward

    args = (x.offsets_q, x.offsets_k, x.max_seqlen_q, x.max_seqlen_k, "silu", 0.5, 2.0, -1, -1)
    return launch_forward(x.q, x.k, x.v, *args), *launch_backward(x.do, x.q, x.k, x.v, *args)


def run_block_attention(x):
    from gem_kernels._src.block_attention.backward import launch_tile_backward
    from gem_kernels._src.block_attention.forward import launch_tile_forward

    args = (x.q, x.k, x.v, x.offsets_q, 32, 0.25)
    return launch_tile_forward(*args), *launch_tile_backward(x.do, *args)


@pytest.mark.parametrize("dim", [0, 1], ids=["rows", "heads"])
@pytest.mark.parametrize("run", [run_jagged_attention, run_jagged_attention_with_bias, run_gdpa, run_block_attention])
def test_attention_reads_far_rows_and_heads(run, dim, hole):
    near = attention_inputs(LENGTHS, num_heads=NUM_HEADS, head_dim=HEAD_DIM, dtype=DTYPE)
    views = {name: far(hole, getattr(near, name), dim, number) for number, name in enumerate(("q", "k", "v", "do"))}
    assert all(x.stride(dim) * (x.shape[dim] - 1) > 2**31 for x in views.values())
    for result, expected in zip(run(near._replace(**views)), run(near), strict=True):
        assert torch.equal(result, expected)
        assert result.isfinite().all()


def test_linear_layers_with_norms_read_far_rows(hole):
    from gem_kernels._src.norm_linear import backward, matmul

    generator = torch.Generator().manual_seed(2)
    x, weight, dout = (torch.randn(rows, 32, generator=generator).to(DTYPE) for rows in (9, 32, 9))

    def run(x, dout):
        rms = matmul.launch_fused_rmsnorm_linear(x, weight, None, 1e-6)
        gradients = backward.launch_rmsnorm_linear_backward(dout, x, weight, None, rms[1], False)
        post = matmul.launch_fused_linear_norm(x, weight, None, None, None, True, 1e-5)
        out, _, rstd = post
        more = backward.launch_linear_norm_backward(dout, x, weight, None, out, rstd, True, False)
        return [tensor for tensor in (*rms, *gradients, *post, *more) if tensor is not None]

    for result, expected in zip(run(far(hole, x, 0, 0), far(hole, dout, 0, 1)), run(x, dout), strict=True):
        assert torch.equal(result, expected)


def test_mx_reads_far_rows(hole):
    from gem_kernels._src.mx.triton_casts import launch_fake_quantize, launch_quantize

    near = torch.randn(6, 40, generator=torch.Generator().manual_seed(0)).to(DTYPE)
    view = far(hole, near, 0, 0)
    options = ((1, 32), torch.float8_e4m3fn, "rceil")
    expected = mx.mx_quantize(near, block_shape=(1, 32))
    for result, wanted in zip(launch_quantize(view, *options), expected, strict=True):
        assert torch.equal(result.view(torch.uint8), wanted.view(torch.uint8))
    assert torch.equal(launch_fake_quantize(view, *options), mx.mx_fake_quantize(near, block_shape=(1, 32)))
