"""A user's own activation in gdpa: registration, both paths, compilation."""

import copy
from dataclasses import replace

import pytest
import torch
import triton
import triton.language as tl
from torch.utils.flop_counter import FlopCounterMode

from gem_kernels import Activation, gdpa, reference
from gem_kernels.modules import GDPA
from gem_kernels.testing import MASK_CASES, assert_matches_oracle, attention_inputs, make_offsets, summation_floor


@triton.jit
def _sigmoid(x):
    return 1.0 / (1.0 + tl.exp(-x))


@triton.jit
def _sigmoid_derivative(x):
    s = 1.0 / (1.0 + tl.exp(-x))
    return s * (1.0 - s)


# Not 0 at 0, so that padding or a masked pair that counted would show.
SIGMOID = Activation(
    name="test_sigmoid",
    torch_value=torch.sigmoid,
    torch_derivative=lambda s: torch.sigmoid(s) * (1 - torch.sigmoid(s)),
    value=_sigmoid,
    derivative=_sigmoid_derivative,
)
CPU_ONLY = Activation(name="test_cube", torch_value=lambda s: s**3, torch_derivative=lambda s: 3 * s**2)
MASKS = MASK_CASES[:3]


def make_inputs(kind, **options):
    """(inputs, pairing options) of one way to pair the two sides."""
    device = options.get("device", "cpu")
    if kind == "targets":
        x = attention_inputs((3, 0, 70, 40), num_heads=2, num_heads_kv=1, **options)
        return x, {"offsets_q": x.offsets_q, "num_targets": torch.tensor([1, 0, 50, 40], device=device)}
    if kind == "seeds":
        x = attention_inputs((5,), (3, 0, 70), num_heads=2, num_heads_kv=1, **options)
        return x._replace(do=x.do.repeat(3, 1, 1)), {"offsets_q": None}
    x = attention_inputs((3, 1, 40, 0), (35, 0, 70, 2), num_heads=2, num_heads_kv=1, **options)
    pairing = {"offsets_q": x.offsets_q}
    if kind == "requests":
        pairing["request_index"] = torch.tensor([0, 0, 2, 3], device=device)
    return x, pairing


KINDS = ["plain", "targets", "seeds", "requests"]


def arguments(x, pairing, mask):
    scales = {"pre_scale": 0.3, "post_scale": 0.6}
    return {"offsets_k": x.offsets_k, **pairing, **scales, "causal": mask.causal, "window_size": mask.window_size}


def check(results, x, pairing, mask, activation):
    options = arguments(x, pairing, mask)
    reached = []
    for y in (x.to(torch.float64), x):
        out = reference.gdpa(y.q, y.k, y.v, **options, activation=activation)
        reached.append((out, *reference.gdpa_backward(y.do, y.q, y.k, y.v, **options, activation=activation)))
    for name, a, o, e in zip(("out", "dq", "dk", "dv"), results, *reached, strict=True):
        assert_matches_oracle(name, a, o, e, floor=summation_floor(o, a.dtype), factor=3.0)


def by_op(x, pairing, mask, activation):
    q, k, v = (t.detach().requires_grad_() for t in (x.q, x.k, x.v))
    lengths = {"max_seqlen_q": x.max_seqlen_q, "max_seqlen_k": x.max_seqlen_k}
    out = gdpa(q, k, v, **arguments(x, pairing, mask), **lengths, activation=activation)
    return out.detach(), *torch.autograd.grad(out, [q, k, v], x.do)


def by_launch(x, pairing, mask, name):
    from gem_kernels._src.gdpa.backward import launch_backward
    from gem_kernels._src.gdpa.forward import launch_forward

    left, right = mask.window_size
    args = (pairing["offsets_q"], x.offsets_k, x.max_seqlen_q, x.max_seqlen_k, name, 0.3, 0.6, left)
    args += (0 if mask.causal else right,)
    indices = {key: pairing[key] for key in ("num_targets", "request_index") if key in pairing}
    return launch_forward(x.q, x.k, x.v, *args, **indices), *launch_backward(x.do, x.q, x.k, x.v, *args, **indices)


@pytest.mark.parametrize("mask", MASKS, ids=lambda m: m.id)
@pytest.mark.parametrize("kind", KINDS)
def test_cpu_op_matches_oracle(kind, mask):
    x, pairing = make_inputs(kind)
    for activation in (SIGMOID, CPU_ONLY):
        check(by_op(x, pairing, mask, activation), x, pairing, mask, activation)


@pytest.mark.parametrize("mask", MASKS, ids=lambda m: m.id)
@pytest.mark.parametrize("kind", KINDS)
def test_interpreted_kernels_match_oracle(kind, mask, interpreter, poisoned_empty):
    x, pairing = make_inputs(kind)
    check(by_launch(x, pairing, mask, SIGMOID.name), x, pairing, mask, SIGMOID)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mask", MASKS, ids=lambda m: m.id)
@pytest.mark.parametrize("kind", KINDS)
def test_gpu_matches_oracle(kind, mask, dtype, poisoned_empty):
    x, pairing = make_inputs(kind, head_dim=64, dtype=dtype, device="cuda")
    check(by_op(x, pairing, mask, SIGMOID), x, pairing, mask, SIGMOID)


def test_gradcheck():
    x, pairing = make_inputs("targets", head_dim=2, dtype=torch.float64)
    offsets = make_offsets((0, 1, 4))
    pairing = {"offsets_q": offsets, "num_targets": torch.tensor([0, 1, 2])}
    q, k, v = (t[:5].requires_grad_() for t in (x.q, x.k, x.v))
    options = arguments(x._replace(offsets_k=offsets), pairing, MASKS[1])
    function = lambda *qkv: gdpa(*qkv, **options, max_seqlen_q=4, max_seqlen_k=4, activation=SIGMOID)  # noqa: E731
    assert torch.autograd.gradcheck(function, (q, k, v))


def test_the_name_alone_works_and_in_a_module():
    x, pairing = make_inputs("plain")
    by_object, by_name = (by_op(x, pairing, MASKS[0], a) for a in (SIGMOID, SIGMOID.name))
    assert all(torch.equal(a, b) for a, b in zip(by_object, by_name, strict=True))
    module = copy.deepcopy(GDPA(activation=SIGMOID, pre_scale=0.3, post_scale=0.6))
    assert module.activation == "test_sigmoid"
    offsets = {"offsets_q": x.offsets_q, "offsets_k": x.offsets_k}
    out = module(x.q, x.k, x.v, **offsets, max_seqlen_q=x.max_seqlen_q, max_seqlen_k=x.max_seqlen_k)
    assert torch.equal(out, by_object[0])


def test_compiles_to_one_graph():
    torch._dynamo.reset()
    x, pairing = make_inputs("requests")

    def loss(q, k, v):
        lengths = {"max_seqlen_q": x.max_seqlen_q, "max_seqlen_k": x.max_seqlen_k}
        out = gdpa(q, k, v, **arguments(x, pairing, MASKS[1]), **lengths, activation=SIGMOID)
        return (out * x.do).sum()

    qkv = [t.clone().requires_grad_() for t in (x.q, x.k, x.v)]
    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    expected = torch.autograd.grad(loss(*qkv), qkv)
    for a, b in zip(torch.autograd.grad(compiled(*qkv), qkv), expected, strict=True):
        assert torch.equal(a, b)


def test_flops_do_not_depend_on_the_activation():
    x, pairing = make_inputs("targets")
    counts = []
    for activation in ("gelu", SIGMOID):
        with FlopCounterMode(display=False) as counter:
            by_op(x, pairing, MASKS[1], activation)
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def test_the_same_functions_may_be_registered_again():
    assert Activation(**{name: getattr(SIGMOID, name) for name in SIGMOID.__slots__}) == SIGMOID
    assert copy.deepcopy({"activation": SIGMOID})["activation"] is SIGMOID


def identity(s):
    return s


BAD = [
    ("taken", {"torch_value": torch.tanh}, ValueError, ["name", "'test_sigmoid'", "choose another"]),
    ("built-in", {"name": "gelu"}, ValueError, ["name", "built-in", "'gelu'"]),
    ("no-identifier", {"name": "my act"}, ValueError, ["name", "identifier", "'my act'"]),
    ("name-type", {"name": 3}, TypeError, ["name", "str", "int"]),
    ("half", {"name": "half", "derivative": None}, ValueError, ["derivative", "None", "CUDA"]),
    ("other-half", {"name": "half", "value": None}, ValueError, ["value", "None", "CUDA"]),
    ("no-jit", {"name": "no_jit", "value": identity}, TypeError, ["value", "triton.jit", "function"]),
    ("no-callable", {"name": "no_callable", "torch_value": 1.0}, TypeError, ["torch_value", "callable", "float"]),
    (
        "infinite",
        {"name": "infinite", "torch_derivative": torch.log},
        ValueError,
        ["torch_derivative", "finite", "inf"],
    ),
    ("reduces", {"name": "reduces", "torch_value": torch.sum}, ValueError, ["torch_value", "elementwise"]),
    (
        "softmax",
        {"name": "softmax", "torch_value": lambda s: s.softmax(-1)},
        ValueError,
        ["torch_value", "elementwise"],
    ),
    ("casts", {"name": "casts", "torch_value": torch.Tensor.double}, ValueError, ["torch_value", "dtype", "float64"]),
    (
        "raises",
        {"name": "raises", "torch_value": lambda s: s.foo},
        ValueError,
        ["torch_value", "AttributeError", "foo"],
    ),
]


def test_a_derivative_that_is_not_the_slope_of_the_value_is_told():
    with pytest.warns(UserWarning, match=r"`torch_derivative` of 'crooked' is 1 at 0.7364, where the slope .* is 1.47"):
        Activation(name="crooked", torch_value=torch.square, torch_derivative=torch.ones_like)


@pytest.mark.parametrize(("changes", "error", "words"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_bad_activation_is_named(changes, error, words):
    with pytest.raises(error, match=r"^Activation: ") as raised:
        replace(SIGMOID, **changes)
    assert all(word in str(raised.value) for word in words), str(raised.value)
    # Nothing half-made is registered.
    if changes.get("name") not in (None, "gelu"):
        x, pairing = make_inputs("plain")
        with pytest.raises(ValueError, match=r"^gdpa: `activation`"):
            by_op(x, pairing, MASKS[0], changes["name"])


def test_cpu_activation_is_refused_by_the_triton_kernels():
    from gem_kernels._src.tiles.activation import activation_pair

    with pytest.raises(ValueError, match=r"'test_cube'.*`value`.*triton\.jit"):
        activation_pair("test_cube", hardware=True)
    with pytest.raises(ValueError, match=r"registered.*'nowhere'"):
        activation_pair("nowhere", hardware=True)
