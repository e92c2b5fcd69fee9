"""What is gdpa's own: activations, scales, its ops. What it shares with jagged_attention: test_packed_attention."""

import pytest
import torch
from packed_ops import FULL, Gdpa

from gem_kernels import gdpa
from gem_kernels._src.gdpa.cpu_activation import CPU_ACTIVATIONS
from gem_kernels._src.gdpa.names import ACTIVATION_NAMES
from gem_kernels._src.gdpa.op import gdpa_backward_op, gdpa_op
from gem_kernels.reference.gdpa import ACTIVATIONS
from gem_kernels.testing import (
    MASK_CASES,
    MaskCase,
    assert_matches_oracle,
    attention_inputs,
    max_error,
    random_lengths,
    summation_floor,
)


def test_every_table_has_every_activation():
    from gem_kernels._src.tiles.activation import activation_pair

    assert tuple(ACTIVATIONS) == tuple(CPU_ACTIVATIONS) == ACTIVATION_NAMES
    assert len({activation_pair(name, hardware=True) for name in ACTIVATION_NAMES}) == len(ACTIVATION_NAMES)


@pytest.mark.parametrize("activation", ACTIVATION_NAMES)
def test_reference_derivative_is_that_of_its_value(activation):
    x = torch.linspace(-4, 4, 81, dtype=torch.float64).add(0.013).requires_grad_()
    act = ACTIVATIONS[activation]
    (slope,) = torch.autograd.grad(act.value(x).sum(), x)
    assert torch.allclose(slope, act.derivative(x.detach()), atol=1e-12)
    assert float(act.value(torch.zeros(1))) == 0.0


def test_reference_activations_are_torchs():
    x = torch.linspace(-5, 5, 201, dtype=torch.float64)
    functional = torch.nn.functional
    for name, function in {
        "gelu": functional.gelu,
        "gelu_approx": lambda t: functional.gelu(t, approximate="tanh"),
        "leaky_relu": functional.leaky_relu,
        "silu": functional.silu,
        "hardswish": functional.hardswish,
    }.items():
        assert torch.allclose(ACTIVATIONS[name].value(x), function(x), atol=1e-12)
    near = x[x.abs() < 0.8]
    assert max_error(ACTIVATIONS["fast_gelu_taylor_approx"].value(near), functional.gelu(near)) < 3e-4


@pytest.mark.parametrize("activation", ACTIVATION_NAMES)
def test_interpreted_kernels_every_activation(activation, interpreter, poisoned_empty):
    x = attention_inputs((3, 20), (17, 6), num_heads=1)
    op = Gdpa(activation=activation)
    op.check(op.by_launch, x)
    op.check(op.by_launch, x, MaskCase(id="w", window_size=(3, 2)))


@pytest.mark.parametrize("lengths", [(), (0, 0), (1,), (3, 0, 65)])
def test_opcheck(lengths):
    x = attention_inputs(lengths)
    q, k, v = (t.requires_grad_() for t in (x.q, x.k, x.v))
    args = (x.offsets_q, x.offsets_k, x.max_seqlen_q, x.max_seqlen_k, "silu", 0.5, 2.0, -1, 3)
    torch.library.opcheck(gdpa_op, (q, k, v, *args, None, None, False))
    torch.library.opcheck(gdpa_backward_op, (x.do, q.detach(), k.detach(), v.detach(), *args, None, None))


BASE = attention_inputs((3, 2), (4, 1), num_heads=4, num_heads_kv=2)
BAD = [
    ("scale-tensor", {"pre_scale": torch.tensor(0.5)}, TypeError, ["pre_scale", "Python float", "Tensor"]),
    ("scale-nan", {"post_scale": float("nan")}, ValueError, ["post_scale", "finite", "nan"]),
    ("activation", {"activation": "softmax"}, ValueError, ["activation", "fast_gelu", "'softmax'"]),
]


@pytest.mark.parametrize(("changes", "error", "words"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_bad_scale_or_activation_is_named(changes, error, words):
    with pytest.raises(error, match=r"^gdpa: ") as raised:
        gdpa(BASE.q, BASE.k, BASE.v, **(Gdpa().keywords(BASE) | changes))
    assert all(word in str(raised.value) for word in words), str(raised.value)
    assert "; " in str(raised.value).partition("got ")[2], f"no remedy: {raised.value}"


# On a GPU.


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("activation", ACTIVATION_NAMES)
def test_gpu_every_activation(activation, dtype, poisoned_empty):
    x = attention_inputs((70, 300), (130, 40), num_heads=2, head_dim=32, dtype=dtype, device="cuda")
    op = Gdpa(activation=activation, hardware_tanh=activation in ("fast_gelu", "fast_silu"))
    op.check(op.by_op, x)
    op.check(op.by_op, x, MASK_CASES[2])


@pytest.mark.gpu
@pytest.mark.parametrize("outlier", [0, 3000])
def test_gpu_80000_sequences(outlier):
    lengths = random_lengths(80_000, 8, sparsity=0.5, seed=0) - 1
    lengths[40_000] = max(outlier, int(lengths[40_000]))
    x = attention_inputs(lengths, num_heads=2, head_dim=16, device="cuda")
    op = Gdpa(activation="gelu")
    results, oracle, eager = (op.by_op(each, FULL) for each in (x, x.to("cpu", torch.float64), x.to("cpu")))
    # n roundings of a sum of n terms, all of one sign in the worst case, grow like a random walk.
    units = max(16.0, 2 * max(lengths.tolist()) ** 0.5)
    for name, a, o, e in zip(op.names, results, oracle, eager, strict=True):
        assert_matches_oracle(name, a, o, e, floor=summation_floor(o, a.dtype, units=units))
