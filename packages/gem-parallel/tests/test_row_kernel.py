"""Rows gathered by the kernel are those of torch's operator."""

import os

import pytest
import torch

interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="runs kernels on CPU tensors: needs TRITON_INTERPRET=1"
)
DEVICES = [pytest.param("cpu", marks=interpreted), pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("dim", "count"), [(4, 1), (12, 1000), (64, 129), (128, 0), (1000, 7), (1024, 9)])
def test_rows_by_number(device, dtype, dim, count):
    from gem_parallel._src.embeddings.row_kernel import gather_rows

    generator = torch.Generator().manual_seed(dim)
    rows = torch.randn(37, dim, generator=generator).to(device, dtype)
    index = torch.randint(0, 37, (count,), generator=generator)
    if count:
        index[0] = 36
    found = gather_rows(rows, index.to(device))
    assert found.dtype == dtype
    assert torch.equal(found.cpu(), rows.cpu()[index])
