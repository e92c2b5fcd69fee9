"""join_columns against torch.cat of casts, bit by bit: CPU, interpreted kernels, CUDA."""

import os

import pytest
import torch
from torch import Tensor

from gem_kernels.join_columns import join_columns

interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="runs kernels on CPU tensors: needs TRITON_INTERPRET=1"
)
F32, F16, BF16 = torch.float32, torch.float16, torch.bfloat16
# Rows, then width and dtype of each part.
CASES = [
    (70, [(64, F32), (64, F32), (64, F32), (32, F32)]),
    (33, [(3, F32), (29, F16), (1, F32)]),
    (5, [(7, F16)]),
    (0, [(4, F32), (4, F16)]),
    (40, [(5, F32)] * 8),
    (40, [(5, F32)] * 9),  # more than one kernel reads
]


def draw(rows: int, parts: list[tuple[int, torch.dtype]], device: str = "cpu") -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(rows, width, generator=generator).to(device, dtype) for width, dtype in parts]


@pytest.mark.parametrize("dtype", [F32, BF16], ids=str)
@pytest.mark.parametrize(("rows", "layout"), CASES)
def test_cpu(rows, layout, dtype):
    parts = [part.requires_grad_() for part in draw(rows, layout)]
    joined = join_columns(parts, dtype)
    assert torch.equal(joined, torch.cat([part.to(dtype) for part in parts], dim=1))
    grad = torch.randn_like(joined)
    for part, gradient, expected in zip(
        parts, torch.autograd.grad(joined, parts, grad), grad.split([p.shape[1] for p in parts], dim=1), strict=True
    ):
        assert torch.equal(gradient, expected.to(part.dtype))


@interpreted
@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize(("rows", "layout"), CASES[:-1])
def test_interpreted_kernels(rows, layout):
    from gem_kernels._src.join_columns.kernels import launch_apart, launch_join

    parts = draw(rows, layout)
    widths, dtypes = [width for width, _ in layout], [dtype for _, dtype in layout]
    joined = launch_join(parts, F16)
    assert torch.equal(joined, torch.cat([part.half() for part in parts], dim=1))
    strided = torch.randn(rows, sum(widths) + 3).half()[:, 2:-1]
    for wanted in (dtypes, [None, *dtypes[1:]]):
        for part, dtype, expected in zip(
            launch_apart(strided, widths, wanted), wanted, strided.split(widths, dim=1), strict=True
        ):
            assert part is None if dtype is None else torch.equal(part, expected.to(dtype))


@pytest.mark.parametrize("beside", [True, False])
def test_thirds_and_their_gradients(beside):
    from gem_kernels.join_columns import split_thirds

    x = torch.randn(5, 12, requires_grad=True)
    thirds = split_thirds(x)
    assert torch.equal(torch.cat(thirds, dim=1), x)
    assert all(third.data_ptr() == x.data_ptr() + 16 * i for i, third in enumerate(thirds))
    grad = torch.randn(5, 12)
    grads = grad.tensor_split(3, dim=1) if beside else [g.clone() for g in grad.tensor_split(3, dim=1)]
    seen = []
    x.register_hook(lambda g: seen.append(g.data_ptr() == grad.data_ptr()))
    assert torch.equal(torch.autograd.grad(thirds, x, grads)[0], grad)
    assert seen == [beside]
    # Two of them swapped lie beside each other, too.
    swapped = [grads[1], grads[0], grads[2]]
    assert torch.equal(torch.autograd.grad(split_thirds(x), x, swapped)[0], torch.cat(swapped, dim=1))
    with pytest.raises(ValueError, match=r"split_thirds: `x` must have shape \(M, 3 n\), got \(5, 4\)"):
        split_thirds(torch.zeros(5, 4))


@pytest.mark.parametrize(
    ("parts", "dtype", "error", "words"),
    [
        ([], F32, ValueError, "`parts` must hold at least one tensor, got none"),
        (torch.zeros(2, 3), F32, TypeError, "`parts` must be a sequence of tensors, got Tensor"),
        ([torch.zeros(2, 3), torch.zeros(3, 3)], F32, ValueError, r"`parts\[1\]` must have shape \(M, w\)"),
        (
            [torch.zeros(2, 3), torch.zeros(2, 3, device="meta")],
            F32,
            ValueError,
            r"`parts\[1\]` must be on the device of `parts\[0\]`, cpu, got meta",
        ),
        ([torch.zeros(2)], F32, ValueError, r"`parts\[0\]` must have shape \(M, w\)"),
        ([torch.zeros(2, 3).int()], F32, TypeError, r"`parts\[0\]` must"),
        ([torch.zeros(2, 3)], torch.int32, TypeError, "`dtype` must be a floating point dtype, got torch.int32"),
    ],
)
def test_bad_input_is_named(parts, dtype, error, words):
    with pytest.raises(error, match=f"join_columns: {words}"):
        join_columns(parts, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [F32, F16, BF16], ids=str)
@pytest.mark.parametrize(("rows", "layout"), [*CASES, (5000, CASES[0][1])])
def test_cuda(rows, layout, dtype):
    parts = [part.requires_grad_() for part in draw(rows, layout, "cuda")]
    parts[-1].requires_grad_(len(parts) == 1)
    joined = join_columns(parts, dtype)
    assert torch.equal(joined, torch.cat([part.to(dtype) for part in parts], dim=1))
    grad = torch.randn_like(joined)
    leaves = [part for part in parts if part.requires_grad]
    pieces = grad.split([p.shape[1] for p in parts], dim=1)
    for part, gradient, expected in zip(leaves, torch.autograd.grad(joined, leaves, grad), pieces, strict=False):
        assert torch.equal(gradient, expected.to(part.dtype))
