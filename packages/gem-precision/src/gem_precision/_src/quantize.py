"""Quantise-dequantise of a recipe, as autograd sees it: straight through forward, or only on the gradient."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gem_kernels.mx import mx_fake_quantize
from gem_precision._src.jagged_blocks import JaggedBlocks
from gem_precision.recipe import MXFP8Recipe


def fake_quantize(x: Tensor, block_shape: tuple[int, int], recipe: MXFP8Recipe) -> Tensor:
    """(M, K) quantised in blocks and dequantised, in the dtype of x."""
    return mx_fake_quantize(
        x, block_shape=block_shape, elem_dtype=recipe.elem_dtype, scale_mode=recipe.scale_mode.value
    )


def _fake_quantize_jagged(x: Tensor, blocks: JaggedBlocks, block_shape: tuple[int, int], recipe: MXFP8Recipe) -> Tensor:
    return blocks.gather(fake_quantize(blocks.spread(x), block_shape, recipe), x.shape[1])


class _QuantizeForward(torch.autograd.Function):
    """Quantised values forward, the gradient as it is."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, blocks: JaggedBlocks, block_shape: tuple[int, int], recipe: MXFP8Recipe) -> Tensor:
        return _fake_quantize_jagged(x, blocks, block_shape, recipe)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return grads[0], None, None, None


class _QuantizeBackward(torch.autograd.Function):
    """Values as they are, quantised gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, blocks: JaggedBlocks, block_shape: tuple[int, int], recipe: MXFP8Recipe) -> Tensor:
        ctx.blocks, ctx.block_shape, ctx.recipe = blocks, block_shape, recipe
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return _fake_quantize_jagged(grads[0], ctx.blocks, ctx.block_shape, ctx.recipe), None, None, None


def quantize_jagged(x: Tensor, blocks: JaggedBlocks, block_shape: tuple[int, int], recipe: MXFP8Recipe) -> Tensor:
    """(T, H, D) quantised per sequence and head; the gradient passes straight through."""
    out = _QuantizeForward.apply(x, blocks, block_shape, recipe)
    assert isinstance(out, Tensor)
    return out


def quantize_jagged_grad(x: Tensor, blocks: JaggedBlocks, block_shape: tuple[int, int], recipe: MXFP8Recipe) -> Tensor:
    """(T, H, D) unchanged; its gradient is quantised per sequence and head."""
    out = _QuantizeBackward.apply(x, blocks, block_shape, recipe)
    assert isinstance(out, Tensor)
    return out
