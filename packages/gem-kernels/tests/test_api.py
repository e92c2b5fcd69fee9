"""The public face: the names, the signatures, what importing costs and needs."""

import importlib
import inspect
import subprocess
import sys

import pytest

import gem_kernels

TOP_LEVEL = {
    "Activation",
    "AttentionSchedule",
    "__version__",
    "block_attention",
    "gdpa",
    "gdpa_norm_block",
    "jagged",
    "jagged_attention",
    "linear_norm",
    "modules",
    "mx",
    "reference",
    "rmsnorm_linear",
    "testing",
    "tuning",
}
MODULES = {
    "gem_kernels.jagged": {
        "jagged_concat",
        "jagged_last_k",
        "jagged_split",
        "jagged_to_padded",
        "lengths_to_offsets",
        "offsets_to_lengths",
        "padded_to_jagged",
    },
    "gem_kernels.modules": {"BlockAttention", "GDPA", "JaggedAttention"},
    "gem_kernels.reference": {
        "block_attention",
        "block_attention_backward",
        "gdpa",
        "gdpa_backward",
        "gdpa_norm_block",
        "gdpa_norm_block_backward",
        "jagged",
        "jagged_attention",
        "jagged_attention_backward",
        "linear_norm",
        "linear_norm_backward",
        "rmsnorm_linear",
        "rmsnorm_linear_backward",
    },
    "gem_kernels.tuning": {"RanksDifferError", "check_ranks", "digest"},
}
SIGNATURES = {
    "jagged_attention": "q, k, v, *, offsets_q, offsets_k, max_seqlen_q, max_seqlen_k, scale, causal, window_size, "
    "position_bias, time_bias, times_q, times_k, time_buckets_per_octave, request_index, schedule, return_lse, "
    "validate",
    "gdpa": "q, k, v, *, offsets_q, offsets_k, max_seqlen_q, max_seqlen_k, activation, pre_scale, post_scale, causal, "
    "window_size, num_targets, request_index, schedule, validate",
    "block_attention": "q, k, v, *, offsets, max_seqlen, block_size, scale, rotary, validate",
    "gdpa_norm_block": "q, k, v, *, offsets_q, offsets_k, max_seqlen_q, max_seqlen_k, activation, pre_scale, "
    "post_scale, norm_weight, norm_bias, rms_weight, layer_norm, query_residual, rms_norm, residual, eps, recompute, "
    "schedule, validate",
    "rmsnorm_linear": "x, weight, bias, *, norm_weight, eps",
    "linear_norm": "x, weight, bias, *, norm, norm_weight, norm_bias, eps",
    "jagged.lengths_to_offsets": "lengths",
    "jagged.offsets_to_lengths": "offsets",
    "jagged.jagged_to_padded": "values, offsets, max_seqlen, fill",
    "jagged.padded_to_jagged": "padded, offsets, total",
    "jagged.jagged_concat": "a, b",
    "jagged.jagged_split": "values, offsets, offsets_a, total_a",
    "jagged.jagged_last_k": "values, offsets, k",
}


def test_top_level_names():
    assert set(gem_kernels.__all__) == TOP_LEVEL
    assert all(hasattr(gem_kernels, name) for name in TOP_LEVEL)


@pytest.mark.parametrize("name", sorted(MODULES))
def test_names_of_a_module(name):
    module = importlib.import_module(name)
    assert set(module.__all__) == MODULES[name]
    for public in MODULES[name]:
        assert inspect.getdoc(getattr(module, public)), f"{name}.{public} has no docstring"


@pytest.mark.parametrize("name", sorted(SIGNATURES))
def test_signature(name):
    function = gem_kernels
    for part in name.split("."):
        function = getattr(function, part)
    names = []
    for parameter in inspect.signature(function).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and "*" not in names:
            names.append("*")
        names.append(parameter.name)
        assert parameter.annotation is not parameter.empty
    assert ", ".join(names) == SIGNATURES[name]
    assert "Args:" in function.__doc__
    assert "Returns:" in function.__doc__


def test_cpu_needs_no_triton_and_import_starts_no_cuda():
    program = (
        "import sys\n"
        "sys.modules['triton'] = None  # an import of it fails\n"
        "import torch, gem_kernels\n"
        "assert not torch.cuda.is_initialized()\n"
        "x = torch.randn(5, 2, 16, requires_grad=True)\n"
        "offsets = torch.tensor([0, 2, 5])\n"
        "gem_kernels.block_attention(x, x, x, offsets=offsets, max_seqlen=3).sum().backward()\n"
        "two = dict(offsets_q=offsets, offsets_k=offsets, max_seqlen_q=3, max_seqlen_k=3)\n"
        "gem_kernels.jagged_attention(x, x, x, **two).sum().backward()\n"
        "gem_kernels.gdpa(x, x, x, **two).sum().backward()\n"
        "gem_kernels.mx.mx_dequantize(*gem_kernels.mx.mx_quantize(x.detach().flatten(1)))\n"
    )
    done = subprocess.run([sys.executable, "-W", "error", "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
