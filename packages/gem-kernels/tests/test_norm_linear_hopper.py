"""Hopper's matmuls with a norm: when they are taken, and that they agree with float64 on the GPU."""

import pytest
import torch
from torch.nn import functional

from gem_kernels import linear_norm, rmsnorm_linear
from gem_kernels._src.attention.hopper.launch import portable_only
from gem_kernels._src.norm_linear import hopper_launch, matmul
from gem_kernels.testing import assert_matches_oracle, summation_floor


def test_columns_of_a_tile_fill_the_output():
    columns = {n: hopper_launch.columns_of(n) for n in (64, 128, 256, 512, 1024, 96, 300, 384, 32)}
    assert columns == {64: 64, 128: 128, 256: 256, 512: 256, 1024: 256, 96: None, 300: None, 384: None, 32: None}


def test_tensors_on_the_cpu_take_the_portable_kernel():
    x, weight = torch.randn(40000, 64, dtype=torch.bfloat16), torch.randn(64, 64, dtype=torch.bfloat16)
    assert not hopper_launch.applies(x, weight, norm_of_output=False)


@pytest.fixture
def on_hopper(monkeypatch):
    """``applies`` as if the tensors lay on a Hopper GPU of 132 multiprocessors."""
    monkeypatch.setattr(hopper_launch, "is_on_hopper", lambda x: True)
    monkeypatch.setattr(hopper_launch, "multiprocessors", lambda device: 132)


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize(
    ("rows", "in_features", "out_features", "dtype", "pre", "post"),
    [
        (16896, 128, 512, torch.bfloat16, True, True),
        (16896, 128, 512, torch.float16, True, True),
        (16896, 128, 1024, torch.bfloat16, True, False),
        (16895, 128, 512, torch.bfloat16, False, False),
        (16896, 96, 512, torch.bfloat16, True, True),
        (16896, 48, 512, torch.bfloat16, False, False),
        (16896, 128, 384, torch.bfloat16, False, False),
        (16896, 128, 512, torch.float32, False, False),
    ],
)
def test_kernels_are_chosen_by_sizes_and_dtype(rows, in_features, out_features, dtype, pre, post):
    x, weight = torch.empty(rows, in_features, dtype=dtype), torch.empty(out_features, in_features, dtype=dtype)
    assert hopper_launch.applies(x, weight, norm_of_output=False) == pre
    assert hopper_launch.applies(x, weight, norm_of_output=True) == post


@pytest.mark.usefixtures("on_hopper")
@pytest.mark.parametrize(
    ("rows", "in_features", "out_features", "dtype", "expected"),
    [
        (16896, 512, 512, torch.bfloat16, True),
        (16896, 128, 1024, torch.float16, True),
        (16895, 512, 512, torch.bfloat16, False),
        (16896, 1024, 512, torch.bfloat16, False),
        (16896, 192, 512, torch.bfloat16, False),
        (16896, 512, 64, torch.bfloat16, False),
        (16896, 512, 512, torch.float32, False),
    ],
)
def test_the_backward_is_chosen_by_sizes_and_dtype(rows, in_features, out_features, dtype, expected):
    x, weight = torch.empty(rows, in_features, dtype=dtype), torch.empty(out_features, in_features, dtype=dtype)
    dout = torch.empty(rows, out_features, dtype=dtype)
    assert hopper_launch.applies_backward(dout, x, weight) == expected
    assert not hopper_launch.applies_backward(dout[:, ::2], x, weight[::2])


@pytest.mark.usefixtures("on_hopper")
def test_the_copy_engine_asks_for_aligned_contiguous_rows():
    x, weight = (torch.empty(rows, 256, dtype=torch.bfloat16) for rows in (16896, 64))
    assert hopper_launch.applies(x[:, :128], weight[:, :128], norm_of_output=False)
    assert not hopper_launch.applies(x[:, 1:129], weight[:, :128], norm_of_output=False)
    assert not hopper_launch.applies(x[:, ::2], weight[:, :128], norm_of_output=False)


# ---------------------------------------------------------------- on the GPU


@pytest.fixture
def launches(monkeypatch):
    """Names of the launches of Hopper kernels so far."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a Hopper GPU")
    names = []

    def count(name):
        launch = getattr(hopper_launch, f"launch_hopper_{name}")

        def counted(*args):
            names.append(name)
            return launch(*args)

        monkeypatch.setattr(matmul.hopper_launch, f"launch_hopper_{name}", counted)

    count("rmsnorm_linear")
    count("rmsnorm_linear_backward")
    count("linear_norm")
    return names


def make(rows, in_features, out_features, dtype):
    torch.manual_seed(0)
    shapes = {"x": (rows, in_features), "weight": (out_features, in_features)}
    shapes |= dict.fromkeys(("bias", "norm_weight", "norm_bias"), (out_features,)) | {"pre_weight": (in_features,)}
    tensors = {name: torch.randn(shape, device="cuda", dtype=dtype) for name, shape in shapes.items()}
    tensors["weight"] *= in_features**-0.5
    return tensors


def pre(x, weight, bias=None, norm_weight=None):
    return functional.linear(functional.rms_norm(x, x.shape[-1:], norm_weight, eps=1e-6), weight, bias)


def post(x, weight, bias=None, norm_weight=None, norm_bias=None, norm="layer"):
    hidden = functional.linear(x, weight, bias)
    if norm == "rms":
        out = functional.rms_norm(hidden, hidden.shape[-1:], eps=1e-5)
        out = out if norm_weight is None else out * norm_weight
        return out if norm_bias is None else out + norm_bias
    return functional.layer_norm(hidden, hidden.shape[-1:], norm_weight, norm_bias, eps=1e-5)


def check(function, plain, arguments, **options):
    """Output and gradients of a call against the plain operations in float64."""

    def run(f, dtype):
        leaves = {name: t.to(dtype).requires_grad_() for name, t in arguments.items()}
        out = f(**leaves, **options)
        dout = torch.linspace(-1, 1, out.numel(), device="cuda", dtype=torch.float64).view(out.shape).to(dtype)
        gradients = torch.autograd.grad(out, tuple(leaves.values()), dout)
        return {"out": out.detach()} | {f"d{n}": g for n, g in zip(leaves, gradients, strict=True)}

    dtype = arguments["x"].dtype
    exact, eager = run(plain, torch.float64), run(plain, dtype)
    for name, actual in run(function, dtype).items():
        floor = summation_floor(exact[name], dtype)
        assert_matches_oracle(name, actual, exact[name], eager[name], floor=floor)


def names(launches, *, backward=False):
    """Of forward launches alone, or of backward ones."""
    return [name for name in launches if name.endswith("_backward") == backward]


SIZES = [(16896, 64, 64), (17001, 96, 128), (17001, 512, 512), (40000, 192, 256), (20000, 256, 128), (33333, 1024, 512)]


@pytest.mark.gpu
@pytest.mark.usefixtures("poisoned_empty")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_gpu_hopper_matches_oracle(sizes, dtype, launches):
    t = make(*sizes, dtype)
    plain = {"x": t["x"], "weight": t["weight"]}
    check(rmsnorm_linear, pre, plain)
    check(rmsnorm_linear, pre, plain | {"bias": t["bias"], "norm_weight": t["pre_weight"]})
    check(linear_norm, post, plain)
    check(linear_norm, post, plain, norm="rms")
    options = {name: t[name] for name in ("bias", "norm_weight", "norm_bias")}
    check(linear_norm, post, plain | options)
    check(linear_norm, post, plain | {"norm_weight": t["norm_weight"]}, norm="rms")
    assert names(launches) == ["rmsnorm_linear"] * 2 + ["linear_norm"] * 4
    assert len(names(launches, backward=True)) == 2 * hopper_launch.has_backward_tiles(*sizes[1:])


@pytest.mark.gpu
def test_gpu_hopper_of_more_columns_than_two_tiles(launches):
    t = make(17001, 256, 1024, torch.bfloat16)
    check(rmsnorm_linear, pre, {"x": t["x"], "weight": t["weight"], "bias": t["bias"]})
    assert launches == ["rmsnorm_linear", "rmsnorm_linear_backward"]


@pytest.mark.gpu
@pytest.mark.parametrize("function", [rmsnorm_linear, linear_norm])
def test_gpu_hopper_lets_no_row_reach_another_and_repeats(function, launches):
    t = make(20000, 512, 512, torch.bfloat16)
    expected = function(t["x"], t["weight"])
    with portable_only():
        portable = function(t["x"], t["weight"])
    torch.testing.assert_close(expected, portable, rtol=2e-2, atol=2e-2)
    changed = t["x"].clone()
    changed[7::64] = float("nan")
    out = function(changed, t["weight"])
    keep = torch.ones(20000, dtype=torch.bool, device="cuda")
    keep[7::64] = False
    assert torch.equal(out[keep], expected[keep])
    assert out[~keep].isnan().all()
    assert torch.equal(function(t["x"], t["weight"]), expected)
    assert len(launches) == 3


@pytest.mark.gpu
def test_gpu_hopper_reads_rows_of_a_wider_tensor(launches):
    t = make(17000, 1024, 256, torch.bfloat16)
    x, weight = t["x"][:, 512:], t["weight"][:, 512:]
    for function in (rmsnorm_linear, linear_norm):
        assert torch.equal(function(x, weight), function(x.contiguous(), weight.contiguous()))
    assert len(launches) == 4
