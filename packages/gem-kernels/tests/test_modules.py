from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gem_kernels import block_attention, gdpa, gdpa_norm_block, jagged_attention
from gem_kernels.modules import GDPA, BlockAttention, JaggedAttention
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


@pytest.mark.parametrize("recompute", [True, False])
def test_gdpa_module_is_the_norm_block(recompute):
    options = {"activation": "silu", "pre_scale": 0.5, "post_scale": 2.0, "recompute": recompute}
    module, q = GDPA(**options), X.q.clone().requires_grad_()
    kept = []
    for function in (partial(module, norm_block=True), partial(gdpa_norm_block, **options)):
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(lambda x, to=saved: to.append(x.shape) or x, lambda x: x):
            out = function(q, X.k, X.v, **BATCH)
        kept.append((out, *torch.autograd.grad(out.square().sum(), q), saved))
    assert all(torch.equal(a, b) for a, b in zip(kept[0][:2], kept[1][:2], strict=True))
    assert kept[0][2] == kept[1][2]
    assert kept[0][2].count(X.q.shape) == (1 if recompute else 3)


@pytest.mark.parametrize(
    ("options", "call", "cause"),
    [
        ({"causal": True}, {}, "`causal` True"),
        ({"window_size": [2, 1]}, {}, r"`window_size` \(2, 1\)"),
        ({}, {"offsets_q": None}, "`offsets_q` None"),
        ({}, {"num_targets": torch.tensor([1, 0, 2])}, "`num_targets`"),
        ({}, {"request_index": torch.tensor([0, 1, 2])}, "`request_index`"),
    ],
)
def test_norm_block_with_what_the_block_has_not_is_refused(options, call, cause):
    with pytest.raises(ValueError, match=f"GDPA: `norm_block` must be False with {cause}, got True; compute"):
        GDPA(**options)(X.q, X.k, X.v, **(BATCH | call), norm_block=True)
    assert GDPA(**options).has_norm_block == (not options)


def test_recompute_is_refused_where_nothing_reads_it():
    for options, cause in (({"causal": True}, "`causal` True"), ({"window_size": (2, -1)}, r"`window_size` \(2, -1\)")):
        with pytest.raises(
            ValueError, match=f"GDPA: `recompute` must be True with {cause}, .* got False; leave it out"
        ):
            GDPA(**options, recompute=False)
    layer = GDPA(window_size=[-1, -1], recompute=False)
    assert layer.has_norm_block
    layer(X.q, X.k, X.v, **BATCH, norm_block=True)
    with pytest.raises(
        ValueError, match=r"`recompute` must be True in a call without `norm_block`, .*; pass norm_block=True"
    ):
        layer(X.q, X.k, X.v, **BATCH)


def test_time_buckets_are_refused_where_nothing_reads_them():
    layer = JaggedAttention(time_buckets_per_octave=4)
    for attend in (layer, partial(jagged_attention, time_buckets_per_octave=4)):
        with pytest.raises(
            ValueError, match="`time_buckets_per_octave` must be left out without `time_bias`, got 4; pass"
        ):
            attend(X.q, X.k, X.v, **BATCH)


def draw(*shape: int, seed: int = 3) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@dataclass(frozen=True, kw_only=True)
class OptionCase:
    """Arguments of a call beside q, k, v and the lengths, and what a module fixes for them."""

    id: str
    kind: type[nn.Module]
    call: Callable[[], dict[str, Any]]
    fixed: dict[str, Any] = field(default_factory=dict)
    lengths_q: tuple[int, ...] = (3, 0, 9)
    lengths_k: tuple[int, ...] | None = (4, 5, 7)
    seeds: bool = False


REQUESTS = {"lengths_q": (3, 0, 4, 2), "lengths_k": (5, 7)}
FUNCTIONS = {JaggedAttention: jagged_attention, GDPA: gdpa, BlockAttention: block_attention}
OPTION_CASES = [
    OptionCase(
        id="position_bias", kind=JaggedAttention, call=lambda: {"position_bias": draw(4, 5)}, fixed={"causal": True}
    ),
    OptionCase(
        id="time_bias",
        kind=JaggedAttention,
        call=lambda: {"time_bias": draw(4, 20), "times_q": torch.arange(12) * 7, "times_k": torch.arange(16) * 5},
        fixed={"time_buckets_per_octave": 4},
    ),
    OptionCase(
        id="requests", kind=JaggedAttention, call=lambda: {"request_index": torch.tensor([0, 0, 1, 1])}, **REQUESTS
    ),
    OptionCase(id="seeds", kind=JaggedAttention, call=dict, lengths_q=(3,), seeds=True),
    OptionCase(
        id="seeds-of-requests-with-both-biases",
        kind=JaggedAttention,
        call=lambda: {
            "request_index": torch.tensor([0, 0, 1, 2, 2]),
            "position_bias": draw(4, 5),
            "time_bias": draw(4, 6),
            "times_q": 40 * draw(15),
            "times_k": 40 * draw(16, seed=4),
        },
        lengths_q=(3,),
        seeds=True,
    ),
    OptionCase(
        id="targets",
        kind=GDPA,
        call=lambda: {"num_targets": torch.tensor([1, 0, 4])},
        fixed={"activation": "silu", "causal": True},
        lengths_k=None,
    ),
    OptionCase(id="gdpa-requests", kind=GDPA, call=lambda: {"request_index": torch.tensor([0, 0, 1, 1])}, **REQUESTS),
    OptionCase(id="gdpa-seeds", kind=GDPA, call=dict, lengths_q=(3,), seeds=True),
    OptionCase(
        id="rotary",
        kind=BlockAttention,
        call=lambda: {"rotary": draw(79, 16)},
        fixed={"block_size": 32},
        lengths_q=(70, 0, 9),
        lengths_k=None,
    ),
]


@pytest.mark.parametrize("case", OPTION_CASES, ids=lambda case: case.id)
def test_module_passes_every_option_of_a_call_on(case):
    x = attention_inputs(case.lengths_q, case.lengths_k, num_heads=4, num_heads_kv=2)
    if case.kind is BlockAttention:
        lengths = {"offsets": x.offsets_q, "max_seqlen": x.max_seqlen_q}
    else:
        lengths = {
            "offsets_q": None if case.seeds else x.offsets_q,
            "offsets_k": x.offsets_k,
            "max_seqlen_q": x.max_seqlen_q,
            "max_seqlen_k": x.max_seqlen_k,
        }
    results = []
    for attend in (case.kind(**case.fixed), lambda *a, **k: FUNCTIONS[case.kind](*a, **k, **case.fixed)):
        call = case.call()
        inputs = [t.clone().requires_grad_() for t in (x.q, x.k, x.v)]
        tables = [t.requires_grad_() for name, t in call.items() if name.endswith("_bias")]
        out = attend(*inputs, **lengths, **call)
        results.append((out, *torch.autograd.grad(out, inputs + tables, draw(*out.shape))))
    for through_module, expected in zip(*results, strict=True):
        assert torch.equal(through_module, expected)


def test_errors_of_a_call_are_those_of_the_function():
    with pytest.raises(ValueError, match="`times_q` must be given with `time_bias`"):
        JaggedAttention()(X.q, X.k, X.v, **BATCH, time_bias=draw(4, 3))
    with pytest.raises(ValueError, match="`num_targets` must be None when `request_index` is given"):
        GDPA()(X.q, X.k, X.v, **BATCH, num_targets=torch.zeros(3).long(), request_index=torch.arange(3))


def test_modules_hold_no_state_and_show_their_options():
    for module in (JaggedAttention(causal=True), GDPA(activation="relu"), BlockAttention()):
        assert list(module.parameters()) == []
        assert module.state_dict() == {}
    assert "causal=True" in repr(JaggedAttention(causal=True))
    assert "time_buckets_per_octave=4" in repr(JaggedAttention(time_buckets_per_octave=4))
    assert "activation='relu'" in repr(GDPA(activation="relu"))
    assert "recompute=False" in repr(GDPA(recompute=False))


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: GDPA(activation="softmax"), ["GDPA", "activation", "'softmax'"]),
        (lambda: GDPA(pre_scale=float("inf")), ["GDPA", "pre_scale", "finite"]),
        (lambda: GDPA(window_size=(-3, 0)), ["GDPA", "window_size", "(-3, 0)"]),
        (lambda: JaggedAttention(window_size=(0, -2)), ["JaggedAttention", "window_size", "(0, -2)"]),
        (lambda: JaggedAttention(scale=float("nan")), ["JaggedAttention", "scale", "finite"]),
        (lambda: JaggedAttention(time_buckets_per_octave=3), ["JaggedAttention", "time_buckets_per_octave", "got 3"]),
        (lambda: JaggedAttention(time_buckets_per_octave=True), ["JaggedAttention", "got True"]),
        (lambda: JaggedAttention(scale=-1.0), ["JaggedAttention", "scale", "> 0"]),
    ],
)
def test_modules_refuse_bad_options_at_construction(build, words):
    with pytest.raises(ValueError, match="must") as raised:
        build()
    assert all(word in str(raised.value) for word in words)
