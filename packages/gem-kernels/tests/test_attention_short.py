"""Tiles of short windows and few queries: which calls take them, and that results do not change."""

import os

import pytest
import torch

from gem_kernels import jagged_attention
from gem_kernels._src.attention.configs import TileConfig
from gem_kernels._src.attention.pairing import Pairing
from gem_kernels._src.jagged_attention.bias import Bias
from gem_kernels._src.jagged_attention.configs import select
from gem_kernels._src.jagged_attention.short import FEW_QUERIES, WINDOW, fit_pairs
from gem_kernels._src.tables.attention import SMALL

HOPPER = (9, 0)
interpreted = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="runs kernels on CPU tensors: needs TRITON_INTERPRET=1"
)


def sizes(config):
    return (config.block_m, config.block_n, config.num_warps, config.num_stages)


def pairing(max_seqlen_q=512, **changes):
    offsets = torch.tensor([0, 3])
    return Pairing(offsets, offsets, max_seqlen_q, None, False)._replace(**changes)


@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("kernel", ["forward", "dq", "dkdv"])
def test_a_short_window_takes_small_tiles(kernel, dim):
    usual = select(kernel, dim, torch.bfloat16, HOPPER)
    for window in ((64, 64), (128, 128)):
        assert sizes(fit_pairs(kernel, usual, dim, pairing(), *window, Bias())) == WINDOW[dim][kernel]
    for left, right in ((200, 64), (64, -1), (-1, 64), (-1, -1)):
        assert fit_pairs(kernel, usual, dim, pairing(), left, right, Bias()) is usual


@pytest.mark.parametrize("dim", [64, 128])
def test_few_queries_take_small_tiles_in_the_forward(dim):
    usual = select("forward", dim, torch.bfloat16, HOPPER)
    assert sizes(fit_pairs("forward", usual, dim, pairing(48), -1, -1, Bias())) == FEW_QUERIES[dim]["forward"]
    assert fit_pairs("forward", usual, dim, pairing(65), -1, -1, Bias()) is usual


@pytest.mark.parametrize("kernel", ["forward", "dq", "dkdv"])
def test_others_keep_their_tiles(kernel):
    window = (64, 64)
    wide, usual = select(kernel, 256, torch.bfloat16, HOPPER), select(kernel, 64, torch.bfloat16, HOPPER)
    assert fit_pairs(kernel, wide, 256, pairing(), *window, Bias()) is wide
    full = select(kernel, 64, torch.float32, HOPPER)
    assert fit_pairs(kernel, full, 64, pairing(), *window, Bias()) is full
    small = select(kernel, 64, torch.bfloat16, (8, 6))
    assert sizes(small) == SMALL[kernel][64]
    assert fit_pairs(kernel, small, 64, pairing(), *window, Bias()) is small
    overridden = TileConfig(block_m=16, block_n=16, num_warps=4, num_stages=1)
    assert fit_pairs(kernel, overridden, 64, pairing(), *window, Bias()) is overridden
    table = torch.zeros(1, 3)
    assert fit_pairs(kernel, usual, 64, pairing(), *window, Bias(position=table)) is usual
    assert fit_pairs(kernel, usual, 64, pairing(broadcast_q=True), *window, Bias()) is usual


def thirds(dtype, device="cpu"):
    """Queries, keys and values side by side, and alone; offsets."""
    offsets = torch.tensor([0, 5, 5, 75, 208]).to(device)
    rows = torch.randn(208, 3, 2, 32, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    return rows.unbind(1), [x.contiguous() for x in rows.unbind(1)], offsets


@interpreted
@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("window", [(16, 16), (0, 200), (-1, 3)])
def test_gradients_lie_side_by_side_as_their_tensors_do(window):
    from gem_kernels._src.jagged_attention.backward import launch_backward
    from gem_kernels._src.jagged_attention.forward import launch_forward
    from gem_kernels._src.jagged_attention.packed import are_thirds

    beside, alone, offsets = thirds(torch.float16)
    assert are_thirds(*beside)
    assert not are_thirds(*alone)
    assert not are_thirds(beside[0], beside[2], beside[1])
    sides = (offsets, offsets, 133, 133, 0.2, *window)
    out, lse = launch_forward(*beside, *sides)
    do = torch.randn(out.shape, generator=torch.Generator().manual_seed(1)).half()
    packed = launch_backward(do, None, *beside, out, lse, *sides)
    assert are_thirds(*packed)
    for x, y in zip(packed, launch_backward(do, None, *alone, out, lse, *sides), strict=True):
        assert torch.equal(x, y)


@pytest.mark.gpu
def test_cuda_gradients_of_one_product_are_one_tensor():
    from gem_kernels.join_columns import split_thirds

    _, alone, offsets = thirds(torch.bfloat16, "cuda")
    rows = torch.cat([x.flatten(1) for x in alone], dim=1).requires_grad_()
    sides = {"offsets_q": offsets, "offsets_k": offsets, "max_seqlen_q": 133, "max_seqlen_k": 133}
    q, k, v = (x.view(-1, 2, 32) for x in split_thirds(rows))
    out = jagged_attention(q, k, v, **sides, window_size=(16, 16))
    do = torch.randn_like(out)
    joined = torch.autograd.grad(out, rows, do)[0]
    leaves = [x.requires_grad_() for x in alone]
    out = jagged_attention(*leaves, **sides, window_size=(16, 16))
    expected = torch.autograd.grad(out, leaves, do)
    assert torch.equal(joined, torch.cat([x.flatten(1) for x in expected], dim=1))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("window", [(64, 64), (0, 128), (-1, -1)], ids=str)
def test_cuda_against_float64(window, dim, dtype):
    lengths = torch.tensor([5, 0, 70, 133, 64, 1, 128, 300])
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
    few = torch.arange(len(lengths) + 1) * 48
    generator = torch.Generator().manual_seed(0)
    # Unmasked with few queries, which the forward's other tiles are for.
    offsets_q, longest_q = (offsets, 300) if window[0] >= 0 else (few, 48)
    rows = (int(offsets_q[-1]), int(offsets[-1]), int(offsets[-1]))
    tensors = [torch.randn(n, 2, dim, generator=generator).to(dtype) for n in rows]
    do = torch.randn(tensors[0].shape, generator=generator, dtype=torch.float64)

    def gradients(tensors, device):
        leaves = [x.to(device).requires_grad_() for x in tensors]
        sides = {"offsets_q": offsets_q.to(device), "offsets_k": offsets.to(device)}
        out = jagged_attention(*leaves, **sides, max_seqlen_q=longest_q, max_seqlen_k=300, window_size=window)
        return [out.detach(), *torch.autograd.grad(out, leaves, do.to(device, out.dtype))]

    expected = gradients([x.double() for x in tensors], "cpu")
    for value, reference in zip(gradients(tensors, "cuda"), expected, strict=True):
        atol = 16 * torch.finfo(dtype).eps * reference.abs().max().item()
        torch.testing.assert_close(value.double().cpu(), reference, rtol=0, atol=atol)
