"""The norm of the events with the latest of them: what the two steps give, with their gradients."""

import pytest
import torch

from gem_kernels.jagged import jagged_last_k
from gem_model._src.blocks import TokenLinear, normalize, token_columns
from gem_model._src.event_norm import _NormalizeAndGather, normalize_events

OFFSETS = {"mixed": (0, 0, 2, 9, 9, 10), "full": (0, 4, 8), "one": (0, 7)}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offsets", OFFSETS.values(), ids=OFFSETS.keys())
def test_is_the_norm_and_its_last_rows(offsets, dtype):
    torch.manual_seed(0)
    offsets = torch.tensor(offsets)
    x = (2.0 + torch.randn(int(offsets[-1]), 16)).to(dtype).requires_grad_()
    weights = torch.randn(x.shape[0], 16).to(dtype), torch.randn(offsets.shape[0] - 1, 4, 16).to(dtype)

    def gradient(normalized, recent):
        loss = (normalized * weights[0]).sum() + (recent * weights[1]).sum()
        return torch.autograd.grad(loss, x)[0]

    ours = normalize_events(x, offsets, 4)
    plain = normalize(x)
    theirs = plain, jagged_last_k(plain, offsets, 4)[0]
    assert torch.equal(ours.values, theirs[0])
    assert torch.equal(ours.recent, theirs[1])
    tolerance = {"rtol": 3e-2, "atol": 6e-2} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(gradient(*ours), gradient(*theirs), **tolerance)


def test_gradcheck():
    torch.manual_seed(0)
    x = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    index, valid = torch.tensor([0, 0, 4, 2]), torch.tensor([False, True, True, True])[:, None]
    torch.autograd.gradcheck(lambda y: _NormalizeAndGather.apply(y, index, valid), (x,))


def test_a_broken_row_stays_where_it_is():
    x = torch.randn(5, 8)
    x[0] = float("nan")  # the row that stands in for those before the first
    x.requires_grad_()
    normalized, recent = normalize_events(x, torch.tensor([0, 3, 4, 5]), 3)
    assert torch.isfinite(recent[1:]).all()
    (recent[1:].sum() + normalized[1:].square().sum()).backward()
    assert torch.isfinite(x.grad[1:]).all()


@pytest.mark.parametrize("num_samples", [0, 3])
def test_no_events(num_samples):
    x = torch.zeros(0, 8, requires_grad=True)
    normalized, recent = normalize_events(x, torch.zeros(num_samples + 1, dtype=torch.int64), 2)
    assert normalized.shape == (0, 8)
    assert recent.shape == (num_samples, 2, 8)
    assert not recent.any()
    recent.sum().backward()
    assert x.grad.shape == (0, 8)


def test_without_recent_events_there_is_the_norm_alone():
    x = torch.randn(4, 8)
    assert torch.equal(normalize_events(x, torch.tensor([0, 4]), 0).values, normalize(x))
    assert normalize_events(x, torch.tensor([0, 4]), 0).recent is None


def test_a_map_of_tokens_does_not_widen_them():
    class Wide(torch.nn.Linear):
        """What a recipe makes of a layer that it leaves in float32."""

        def forward(self, x):
            return super().forward(x.to(self.weight.dtype))

    module, x = TokenLinear(5, 3), torch.randn(2, 5, 4)
    exact = module(x)
    assert torch.equal(module(x, token_columns(x)), exact)
    module.linear.__class__ = Wide
    narrow = module(x.bfloat16())
    assert narrow.dtype == torch.bfloat16
    torch.testing.assert_close(narrow.float(), exact, rtol=2e-2, atol=2e-2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert TokenLinear(5, 3)(x).dtype == torch.bfloat16
