from dataclasses import dataclass

import pytest
import torch
from precision_measures import MXFP8, sqnr_db, stored
from torch import Tensor, nn

from gem_precision import BF16Linear, BF16Recipe, MXFP8Linear, MXFP8Recipe, ScaleMode, convert
from gem_precision.linear import HighPrecisionLinear


@dataclass(frozen=True, kw_only=True)
class LinearCase:
    id: str
    rows: int = 96
    in_features: int = 64
    out_features: int = 96
    bias: bool = True
    recipe: MXFP8Recipe = MXFP8


CASES = [
    LinearCase(id="multiples-of-32"),
    *(LinearCase(id=f"in-{size}", in_features=size) for size in (1, 31, 33)),
    *(LinearCase(id=f"out-{size}", out_features=size) for size in (1, 31, 33)),
    *(LinearCase(id=f"rows-{size}", rows=size) for size in (1, 31, 33)),
    LinearCase(id="all-ragged", rows=77, in_features=45, out_features=70, bias=False),
    LinearCase(id="row-weight-blocks", rows=40, out_features=70, recipe=MXFP8Recipe(weight_block_shape=(1, 32))),
    LinearCase(id="wgrad-high-precision", rows=40, recipe=MXFP8Recipe(wgrad="high_precision")),
    LinearCase(id="floor", rows=40, recipe=MXFP8Recipe(scale_mode=ScaleMode.FLOOR)),
    LinearCase(id="e5m2", rows=40, recipe=MXFP8Recipe(elem_dtype=torch.float8_e5m2)),
]


@dataclass
class Result:
    y: Tensor
    dx: Tensor
    dweight: Tensor
    dbias: Tensor | None


def make(case: LinearCase, dtype: torch.dtype = torch.float32) -> tuple[MXFP8Linear, Tensor, Tensor]:
    torch.manual_seed(0)
    layer = MXFP8Linear(case.in_features, case.out_features, bias=case.bias, dtype=dtype, recipe=case.recipe)
    x = torch.randn(case.rows, case.in_features, dtype=dtype)
    return layer, x, torch.randn(case.rows, case.out_features, dtype=dtype)


def run(layer: nn.Linear, x: Tensor, dy: Tensor) -> Result:
    x = x.detach().clone().requires_grad_()
    layer.zero_grad()
    y = layer(x)
    y.backward(dy)
    bias = None if layer.bias is None else layer.bias.grad.clone()
    return Result(y.detach(), x.grad, layer.weight.grad.clone(), bias)


def oracle(layer: MXFP8Linear, x: Tensor, dy: Tensor) -> Result:
    """Dequantise what was stored in FP8, multiply in float64."""
    recipe, weight = layer.recipe, layer.weight.detach()

    def cast(tensor: Tensor, shape: tuple[int, int]) -> Tensor:
        return stored(tensor, shape, recipe)

    transposed = (32, 32) if recipe.weight_block_shape == (32, 32) else (32, 1)
    y = cast(x, (1, 32)) @ cast(weight, recipe.weight_block_shape).t()
    dx = cast(dy, (1, 32)) @ cast(weight, transposed)
    if recipe.wgrad == "mxfp8":
        dweight = cast(dy, (32, 1)).t() @ cast(x, (32, 1))
    else:
        dweight = dy.double().t() @ x.double()
    if layer.bias is None:
        return Result(y, dx, dweight, None)
    return Result(y + layer.bias.detach().double(), dx, dweight, dy.double().sum(0))


def assert_sqnr(actual: Result, exact: Result, forward_db: float, gradient_db: float) -> None:
    assert sqnr_db(actual.y, exact.y) >= forward_db
    assert sqnr_db(actual.dx, exact.dx) >= gradient_db
    assert sqnr_db(actual.dweight, exact.dweight) >= gradient_db
    if exact.dbias is not None:
        assert sqnr_db(actual.dbias, exact.dbias) >= 80


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
def test_equals_dequantise_then_matmul(case: LinearCase) -> None:
    layer, x, dy = make(case)
    assert_sqnr(run(layer, x, dy), oracle(layer, x, dy), 80, 80)


@pytest.mark.parametrize("case", [c for c in CASES if c.id not in ("e5m2", "floor")], ids=lambda case: case.id)
def test_is_close_to_float32_on_gaussian_data(case: LinearCase) -> None:
    layer, x, dy = make(case)
    plain = nn.Linear(case.in_features, case.out_features, bias=case.bias)
    plain.load_state_dict(layer.state_dict())
    assert_sqnr(run(layer, x, dy), run(plain, x, dy), 26, 24)


def test_e4m3_is_closer_than_e5m2() -> None:
    results = {}
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        layer, x, dy = make(LinearCase(id="", recipe=MXFP8Recipe(elem_dtype=dtype)))
        results[dtype] = sqnr_db(run(layer, x, dy).y, nn.functional.linear(x, layer.weight, layer.bias))
    # One bit of mantissa is 6 dB.
    assert 4 < results[torch.float8_e4m3fn] - results[torch.float8_e5m2] < 8


def test_the_bias_gradient_and_a_high_precision_weight_gradient_are_exact() -> None:
    layer, x, dy = make(LinearCase(id="", recipe=MXFP8Recipe(wgrad="high_precision")))
    result = run(layer, x, dy)
    assert torch.equal(result.dweight, dy.t() @ x)
    assert torch.equal(result.dbias, dy.sum(0))


def test_bfloat16_multiplies_the_same_operands() -> None:
    # An FP8 value times a power of two is exact in bfloat16, so only the result is rounded.
    layer, x, dy = make(LinearCase(id="", rows=33, in_features=45), torch.bfloat16)
    result = run(layer, x, dy)
    assert {t.dtype for t in (result.y, result.dx, result.dweight, result.dbias)} == {torch.bfloat16}
    exact = oracle(layer, x, dy)
    # bfloat16 rounds to 8 bits: a ratio of at least 6 * 8 + 4 dB for one rounding of the result.
    for name in ("y", "dx", "dweight"):
        assert sqnr_db(getattr(result, name), getattr(exact, name)) > 48


def test_leading_dims_are_rows() -> None:
    layer, x, dy = make(LinearCase(id="", rows=60))
    flat = run(layer, x, dy)
    cube = run(layer, x.view(4, 5, 3, 64), dy.view(4, 5, 3, 96))
    assert cube.y.shape == (4, 5, 3, 96)
    assert torch.equal(cube.y.view(60, 96), flat.y)
    assert torch.equal(cube.dx.view(60, 64), flat.dx)
    assert torch.equal(cube.dweight, flat.dweight)
    assert sqnr_db(layer(x[0]), flat.y[0]) > 80


def test_no_rows() -> None:
    layer, x, dy = make(LinearCase(id="", rows=0))
    result = run(layer, x, dy)
    assert result.y.shape == (0, 96)
    assert result.dx.shape == (0, 64)
    assert torch.equal(result.dweight, torch.zeros(96, 64))
    assert torch.equal(result.dbias, torch.zeros(96))


def test_no_token_changes_another_tokens_output() -> None:
    layer, x, _ = make(LinearCase(id="", rows=70))
    before = layer(x)
    for value in (1e4, float("nan")):
        changed = x.clone()
        changed[17] = value
        others = torch.arange(70) != 17
        assert torch.equal(layer(changed)[others], before[others])


def test_only_needed_gradients_are_computed() -> None:
    layer, x, _ = make(LinearCase(id=""))
    layer.weight.requires_grad_(False)
    layer(x).sum().backward()
    assert layer.weight.grad is None
    assert layer.bias.grad is not None


def test_a_second_derivative_is_an_error() -> None:
    layer, x, _ = make(LinearCase(id=""))
    x.requires_grad_()
    (dx,) = torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


def test_autocast_multiplies_in_its_dtype() -> None:
    layer, x, _ = make(LinearCase(id=""))
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    y.float().square().sum().backward()
    assert layer.weight.grad.dtype == torch.float32
    assert sqnr_db(y, nn.functional.linear(x, layer.weight, layer.bias)) >= 26


# torch's own tracer makes an instance of every autograd Function and warns about it.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("kind", [MXFP8Linear, BF16Linear, HighPrecisionLinear], ids=lambda kind: kind.__name__)
def test_full_graph_compile_with_any_number_of_rows(kind: type[nn.Linear]) -> None:
    torch.manual_seed(0)
    layer = kind(48, 40)
    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (5, 64, 33):
        x, dy = torch.randn(rows, 48), torch.randn(rows, 40)
        expected, actual = run(layer, x, dy), Result(*[None] * 4)
        layer.zero_grad()
        inputs = x.clone().requires_grad_()
        actual.y = compiled(inputs)
        actual.y.backward(dy)
        assert torch.equal(actual.y, expected.y)
        assert torch.equal(inputs.grad, expected.dx)
        assert torch.equal(layer.weight.grad, expected.dweight)


def test_bf16_linear_rounds_operands_and_keeps_dtypes() -> None:
    torch.manual_seed(0)
    layer = BF16Linear(64, 96)
    x, dy = torch.randn(50, 64), torch.randn(50, 96)
    result = run(layer, x, dy)
    assert {t.dtype for t in (result.y, result.dx, result.dweight, result.dbias)} == {torch.float32}
    plain = nn.Linear(64, 96)
    plain.load_state_dict(layer.state_dict())
    exact = run(plain, x, dy)
    for name in ("y", "dx", "dweight", "dbias"):
        assert 40 < sqnr_db(getattr(result, name), getattr(exact, name)) < 80
    low = nn.Linear(64, 96, dtype=torch.bfloat16)
    low.load_state_dict(layer.state_dict())
    assert torch.equal(result.y, low(x.bfloat16()).float())


def test_bf16_linear_may_keep_its_result_in_bf16() -> None:
    torch.manual_seed(0)
    layer = BF16Linear(64, 96, recipe=BF16Recipe(activations="bfloat16"))
    x = torch.randn(50, 64)
    assert torch.equal(layer(x).float(), BF16Linear.forward(_like(layer), x))
    result = run(layer, x, torch.randn(50, 96, dtype=torch.bfloat16))
    assert (result.y.dtype, result.dx.dtype, result.dweight.dtype) == (torch.bfloat16, torch.float32, torch.float32)


def _like(layer: BF16Linear) -> BF16Linear:
    other = BF16Linear(layer.in_features, layer.out_features)
    other.load_state_dict(layer.state_dict())
    return other


@pytest.mark.parametrize(
    ("x", "error", "words"),
    [
        (torch.randn(3, 63), ValueError, r"`input` must have 64 features in its last dim, got \(3, 63\)"),
        (torch.randn(3, 64).double(), TypeError, "`input` must be float32, .* got torch.float64"),
        (torch.randn(3, 64).bfloat16(), TypeError, "got torch.bfloat16 and a weight in torch.float32"),
    ],
    ids=["features", "float64", "mixed"],
)
def test_errors(x: Tensor, error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        MXFP8Linear(64, 32)(x)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bool, torch.complex64], ids=str)
@pytest.mark.parametrize("activations", ["input", "bfloat16"])
def test_bf16_refuses_what_a_cast_would_cut(activations: str, dtype: torch.dtype) -> None:
    layers = nn.Sequential(nn.Linear(64, 32), nn.Linear(64, 8))
    convert(layers, BF16Recipe(activations=activations))
    x = torch.ones(3, 64, dtype=dtype)
    with pytest.raises(TypeError, match=rf"BF16Linear: `input` and .* must be float32, .* got {dtype} and a weight in"):
        layers[0](x)
    if activations == "bfloat16":
        assert type(layers[1]) is HighPrecisionLinear
        with pytest.raises(TypeError, match=rf"HighPrecisionLinear: `input` must be float32, .* got {dtype}"):
            layers[1](x)
    layers[0].weight = nn.Parameter(layers[0].weight.detach().to(dtype), requires_grad=False)
    with pytest.raises(TypeError, match=f"got torch[.]float32 and a weight in {dtype}"):
        layers[0](torch.ones(3, 64))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_bf16_takes_the_dtypes_it_names(dtype: torch.dtype) -> None:
    layers = convert(nn.Sequential(nn.Linear(64, 32), nn.Linear(64, 8)), BF16Recipe(activations="bfloat16"))
    x = torch.randn(3, 64).to(dtype)
    assert BF16Linear(64, 32)(x).dtype == dtype
    assert (layers[0](x).dtype, layers[1](x).dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.id)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_on_the_gpu(case: LinearCase, dtype: torch.dtype) -> None:
    layer, x, dy = make(case, dtype)
    exact = oracle(layer, x, dy)
    result = run(layer.cuda(), x.cuda(), dy.cuda())
    # The casts are the same bits as on the CPU; what is left is the rounding of the product.
    bound = 80 if dtype == torch.float32 else 45
    for name in ("y", "dx", "dweight"):
        assert sqnr_db(getattr(result, name), getattr(exact, name)) >= bound
