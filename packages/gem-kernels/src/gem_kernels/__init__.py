"""Attention over packed sequences for ranking models, on Triton and on CPU."""

from gem_kernels import jagged, modules, mx, reference, testing, tuning
from gem_kernels._version import __version__
from gem_kernels.attention_schedule import AttentionSchedule
from gem_kernels.block_attention import block_attention
from gem_kernels.gdpa import Activation, gdpa
from gem_kernels.gdpa_norm_block import gdpa_norm_block
from gem_kernels.jagged_attention import jagged_attention
from gem_kernels.norm_linear import linear_norm, rmsnorm_linear

__all__ = [
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
]
