import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from precision_measures import sqnr_db, stored, uneven
from torch import Tensor, nn

from gem_kernels import reference
from gem_kernels.modules import GDPA, BlockAttention, JaggedAttention
from gem_kernels.testing import LENGTH_CASES, AttentionInputs, LengthCase, attention_inputs
from gem_precision import BF16Recipe, MXFP8Recipe, convert

Gradients = tuple[Tensor, Tensor, Tensor]
PROBABILITIES_FIRST = {"causal": True, "window_size": (40, -1)}


@dataclass(frozen=True, kw_only=True)
class Kind:
    id: str
    module: Callable[[], nn.Module]
    forward: Callable[..., Any]
    backward: Callable[..., Gradients]
    options: dict
    two_sided: bool = True

    def offsets(self, x: AttentionInputs) -> dict:
        """Arguments of the reference."""
        return {"offsets_q": x.offsets_q, "offsets_k": x.offsets_k} if self.two_sided else {"offsets": x.offsets_q}

    def batch(self, x: AttentionInputs) -> dict:
        """Arguments of the module."""
        if not self.two_sided:
            return {"offsets": x.offsets_q, "max_seqlen": x.max_seqlen_q}
        return {**self.offsets(x), "max_seqlen_q": x.max_seqlen_q, "max_seqlen_k": x.max_seqlen_k}


GDPA_OPTIONS = {"activation": "silu", "pre_scale": 0.25, "post_scale": 0.1}
KINDS = [
    Kind(
        id="jagged_attention",
        module=lambda: JaggedAttention(**PROBABILITIES_FIRST),
        forward=lambda *args, **kwargs: reference.jagged_attention(*args, **kwargs)[0],
        backward=reference.jagged_attention_backward,
        options=PROBABILITIES_FIRST,
    ),
    Kind(
        id="gdpa",
        module=lambda: GDPA(**GDPA_OPTIONS),
        forward=reference.gdpa,
        backward=reference.gdpa_backward,
        options=GDPA_OPTIONS,
    ),
    Kind(
        id="block_attention",
        module=lambda: BlockAttention(block_size=64),
        forward=reference.block_attention,
        backward=reference.block_attention_backward,
        options={"block_size": 64},
        two_sided=False,
    ),
]
all_kinds = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.id)


def run(module: nn.Module, kind: Kind, x: AttentionInputs) -> tuple[Tensor, Gradients]:
    q, k, v = (t.detach().clone().requires_grad_() for t in (x.q, x.k, x.v))
    out = module(q, k, v, **kind.batch(x))
    return out.detach(), torch.autograd.grad(out, (q, k, v), x.do)


def cast_per_sequence(x: Tensor, offsets: Tensor, block_shape: tuple[int, int]) -> Tensor:
    """Each sequence and head on its own, through the stored format, in float64."""
    out = torch.zeros(x.shape, dtype=torch.float64)
    bounds = offsets.tolist()
    for start, stop in itertools.pairwise(bounds):
        for head in range(x.shape[1]):
            out[start:stop, head] = stored(x[start:stop, head], block_shape)
    return out


def cast_by_hand(x: AttentionInputs) -> AttentionInputs:
    return x._replace(
        q=cast_per_sequence(x.q, x.offsets_q, (32, 32)),
        k=cast_per_sequence(x.k, x.offsets_k, (32, 32)),
        v=cast_per_sequence(x.v, x.offsets_k, (32, 1)),
        do=cast_per_sequence(x.do, x.offsets_q, (32, 32)),
    )


def oracle(kind: Kind, x: AttentionInputs) -> tuple[Tensor, Gradients]:
    x = cast_by_hand(x)
    arguments = {**kind.offsets(x), **kind.options}
    return kind.forward(x.q, x.k, x.v, **arguments), kind.backward(x.do, x.q, x.k, x.v, **arguments)


def uneven_rows(x: AttentionInputs) -> AttentionInputs:
    """Of Gaussian rows all blocks have nearly the same scale, and one that is cut in another place would pass."""
    return x._replace(q=uneven(x.q), k=uneven(x.k), v=uneven(x.v), do=uneven(x.do))


def inputs_for(kind: Kind, case: LengthCase, **options: Any) -> AttentionInputs:
    lengths_k = case.lengths_k if kind.two_sided else None
    return uneven_rows(attention_inputs(case.lengths_q, lengths_k, num_heads=4, num_heads_kv=2, **options))


@all_kinds
@pytest.mark.parametrize("case", LENGTH_CASES, ids=lambda case: case.id)
@pytest.mark.parametrize("head_dim", [16, 40])
def test_equals_casts_per_sequence_then_attention(kind: Kind, case: LengthCase, head_dim: int) -> None:
    x = inputs_for(kind, case, head_dim=head_dim, head_dim_v=33)
    out, gradients = run(convert(kind.module(), MXFP8Recipe()), kind, x)
    expected, expected_gradients = oracle(kind, x)
    assert out.shape == expected.shape
    assert sqnr_db(out, expected) >= 80
    for name, actual, exact in zip("qkv", gradients, expected_gradients, strict=True):
        assert sqnr_db(actual, exact) >= 80, f"d{name}"
    # A block that is cut in another place rounds its small values otherwise, which no ratio of energies shows.
    same_out, same_gradients = run(kind.module(), kind, cast_by_hand(x).to(torch.float32))
    for actual, same in zip((out, *gradients), (same_out, *same_gradients), strict=True):
        assert torch.equal(actual, same)


@all_kinds
def test_is_close_to_float32_on_gaussian_data(kind: Kind) -> None:
    lengths = (100, 65, 7, 130)
    x = attention_inputs(lengths, num_heads=2, head_dim=64)
    out, gradients = run(convert(kind.module(), MXFP8Recipe()), kind, x)
    exact, exact_gradients = run(kind.module(), kind, x)
    assert sqnr_db(out, exact) >= 26
    for name, actual, expected in zip("qkv", gradients, exact_gradients, strict=True):
        assert sqnr_db(actual, expected) >= 24, f"d{name}"


@all_kinds
@pytest.mark.parametrize("value", [1e4, float("nan")], ids=["large", "nan"])
def test_no_sequence_changes_another(kind: Kind, value: float) -> None:
    x = attention_inputs((33, 40, 5, 70), num_heads=2, head_dim=16)
    module = convert(kind.module(), MXFP8Recipe())
    before = run(module, kind, x)
    rows = slice(33, 73)
    for t in (x.q, x.k, x.v, x.do):
        t[rows] = value
    after = run(module, kind, x)
    others = torch.ones(148, dtype=torch.bool)
    others[rows] = False
    for actual, expected in zip((after[0], *after[1]), (before[0], *before[1]), strict=True):
        assert torch.equal(actual[others], expected[others])


@all_kinds
def test_bf16_rounds_operands_and_keeps_dtypes(kind: Kind) -> None:
    x = attention_inputs((33, 40, 0, 70), num_heads=2, head_dim=32)
    out, gradients = run(convert(kind.module(), BF16Recipe()), kind, x)
    exact, exact_gradients = run(kind.module(), kind, x)
    for actual, expected in zip((out, *gradients), (exact, *exact_gradients), strict=True):
        assert actual.dtype == torch.float32
        assert 38 < sqnr_db(actual, expected) < 80
    low, _ = run(kind.module(), kind, x.to(torch.bfloat16))
    assert torch.equal(out, low.float())


@all_kinds
@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bool, torch.complex64], ids=str)
@pytest.mark.parametrize("operand", ["q", "k", "v"])
def test_bf16_refuses_what_a_cast_would_cut(kind: Kind, dtype: torch.dtype, operand: str) -> None:
    x = attention_inputs((5, 3), num_heads=2, head_dim=16)
    tensors = {name: getattr(x, name) for name in "qkv"}
    tensors[operand] = tensors[operand].to(dtype)
    for recipe in (BF16Recipe(), BF16Recipe(activations="bfloat16")):
        with pytest.raises(TypeError, match=rf"BF16 attention: `{operand}` must be float32, .* got {dtype}; cast it"):
            convert(kind.module(), recipe)(*tensors.values(), **kind.batch(x))


@all_kinds
def test_bf16_may_keep_its_result_in_bf16(kind: Kind) -> None:
    x = attention_inputs((33, 40, 0, 70), num_heads=2, head_dim=32)
    expected, _ = run(convert(kind.module(), BF16Recipe()), kind, x)
    out, gradients = run(convert(kind.module(), BF16Recipe(activations="bfloat16")), kind, x)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out.float(), expected)
    assert {gradient.dtype for gradient in gradients} == {torch.float32}


@all_kinds
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_half_precision_inputs(kind: Kind, dtype: torch.dtype) -> None:
    x = uneven_rows(attention_inputs((33, 64), num_heads=2, head_dim=32, dtype=dtype, contiguous=False))
    out, gradients = run(convert(kind.module(), MXFP8Recipe()), kind, x)
    expected, expected_gradients = oracle(kind, x)
    for actual, exact in zip((out, *gradients), (expected, *expected_gradients), strict=True):
        assert actual.dtype == dtype
        # What is left is the rounding of the results to the dtype, and of the output that the backward reads again.
        assert sqnr_db(actual, exact) >= 40


@all_kinds
def test_int32_offsets_and_a_loose_max_seqlen(kind: Kind) -> None:
    x = attention_inputs((33, 0, 64, 1), num_heads=2, head_dim=16, offsets_dtype=torch.int32)
    module = convert(kind.module(), MXFP8Recipe())
    tight = run(module, kind, x)
    loose = run(module, kind, x._replace(max_seqlen_q=1000, max_seqlen_k=1000))
    for actual, expected in zip((loose[0], *loose[1]), (tight[0], *tight[1]), strict=True):
        assert torch.equal(actual, expected)


# torch's own tracer makes an instance of every autograd Function and warns about it.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@all_kinds
@pytest.mark.parametrize("recipe", [MXFP8Recipe(), BF16Recipe()], ids=lambda recipe: recipe.name)
def test_full_graph_compile(kind: Kind, recipe: MXFP8Recipe | BF16Recipe) -> None:
    module = convert(kind.module(), recipe)
    compiled = torch.compile(module, fullgraph=True, dynamic=True, backend="aot_eager")
    for lengths in ((33, 40, 5), (64, 3, 30)):
        x = attention_inputs(lengths, num_heads=2, head_dim=16)
        expected, actual = run(module, kind, x), run(compiled, kind, x)
        for a, e in zip((actual[0], *actual[1]), (expected[0], *expected[1]), strict=True):
            assert torch.equal(a, e)


@all_kinds
def test_errors_come_from_the_op_that_knows_the_rule(kind: Kind) -> None:
    module = convert(kind.module(), MXFP8Recipe())
    x = attention_inputs((5, 3), num_heads=2, head_dim=16)
    batch = kind.batch(x)
    name = "offsets_q" if kind.two_sided else "offsets"
    cases = [
        ((x.q[0], x.k, x.v), batch, ValueError, r"`q` must have shape \(T, H, D\)"),
        ((x.q.double(), x.k, x.v), batch, TypeError, "`q` must be float32, bfloat16 or float16, got torch.float64"),
        ((x.q, x.k, x.v), {**batch, name: torch.tensor([0, 5, 7])}, ValueError, f"`{name}` must end at"),
        ((x.q, x.k, x.v), {**batch, name: torch.tensor([[0, 5, 8]])}, ValueError, f"`{name}` must have shape"),
        ((x.q, x.k[:, :, :8], x.v), batch, ValueError, "`k` must have the head dim of `q`"),
    ]
    for tensors, arguments, error, words in cases:
        with pytest.raises(error, match=words):
            module(*tensors, **arguments)


@pytest.mark.gpu
@all_kinds
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("case", LENGTH_CASES, ids=lambda case: case.id)
def test_on_the_gpu(kind: Kind, dtype: torch.dtype, case: LengthCase) -> None:
    x = inputs_for(kind, case, head_dim=32, dtype=dtype)
    expected, expected_gradients = oracle(kind, x)
    out, gradients = run(convert(kind.module(), MXFP8Recipe()), kind, x.to("cuda"))
    bound = 80 if dtype == torch.float32 else 38
    for actual, exact in zip((out, *gradients), (expected, *expected_gradients), strict=True):
        assert sqnr_db(actual, exact) >= bound
