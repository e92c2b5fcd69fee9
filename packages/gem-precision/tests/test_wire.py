"""The wire format by itself: bytes, values, and how it meets layers that quantise."""

import copy
import dataclasses
import json
from dataclasses import dataclass

import pytest
import torch
from torch import nn

from gem_kernels.mx import mx_dequantize, mx_quantize
from gem_precision import MXFP8Recipe, MXFP8Wire, convert, get_wire, wire_names
from gem_precision.wire import ScaleMode

WIRES = [MXFP8Wire(), MXFP8Wire(block_shape=(32, 32)), MXFP8Wire(scale_mode=ScaleMode.FLOOR)]


@dataclass(frozen=True)
class Case:
    rows: int
    columns: int
    dtype: torch.dtype = torch.float32

    @property
    def id(self) -> str:
        return f"{self.rows}x{self.columns} {str(self.dtype).removeprefix('torch.')}"


CASES = [Case(64, 96), Case(33, 65), Case(1, 31), Case(32, 1, torch.bfloat16), Case(70, 130, torch.bfloat16)]
CASES += [Case(40, 64, torch.float16), Case(0, 32)]


def matrix(case: Case) -> torch.Tensor:
    """Sizes over 40 octaves, a row and a block of zeros, signed zeros."""
    generator = torch.Generator().manual_seed(case.rows + case.columns)
    x = torch.randn(case.rows, case.columns, generator=generator)
    if case.dtype != torch.float16:
        x *= torch.exp2(torch.randint(-20, 20, (case.rows, 1), generator=generator).float())
    if case.rows > 2:
        x[1] = 0
        x[2, : case.columns // 2] = -0.0
    return x.to(case.dtype)


@pytest.mark.parametrize("wire", WIRES, ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_what_arrives(case: Case, wire: MXFP8Wire) -> None:
    x = matrix(case)
    rows = wire.encode(x)
    assert rows.dtype == torch.uint8
    assert rows.shape == (case.rows, case.columns + -(-case.columns // 32)) == (case.rows, wire.row_bytes(case.columns))
    assert rows.is_contiguous()
    values = wire.decode(rows, case.columns, case.dtype)
    pair = mx_quantize(x, block_shape=wire.block_shape, scale_mode=wire.scale_mode)
    expected = mx_dequantize(*pair, block_shape=wire.block_shape, dtype=case.dtype)
    assert values.dtype == case.dtype
    # Bits, so that signs of zeros count.
    width = torch.int32 if case.dtype == torch.float32 else torch.int16
    assert torch.equal(values.view(width), expected.view(width))
    assert torch.equal(wire.round(x).view(width), values.view(width))
    if case.rows >= 64:
        assert not torch.equal(values, x)


@pytest.mark.parametrize("wire", WIRES, ids=str)
def test_any_cut_between_blocks_of_rows_sends_the_same_bytes(wire: MXFP8Wire) -> None:
    x = matrix(CASES[4])
    whole = wire.encode(x)
    for cut in (1, 31, 33) if wire.rows_per_block == 1 else (32, 64):
        assert torch.equal(torch.cat([wire.encode(x[:cut]), wire.encode(x[cut:])]), whole)


def test_a_broken_value_arrives_as_nan() -> None:
    x = torch.ones(32, 64)
    x[3, 40] = torch.inf
    for wire, seen in zip(WIRES[:2], (32, 32 * 32), strict=True):
        assert int(wire.decode(wire.encode(x), 64, torch.float32).isnan().sum()) == seen


COVERED = {(32, 32): True, (4, 8, 32): True, (31, 64): False, (64, 31): False, (1024,): False, (): False}


@pytest.mark.parametrize(("shape", "covered"), COVERED.items(), ids=str)
def test_what_it_covers(shape: tuple[int, ...], covered: bool) -> None:
    assert MXFP8Wire().covers(shape) == covered
    assert MXFP8Wire(min_features=1).covers(shape) == (len(shape) > 1)


def test_a_row_costs_a_thirtysecond_more_than_its_elements() -> None:
    assert [MXFP8Wire().row_bytes(columns) for columns in (1, 32, 33, 1024)] == [2, 33, 35, 1056]


def layers_on(weight: torch.Tensor, recipe: MXFP8Recipe) -> tuple[torch.Tensor, torch.Tensor]:
    """(y, dx) of a converted layer with a weight."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    layer.weight.data = weight
    convert(layer_in := nn.Sequential(layer), recipe)
    x = torch.randn(9, weight.shape[1], generator=torch.Generator().manual_seed(1), requires_grad=True)
    y = layer_in(x)
    y.square().sum().backward()
    assert x.grad is not None
    return y.detach(), x.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layers_that_quantise_alike_find_nothing_to_round(dtype: torch.dtype) -> None:
    """Square blocks leave the bits of the default recipe; (1, 32) those of the forward of a recipe with (1, 32)."""
    generator = torch.Generator().manual_seed(0)
    alike = torch.randn(64, 96, generator=generator).to(dtype).float()
    # Rows so unlike that the smaller ones are subnormal in a scale for 32 of them.
    unlike = (alike * torch.exp2(-torch.randint(0, 14, (64, 1), generator=generator).float())).to(dtype).float()
    rows, square = WIRES[:2]
    for weight in (alike, unlike):
        for found, expected in zip(
            layers_on(square.round(weight), MXFP8Recipe()), layers_on(weight, MXFP8Recipe()), strict=True
        ):
            assert torch.equal(found, expected)
        recipe = MXFP8Recipe(weight_block_shape=(1, 32))
        assert torch.equal(layers_on(rows.round(weight), recipe)[0], layers_on(weight, recipe)[0])
        # Other blocks round twice, which shows where an element is subnormal in one of the scales.
        assert torch.equal(square.round(rows.round(weight)), square.round(weight)) == (weight is alike)


@pytest.mark.parametrize("wire", WIRES, ids=str)
def test_rounding_twice_changes_nothing(wire: MXFP8Wire) -> None:
    for case in CASES:
        once = wire.round(matrix(case))
        assert torch.equal(wire.round(once), once)
    generator = torch.Generator().manual_seed(0)
    # Largest elements all over two octaves: near 224 and 448 of their scale, where it rounds over.
    x = torch.linspace(200, 900, 64 * 32).view(64, 32) * torch.rand(64, 32, generator=generator).round()
    assert torch.equal(wire.round(wire.round(x)), wire.round(x))


def test_names() -> None:
    assert wire_names() == ("mxfp8",)
    assert get_wire("mxfp8") == MXFP8Wire()
    assert MXFP8Wire().name == "mxfp8"
    with pytest.raises(ValueError, match=r"get_wire: `name` must be one of mxfp8, got 'fp4'; parameters travel in"):
        get_wire("fp4")


def test_is_a_value() -> None:
    wire = MXFP8Wire(block_shape=(32, 32))
    assert copy.deepcopy(wire) == wire == dataclasses.replace(MXFP8Wire(), block_shape=(32, 32))
    assert json.loads(json.dumps(dataclasses.asdict(wire))) == {
        "block_shape": [32, 32],
        "scale_mode": "rceil",
        "min_features": 32,
    }


@pytest.mark.parametrize(
    ("arguments", "error", "text"),
    [
        ({"block_shape": (32, 1)}, ValueError, r"`block_shape` must be \(1, 32\) or \(32, 32\), got \(32, 1\); other"),
        ({"scale_mode": "even"}, ValueError, r"`scale_mode` must be one of \['rceil', 'floor'\], got 'even'"),
        ({"min_features": 0}, ValueError, "`min_features` must be >= 1, got 0; 1 takes matrices of any size"),
        ({"min_features": 2.0}, TypeError, "`min_features` must be an int, got float"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_refuses(arguments: dict[str, object], error: type[Exception], text: str) -> None:
    with pytest.raises(error, match=f"MXFP8Wire: {text}"):
        MXFP8Wire(**arguments)  # type: ignore[arg-type]


def test_refuses_what_the_casts_refuse() -> None:
    with pytest.raises(TypeError, match=r"must be float32, bfloat16 or float16, got torch\.float64"):
        MXFP8Wire().encode(torch.zeros(2, 2, dtype=torch.float64))


@pytest.mark.gpu
def test_a_gpu_sends_the_bytes_of_a_cpu() -> None:
    for wire in WIRES:
        for case in CASES:
            x = matrix(case)
            rows = wire.encode(x.cuda())
            assert torch.equal(rows.cpu(), wire.encode(x))
            assert torch.equal(
                wire.decode(rows, case.columns, case.dtype).cpu(), wire.decode(rows.cpu(), case.columns, case.dtype)
            )
