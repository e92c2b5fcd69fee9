"""Plain loops over sequences: what each op means, forward and closed-form backward, in any float dtype."""

from gem_kernels.reference import jagged
from gem_kernels.reference.block_attention import block_attention, block_attention_backward
from gem_kernels.reference.gdpa import gdpa, gdpa_backward
from gem_kernels.reference.gdpa_norm_block import gdpa_norm_block, gdpa_norm_block_backward
from gem_kernels.reference.jagged_attention import jagged_attention, jagged_attention_backward
from gem_kernels.reference.norm_linear import (
    linear_norm,
    linear_norm_backward,
    rmsnorm_linear,
    rmsnorm_linear_backward,
)

__all__ = [
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
]
