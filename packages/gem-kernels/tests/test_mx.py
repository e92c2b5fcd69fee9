import itertools
import math
import warnings
from dataclasses import dataclass

import pytest
import torch
import triton
import triton.language as tl
from torch import Tensor

from gem_kernels import mx
from gem_kernels._src.mx import vectorized
from gem_kernels.reference import mx as reference

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
BLOCK_SHAPES = ((1, 32), (32, 1), (32, 32))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SHAPES = ((1, 1), (31, 33), (32, 32), (33, 65), (64, 1), (1, 64))
MAX_FLOAT32 = torch.finfo(torch.float32).max


@dataclass(frozen=True, kw_only=True)
class CastCase:
    elem_dtype: torch.dtype
    scale_mode: str
    block_shape: tuple[int, int]
    dtype: torch.dtype

    @property
    def id(self) -> str:
        names = [str(d).removeprefix("torch.").removeprefix("float8_") for d in (self.elem_dtype, self.dtype)]
        return f"{names[0]}-{self.scale_mode}-{self.block_shape[0]}x{self.block_shape[1]}-{names[1]}"

    @property
    def options(self) -> dict:
        return {"block_shape": self.block_shape, "elem_dtype": self.elem_dtype, "scale_mode": self.scale_mode}


CASES = [
    CastCase(elem_dtype=elem_dtype, scale_mode=scale_mode, block_shape=block_shape, dtype=dtype)
    for elem_dtype in (E4M3, E5M2)
    for scale_mode in ("rceil", "floor")
    for block_shape in BLOCK_SHAPES
    for dtype in DTYPES
]
all_cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)


def wild(shape: tuple[int, int], dtype: torch.dtype, seed: int, exponents: tuple[int, int] = (-150, 126)) -> Tensor:
    """Values of all magnitudes the dtype has, subnormals and zeros of both signs included; all finite."""
    generator = torch.Generator().manual_seed(seed)
    exponent = torch.randint(exponents[0], exponents[1] + 1, shape, generator=generator).double()
    limit = torch.finfo(dtype).max
    x = (torch.randn(shape, generator=generator).double() * torch.exp2(exponent)).clamp(-limit, limit).to(dtype)
    x.flatten()[::7] = 0.0
    x.flatten()[::11] = -0.0
    return x


def moderate(shape: tuple[int, int], dtype: torch.dtype, seed: int) -> Tensor:
    """Values whose blocks keep many significant elements."""
    generator = torch.Generator().manual_seed(seed)
    row_scale = torch.exp2(torch.randint(-12, 4, (shape[0], 1), generator=generator).float())
    return (torch.randn(shape, generator=generator) * row_scale).to(dtype)


def inputs(dtype: torch.dtype) -> list[Tensor]:
    tensors = [moderate(shape, dtype, seed) for seed, shape in enumerate(SHAPES)]
    # The last two cover the small end, where scales and elements are subnormal, without large values beside it.
    tensors += [
        wild((37, 70), dtype, 100),
        wild((33, 64), dtype, 101, (-8, 8)),
        torch.zeros(33, 40, dtype=dtype),
        wild((33, 40), dtype, 103, (-149, -110)),
        wild((33, 40), dtype, 104, (-110, -70)),
    ]
    broken = wild((70, 70), dtype, 102)
    broken[3, 40], broken[40, 3], broken[69, 69] = math.nan, math.inf, -math.inf
    return [*tensors, broken]


def as_bytes(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8).cpu()


def assert_bitwise(actual: Tensor, expected: Tensor) -> None:
    """Equal bits, the sign of zeros included; NaN only has to meet NaN."""
    assert actual.dtype == expected.dtype
    assert actual.shape == expected.shape
    actual, expected = actual.cpu(), expected.cpu()
    is_nan = expected.isnan()
    assert torch.equal(actual.isnan(), is_nan)
    bits = {4: torch.int32, 2: torch.int16}[expected.element_size()]
    differ = ((actual.contiguous().view(bits) != expected.contiguous().view(bits)) & ~is_nan).nonzero()
    if differ.numel():
        worst = tuple(differ[0].tolist())
        raise AssertionError(f"{len(differ)} differ, first at {worst}: {actual[worst]!r} != {expected[worst]!r}")


def assert_same_pair(actual: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    for a, e in zip(actual, expected, strict=True):
        assert a.dtype == e.dtype
        assert torch.equal(as_bytes(a), as_bytes(e))


# ---------------------------------------------------------------- against the reference


@all_cases
def test_casts_equal_the_reference_bit_by_bit(case: CastCase) -> None:
    for x in inputs(case.dtype):
        expected = reference.mx_quantize(x, **case.options)
        actual = mx.mx_quantize(x, **case.options)
        assert_same_pair(actual, expected)
        values = reference.mx_dequantize(*expected, block_shape=case.block_shape, dtype=case.dtype)
        assert_bitwise(mx.mx_dequantize(*actual, block_shape=case.block_shape, dtype=case.dtype), values)
        assert_bitwise(mx.mx_fake_quantize(x, **case.options), values)


@pytest.mark.parametrize("elem_dtype", [E4M3, E5M2], ids=["e4m3fn", "e5m2"])
def test_every_code_and_scale_dequantises_like_the_reference(elem_dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(8, 32).view(elem_dtype)
    for scale_byte in (0, 1, 2, 64, 119, 127, 200, 254, 255):
        scale = torch.full((8, 1), scale_byte, dtype=torch.uint8).view(torch.float8_e8m0fnu)
        for dtype in DTYPES:
            expected = reference.mx_dequantize(codes, scale, dtype=dtype)
            assert_bitwise(mx.mx_dequantize(codes, scale, dtype=dtype), expected)


@pytest.mark.parametrize("elem_dtype", [E4M3, E5M2], ids=["e4m3fn", "e5m2"])
def test_every_bfloat16_in_range_rounds_like_the_reference(elem_dtype: torch.dtype) -> None:
    fmt_max = {E4M3: 448.0, E5M2: 57344.0}[elem_dtype]
    x = torch.arange(1 << 15, dtype=torch.int16).view(torch.bfloat16).float()
    x = x[x <= fmt_max][::5]
    x = torch.cat([x, -x])
    # Column 0 pins the scale of each row to 1.
    rows = torch.cat([torch.full((len(x), 1), fmt_max), x[:, None]], dim=1)
    qdata, scale = mx.mx_quantize(rows, elem_dtype=elem_dtype)
    assert torch.equal(as_bytes(scale), torch.full((len(x), 1), 127, dtype=torch.uint8))
    table = [float(value) for value in reference.element_values(elem_dtype)]
    midpoints = [(low + high) / 2 for low, high in itertools.pairwise(table)]
    expected = torch.zeros(len(x), dtype=torch.int64)
    for code, midpoint in enumerate(midpoints):
        # A tie goes to the even code.
        expected += (x.abs() > midpoint) | ((x.abs() == midpoint) & (code % 2 == 1))
    expected += torch.where(x.signbit(), 0x80, 0)
    assert torch.equal(as_bytes(qdata)[:, 1].long(), expected)


# ---------------------------------------------------------------- corner cases, by hand


@dataclass(frozen=True, kw_only=True)
class CornerCase:
    id: str
    amax: float
    elem_dtype: torch.dtype = E4M3
    rceil: tuple[int, int]
    """Scale byte and code of amax."""
    floor: tuple[int, int]


CORNERS = [
    CornerCase(id="zero", amax=0.0, rceil=(0, 0), floor=(0, 0)),
    CornerCase(id="largest-element", amax=448.0, rceil=(127, 0x7E), floor=(127, 0x7E)),
    # 448 * (1 + 2**-23) halves to just above 224: code of 224 is 0x76.
    CornerCase(id="just-above", amax=448.00003, rceil=(128, 0x76), floor=(127, 0x7E)),
    # Just below 512 rounds to 256 of twice the scale; with floor it saturates at 448.
    CornerCase(id="just-below-a-power", amax=511.99997, rceil=(128, 0x78), floor=(127, 0x7E)),
    CornerCase(id="power", amax=512.0, rceil=(128, 0x78), floor=(128, 0x78)),
    CornerCase(id="one", amax=1.0, rceil=(119, 0x78), floor=(119, 0x78)),
    CornerCase(id="just-below-one", amax=1.0 - 2.0**-24, rceil=(119, 0x78), floor=(118, 0x7E)),
    # The smallest float32, 2**-149, is 2**-22 of the smallest scale: far below half of 2**-9.
    CornerCase(id="smallest-subnormal", amax=2.0**-149, rceil=(0, 0), floor=(0, 0)),
    CornerCase(id="subnormal", amax=1.5 * 2.0**-127, rceil=(0, 0x3C), floor=(0, 0x3C)),
    CornerCase(id="half-the-smallest-element", amax=2.0**-137, rceil=(0, 0), floor=(0, 0)),
    CornerCase(id="above-half-the-smallest-element", amax=2.0**-137 + 2.0**-149, rceil=(0, 1), floor=(0, 1)),
    CornerCase(id="smallest-scale-full", amax=448.0 * 2.0**-127, rceil=(0, 0x7E), floor=(0, 0x7E)),
    CornerCase(id="largest-float32", amax=MAX_FLOAT32, rceil=(247, 0x78), floor=(246, 0x7E)),
    CornerCase(id="nan", amax=math.nan, rceil=(255, 0x7F), floor=(255, 0x7F)),
    CornerCase(id="inf", amax=math.inf, rceil=(255, 0x7F), floor=(255, 0x7F)),
    CornerCase(id="e5m2-largest", amax=57344.0, elem_dtype=E5M2, rceil=(127, 0x7B), floor=(127, 0x7B)),
    CornerCase(id="e5m2-just-above", amax=57344.004, elem_dtype=E5M2, rceil=(128, 0x77), floor=(127, 0x7B)),
    CornerCase(id="e5m2-nan", amax=math.nan, elem_dtype=E5M2, rceil=(255, 0x7F), floor=(255, 0x7F)),
]


@pytest.mark.parametrize("block_shape", BLOCK_SHAPES, ids=str)
@pytest.mark.parametrize("scale_mode", ["rceil", "floor"])
@pytest.mark.parametrize("corner", CORNERS, ids=lambda corner: corner.id)
def test_corner(corner: CornerCase, scale_mode: str, block_shape: tuple[int, int]) -> None:
    x = torch.zeros(block_shape)
    x[-1, -1] = corner.amax
    options = {"block_shape": block_shape, "elem_dtype": corner.elem_dtype, "scale_mode": scale_mode}
    qdata, scale = mx.mx_quantize(x, **options)
    scale_byte, code = getattr(corner, scale_mode)
    assert as_bytes(scale).tolist() == [[scale_byte]]
    assert as_bytes(qdata)[-1, -1].item() == code
    # The other elements are zero; of a NaN block all are NaN.
    rest = as_bytes(qdata).flatten()[:-1]
    assert torch.equal(rest, torch.full_like(rest, 0x7F if scale_byte == 255 else 0))
    values = mx.mx_dequantize(qdata, scale, block_shape=block_shape)
    assert_bitwise(mx.mx_fake_quantize(x, **options), values)
    if scale_byte == 255:
        assert values.isnan().all()
        return
    negative = mx.mx_quantize(-x, **options)
    assert torch.equal(as_bytes(negative.scale), as_bytes(scale))
    assert torch.equal(as_bytes(negative.qdata), as_bytes(qdata) | 0x80)


def test_a_broken_value_stays_in_its_block() -> None:
    x = torch.ones(64, 64)
    x[33, 5] = math.nan
    for block_shape, broken in (((1, 32), (slice(33, 34), slice(0, 32))), ((32, 32), (slice(32, 64), slice(0, 32)))):
        expected = torch.ones(64, 64)
        expected[broken] = math.nan
        assert_bitwise(mx.mx_fake_quantize(x, block_shape=block_shape), expected)


def test_rceil_never_saturates_and_floor_loses_up_to_an_eighth() -> None:
    amax = torch.rand(4096, 1, generator=torch.Generator().manual_seed(0)) + 1.0
    relative = {
        mode: ((mx.mx_fake_quantize(amax, scale_mode=mode) - amax).abs() / amax).max().item()
        for mode in ("rceil", "floor")
    }
    assert relative["rceil"] <= 2.0**-4
    assert 2.0**-4 < relative["floor"] <= 2.0**-3


def test_ties_go_to_the_even_code() -> None:
    # With 448 in the block the scale is 1; 17 lies midway between 16 and 18, 19 midway between 18 and 20.
    x = torch.tensor([[448.0, 17.0, 19.0, -17.0, -19.0, 2.0**-10, 3 * 2.0**-10, -(2.0**-10)]])
    expected = torch.tensor([[448.0, 16.0, 20.0, -16.0, -20.0, 0.0, 2.0**-8, -0.0]])
    assert_bitwise(mx.mx_fake_quantize(x), expected)


# ---------------------------------------------------------------- properties


@all_cases
def test_quantised_values_are_fixed_points(case: CastCase) -> None:
    # Of wild values, blocks above bfloat16's range could round to infinity; these stay well inside float16's.
    once = mx.mx_fake_quantize(moderate((70, 70), case.dtype, 3), **case.options)
    assert_bitwise(mx.mx_fake_quantize(once, **case.options), once)


def test_square_blocks_commute_with_the_transpose() -> None:
    x = moderate((70, 45), torch.float32, 4)
    qdata, scale = mx.mx_quantize(x, block_shape=(32, 32))
    transposed = mx.mx_quantize(x.t(), block_shape=(32, 32))
    assert_same_pair(
        transposed,
        (
            qdata.view(torch.uint8).t().contiguous().view(E4M3),
            scale.view(torch.uint8).t().contiguous().view(torch.float8_e8m0fnu),
        ),
    )


def test_row_blocks_of_the_transpose_are_column_blocks() -> None:
    x = moderate((70, 45), torch.float32, 5)
    columns = mx.mx_fake_quantize(x, block_shape=(32, 1))
    assert_bitwise(columns, mx.mx_fake_quantize(x.t(), block_shape=(1, 32)).t())


def test_rows_do_not_change_each_other() -> None:
    x = wild((40, 70), torch.float32, 6)
    before = mx.mx_fake_quantize(x)
    x[17] *= 1000.0
    after = mx.mx_fake_quantize(x)
    others = torch.arange(40) != 17
    assert_bitwise(after[others], before[others])


@pytest.mark.parametrize("block_shape", BLOCK_SHAPES, ids=str)
@pytest.mark.parametrize("tile_elements", [1, 4096], ids=str)
def test_tiling_does_not_change_the_result(
    block_shape: tuple[int, int], tile_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = wild((200, 129), torch.float32, 7)
    x[100, 100] = math.nan
    whole = mx.mx_quantize(x, block_shape=block_shape), mx.mx_fake_quantize(x, block_shape=block_shape)
    monkeypatch.setattr(vectorized, "_TILE_ELEMENTS", tile_elements)
    assert_same_pair(mx.mx_quantize(x, block_shape=block_shape), whole[0])
    assert_bitwise(mx.mx_fake_quantize(x, block_shape=block_shape), whole[1])


@all_cases
def test_strided_inputs(case: CastCase) -> None:
    wide = torch.full((140, 99), math.nan, dtype=case.dtype)
    view = wide[::2, 5:75]
    view.copy_(moderate((70, 70), case.dtype, 8))
    for x in (view, view.t()):
        assert not x.is_contiguous()
        assert_same_pair(mx.mx_quantize(x, **case.options), mx.mx_quantize(x.contiguous(), **case.options))
        fake = mx.mx_fake_quantize(x, **case.options)
        assert fake.is_contiguous()
        assert_bitwise(fake, mx.mx_fake_quantize(x.contiguous(), **case.options))


@pytest.mark.parametrize("block_shape", BLOCK_SHAPES, ids=str)
@pytest.mark.parametrize("shape", [(0, 64), (64, 0), (0, 0)], ids=str)
def test_empty(shape: tuple[int, int], block_shape: tuple[int, int]) -> None:
    x = torch.empty(shape)
    qdata, scale = mx.mx_quantize(x, block_shape=block_shape)
    assert qdata.shape == shape
    assert scale.shape == (-(-shape[0] // block_shape[0]), -(-shape[1] // block_shape[1]))
    assert mx.mx_dequantize(qdata, scale, block_shape=block_shape).shape == shape
    assert mx.mx_fake_quantize(x, block_shape=block_shape).shape == shape


def test_the_gradient_passes_straight_through() -> None:
    x = torch.randn(33, 40, requires_grad=True)
    grad = torch.randn(33, 40)
    mx.mx_fake_quantize(x).backward(grad)
    assert torch.equal(x.grad, grad)


# ---------------------------------------------------------------- Triton kernels


def assert_triton_equals_torch(x: Tensor, case: CastCase) -> None:
    from gem_kernels._src.mx import triton_casts

    arguments = (case.block_shape, case.elem_dtype, case.scale_mode)
    expected = vectorized.quantize(x.cpu(), *arguments)
    pair = triton_casts.launch_quantize(x, *arguments)
    assert_same_pair(pair, expected)
    values = vectorized.dequantize(*expected, case.block_shape, case.dtype)
    assert_bitwise(triton_casts.launch_dequantize(*pair, case.block_shape, case.dtype), values)
    # Rows that lie apart.
    apart = [torch.cat([each.view(torch.uint8), each.view(torch.uint8)[:, :1]], dim=1) for each in pair]
    apart = [each[:, :-1].view(whole.dtype) for each, whole in zip(apart, pair, strict=True)]
    assert_bitwise(triton_casts.launch_dequantize(*apart, case.block_shape, case.dtype), values)
    assert_bitwise(triton_casts.launch_fake_quantize(x, *arguments), values)


def assert_every_nan_is_stored_as_nan(device: str) -> None:
    from gem_kernels._src.mx.triton_casts import _store_float32

    @triton.jit
    def store(bits_ptr, out_ptr, store_float32: tl.constexpr, N: tl.constexpr):
        offsets = tl.arange(0, N)
        store_float32(out_ptr + offsets, tl.load(bits_ptr + offsets).to(tl.float32, bitcast=True), offsets < N)

    payloads = torch.tensor([0x7F800001, 0x7F808000, 0x7FC00000, 0x7FFF8000, 0x7FFFFFFF])
    bits = torch.cat([payloads, payloads - 2**31, torch.zeros(6, dtype=torch.int64)]).to(torch.int32).to(device)
    for dtype in DTYPES:
        out = torch.zeros(16, dtype=dtype, device=device)
        store[(1,)](bits, out, _store_float32, 16)
        assert out.isnan().tolist() == [True] * 10 + [False] * 6


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where there is no GPU")
def test_every_nan_is_stored_as_nan_in_the_interpreter() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        assert_every_nan_is_stored_as_nan("cpu")


@pytest.mark.gpu
def test_every_nan_is_stored_as_nan_on_the_gpu() -> None:
    assert_every_nan_is_stored_as_nan("cuda")


@pytest.mark.skipif(torch.cuda.is_available(), reason="the interpreter runs where there is no GPU")
@all_cases
def test_triton_equals_torch_in_the_interpreter(case: CastCase) -> None:
    # The interpreter computes with NumPy, which reports what IEEE arithmetic does silently: NaN and overflow.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)
        for x in (*inputs(case.dtype)[-3:], moderate((40, 170), case.dtype, 9)[:, 3:165].t()):
            assert_triton_equals_torch(x, case)


@pytest.mark.gpu
@all_cases
def test_triton_equals_torch_on_the_gpu(case: CastCase) -> None:
    for x in [*inputs(case.dtype), moderate((1000, 515), case.dtype, 10)]:
        assert_triton_equals_torch(x.cuda(), case)
        assert_triton_equals_torch(x.cuda().t(), case)
        assert_same_pair(mx.mx_quantize(x.cuda(), **case.options), mx.mx_quantize(x, **case.options))
        assert_bitwise(mx.mx_fake_quantize(x.cuda(), **case.options), mx.mx_fake_quantize(x, **case.options))


@pytest.mark.gpu
@pytest.mark.parametrize("elem_dtype", [E4M3, E5M2], ids=["e4m3fn", "e5m2"])
def test_every_code_dequantises_on_the_gpu_as_on_the_cpu(elem_dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.uint8).repeat(256, 1).view(elem_dtype)
    scale = torch.arange(256, dtype=torch.uint8)[:, None].repeat(1, 8).view(torch.float8_e8m0fnu)
    for dtype in DTYPES:
        expected = mx.mx_dequantize(codes, scale, dtype=dtype)
        assert_bitwise(mx.mx_dequantize(codes.cuda(), scale.cuda(), dtype=dtype), expected)


@pytest.mark.gpu
@pytest.mark.memory
def test_more_than_two_to_the_31_elements_on_the_gpu() -> None:
    rows, cols = (1 << 21) + 40, 1024
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("needs 12 GiB of free GPU memory")
    x = torch.zeros(rows, cols, dtype=torch.bfloat16, device="cuda")
    x[-40:] = moderate((40, cols), torch.bfloat16, 11).cuda()
    fake = mx.mx_fake_quantize(x)
    assert not fake[:-40].any()
    assert_bitwise(fake[-40:], mx.mx_fake_quantize(x[-40:].cpu()))


# ---------------------------------------------------------------- registration


@pytest.mark.parametrize("shape", [(64, 64), (33, 70), (0, 32)], ids=str)
def test_opcheck(shape: tuple[int, int]) -> None:
    x = torch.randn(shape)
    quantize, dequantize, fake = (
        getattr(torch.ops.gem_kernels, name).default for name in ("mx_quantize", "mx_dequantize", "mx_fake_quantize")
    )
    # The other two tests of opcheck compare tensors, for which torch has no FP8 kernels.
    fp8_checks = ("test_autograd_registration", "test_faketensor")
    torch.library.opcheck(quantize, (x, 1, 32, E4M3, "rceil"), test_utils=fp8_checks)
    torch.library.opcheck(dequantize, (*mx.mx_quantize(x), 1, 32, torch.float32), test_utils=fp8_checks)
    torch.library.opcheck(fake, (x.requires_grad_(), 1, 32, E4M3, "rceil"))


def test_full_graph_compile_with_any_number_of_rows() -> None:
    def function(x: Tensor) -> Tensor:
        qdata, scale = mx.mx_quantize(x, block_shape=(32, 1))
        return mx.mx_dequantize(qdata, scale, block_shape=(32, 1)) + mx.mx_fake_quantize(x)

    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (5, 64, 33):
        x = torch.randn(rows, 48)
        assert torch.equal(compiled(x), function(x))


# ---------------------------------------------------------------- errors


X = torch.randn(4, 64)


@pytest.mark.parametrize("function", [mx.mx_quantize, mx.mx_fake_quantize], ids=["quantize", "fake"])
@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"x_hp": [1.0]}, TypeError, "`x_hp` must be a Tensor, got list"),
        ({"x_hp": torch.randn(4)}, ValueError, r"`x_hp` must have shape \(M, K\), got \(4,\)"),
        ({"x_hp": X.double()}, TypeError, "`x_hp` must be float32, bfloat16 or float16, got torch.float64"),
        ({"x_hp": X.long()}, TypeError, "got torch.int64"),
        ({"block_shape": 32}, TypeError, "`block_shape` must be a pair of ints, got int"),
        ({"block_shape": (1, 16)}, ValueError, r"`block_shape` must be one of .* got \(1, 16\)"),
        ({"elem_dtype": torch.float16}, ValueError, "`elem_dtype` must be .* got torch.float16"),
        ({"scale_mode": "ceil"}, ValueError, "`scale_mode` must be 'rceil' or 'floor', got 'ceil'"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_errors_of_quantize(function, arguments: dict, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        function(**{"x_hp": X, **arguments})


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        ({"qdata": X}, ValueError, "`elem_dtype` must be"),
        ({"scale": None}, TypeError, "`scale` must be a Tensor, got NoneType"),
        ({"scale": torch.ones(4, 2)}, TypeError, "`scale` must be float8_e8m0fnu, got torch.float32"),
        ({"block_shape": (32, 32)}, ValueError, r"`scale` must have shape \(1, 2\) .* got \(4, 2\)"),
        ({"block_shape": (2, 2)}, ValueError, "`block_shape` must be one of"),
        ({"dtype": torch.float64}, TypeError, "`dtype` must be float32, bfloat16 or float16, got torch.float64"),
    ],
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_errors_of_dequantize(arguments: dict, error: type[Exception], words: str) -> None:
    pair = mx.mx_quantize(X)
    with pytest.raises(error, match=words):
        mx.mx_dequantize(**{"qdata": pair.qdata, "scale": pair.scale, **arguments})


def test_public_names() -> None:
    assert mx.__all__ == ["MXTensorPair", "mx_dequantize", "mx_fake_quantize", "mx_quantize"]
    assert mx.MXTensorPair._fields == ("qdata", "scale")
