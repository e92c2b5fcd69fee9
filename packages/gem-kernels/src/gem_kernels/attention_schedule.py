"""What the attention ops derive from the offsets of a batch, made once for all its layers."""

from gem_kernels._src.attention.schedule import AttentionSchedule

__all__ = ["AttentionSchedule"]
