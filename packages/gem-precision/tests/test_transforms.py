"""Forward-mode AD and torch.func through converted layers: an error where no formula is, right where torch has one."""

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad

from gem_kernels.modules import GDPA, BlockAttention, JaggedAttention
from gem_precision import convert, get_recipe

# torch's forward-mode AD scripts its own formulas on first use.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
OFFSETS = torch.tensor([0, 2, 5])
SIDES = {"offsets_q": OFFSETS, "offsets_k": OFFSETS, "max_seqlen_q": 3, "max_seqlen_k": 3}


@pytest.mark.parametrize("tensor", ["input", "weight", "bias"])
def test_a_linear_layer_in_mxfp8_refuses_it(tensor: str) -> None:
    layer = convert(nn.Linear(64, 64), get_recipe("mxfp8"))
    tensors = {"input": torch.randn(3, 64)} | {name: p.detach() for name, p in layer.named_parameters()}

    def call(value: torch.Tensor) -> torch.Tensor:
        given = tensors | {tensor: value}
        return torch.func.functional_call(layer, given, given.pop("input"))

    x = tensors[tensor]
    words = f"^MXFP8Linear: `{tensor}` must have no tangent of forward-mode AD .*; use torch.autograd.grad, or leave"
    with pytest.raises(NotImplementedError, match=words):
        torch.func.jvp(call, (x,), (torch.ones_like(x),))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=words):
        call(forward_ad.make_dual(x, torch.ones_like(x)))
    words = f"^MXFP8Linear: `{tensor}` must be no tensor of torch.func .*; use torch.autograd.grad, or leave"
    with pytest.raises(NotImplementedError, match=words):
        torch.func.grad(lambda value: call(value).sum())(x)
    with pytest.raises(NotImplementedError, match=words):
        torch.func.vmap(call)(x[None])


@pytest.mark.parametrize("name", ["mxfp8", "bf16"])
@pytest.mark.parametrize("layer", [JaggedAttention(), GDPA(), BlockAttention()], ids=lambda x: type(x).__name__)
@pytest.mark.parametrize("operand", range(3))
def test_attention_refuses_it(name: str, layer: nn.Module, operand: int) -> None:
    layer = convert(type(layer)(), get_recipe(name))
    x = torch.randn(5, 2, 32)
    options = {"offsets": OFFSETS, "max_seqlen": 3} if isinstance(layer, BlockAttention) else SIDES

    def call(value: torch.Tensor) -> torch.Tensor:
        return layer(*(value if i == operand else x for i in range(3)), **options)

    with pytest.raises(NotImplementedError, match=r": `[qkv]` must have no tangent of forward-mode AD"):
        torch.func.jvp(call, (x,), (torch.ones_like(x),))


def test_a_linear_layer_in_bf16_follows_it() -> None:
    layer = convert(nn.Linear(64, 64, bias=False), get_recipe("bf16"))
    x, tangent = torch.randn(3, 64), torch.randn(3, 64)
    torch.testing.assert_close(torch.func.jvp(layer, (x,), (tangent,))[1], layer(tangent), rtol=0, atol=0)
