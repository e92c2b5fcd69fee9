"""One conformance case: the op and its gradients against the float64 reference, on the device of the run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

import gem_kernels
from gem_kernels import reference
from gem_kernels._src.conformance.cases import ATTENTION_OPS, DTYPES, LINEAR_OPS, ConformanceCase
from gem_kernels.testing import attention_inputs, max_error, summation_floor

FORWARD_FACTOR = 2.0
GRADIENT_FACTOR = 3.0
"""How many times the error of the plain computation in the same dtype an op may have: more where it sums over rows."""


class Measured(NamedTuple):
    """One tensor of one case."""

    tensor: str
    """"out", or "d" and the name of the argument."""
    error: float
    """Largest difference from the float64 reference."""
    bound: float
    """What it may be: a multiple of the plain computation's, plus rounding."""

    @property
    def passed(self) -> bool:
        """Whether the error is within its bound; NaN is not."""
        return self.error <= self.bound


class _Problem(NamedTuple):
    """Differentiable tensors by argument, the gradient of the output, and the options of the op and of its oracle."""

    tensors: dict[str, Tensor]
    dout: Tensor
    options: dict[str, Any]
    """Of both."""
    bounds: dict[str, Any]
    """Of the op only: what the reference reads from the lengths, or has no use for."""


def _draw(case: ConformanceCase, device: torch.device, *shape: int, shift: float = 0.0, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.randn(shape, generator=generator) + shift).to(device=device, dtype=DTYPES[case.dtype])


def _linear_problem(case: ConformanceCase, device: torch.device) -> _Problem:
    tensors = {
        "x": _draw(case, device, case.rows, case.in_features),
        "weight": _draw(case, device, case.out_features, case.in_features, seed=1) * case.in_features**-0.5,
    }
    is_post = case.op == "linear_norm"
    if case.affine:
        tensors["bias"] = _draw(case, device, case.out_features, seed=2)
        normed = case.out_features if is_post else case.in_features
        tensors["norm_weight"] = _draw(case, device, normed, shift=1.0, seed=3)
        if is_post:
            tensors["norm_bias"] = _draw(case, device, normed, seed=4)
    options = {"norm": case.norm} if is_post else {}
    return _Problem(tensors, _draw(case, device, case.rows, case.out_features, seed=5), options, {})


def _rotary_table(rows: int, dim: int, device: torch.device) -> Tensor:
    positions = torch.arange(rows, dtype=torch.float64)
    angles = positions[:, None] * torch.logspace(0, -3, dim // 2, dtype=torch.float64)
    return torch.cat([angles.sin(), angles.cos()], 1).to(device=device, dtype=torch.float32)


def _attention_problem(case: ConformanceCase, device: torch.device) -> _Problem:
    x = attention_inputs(
        case.query_lengths,
        case.lengths_k,
        num_heads=case.num_heads,
        num_heads_kv=case.num_heads_kv,
        head_dim=case.head_dim,
        head_dim_v=case.head_dim_v,
        dtype=DTYPES[case.dtype],
        device=device,
    )
    tensors = {"q": x.q[: case.num_seeds] if case.num_seeds else x.q, "k": x.k, "v": x.v}
    if case.op == "block_attention":
        options: dict[str, Any] = {"offsets": x.offsets_q, "block_size": case.block_size}
        if case.rotary:
            options["rotary"] = _rotary_table(x.q.shape[0], case.head_dim, device)
        return _Problem(tensors, x.do, options, {"max_seqlen": x.max_seqlen_q})
    options = {"offsets_q": None if case.num_seeds else x.offsets_q, "offsets_k": x.offsets_k}
    bounds: dict[str, Any] = {"max_seqlen_q": x.max_seqlen_q, "max_seqlen_k": x.max_seqlen_k}
    for name in ("request_index", "num_targets"):
        if (numbers := getattr(case, name)) is not None:
            options[name] = torch.tensor(numbers, dtype=torch.int64, device=device)
    if case.op != "jagged_attention":
        # Scores of about 1, as after training: far from where an activation is constant or linear.
        options |= {"activation": case.activation, "pre_scale": case.head_dim**-0.5}
    if case.bias:
        tensors["position_bias"] = _draw(case, device, case.num_heads, 33, seed=6)
        tensors["time_bias"] = _draw(case, device, case.num_heads, 20, seed=7)
        options |= {
            f"times_{side}": torch.arange(x.shape[0], device=device) ** 2 for side, x in (("q", x.do), ("k", x.k))
        }
    if case.op == "gdpa_norm_block":
        bounds["recompute"] = case.recompute
        if case.affine:
            for seed, name in enumerate(("norm_weight", "norm_bias", "rms_weight")):
                tensors[name] = _draw(case, device, case.num_heads * case.head_dim, shift=1.0, seed=seed)
    else:
        options |= {"causal": case.causal, "window_size": case.window_size}
    return _Problem(tensors, x.do, options, bounds)


def make_problem(case: ConformanceCase, device: torch.device) -> _Problem:
    """Inputs of a case, the same numbers on every device."""
    return (_linear_problem if case.op in LINEAR_OPS else _attention_problem)(case, device)


def make_calls(case: ConformanceCase, device: torch.device) -> list[Callable[[], tuple[Tensor, ...]]]:
    """The forward of a case and its backward, each to be called again and again."""
    problem = make_problem(case, device)
    function: Callable[..., Tensor] = getattr(gem_kernels, case.op)
    leaves = {name: x.detach().requires_grad_() for name, x in problem.tensors.items()}

    def forward() -> tuple[Tensor, ...]:
        return (function(**leaves, **problem.options, **problem.bounds),)

    (out,) = forward()

    def backward() -> tuple[Tensor, ...]:
        return torch.autograd.grad(out, tuple(leaves.values()), problem.dout, retain_graph=True)

    return [forward, backward]


def run_op(case: ConformanceCase, problem: _Problem) -> dict[str, Tensor]:
    """Output and gradients of the op by name."""
    function: Callable[..., Tensor] = getattr(gem_kernels, case.op)
    leaves = {name: x.detach().requires_grad_() for name, x in problem.tensors.items()}
    # Indices come from a user's file.
    checks = {"validate": True} if case.op in ATTENTION_OPS else {}
    out = function(**leaves, **problem.options, **problem.bounds, **checks)
    gradients = torch.autograd.grad(out, tuple(leaves.values()), problem.dout)
    return {"out": out.detach()} | {f"d{name}": g for name, g in zip(leaves, gradients, strict=True)}


def _run_reference(case: ConformanceCase, problem: _Problem, dtype: torch.dtype) -> dict[str, Tensor]:
    tensors = {name: x.detach().to(dtype) for name, x in problem.tensors.items()}
    dout, options = problem.dout.to(dtype), problem.options
    forward = getattr(reference, case.op)(**tensors, **options)
    if case.op == "jagged_attention":
        forward = forward[0] if isinstance(forward, tuple) else forward
    gradients = getattr(reference, f"{case.op}_backward")(dout, **tensors, **options)
    # The references return gradients in the order of their arguments, without those of absent ones.
    present = [g for g in gradients if g is not None]
    return {"out": forward} | {f"d{name}": g for name, g in zip(tensors, present, strict=True)}


def measure(case: ConformanceCase, device: torch.device) -> list[Measured]:
    """Errors of the output and of every gradient, and what they may be."""
    problem = make_problem(case, device)
    dtype = DTYPES[case.dtype]
    actual = run_op(case, problem)
    exact, eager = _run_reference(case, problem, torch.float64), _run_reference(case, problem, dtype)
    rows = []
    for name, x in actual.items():
        factor = FORWARD_FACTOR if name == "out" else GRADIENT_FACTOR
        bound = factor * max_error(eager[name], exact[name]) + summation_floor(exact[name], dtype)
        rows.append(Measured(name, max_error(x, exact[name]), bound))
    return rows
