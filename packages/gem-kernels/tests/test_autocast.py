"""Autocast decides the dtype of the attention ops as it does for matmuls."""

import pytest
import torch

from gem_kernels import block_attention, gdpa, jagged_attention

OFFSETS = torch.tensor([0, 3, 3, 8])
TWO_SIDED = {"offsets_q": OFFSETS, "offsets_k": OFFSETS, "max_seqlen_q": 5, "max_seqlen_k": 5}
CALLS = {
    "jagged_attention": lambda q, k, v: jagged_attention(q, k, v, **TWO_SIDED),
    "gdpa": lambda q, k, v: gdpa(q, k, v, **TWO_SIDED),
    "block_attention": lambda q, k, v: block_attention(q, k, v, offsets=OFFSETS, max_seqlen=5, block_size=32),
}


@pytest.mark.parametrize("op", CALLS)
def test_operands_of_different_dtypes_meet_in_the_autocast_dtype(op):
    torch.manual_seed(0)
    q, k, v = (torch.randn(8, 2, 16, requires_grad=True) for _ in range(3))
    mixed = (q.bfloat16(), k, v)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = CALLS[op](*mixed)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, CALLS[op](q.bfloat16(), k.bfloat16(), v.bfloat16()))
    out.sum().backward()
    assert all(x.grad is not None and x.grad.dtype == torch.float32 for x in (q, k, v))


@pytest.mark.parametrize("op", CALLS)
def test_operands_of_different_dtypes_are_refused_without_autocast(op):
    q, k, v = (torch.randn(8, 2, 16) for _ in range(3))
    with pytest.raises(TypeError, match="dtype"):
        CALLS[op](q.bfloat16(), k, v)


@pytest.mark.parametrize("op", CALLS)
def test_no_tensor_is_refused_under_autocast_too(op):
    q, k, _ = (torch.randn(8, 2, 16) for _ in range(3))
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(TypeError, match="v"):
        CALLS[op](q, k, [1.0])


@pytest.mark.parametrize("dtype", [torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn])
@pytest.mark.parametrize("op", CALLS)
def test_a_dtype_of_no_matmul_is_refused_under_autocast_too(op, dtype):
    q, k, v = (torch.randn(8, 2, 16) for _ in range(3))
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(TypeError, match=r"must be|must have"):
        CALLS[op](q.to(dtype), k, v)
