"""The variants of the matmuls with a norm that tuning may choose: what the compile test builds of each."""

from __future__ import annotations

from collections.abc import Sequence

from gem_kernels._src.compile_spec import CompileSpec
from gem_kernels._src.norm_linear.matmul import _linear_norm_fwd_kernel, _rmsnorm_linear_fwd_kernel
from gem_kernels._src.norm_linear.specs import _matmul_spec
from gem_kernels._src.tables.norm_linear import CANDIDATES

_KERNELS = {"rmsnorm_linear": _rmsnorm_linear_fwd_kernel, "linear_norm": _linear_norm_fwd_kernel}


def compile_specs() -> Sequence[CompileSpec]:
    """Every alternative to a default tile at 512 features."""
    return [
        _matmul_spec(
            _KERNELS[kernel], config, f"{kernel}-candidate-{number}-sm{target}", 512, 512, bias=True, targets=(target,)
        )
        for target in (90, 100)
        for kernel, configs in CANDIDATES.items()
        for number, config in enumerate(configs)
    ]
