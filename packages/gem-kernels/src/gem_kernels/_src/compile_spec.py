"""How an op names the kernel variants that the compile test builds for sm_90 and sm_100 without a GPU."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileSpec:
    """One variant of a Triton kernel.

    An op's ``compile_specs()`` lives in any module of ``gem_kernels._src.<op>`` and returns a sequence of these, made
    from the same constants and tile configuration that its launcher uses.
    """

    id: str
    """Unique within the op: kernel, dtype, sizes."""
    kernel: Any
    """The ``triton.jit`` function."""
    signature: Mapping[str, str]
    """Type of every runtime argument in Triton's notation: "*bf16", "*i64", "i32", "i64", "fp32"."""
    constexprs: Mapping[str, Any] = field(default_factory=dict)
    """Value of every ``tl.constexpr`` argument, and of arguments passed as None or specialised to 1."""
    aligned: tuple[str, ...] = ()
    """Pointers and integers that real launches pass as multiples of 16, which Triton specialises on."""
    num_warps: int = 4
    num_stages: int = 2
    targets: tuple[int, ...] = (90, 100)
    """Compute capabilities, times 10, that this variant is launched on."""
    max_spill_bytes: int = 0
    """Local memory per thread the variant may use for spilled registers and stack, in bytes."""

    def __post_init__(self) -> None:
        names = set(self.kernel.arg_names)
        given = set(self.signature) | set(self.constexprs)
        if given != names:
            raise ValueError(
                f"CompileSpec: {self.id} must give a type or a value to every argument of its kernel, "
                f"got none for {sorted(names - given)}, and unknown {sorted(given - names)}; correct its signature."
            )
        if not set(self.aligned) <= set(self.signature):
            unknown = sorted(set(self.aligned) - set(self.signature))
            raise ValueError(
                f"CompileSpec: `aligned` of {self.id} must name arguments in `signature`, got {unknown}; name "
                "arguments of the kernel."
            )
