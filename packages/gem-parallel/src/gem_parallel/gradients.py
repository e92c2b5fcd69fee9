"""Norm and clipping of gradients over a mesh."""

from gem_parallel._src.gradient_norm import clip_grad_norm_, grad_norm

__all__ = ["clip_grad_norm_", "grad_norm"]
