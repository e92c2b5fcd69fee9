"""Parameters cast once for all layers, and the matmuls that read the copies: on the CPU as on CUDA."""

import copy

import pytest
import torch
from torch import Tensor, nn

from gem_precision import BF16Recipe, convert
from gem_precision._src import cast_once

RECIPE = BF16Recipe(activations="bfloat16")


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cast_once, "DEVICES", ("cpu", "cuda"))


def build() -> nn.Sequential:
    torch.manual_seed(0)
    return convert(nn.Sequential(nn.Linear(40, 64), nn.GELU(), nn.Linear(64, 48, bias=False)), RECIPE)


def run(model: nn.Module, x: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Output, gradient of x, gradients of the parameters."""
    x = x.clone().requires_grad_()
    y = model(x)
    dx, *gradients = torch.autograd.grad(y.float().square().sum(), [x, *model.parameters()])
    return y.detach(), dx, gradients


@pytest.mark.parametrize("shape", [(5, 40), (2, 3, 40), (0, 40)], ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_equals_a_cast_in_every_layer(shape: tuple[int, ...], transposed: bool, monkeypatch) -> None:
    model = build()
    x = torch.randn(shape).to(torch.bfloat16)
    if transposed:
        x = x.transpose(0, -1).contiguous().transpose(0, -1)
    plain = run(model, x)
    monkeypatch.setattr(cast_once, "DEVICES", ("cpu",))
    own = run(model, x)
    # torch adds the bias behind the product of a strided input, and rounds twice.
    loose = 2**-6 if transposed else 0
    for actual, expected in zip(own[:2], plain[:2], strict=True):
        torch.testing.assert_close(actual, expected, rtol=loose, atol=loose)
    for name, actual, expected in zip(dict(model.named_parameters()), own[2], plain[2], strict=True):
        assert actual.dtype == torch.float32
        # A bias is summed in float32, where the plain layer rounds the sum.
        rtol = 2**-7 if "bias" in name else loose
        torch.testing.assert_close(actual, expected, rtol=rtol, atol=1e-6 + 2 * loose, msg=name)


@pytest.mark.usefixtures("everywhere")
def test_layers_cast_nothing_while_the_model_runs() -> None:
    model, seen = build(), []
    model[0].register_forward_hook(lambda layer, *_: seen.append(cast_once.copies_of(layer)))
    model(torch.randn(5, 40).to(torch.bfloat16))
    (copies,) = seen
    assert torch.equal(copies.weight, model[0].weight.to(torch.bfloat16))
    assert torch.equal(copies.bias, model[0].bias.to(torch.bfloat16))
    assert all(cast_once.copies_of(layer) is None for layer in (model[0], model[2]))


@pytest.mark.usefixtures("everywhere")
def test_a_changed_parameter_is_cast_anew() -> None:
    model, x = build(), torch.randn(5, 40).to(torch.bfloat16)
    before = model(x)
    # A forward that fails leaves its copies behind.
    with pytest.raises(ValueError):
        model(torch.randn(5, 41).to(torch.bfloat16))
    assert cast_once.copies_of(model[0]) is not None
    with torch.no_grad():
        model[0].weight.mul_(2.0)
    assert cast_once.copies_of(model[0]) is None
    hidden = model[0](x)
    assert torch.equal(hidden, nn.functional.linear(x, *(p.to(torch.bfloat16) for p in model[0].parameters())))
    assert not torch.equal(model(x), before)


@pytest.mark.usefixtures("everywhere")
def test_two_forwards_before_their_backwards() -> None:
    model, x = build(), torch.randn(5, 40).to(torch.bfloat16)
    expected = run(model, x)[2]
    first, second = model(x), model(x)
    for y in (first, second):
        gradients = torch.autograd.grad(y.float().square().sum(), list(model.parameters()))
        assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))


@pytest.mark.usefixtures("everywhere")
def test_a_copy_of_the_model_casts_its_own_parameters() -> None:
    model, x = build(), torch.randn(5, 40).to(torch.bfloat16)
    before = model(x)
    other = copy.deepcopy(model)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    assert not other(x).any()
    assert torch.equal(model(x), before)


@pytest.mark.usefixtures("everywhere")
def test_layers_joined_are_the_layers() -> None:
    torch.manual_seed(0)
    layers = [convert(nn.Linear(40, n, bias=bias), RECIPE) for n, bias in ((64, True), (48, False), (32, False))]
    x = torch.randn(7, 40).to(torch.bfloat16).requires_grad_()
    parameters = [p for layer in layers for p in layer.parameters()]
    apart = torch.cat([layer(x) for layer in layers], dim=1)
    joined = layers[0].product(x, torch.cat([layer.weight for layer in layers]), layers[0].bias)
    assert torch.equal(joined, apart)
    grad = torch.randn(7, 144).to(torch.bfloat16)
    dx, *gradients = torch.autograd.grad(joined, [x, *parameters], grad)
    expected_dx, *expected = torch.autograd.grad(apart, [x, *parameters], grad)
    # One sum, and not three that are rounded.
    torch.testing.assert_close(dx, expected_dx, rtol=2**-6, atol=2**-6)
    for actual, reference in zip(gradients, expected, strict=True):
        assert torch.equal(actual, reference)
    assert layers[0].product(x.float(), layers[0].weight, None) is None


# torch's forward-mode AD scripts its own formulas on first use.
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.usefixtures("everywhere")
def test_transforms_take_the_plain_layer() -> None:
    model, x = build(), torch.randn(3, 40).to(torch.bfloat16)
    last, hidden, tangent = model[2], *torch.randn(2, 3, 64).to(torch.bfloat16)
    assert torch.equal(torch.func.jvp(last, (hidden,), (tangent,))[1], last(tangent))
    torch.testing.assert_close(torch.vmap(model)(x), model(x), rtol=2**-7, atol=2**-7)


@pytest.mark.usefixtures("everywhere")
def test_full_graph_compile() -> None:
    model = build()
    x = torch.randn(5, 40).to(torch.bfloat16)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), model(x), rtol=2**-7, atol=2**-7)


@pytest.mark.gpu
def test_cuda_gradients_of_parameters_are_not_rounded() -> None:
    model = build().cuda()
    x = torch.randn(5000, 40, device="cuda").to(torch.bfloat16)
    _, _, (dweight, dbias, dlast) = run(model, x)
    layer = model[0]
    hidden = nn.functional.linear(x, layer.weight.to(torch.bfloat16), layer.bias.to(torch.bfloat16))
    active = nn.functional.gelu(hidden)
    y = active @ model[2].weight.to(torch.bfloat16).t()
    dy = (2 * y.float()).to(torch.bfloat16)
    reference = dy.double().t() @ active.double()
    torch.testing.assert_close(dlast.double(), reference, rtol=1e-4, atol=1e-4 * reference.abs().max().item())
    assert dweight.dtype == dbias.dtype == torch.float32
