"""The variants of jagged attention's kernels that tuning may choose: what the compile test builds of each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from gem_kernels._src.attention.specs import alternatives, attention_spec
from gem_kernels._src.compile_spec import CompileSpec
from gem_kernels._src.jagged_attention.configs import select
from gem_kernels._src.jagged_attention.specs import _KERNELS, _bias_flags, _with_types
from gem_kernels._src.tables.attention import Kernel


def _kinds(kernel: Kernel, dim: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Suffix and flags of the kinds of call that reach an alternative."""
    yield "", {}
    if kernel != "dqdkdv":
        yield "-causal", {"HAS_RIGHT": True}
    if kernel == "forward" and dim > 64:
        yield "-seeds", {"BROADCAST_Q": True}


def compile_specs() -> Sequence[CompileSpec]:
    """Every alternative to a default tile, without a mask and causal; the widest forward with seeds too."""
    specs = []
    for target, kernel, dim, name, config in alternatives(select):
        for suffix, flags in _kinds(kernel, dim):
            constexprs = {"WRITE_DQ": kernel == "dqdkdv", "BROADCAST_Q": False, **_bias_flags("none")}
            spec = attention_spec(
                f"{name}{suffix}-sm{target}",
                _KERNELS[kernel],
                config,
                torch.bfloat16,
                dim,
                target=target,
                constexprs=constexprs | flags,
            )
            specs.append(_with_types(spec))
    return specs
