"""The attentions over packed sequences as their tests see them: how each is called and compared with float64."""

import importlib
from dataclasses import dataclass

import torch

from gem_kernels import gdpa, jagged_attention, reference
from gem_kernels.testing import (
    MASK_CASES,
    LengthCase,
    assert_matches_oracle,
    assert_rms,
    attention_inputs,
    summation_floor,
)

FULL = MASK_CASES[0]
MIXED = LengthCase(id="mixed", lengths_q=(3, 0, 40, 1, 17), lengths_k=(20, 5, 0, 33, 1))
PRE_SCALE, POST_SCALE = 0.3, 0.6
# tanh.approx has a relative error of 2^-11; gelu and silu turn it into an absolute error of 2^-11 |x| / 2 per score.
HARDWARE_TANH_ERROR = 2.0**-11


def inputs(case, **options):
    """Random inputs of a length case."""
    return attention_inputs(case.lengths_q, case.lengths_k, **options)


def sizes(x):
    """Offsets and bounds of both sides, as keywords."""
    names = ("offsets_q", "offsets_k", "max_seqlen_q", "max_seqlen_k")
    return {name: getattr(x, name) for name in names}


def assert_one_graph(loss, batches):
    """loss(x, q, k, v) compiles once for batches of all sizes, with the gradients of the plain one."""
    torch._dynamo.reset()
    graphs = 0

    def backend(module, example_inputs):
        nonlocal graphs
        graphs += 1
        return module.forward

    compiled = torch.compile(loss, fullgraph=True, dynamic=True, backend="aot_eager")
    counting = torch.compile(loss, fullgraph=True, dynamic=True, backend=backend)
    for x in batches:
        qkv = [t.clone().requires_grad_() for t in (x.q, x.k, x.v)]
        expected = torch.autograd.grad(loss(x, *qkv), qkv)
        for a, b in zip(torch.autograd.grad(compiled(x, *qkv), qkv), expected, strict=True):
            assert torch.equal(a, b)
        counting(x, *qkv)
    assert graphs == 1


def masking(mask):
    """Causal flag and window, as keywords."""
    return {"causal": mask.causal, "window_size": mask.window_size}


def launch_window(mask):
    """Window sides as the launchers take them."""
    left, right = mask.window_size
    return left, 0 if mask.causal else right


class PackedOp:
    """What both ops share; ``names`` are those of the tensors that each way of computing returns, gradients last."""

    name: str
    names: tuple[str, ...]

    def module(self, name):
        """An internal module of the op; imported where it is used, because some need Triton."""
        return importlib.import_module(f"gem_kernels._src.{self.name}.{name}")

    def floor(self, name, x, oracle, dtype):
        """Error that rounding alone may make in a result."""
        return summation_floor(oracle, dtype)

    def check(self, compute, x, mask=FULL, *, rms=None):
        """Results of ``compute`` against float64, as far off as the loop in the same dtype, twice."""
        results = compute(x, mask)
        oracle, eager = self.by_reference(x.to(torch.float64), mask), self.by_reference(x, mask)
        for name, a, o, e in zip(self.names, results, oracle, eager, strict=True):
            assert_matches_oracle(
                name,
                a,
                o,
                e,
                offsets=x.offsets_k if name in ("dk", "dv") else x.offsets_q,
                floor=self.floor(name, x, o, a.dtype),
                # Gradients sum over keys or queries in another order than the loop.
                factor=3.0 if name.startswith("d") else 2.0,
            )
            if rms is not None and name != "lse":
                assert_rms(name, a, o, ratio=rms)


@dataclass(frozen=True, kw_only=True)
class Gdpa(PackedOp):
    """gdpa with one activation."""

    activation: str = "gelu_approx"
    hardware_tanh: bool = False
    """The GPU's own tanh computes it."""

    name = "gdpa"
    names = ("out", "dq", "dk", "dv")
    function = staticmethod(gdpa)

    def keywords(self, x, mask=FULL):
        scales = {"activation": self.activation, "pre_scale": PRE_SCALE, "post_scale": POST_SCALE}
        return {**sizes(x), **masking(mask), **scales}

    def by_reference(self, x, mask):
        """(out, dq, dk, dv) of the loop, in the dtype of ``x``."""
        options = self.keywords(x, mask)
        del options["max_seqlen_q"], options["max_seqlen_k"]
        return reference.gdpa(x.q, x.k, x.v, **options), *reference.gdpa_backward(x.do, x.q, x.k, x.v, **options)

    def by_op(self, x, mask):
        """(out, dq, dk, dv) of the public function and autograd."""
        q, k, v = (t.detach().requires_grad_() for t in (x.q, x.k, x.v))
        out = gdpa(q, k, v, **self.keywords(x, mask))
        return out.detach(), *torch.autograd.grad(out, [q, k, v], x.do)

    def by_launch(self, x, mask):
        """(out, dq, dk, dv) of the Triton kernels on any tensors, CPU ones interpreted."""
        args = (*sizes(x).values(), self.activation, PRE_SCALE, POST_SCALE, *launch_window(mask))
        out = self.module("forward").launch_forward(x.q, x.k, x.v, *args)
        return out, *self.module("backward").launch_backward(x.do, x.q, x.k, x.v, *args)

    def floor(self, name, x, oracle, dtype):
        floor = super().floor(name, x, oracle, dtype)
        if self.hardware_tanh and oracle.numel():
            floor += HARDWARE_TANH_ERROR * max(float(oracle.abs().max()), 1.0)
        return floor


@dataclass(frozen=True, kw_only=True)
class JaggedAttention(PackedOp):
    """jagged_attention with its log-sum-exp, through which a gradient flows too."""

    scale: float | None = None

    name = "jagged_attention"
    names = ("out", "lse", "dq", "dk", "dv")
    function = staticmethod(jagged_attention)

    def keywords(self, x, mask=FULL):
        return {**sizes(x), **masking(mask), "scale": self.scale}

    def dlse(self, x):
        """(T_q, H) gradient of the log-sum-exp, from -1 to 1."""
        rows, heads = x.q.shape[:2]
        return torch.linspace(-1, 1, rows * heads, device=x.q.device).view(rows, heads)

    def by_reference(self, x, mask):
        """(out, lse, dq, dk, dv) of the loop, in the dtype of ``x``."""
        options = self.keywords(x, mask)
        del options["max_seqlen_q"], options["max_seqlen_k"]
        dlse = self.dlse(x).double() if x.q.dtype == torch.float64 else self.dlse(x)
        out, lse = reference.jagged_attention(x.q, x.k, x.v, **options)
        return out, lse, *reference.jagged_attention_backward(x.do, x.q, x.k, x.v, dlse=dlse, **options)

    def by_op(self, x, mask):
        """(out, lse, dq, dk, dv) of the public function and autograd."""
        q, k, v = (t.detach().requires_grad_() for t in (x.q, x.k, x.v))
        out, lse = jagged_attention(q, k, v, return_lse=True, **self.keywords(x, mask))
        gradients = torch.autograd.grad([out, lse], [q, k, v], [x.do, self.dlse(x).to(lse.dtype)])
        return out.detach(), lse.detach(), *gradients

    def by_launch(self, x, mask):
        """(out, lse, dq, dk, dv) of the Triton kernels on any tensors, CPU ones interpreted."""
        return self.launch(x, mask, self.dlse(x))

    def launch(self, x, mask, dlse):
        """``by_launch`` with another gradient of the log-sum-exp, or None."""
        scale = x.q.shape[2] ** -0.5 if self.scale is None else self.scale
        args = (*sizes(x).values(), scale, *launch_window(mask))
        out, lse = self.module("forward").launch_forward(x.q, x.k, x.v, *args)
        return out, lse, *self.module("backward").launch_backward(x.do, dlse, x.q, x.k, x.v, out, lse, *args)

    def floor(self, name, x, oracle, dtype):
        """For gradients of scores also one float32 rounding of what cancels: of dq the keys, of dk the queries.

        dS = P (dO V^T - rowsum(dO O) + dLSE), and where a query sees one key the first two, summed in different orders,
        are equal. By Cauchy-Schwarz the terms of either sum to at most |dO| |V|.
        """
        floor = super().floor(name, x, oracle, dtype)
        factor = {"dq": x.k, "dk": x.q}.get(name)
        if factor is None or 0 in (x.do.numel(), x.v.numel(), factor.numel()):
            return floor
        scale = x.q.shape[2] ** -0.5 if self.scale is None else self.scale
        terms = x.do.double().norm(dim=-1).max() * x.v.double().norm(dim=-1).max()
        return floor + float(torch.finfo(torch.float32).eps * terms * abs(scale) * factor.double().abs().max())


OPS = (Gdpa(), JaggedAttention())
"""Both, with what most tests want."""
