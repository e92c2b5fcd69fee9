"""The parts, each against its formula."""

import math

import pytest
import torch
import torch.nn.functional as F

from gem_kernels.hat_columns import hat_encoding, recency
from gem_model._src import blocks
from gem_model._src.blocks import SumKronLinear, TokenLinear, token_columns
from gem_model._src.interaction import FactorizationMachineBlock
from gem_model._src.jagged import fixed_offsets
from gem_model._src.rms_norm import _RMSNorm, rms_norm


def test_rms_norm_is_torchs():
    x = torch.randn(7, 3, 16, dtype=torch.float64, requires_grad=True)
    grad = torch.randn(7, 3, 16, dtype=torch.float64)
    actual, expected = _RMSNorm.apply(x), F.rms_norm(x, (16,), eps=1e-5)
    torch.testing.assert_close(actual, expected)
    torch.testing.assert_close(
        torch.autograd.grad(actual, x, grad)[0], torch.autograd.grad(expected, x, grad)[0], rtol=1e-10, atol=1e-12
    )
    torch.autograd.gradcheck(_RMSNorm.apply, (x[:2],))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rms_norm_keeps_the_dtype(dtype):
    x = torch.randn(5, 64).to(dtype).requires_grad_()
    y = rms_norm(x)
    y.sum().backward()
    assert y.dtype == x.grad.dtype == dtype
    torch.testing.assert_close(y.float(), F.rms_norm(x.detach().float(), (64,), eps=1e-5), rtol=2e-2, atol=1e-2)


def test_rms_norm_of_zeros_and_of_nothing():
    x = torch.zeros(2, 8, requires_grad=True)
    rms_norm(x).sum().backward()
    assert torch.isfinite(x.grad).all()
    assert rms_norm(torch.zeros(0, 8)).shape == (0, 8)


def test_token_linear_maps_the_token_axis():
    module, x = TokenLinear(5, 3), torch.randn(2, 5, 4)
    expected = torch.einsum("oi,bid->bod", module.linear.weight, x) + module.linear.bias[None, :, None]
    torch.testing.assert_close(module(x), expected)


def test_sum_kron_linear_is_a_sum_of_kronecker_products():
    num_inputs, num_outputs, dim, rank = 6, 2, 4, 3
    module, x = SumKronLinear(num_inputs, num_outputs, dim, rank).double(), torch.randn(5, 6, 4).double()
    z = module.tokens.linear.weight.view(num_outputs, rank, num_inputs)  # row o * rank + i is column o of Z_i
    w = module.columns.weight.view(dim, rank, dim)  # input i * dim + c is row c of W_i
    expected = sum(z[:, i] @ x @ w[:, i].T for i in range(rank))
    torch.testing.assert_close(module(x), expected)


def test_factorization_machine_block_is_its_formula(two_towers):
    module, x = FactorizationMachineBlock(two_towers, 5), torch.randn(3, 5, two_towers.dim)
    compressed = torch.einsum("oi,bid->bod", module.compress.linear.weight, x)
    compressed = compressed + module.compress.linear.bias[None, :, None]
    y = module.projection(compressed.flatten(1)).view(3, 5, two_towers.fm_rank)
    products = F.layer_norm((x @ x.transpose(1, 2) @ y).flatten(1), (5 * two_towers.fm_rank,))
    expected = module.output(products).view(3, two_towers.num_fm_tokens, two_towers.dim)
    torch.testing.assert_close(module(x), expected, rtol=1e-4, atol=1e-5)


def test_hat_encoding_interpolates_between_knots():
    x = torch.tensor([0.0, 2.5, 3.75, 10.0, 99.0])
    hats = hat_encoding(x, 5, 10.0)
    torch.testing.assert_close(hats @ torch.linspace(0.0, 10.0, 5), x.clamp(max=10.0))
    torch.testing.assert_close(hats.sum(1), torch.ones(5))
    assert ((hats > 0).sum(1) <= 2).all()
    assert hat_encoding(torch.zeros(0), 4, 1.0).shape == (0, 4)


def test_recency_counts_later_events():
    offsets = torch.tensor([0, 3, 3, 4, 6])
    assert recency(offsets, 6).tolist() == [2.0, 1.0, 0.0, 0.0, 1.0, 0.0]
    assert recency(torch.tensor([0, 0]), 0).shape == (0,)


def test_fixed_offsets():
    assert fixed_offsets(3, 4, torch.device("cpu")).tolist() == [0, 4, 8, 12]
    assert fixed_offsets(0, 4, torch.device("cpu")).tolist() == [0]


def test_age_range_covers_years():
    assert math.expm1(20.0) > 15 * 365 * 86_400


def test_transposes_in_memory_are_the_same_bits(monkeypatch):
    torch.manual_seed(0)
    module, x, weight = TokenLinear(6, 4), torch.randn(3, 6, 8), torch.randn(3, 4, 8)

    def run():
        leaf = x.clone().requires_grad_()
        out = module(leaf, token_columns(leaf))
        return out, torch.autograd.grad((out * weight).sum(), [leaf, *module.parameters()])

    lazy, gradients = run()
    monkeypatch.setattr(blocks, "TRANSPOSE_DEVICES", ("cpu",))
    monkeypatch.setattr(blocks, "_MIN_TRANSPOSE", 0)
    out, own_gradients = run()
    assert out.is_contiguous()
    assert not lazy.is_contiguous()
    assert torch.equal(out, lazy)
    for ours, theirs in zip(own_gradients, gradients, strict=True):
        assert torch.equal(ours, theirs)
