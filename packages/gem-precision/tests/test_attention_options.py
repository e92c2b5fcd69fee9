"""Options that belong to a call of an attention layer: through a recipe they are the function on cast operands."""

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from precision_measures import stored, uneven
from torch import Tensor, nn

from gem_kernels import block_attention, gdpa, gdpa_norm_block, jagged_attention
from gem_kernels.modules import GDPA, BlockAttention, JaggedAttention
from gem_kernels.testing import attention_inputs, make_offsets
from gem_precision import BF16Recipe, MXFP8Recipe, convert

FUNCTIONS = {JaggedAttention: jagged_attention, GDPA: gdpa, BlockAttention: block_attention}


def draw(*shape: int, seed: int = 3, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def rotary_table(rows: int, dim: int) -> Tensor:
    angles = draw(rows, dim // 2)
    return torch.cat([angles.sin(), angles.cos()], 1)


def rising_times(rows: int) -> Tensor:
    return 1_700_000_000 + torch.arange(rows) * 11


@dataclass(frozen=True, kw_only=True)
class Case:
    id: str
    kind: type[nn.Module]
    lengths_q: tuple[int, ...]
    """Of the seeds: one."""
    lengths_k: tuple[int, ...] | None
    call: Callable[[], dict[str, Any]]
    fixed: dict[str, Any] = field(default_factory=dict)
    lengths_out: tuple[int, ...] | None = None
    """Rows of the output by sequence, for seeds."""

    def inputs(self, dtype: torch.dtype = torch.float32) -> "Inputs":
        x = attention_inputs(self.lengths_q, self.lengths_k, num_heads=4, num_heads_kv=2, head_dim=16, dtype=dtype)
        if self.kind is BlockAttention:
            lengths = {"offsets": x.offsets_q, "max_seqlen": x.max_seqlen_q}
        else:
            lengths = {
                "offsets_q": x.offsets_q if self.lengths_out is None else None,
                "offsets_k": x.offsets_k,
                "max_seqlen_q": x.max_seqlen_q,
                "max_seqlen_k": x.max_seqlen_k,
            }
        offsets_out = x.offsets_q if self.lengths_out is None else make_offsets(self.lengths_out)
        do = draw(int(offsets_out[-1]), 4, 16, seed=9, dtype=dtype)
        return Inputs(
            operands=(uneven(x.q), uneven(x.k), uneven(x.v)),
            do=uneven(do),
            lengths=lengths,
            offsets=(x.offsets_q, x.offsets_k, x.offsets_k),
            offsets_out=offsets_out,
        )

    def function(self, *args: Tensor, **kwargs: Any) -> Tensor:
        out = FUNCTIONS[self.kind](*args, **kwargs, **self.fixed)
        assert isinstance(out, Tensor)
        return out

    def module(self) -> nn.Module:
        return self.kind(**self.fixed)


@dataclass(frozen=True, kw_only=True)
class Inputs:
    operands: tuple[Tensor, ...]
    do: Tensor
    lengths: dict[str, Any]
    offsets: tuple[Tensor, ...]
    """By which q, k and v are cast."""
    offsets_out: Tensor


# Sequences of more than one block, and blocks that would differ if cut from the start of another side.
REQUESTS = {"lengths_q": (1, 40, 0, 5, 33), "lengths_k": (50, 9, 35)}
REQUEST_INDEX = (0, 0, 0, 2, 2)
CASES = [
    Case(
        id="position_bias",
        kind=JaggedAttention,
        lengths_q=(35, 0, 70),
        lengths_k=(40, 5, 33),
        call=lambda: {"position_bias": draw(4, 15)},
        fixed={"causal": True},
    ),
    Case(
        id="time_bias",
        kind=JaggedAttention,
        lengths_q=(35, 0, 70),
        lengths_k=(40, 5, 33),
        call=lambda: {
            "time_bias": draw(4, 20, dtype=torch.float64),
            "times_q": rising_times(105),
            "times_k": rising_times(78),
        },
        fixed={"time_buckets_per_octave": 2},
    ),
    Case(
        id="requests",
        kind=JaggedAttention,
        call=lambda: {"request_index": torch.tensor(REQUEST_INDEX), "position_bias": draw(4, 5)},
        **REQUESTS,
    ),
    Case(
        id="seeds",
        kind=JaggedAttention,
        lengths_q=(40,),
        lengths_k=(50, 0, 35),
        call=lambda: {"time_bias": draw(4, 6), "times_q": 99 * draw(120), "times_k": 99 * draw(85)},
        lengths_out=(40, 40, 40),
    ),
    Case(
        id="seeds-of-requests",
        kind=JaggedAttention,
        lengths_q=(5,),
        lengths_k=(50, 9, 35),
        call=lambda: {"request_index": torch.tensor(REQUEST_INDEX)},
        lengths_out=(5,) * 5,
    ),
    Case(
        id="no-seed",
        kind=JaggedAttention,
        lengths_q=(0,),
        lengths_k=(3, 4),
        call=dict,
        lengths_out=(0, 0),
    ),
    Case(
        id="targets",
        kind=GDPA,
        lengths_q=(70, 0, 40),
        lengths_k=None,
        call=lambda: {"num_targets": torch.tensor([9, 0, 35])},
        fixed={"activation": "silu", "causal": True, "post_scale": 0.1},
    ),
    Case(
        id="gdpa-requests",
        kind=GDPA,
        call=lambda: {"request_index": torch.tensor(REQUEST_INDEX)},
        fixed={"activation": "silu", "pre_scale": 0.25},
        **REQUESTS,
    ),
    Case(
        id="gdpa-seeds-of-requests",
        kind=GDPA,
        lengths_q=(34,),
        lengths_k=(50, 9, 35),
        call=lambda: {"request_index": torch.tensor(REQUEST_INDEX)},
        fixed={"pre_scale": 0.25},
        lengths_out=(34,) * 5,
    ),
    Case(
        id="rotary",
        kind=BlockAttention,
        lengths_q=(70, 0, 9),
        lengths_k=None,
        call=lambda: {"rotary": rotary_table(79, 16)},
    ),
]
TWO_SIDED = [case for case in CASES if case.kind is not BlockAttention]


def by_id(case: Case) -> str:
    return case.id


def run(
    attend: Callable[..., Tensor], operands: tuple[Tensor, ...], do: Tensor, lengths: dict, call: dict
) -> tuple[Tensor, ...]:
    """Output, gradients of the operands and of the bias tables."""
    operands = tuple(x.detach().clone().requires_grad_() for x in operands)
    tables = tuple(x.requires_grad_() for name, x in call.items() if name.endswith("_bias"))
    out = attend(*operands, **lengths, **call)
    return out.detach(), *torch.autograd.grad(out, operands + tables, do.to(out.dtype))


def cast_per_sequence(x: Tensor, offsets: Tensor, block_shape: tuple[int, int]) -> Tensor:
    """Each sequence and head on its own, through the stored format, in the dtype of x."""
    out = torch.empty_like(x)
    for start, stop in itertools.pairwise(offsets.tolist()):
        for head in range(x.shape[1]):
            out[start:stop, head] = stored(x[start:stop, head], block_shape).to(x.dtype)
    return out


@pytest.mark.parametrize("case", CASES, ids=by_id)
def test_bf16_is_the_function_on_bf16_operands(case: Case) -> None:
    x = case.inputs()
    low = tuple(t.to(torch.bfloat16) for t in x.operands)
    expected = run(case.function, low, x.do, x.lengths, case.call())
    actual = run(convert(case.module(), BF16Recipe()), x.operands, x.do, x.lengths, case.call())
    for a, e in zip(actual[:4], expected[:4], strict=True):
        assert a.dtype == torch.float32
        assert torch.equal(a, e.float())
    for a, e in zip(actual[4:], expected[4:], strict=True):
        assert a.dtype == e.dtype
        assert torch.equal(a, e)


@pytest.mark.parametrize("case", TWO_SIDED, ids=by_id)
def test_mxfp8_is_the_function_on_operands_cast_by_hand(case: Case) -> None:
    x = case.inputs()
    shapes = ((32, 32), (32, 32), (32, 1))
    cast = tuple(map(cast_per_sequence, x.operands, x.offsets, shapes))
    assert all(t.numel() == 0 or not torch.equal(t, high) for t, high in zip(cast, x.operands, strict=True))
    do = cast_per_sequence(x.do, x.offsets_out, (32, 32))
    expected = run(case.function, cast, do, x.lengths, case.call())
    actual = run(convert(case.module(), MXFP8Recipe()), x.operands, x.do, x.lengths, case.call())
    # The gradient of a table comes from dS, and that from the cast dO: nothing of it is left in high precision.
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == e.dtype
        assert torch.equal(a, e)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.bfloat16])
def test_bf16_takes_a_rotary_table_in_the_dtype_of_its_input(dtype: torch.dtype) -> None:
    x = attention_inputs((70, 9), head_dim=16, dtype=dtype)
    batch = {"offsets": x.offsets_q, "max_seqlen": x.max_seqlen_q}
    table = rotary_table(79, 16).to(dtype)
    out = convert(BlockAttention(), BF16Recipe())(x.q, x.k, x.v, **batch, rotary=table)
    operands = (t.to(torch.bfloat16) for t in (x.q, x.k, x.v))
    expected = block_attention(*operands, **batch, rotary=table if dtype == torch.bfloat16 else table.float())
    assert torch.equal(out, expected.to(dtype))


def test_bf16_leaves_what_is_wrong_about_a_rotary_table_to_the_op() -> None:
    x = attention_inputs((70, 9), head_dim=16)
    layer = convert(BlockAttention(), BF16Recipe())
    batch = {"offsets": x.offsets_q, "max_seqlen": x.max_seqlen_q}
    table = rotary_table(79, 16)
    with pytest.raises(TypeError, match=r"`rotary` must be float32 or .*got torch.float16"):
        layer(x.q, x.k, x.v, **batch, rotary=table.half())
    with pytest.raises(ValueError, match="`rotary` gets no gradient"):
        layer(x.q.half(), x.k, x.v, **batch, rotary=table.half().requires_grad_())


def test_mxfp8_refuses_rotary_and_says_what_to_do() -> None:
    x = attention_inputs((70, 9), head_dim=16)
    batch = {"offsets": x.offsets_q, "max_seqlen": x.max_seqlen_q}
    table = rotary_table(79, 16)
    layer = convert(BlockAttention(), MXFP8Recipe())
    with pytest.raises(ValueError, match="MXFP8BlockAttention: `rotary` must be None") as raised:
        layer(x.q, x.k, x.v, **batch, rotary=table)
    for words in ("quantised already", "got a tensor of shape (79, 16)", "rotate q, k and v before", "filter"):
        assert words in str(raised.value)
    assert torch.equal(layer(x.q, x.k, x.v, **batch, rotary=None), layer(x.q, x.k, x.v, **batch))


def test_errors_come_from_the_op_that_knows_the_rule() -> None:
    x = attention_inputs((5, 3), head_dim=16)
    lengths = {"offsets_k": x.offsets_k, "max_seqlen_q": 8, "max_seqlen_k": 5}
    jagged, activated = (convert(kind(), MXFP8Recipe()) for kind in (JaggedAttention, GDPA))
    cases = [
        (jagged, {"offsets_q": None, "request_index": [0, 1]}, TypeError, "`request_index` must be a Tensor"),
        (jagged, {"offsets_q": None, "request_index": torch.tensor([1, 0])}, ValueError, "must not decrease"),
        (jagged, {"offsets_q": x.offsets_q, "time_bias": draw(2, 3)}, ValueError, "`times_q` must be given"),
        (jagged, {"offsets_q": None, "offsets_k": None}, TypeError, "`offsets_k` must be a Tensor"),
        (activated, {"offsets_q": None, "num_targets": torch.tensor([1, 0])}, ValueError, "`num_targets` must be None"),
        (activated, {"offsets_q": x.offsets_q, "position_bias": draw(2, 3)}, TypeError, "position_bias"),
    ]
    for layer, arguments, error, words in cases:
        with pytest.raises(error, match=words):
            layer(x.q, x.k, x.v, **{**lengths, **arguments})


def test_norm_block_of_bf16_activations_is_the_op_on_bfloat16():
    x = attention_inputs((35, 0, 70), (4, 5, 7), num_heads=4, num_heads_kv=2, head_dim=16)
    sides = {"offsets_q": x.offsets_q, "offsets_k": x.offsets_k, "max_seqlen_q": 70, "max_seqlen_k": 7}
    layer = convert(GDPA("silu", 0.5), BF16Recipe(activations="bfloat16"))
    assert layer.has_norm_block
    operands = (x.q.bfloat16(), x.k.bfloat16(), x.v.bfloat16())
    expected = gdpa_norm_block(*operands, **sides, activation="silu", pre_scale=0.5)
    assert torch.equal(layer(*operands, **sides, norm_block=True), expected)


@pytest.mark.parametrize("recipe", [BF16Recipe(), MXFP8Recipe()], ids=lambda recipe: recipe.name)
def test_norm_block_is_refused_where_a_cast_would_round_the_residual(recipe):
    x = attention_inputs((35, 0, 70), (4, 5, 7), num_heads=4, num_heads_kv=2, head_dim=16)
    sides = {"offsets_q": x.offsets_q, "offsets_k": x.offsets_k, "max_seqlen_q": 70, "max_seqlen_k": 7}
    for options in ({}, {"recompute": False}):
        layer = convert(GDPA(**options), recipe)
        assert not layer.has_norm_block
        cause = f"`has_norm_block` False, as it is of this {type(layer).__name__}"
        with pytest.raises(
            ValueError, match=f"{type(layer).__name__}: `norm_block` must be False with {cause}, got True"
        ):
            layer(x.q, x.k, x.v, **sides, norm_block=True)
        # The model that converted it computes the norms around it, whatever the layer would have kept.
        assert layer(x.q, x.k, x.v, **sides).shape == x.q.shape
