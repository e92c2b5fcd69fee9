"""Calls of the attentions with a schedule, as its tests make them."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from packed_ops import sizes

from gem_kernels import AttentionSchedule, gdpa, gdpa_norm_block, jagged_attention
from gem_kernels.modules import GDPA, JaggedAttention
from gem_kernels.testing import attention_inputs

X = attention_inputs(
    (3, 0, 40, 1, 17), (20, 5, 0, 33, 1), num_heads=4, num_heads_kv=2, head_dim=16, dtype=torch.float32
)
REQUESTS = torch.tensor([0, 0, 1, 3, 4])


def make_schedule(x=X, **changes):
    """A schedule of the inputs, changed where a test says so."""
    arguments = {
        "offsets_q": x.offsets_q,
        "offsets_k": x.offsets_k,
        "total_q": x.q.shape[0],
        "total_k": x.k.shape[0],
        "max_seqlen_q": x.max_seqlen_q,
        "max_seqlen_k": x.max_seqlen_k,
    }
    return AttentionSchedule(**(arguments | changes))


def store_of(schedule):
    return schedule.token.gem_kernels_store


@dataclass(frozen=True, kw_only=True)
class Call:
    """One way of calling an op with a schedule."""

    id: str
    op: Callable[..., torch.Tensor]
    options: dict[str, Any] = field(default_factory=dict)
    schedule: dict[str, Any] = field(default_factory=dict)


SEEDS = {"offsets_q": None, "max_seqlen_q": 77}
CALLS = [
    Call(id="jagged_attention", op=jagged_attention),
    Call(id="jagged_attention-window", op=jagged_attention, options={"window_size": (5, 3)}),
    Call(id="jagged_attention-bias", op=jagged_attention, options={"position_bias": torch.randn(4, 9)}),
    Call(
        id="jagged_attention-requests",
        op=jagged_attention,
        options={"request_index": REQUESTS},
        schedule={"request_index": REQUESTS},
    ),
    Call(id="jagged_attention-module", op=JaggedAttention(causal=True)),
    Call(id="gdpa", op=gdpa),
    Call(id="gdpa-causal", op=gdpa, options={"activation": "silu", "causal": True}),
    Call(id="gdpa-requests", op=gdpa, options={"request_index": REQUESTS}, schedule={"request_index": REQUESTS}),
    Call(id="gdpa-seeds", op=gdpa, options=SEEDS, schedule={**SEEDS, "total_q": 61}),
    Call(id="gdpa-module", op=GDPA()),
    Call(id="gdpa_norm_block", op=gdpa_norm_block),
    Call(id="gdpa_norm_block-module", op=GDPA(), options={"norm_block": True}),
]


def run(call, schedule, x=X, loss_factor=1.0):
    """Output and gradients."""
    leaves = [t.detach().clone().requires_grad_() for t in (x.q, x.k, x.v)]
    out = call.op(*leaves, **(sizes(x) | call.options), schedule=schedule)
    return out, *torch.autograd.grad((out * loss_factor).square().sum(), leaves)
