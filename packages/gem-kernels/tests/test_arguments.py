"""What every public op asks of its arguments alike, where a wrong one would otherwise pass, or fail late."""

import importlib
import inspect

import numpy as np
import pytest
import torch
from torch.autograd import forward_ad

from gem_kernels import block_attention, gdpa, gdpa_norm_block, jagged_attention, linear_norm, rmsnorm_linear
from gem_kernels._src.block_attention.op import block_attention_op
from gem_kernels._src.gdpa.op import gdpa_op
from gem_kernels._src.gdpa_norm_block.op import gdpa_norm_block_op
from gem_kernels._src.jagged_attention.op import jagged_attention_op
from gem_kernels.jagged import jagged_concat, jagged_last_k, jagged_split, jagged_to_padded, padded_to_jagged
from gem_kernels.layer_norm_rows import layer_norm_rows, layer_norm_rows_backward
from gem_kernels.modules import GDPA, BlockAttention, JaggedAttention
from gem_kernels.mx import mx_dequantize, mx_fake_quantize, mx_quantize
from gem_kernels.transpose_tokens import transpose_tokens

OFFSETS = torch.tensor([0, 2, 5])
SIDES = {"offsets_q": OFFSETS, "offsets_k": OFFSETS, "max_seqlen_q": 3, "max_seqlen_k": 3}

# torch's forward-mode AD scripts its own formulas on first use.
forward_mode = pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")


def draw(*shape):
    return torch.randn(shape, generator=torch.Generator().manual_seed(0))


def attention(function):
    """The function with its tensors by name, and those it differentiates."""
    return function, dict.fromkeys("qkv", draw(5, 2, 8)), SIDES


# Op of torch.ops.gem_kernels, public function, differentiable tensors, other arguments.
CALLS = {
    "jagged_attention": (
        jagged_attention,
        dict.fromkeys("qkv", draw(5, 2, 8)) | {"position_bias": draw(2, 5), "time_bias": draw(2, 8)},
        SIDES | {"times_q": torch.arange(5), "times_k": torch.arange(5)},
    ),
    "gdpa": attention(gdpa),
    "gdpa_norm_block": (
        gdpa_norm_block,
        dict.fromkeys("qkv", draw(5, 2, 8)) | dict.fromkeys(("norm_weight", "norm_bias", "rms_weight"), draw(16)),
        SIDES,
    ),
    "block_attention": (
        block_attention,
        dict.fromkeys("qkv", draw(5, 2, 8)) | {"rotary": draw(5, 8)},
        {"offsets": OFFSETS, "max_seqlen": 3},
    ),
    "rmsnorm_linear": (
        rmsnorm_linear,
        {"x": draw(5, 8), "weight": draw(4, 8), "bias": draw(4), "norm_weight": draw(8)},
        {},
    ),
    "linear_norm": (
        linear_norm,
        {"x": draw(5, 8), "weight": draw(4, 8), "bias": draw(4), "norm_weight": draw(4), "norm_bias": draw(4)},
        {},
    ),
    "mx_quantize": (mx_quantize, {"x_hp": draw(32, 32)}, {}),
    "mx_fake_quantize": (mx_fake_quantize, {"x_hp": draw(32, 32)}, {}),
    "layer_norm_rows": (layer_norm_rows, {"x": draw(5, 8)}, {}),
    "layer_norm_rows_backward": (
        lambda grad, x, mean, rstd, direct: layer_norm_rows_backward([grad], x, mean, rstd, direct=direct),
        dict.fromkeys(("grad", "x", "direct"), draw(5, 8)) | dict.fromkeys(("mean", "rstd"), draw(5)),
        {},
    ),
    "transpose_tokens": (transpose_tokens, {"x": draw(2, 3, 4)}, {}),
}
# Made of the ops above by their backward, or without floating point inputs that could have a tangent.
OTHER_OPS = {"mx_dequantize", "attention_schedule"}
ATTENTIONS = ("jagged_attention", "gdpa", "gdpa_norm_block", "block_attention")


def with_bool(function):
    return [name for name, p in inspect.signature(function).parameters.items() if p.annotation == "bool"]


def test_the_list_of_ops_is_complete():
    assert mx_dequantize(*mx_quantize(draw(32, 32))).shape == (32, 32)
    names = {
        name.split("::")[1].split(".")[0] for name in torch._C._dispatch_get_all_op_names() if "gem_kernels" in name
    }
    calls = {name for name in names if not name.endswith("_backward") or name == "layer_norm_rows_backward"}
    assert calls == set(CALLS) | OTHER_OPS


# ---------------------------------------------------------------- forward-mode AD


@forward_mode
@pytest.mark.parametrize(("op", "tensor"), [(op, tensor) for op in CALLS for tensor in CALLS[op][1]])
def test_forward_mode_is_refused_for_every_tensor(op, tensor):
    function, tensors, options = CALLS[op]
    x = tensors[tensor]

    def of_one(value):
        return function(**tensors | {tensor: value}, **options)

    # Without a bar a tangent of zeros would come back, without a word.
    words = rf"^{op}: `(\w+|grads\[0\])` must have no tangent of forward-mode AD .*; use torch.autograd.grad"
    with pytest.raises(NotImplementedError, match=words):
        torch.func.jvp(of_one, (x,), (torch.ones_like(x),))
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match=words):
        of_one(forward_ad.make_dual(x, torch.ones_like(x)))
    with forward_ad.dual_level():
        of_one(x)  # nothing to follow


@forward_mode
@pytest.mark.parametrize("op", ["gdpa", "rmsnorm_linear"])
def test_forward_mode_through_a_compiled_function_is_refused(op):
    function, tensors, options = CALLS[op]
    name, x = next(iter(tensors.items()))
    compiled = torch.compile(lambda value: function(**tensors | {name: value}, **options), backend="eager")
    compiled(x)
    with pytest.raises(NotImplementedError, match="forward-mode AD"):
        torch.func.jvp(compiled, (x,), (torch.ones_like(x),))


@pytest.mark.parametrize(("op", "tensor"), [(op, tensor) for op in CALLS for tensor in CALLS[op][1]])
def test_gradients_by_torch_func_are_refused_for_every_tensor(op, tensor):
    function, tensors, options = CALLS[op]

    def of_one(value):
        return function(**tensors | {tensor: value}, **options)

    # torch's own error speaks of a staticmethod that an autograd.Function lacks.
    words = rf"^{op}: `(\w+|grads\[0\])` must be no tensor of torch.func .*; use torch.autograd.grad"
    for transform in (torch.func.grad, lambda f: torch.func.vmap(torch.func.grad(f), out_dims=0)):
        x = tensors[tensor] if transform is torch.func.grad else tensors[tensor][None]
        with pytest.raises(NotImplementedError, match=words):
            transform(of_one)(x)


@forward_mode
def test_jagged_helpers_follow_forward_mode():
    x, tangent = draw(5, 2), draw(5, 2)
    for linear in (
        lambda v: jagged_to_padded(v, OFFSETS, 3),
        lambda v: padded_to_jagged(v[None].expand(2, 5, 2), OFFSETS),
        lambda v: jagged_concat((v, OFFSETS), (v, OFFSETS))[0],
        lambda v: jagged_split(v, OFFSETS, torch.tensor([0, 1, 2]))[1][0],
        lambda v: jagged_last_k(v, OFFSETS, 2)[0],
    ):
        assert torch.equal(torch.func.jvp(linear, (x,), (tangent,))[1], linear(tangent))


# ---------------------------------------------------------------- gradients


@pytest.mark.parametrize(("op", "tensor"), [("layer_norm_rows", "x"), ("mx_quantize", "x_hp")])
def test_ops_without_a_gradient_refuse_tensors_that_require_one(op, tensor):
    function, tensors, options = CALLS[op]
    x = tensors[tensor].clone().requires_grad_()
    with pytest.raises(ValueError, match=rf"^{op}: `{tensor}` gets no gradient, .*; pass `{tensor}.detach\(\)`"):
        function(x, **options)
    with torch.no_grad():
        function(x, **options)


@pytest.mark.parametrize("op", ["gdpa", "gdpa_norm_block", "block_attention", "jagged_attention"])
def test_outputs_may_be_changed_in_place(op):
    function, tensors, options = CALLS[op]
    q, k, v = (tensors[name].clone().requires_grad_() for name in "qkv")
    given = tensors | {"q": q, "k": k, "v": v}
    expected = torch.autograd.grad((function(**given, **options) + q).square().sum(), (q, k, v))
    out = function(**given, **options)
    # A softmax's backward reads its output, which is then no longer there.
    out = out.clone() if op == "jagged_attention" else out
    out += q
    for a, b in zip(torch.autograd.grad(out.square().sum(), (q, k, v)), expected, strict=True):
        assert torch.equal(a, b)


# ---------------------------------------------------------------- types


@pytest.mark.parametrize(("op", "flag"), [(op, flag) for op in ATTENTIONS for flag in with_bool(CALLS[op][0])])
@pytest.mark.parametrize("value", ["no", 1, None, np.True_, torch.tensor(True)], ids=repr)
def test_a_flag_must_be_a_bool(op, flag, value):
    function, tensors, options = CALLS[op]
    with pytest.raises(TypeError, match=rf"^{op}: `{flag}` must be a bool, got \w+; pass True or False\.$"):
        function(**tensors, **options, **{flag: value})


def test_a_flag_of_a_module_must_be_a_bool():
    for module in (JaggedAttention, GDPA):
        with pytest.raises(TypeError, match=rf"^{module.__name__}: `causal` must be a bool, got str"):
            module(causal="no")
    with pytest.raises(TypeError, match=r"^GDPA: `norm_block` must be a bool, got str"):
        GDPA()(*(draw(5, 2, 8),) * 3, **SIDES, norm_block="no")


@pytest.mark.parametrize("op", [op for op in CALLS if not op.startswith("mx_") and op != "transpose_tokens"])
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.int64, torch.complex64], ids=str)
def test_a_dtype_without_arithmetic_is_refused(op, dtype):
    function, tensors, options = CALLS[op]
    low = {name: x.to(dtype) for name, x in tensors.items()}
    with pytest.raises(TypeError, match=rf"^{op}: .*must be .*got {dtype}; cast it first") as raised:
        function(**low, **options)
    assert isinstance(raised.value, ValueError)


@pytest.mark.parametrize("op", ATTENTIONS)
def test_tensors_of_one_call_share_dtype_and_device(op):
    function, tensors, options = CALLS[op]
    name = next(name for name in options if name.startswith("offsets"))
    for changes in ({"k": tensors["k"].bfloat16()}, {name: OFFSETS.float()}, {name: OFFSETS.short()}):
        with pytest.raises(ValueError, match=rf"^{op}: `{next(iter(changes))}` must .* got torch\."):
            function(**tensors | options | changes)
    for changes in ({"v": tensors["v"].to("meta")}, {name: OFFSETS.to("meta")}):
        with pytest.raises(ValueError, match=rf"^{op}: `{next(iter(changes))}` must be on the device .* got meta; "):
            function(**tensors | options | changes)


def test_dtypes_of_tables_and_times_are_values_too():
    for op, name, wrong in (
        ("jagged_attention", "times_q", torch.arange(5).bfloat16()),
        ("jagged_attention", "times_k", torch.arange(5.0)),
        ("block_attention", "rotary", draw(5, 8).double()),
        ("mx_quantize", "x_hp", draw(32, 32).double()),
    ):
        function, tensors, options = CALLS[op]
        with pytest.raises(ValueError, match=rf"^{op}: `{name}` must .* got torch\."):
            function(**tensors | options | {name: wrong})


@pytest.mark.parametrize("op", ATTENTIONS)
def test_numbers_that_nothing_can_hold_are_refused(op):
    function, tensors, options = CALLS[op]
    name = next(name for name in options if name.startswith("max_seqlen"))
    with pytest.raises(ValueError, match=rf"^{op}: `{name}` must be below 2\*\*62, got {2**63}; "):
        function(**tensors, **options | {name: 2**63})
    assert function(**tensors, **options | {name: 2**62 - 1}).isfinite().all()
    scale = "scale" if op in ("jagged_attention", "block_attention") else "pre_scale"
    for number, words in ((10**400, "1000"), (1e39, "1e[+]39")):
        with pytest.raises(ValueError, match=rf"^{op}: `{scale}` must be finite, got {words}.* float32"):
            function(**tensors, **options, **{scale: number})
    if op in ("jagged_attention", "gdpa"):
        with pytest.raises(ValueError, match=rf"^{op}: `window_size` must be below 2\*\*62, got {2**70}; "):
            function(**tensors, **options, window_size=(2**70, 0))
        wide = function(**tensors, **options, window_size=(2**62 - 1, 2**62 - 1))
        assert torch.equal(wide, function(**tensors, **options))


@pytest.mark.parametrize("op", CALLS)
def test_what_is_no_dense_tensor_is_refused(op):
    function, tensors, options = CALLS[op]
    name, x = next((name, x) for name, x in tensors.items() if name in ("q", "x", "x_hp", "grad"))
    jagged = torch.nested.nested_tensor_from_jagged(x.contiguous(), torch.tensor([0, 1, x.shape[0]]))
    for wrong, words in ((jagged, "nested one; pass its packed rows"), (x.to_sparse(), "sparse_coo one")):
        with pytest.raises(TypeError, match=rf"^{op}: `\S+` must be a dense Tensor, got a {words}"):
            function(**tensors | {name: wrong}, **options)
    with pytest.raises(TypeError, match=rf"^{op}: `\S+` must be a Tensor, got list"):
        function(**tensors | {name: x.tolist()}, **options)


@pytest.mark.parametrize("op", ATTENTIONS)
def test_offsets_must_be_dense(op):
    function, tensors, options = CALLS[op]
    name = next(name for name in options if name.startswith("offsets"))
    with pytest.raises(TypeError, match=rf"^{op}: `{name}` must be a dense Tensor, got a sparse_coo one"):
        function(**tensors, **options | {name: OFFSETS.to_sparse()})


@pytest.mark.parametrize("op", ATTENTIONS)
def test_numbers_of_numpy_are_refused_with_the_remedy(op):
    function, tensors, options = CALLS[op]
    name = next(name for name in options if name.startswith("max_seqlen"))
    with pytest.raises(TypeError, match=rf"^{op}: `{name}` must be a Python int, got int64; .* pass int\(x\)\.$"):
        function(**tensors, **options | {name: np.int64(7)})
    scale = "scale" if op in ("jagged_attention", "block_attention") else "pre_scale"
    with pytest.raises(
        TypeError, match=rf"^{op}: `{scale}` must be a Python float, got float32; .* pass float\(x\)\.$"
    ):
        function(**tensors, **options, **{scale: np.float32(1)})


@pytest.mark.parametrize("scale", [0, -1.0, float("nan")])
def test_a_scale_of_a_softmax_is_positive(scale):
    for op in ("jagged_attention", "block_attention"):
        function, tensors, options = CALLS[op]
        with pytest.raises(ValueError, match=f"^{op}: `scale` must be (> 0|finite), got"):
            function(**tensors, **options, scale=scale)
    for module in (JaggedAttention, BlockAttention):
        with pytest.raises(ValueError, match=rf"^{module.__name__}: `scale` must be (> 0|finite), got"):
            module(scale=scale)


def test_numbers_that_only_equal_an_int_are_refused_or_taken_as_it():
    function, tensors, options = CALLS["jagged_attention"]
    with pytest.raises(ValueError, match=r"`time_buckets_per_octave` must be 1, 2, 4 or 8, an int, got 2\.0"):
        function(**tensors, **options, time_buckets_per_octave=2.0)
    x = draw(32, 32)
    assert torch.equal(mx_fake_quantize(x, block_shape=(1.0, 32.0)), mx_fake_quantize(x))


def test_seeds_are_refused_where_they_have_no_residual():
    function, tensors, options = CALLS["gdpa_norm_block"]
    with pytest.raises(
        TypeError, match=r"^gdpa_norm_block: `offsets_q` must be a Tensor of shape .*, got None: .*; repeat"
    ):
        function(**tensors | {"q": draw(3, 2, 8)}, **options | {"offsets_q": None})


def test_an_activation_is_a_name_or_an_activation():
    for op in ("gdpa", "gdpa_norm_block"):
        function, tensors, options = CALLS[op]
        with pytest.raises(ValueError, match=rf"^{op}: `activation` must be one of .*, got \['gelu'\]"):
            function(**tensors, **options, activation=["gelu"])


@pytest.mark.parametrize(
    ("call", "error", "words"),
    [
        (
            lambda v: jagged_to_padded(v, OFFSETS, 3, fill="a"),
            TypeError,
            "jagged_to_padded: `fill` must be a Python number",
        ),
        (
            lambda v: jagged_to_padded(v.long(), OFFSETS, 3, fill=0.5),
            ValueError,
            "`fill` must be an integer for `values` in",
        ),
        (
            lambda v: jagged_concat(v, OFFSETS),
            TypeError,
            r"jagged_concat: `a` must be a pair \(values, offsets\), got Tensor",
        ),
        (
            lambda v: jagged_concat((v, OFFSETS), (v,)),
            TypeError,
            r"`b` must be a pair \(values, offsets\), got 1 entries",
        ),
        (
            lambda v: jagged_last_k(v, OFFSETS, np.int64(2)),
            TypeError,
            r"`k` must be a Python int, got int64; pass int\(x\)",
        ),
        (lambda v: jagged_last_k(v, OFFSETS, -1), ValueError, "`k` must be >= 0 tokens, got -1"),
    ],
)
def test_jagged_helpers(call, error, words):
    with pytest.raises(error, match=words):
        call(draw(5, 2))


def test_a_padding_of_infinities_is_a_number():
    assert jagged_to_padded(draw(5, 2), OFFSETS, 3, fill=-float("inf"))[0, 2, 0] == -float("inf")


# ---------------------------------------------------------------- values of offsets on CUDA


@pytest.mark.parametrize("op", [block_attention_op, gdpa_op, gdpa_norm_block_op, jagged_attention_op])
@pytest.mark.parametrize(("debug", "validate", "checked"), [("1", False, True), ("0", False, False), ("", True, True)])
def test_values_of_offsets_are_read_on_cuda_only_when_asked_or_debugging(monkeypatch, op, debug, validate, checked):
    """What CUDA runs, on tensors of the CPU, up to its launch: the check comes before."""
    launched = []
    names = ("block_attention.forward", "gdpa.forward", "gdpa_norm_block.launch", "jagged_attention.forward")
    # All are there before one is changed: they import from each other.
    for module in [importlib.import_module(f"gem_kernels._src.{name}") for name in names]:
        made = (torch.empty(0), (), ()) if "gdpa_norm_block" in module.__name__ else (torch.empty(0), ())
        monkeypatch.setattr(module, "launch_forward", lambda *args, out=made, **options: launched.append(args) or out)
    monkeypatch.setenv("GEM_KERNELS_DEBUG", debug)
    x, bad = draw(5, 2, 16), torch.tensor([0, 4, 2])
    values = dict.fromkeys("qkv", x) | {"activation": "gelu", "block_size": 32, "validate": validate}
    values |= dict.fromkeys(("offsets", "offsets_q", "offsets_k"), bad)
    values |= dict.fromkeys(("max_seqlen", "max_seqlen_q", "max_seqlen_k"), 5)
    values |= dict.fromkeys(("scale", "pre_scale", "post_scale", "eps"), 1.0)
    values |= dict.fromkeys(("window_left", "window_right"), -1)
    on_cuda = op._init_fn
    names = inspect.signature(on_cuda).parameters
    arguments = {name: values.get(name) for name in names if name in values or names[name].default is names[name].empty}
    if checked:
        with pytest.raises(ValueError, match="must end at the number of packed rows, 5, got 2"):
            on_cuda(**arguments)
    else:
        on_cuda(**arguments)
    assert bool(launched) is not checked
