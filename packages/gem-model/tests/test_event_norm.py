"""The norm of the events with the latest of them: what the two steps give, with their gradients."""

import pytest
import torch

from gem_kernels.jagged import jagged_last_k
from gem_model._src import blocks
from gem_model._src.blocks import TokenLinear, normalize, token_columns
from gem_model._src.event_norm import _Normalize, normalize_events

OFFSETS = {"mixed": (0, 0, 2, 9, 9, 10), "full": (0, 4, 8), "one": (0, 7)}


@pytest.fixture(params=[False, True], ids=["plain", "adds"])
def adds(request, monkeypatch):
    """Whether the backward adds the gradients, as on CUDA."""
    if request.param:
        monkeypatch.setattr(blocks, "NORM_DEVICES", ("cpu",))
        monkeypatch.setattr(blocks, "_MIN_NORM", 0)
    return request.param


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("offsets", OFFSETS.values(), ids=OFFSETS.keys())
def test_is_the_norm_and_its_last_rows(offsets, dtype, adds):
    torch.manual_seed(0)
    offsets = torch.tensor(offsets)
    x = (2.0 + torch.randn(int(offsets[-1]), 16)).to(dtype).requires_grad_()
    weights = [torch.randn(x.shape[0], 16).to(dtype) for _ in range(3)]
    recent_weights = torch.randn(offsets.shape[0] - 1, 4, 16).to(dtype)

    def gradient(rows, normalized, recent):
        parts = (*normalized, rows, recent)
        loss = sum((part * weight).sum() for part, weight in zip(parts, (*weights, recent_weights), strict=True))
        return torch.autograd.grad(loss, x)[0]

    ours = normalize_events(x, offsets, 4, num_readers=2)
    plain = normalize(x)
    recent = jagged_last_k(plain, offsets, 4)[0]
    assert ours.rows is x or adds
    # On the CPU the bits are torch's own.
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {}
    for actual, wanted in zip((*ours.normalized, ours.recent), (plain, plain, recent), strict=True):
        assert torch.equal(actual, wanted) or adds
        torch.testing.assert_close(actual, wanted, **tolerance)
    tolerance = {"rtol": 3e-2, "atol": 1e-1} if dtype == torch.bfloat16 else {}
    torch.testing.assert_close(gradient(*ours), gradient(x, (plain, plain), recent), **tolerance)


@pytest.mark.parametrize("adds", [False, True], ids=["plain", "adds"])
def test_gradcheck(adds):
    torch.manual_seed(0)
    x = torch.randn(5, 6, dtype=torch.float64, requires_grad=True)
    index, valid = torch.tensor([0, 0, 4, 2]), torch.tensor([False, True, True, True])[:, None]
    readers = 3 if adds else 1

    def outputs(y, index, valid):
        rows, *others = _Normalize.apply(y, index, valid, readers, adds)
        return (rows * adds, *(x for x in others if x is not None))

    torch.autograd.gradcheck(lambda y: outputs(y, index, valid), (x,))
    torch.autograd.gradcheck(lambda y: outputs(y, None, None), (x,))


def test_readers_that_send_nothing_back_cost_nothing(adds):
    x = torch.randn(6, 8, dtype=torch.float64, requires_grad=True)
    events = normalize_events(x, torch.tensor([0, 2, 6]), 2, num_readers=3)
    wanted = torch.autograd.grad((normalize(x) ** 3).sum(), x)[0]
    (actual,) = torch.autograd.grad((events.normalized[1] ** 3).sum(), x, retain_graph=True)
    torch.testing.assert_close(actual, wanted)
    (actual,) = torch.autograd.grad((events.rows * 2.0).sum(), x, retain_graph=True)
    torch.testing.assert_close(actual, torch.full_like(x, 2.0))
    (actual,) = torch.autograd.grad(events.recent.sum(), x)
    torch.testing.assert_close(actual, torch.zeros_like(x))


def test_a_broken_row_stays_where_it_is(adds):
    x = torch.randn(5, 8)
    x[0] = float("nan")  # the row that stands in for those before the first
    x.requires_grad_()
    _, (normalized,), recent = normalize_events(x, torch.tensor([0, 3, 4, 5]), 3, num_readers=1)
    assert torch.isfinite(recent[1:]).all()
    (recent[1:].sum() + normalized[1:].square().sum()).backward()
    assert torch.isfinite(x.grad[1:]).all()


@pytest.mark.parametrize("shape", [(5, 8), (2, 3, 16), (0, 8), (2, 0, 4)], ids=str)
def test_the_own_norm_is_torchs(shape, monkeypatch):
    monkeypatch.setattr(blocks, "NORM_DEVICES", ("cpu",))
    monkeypatch.setattr(blocks, "_MIN_NORM", 0)
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    actual, wanted = normalize(x), torch.nn.functional.layer_norm(x, shape[-1:])
    assert not actual._is_view()
    torch.testing.assert_close(actual, wanted)
    gradients = (torch.autograd.grad((y**3).sum(), x)[0] for y in (actual, wanted))
    torch.testing.assert_close(*gradients)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert normalize(x.float()).dtype == torch.float32


@pytest.mark.parametrize("num_samples", [0, 3])
def test_no_events(num_samples, adds):
    x = torch.zeros(0, 8, requires_grad=True)
    _, (normalized, _), recent = normalize_events(x, torch.zeros(num_samples + 1, dtype=torch.int64), 2, num_readers=2)
    assert normalized.shape == (0, 8)
    assert recent.shape == (num_samples, 2, 8)
    assert not recent.any()
    recent.sum().backward()
    assert x.grad.shape == (0, 8)


def test_without_recent_events_there_is_the_norm_alone():
    x = torch.randn(4, 8)
    events = normalize_events(x, torch.tensor([0, 4]), 0, num_readers=3)
    assert events.recent is None
    assert all(torch.equal(each, normalize(x)) for each in events.normalized)


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
