import pytest
import torch

from gem_kernels import gdpa, jagged_attention
from gem_kernels.modules import GDPA, JaggedAttention
from gem_kernels.testing import attention_inputs

X = attention_inputs((3, 0, 9), (4, 5, 7), num_heads=4, num_heads_kv=2)
BATCH = {
    "offsets_q": X.offsets_q,
    "offsets_k": X.offsets_k,
    "max_seqlen_q": X.max_seqlen_q,
    "max_seqlen_k": X.max_seqlen_k,
}


@pytest.mark.parametrize("options", [{}, {"scale": 0.3, "causal": True}, {"window_size": (2, 1)}])
def test_jagged_attention_module_is_the_function(options):
    module = JaggedAttention(**options)
    assert torch.equal(module(X.q, X.k, X.v, **BATCH), jagged_attention(X.q, X.k, X.v, **BATCH, **options))


@pytest.mark.parametrize(
    "options",
    [{}, {"activation": "silu", "pre_scale": 0.5, "post_scale": 2.0}, {"causal": True, "window_size": (2, 1)}],
)
def test_gdpa_module_is_the_function(options):
    module = GDPA(**options)
    assert torch.equal(module(X.q, X.k, X.v, **BATCH), gdpa(X.q, X.k, X.v, **BATCH, **options))


def test_modules_hold_no_state_and_show_their_options():
    for module in (JaggedAttention(causal=True), GDPA(activation="relu")):
        assert list(module.parameters()) == []
        assert module.state_dict() == {}
    assert "causal=True" in repr(JaggedAttention(causal=True))
    assert "activation='relu'" in repr(GDPA(activation="relu"))


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: GDPA(activation="softmax"), ["GDPA", "activation", "'softmax'"]),
        (lambda: GDPA(pre_scale=float("inf")), ["GDPA", "pre_scale", "finite"]),
        (lambda: GDPA(window_size=(-3, 0)), ["GDPA", "window_size", "(-3, 0)"]),
        (lambda: JaggedAttention(window_size=(0, -2)), ["JaggedAttention", "window_size", "(0, -2)"]),
        (lambda: JaggedAttention(scale=float("nan")), ["JaggedAttention", "scale", "finite"]),
        (lambda: JaggedAttention(scale=-1.0), ["JaggedAttention", "scale", "> 0"]),
    ],
)
def test_modules_refuse_bad_options_at_construction(build, words):
    with pytest.raises(ValueError, match="must") as raised:
        build()
    assert all(word in str(raised.value) for word in words)
