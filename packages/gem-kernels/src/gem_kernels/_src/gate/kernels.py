"""Triton kernels of x sigmoid(z): one pass each way over what torch reads and writes several times."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gem_kernels._src.attention.launch import device_guard

BLOCK = 2048


@triton.jit(do_not_specialize=["size"])
def gate_fwd_kernel(x_ptr, z_ptr, out_ptr, size, BLOCK: tl.constexpr, EVEN: tl.constexpr):  # all (size,) contiguous
    if EVEN:
        # A multiple of 16, which the compiler must see to read 16 bytes at once.
        size = size // 16 * 16
    # int64: a batch may have more than 2**31 elements.
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < size
    x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    z = tl.load(z_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    tl.store(out_ptr + offs, (x * tl.sigmoid(z)).to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["size"])
def gate_bwd_kernel(
    dout_ptr, x_ptr, z_ptr, dx_ptr, dz_ptr, size, BLOCK: tl.constexpr, EVEN: tl.constexpr
):  # all (size,) contiguous
    if EVEN:
        size = size // 16 * 16
    offs = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offs < size
    dout = tl.load(dout_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    x = tl.load(x_ptr + offs, mask=mask, other=0.0).to(tl.float32)
    gate = tl.sigmoid(tl.load(z_ptr + offs, mask=mask, other=0.0).to(tl.float32))
    tl.store(dx_ptr + offs, (dout * gate).to(dx_ptr.dtype.element_ty), mask=mask)
    tl.store(dz_ptr + offs, (dout * x * gate * (1.0 - gate)).to(dz_ptr.dtype.element_ty), mask=mask)


def launch_forward(x: Tensor, z: Tensor) -> Tensor:
    """The gated x, contiguous; both contiguous."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.numel():
        with device_guard(x):
            size, even = x.numel(), x.numel() % 16 == 0
            gate_fwd_kernel[(triton.cdiv(size, BLOCK),)](x, z, out, size, BLOCK=BLOCK, EVEN=even, num_warps=4)
    return out


def launch_backward(dout: Tensor, x: Tensor, z: Tensor) -> tuple[Tensor, Tensor]:
    """Gradients of x and z, contiguous; all contiguous."""
    dx, dz = (torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (x, z))
    if x.numel():
        with device_guard(x):
            size, even = x.numel(), x.numel() % 16 == 0
            grid = (triton.cdiv(size, BLOCK),)
            gate_bwd_kernel[grid](dout, x, z, dx, dz, size, BLOCK=BLOCK, EVEN=even, num_warps=4)
    return dx, dz
