"""Linear layers in low precision: ``torch.nn.Linear`` with the same parameters and other arithmetic."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear, pad

from gem_kernels.column_sums import column_sums
from gem_precision._src import cast_once
from gem_precision._src.quantize import fake_quantize
from gem_precision._src.transforms import refuse_transforms
from gem_precision.recipe import BF16Recipe, MXFP8Recipe

__all__ = ["BF16Linear", "HighPrecisionLinear", "MXFP8Linear"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _check_input(layer: str, x: Tensor, in_features: int) -> None:
    """Raise unless ``x`` is a tensor of rows with that many features."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{layer}: `input` must be a Tensor, got {type(x).__name__}; convert it with torch.as_tensor.")
    if x.dim() < 1 or x.shape[-1] != in_features:
        raise ValueError(
            f"{layer}: `input` must have {in_features} features in its last dim, got {tuple(x.shape)}; project it to "
            "that width."
        )


class _MXFP8Matmul(torch.autograd.Function):
    """The three matmuls of a linear layer on rows (T, K), each with operands quantised along its reduction dim.

    Saves the operands in high precision: the weight gradient needs x along tokens, which cannot be had from x quantised
    along features without rounding twice.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, recipe: MXFP8Recipe) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.recipe = recipe
        x_q = fake_quantize(x, (1, 32), recipe)
        weight_q = fake_quantize(weight, recipe.weight_block_shape, recipe)
        return linear(x_q, weight_q, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        (dy,) = grads
        x, weight = ctx.saved_tensors
        recipe: MXFP8Recipe = ctx.recipe
        dx = dweight = dbias = None
        if ctx.needs_input_grad[0]:
            # Row blocks of the transposed weight are its column blocks.
            weight_q = fake_quantize(weight, (32, 32) if recipe.weight_block_shape == (32, 32) else (32, 1), recipe)
            dx = fake_quantize(dy, (1, 32), recipe) @ weight_q
        if ctx.needs_input_grad[1]:
            if recipe.wgrad == "mxfp8":
                dweight = fake_quantize(dy, (32, 1), recipe).t() @ fake_quantize(x, (32, 1), recipe)
            else:
                dweight = dy.t() @ x
        if ctx.needs_input_grad[2]:
            dbias = dy.sum(0)
        return dx, dweight, dbias, None


class MXFP8Linear(nn.Linear):
    """``nn.Linear`` whose forward and backward matmuls read MXFP8 operands.

    Emulated: operands are quantised and dequantised, products and sums are in the dtype of the input. Activations are
    quantised per token along features, so a token never changes another token's output. The bias, its gradient and the
    sums stay in high precision. Any sizes: blocks at ragged edges are smaller.

    Args:
        in_features: K.
        out_features: N.
        bias: Whether y = x Wᵀ + b.
        device: Of the parameters.
        dtype: Of the parameters: float32, bfloat16 or float16.
        recipe: Formats and policies. Its ``min_features`` speaks to ``convert`` only.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: MXFP8Recipe | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.recipe = MXFP8Recipe() if recipe is None else recipe

    def forward(self, input: Tensor) -> Tensor:
        """(..., K) -> (..., N) in the dtype of the input; under autocast, in the autocast dtype.

        Raises:
            TypeError: if the input is no tensor, or not float32, bfloat16 or float16 like the weight.
            ValueError: on another number of features.
            NotImplementedError: under forward-mode AD or torch.func.
        """
        _check_input("MXFP8Linear", input, self.in_features)
        refuse_transforms("MXFP8Linear", input=input, weight=self.weight, bias=self.bias)
        x: Tensor = input
        weight: Tensor = self.weight
        bias: Tensor | None = self.bias
        device_type = x.device.type
        has_autocast = torch.amp.is_autocast_available(device_type)  # not on meta
        if has_autocast and torch.is_autocast_enabled(device_type):
            dtype = torch.get_autocast_dtype(device_type)
            x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        if x.dtype not in _DTYPES or weight.dtype != x.dtype:
            raise TypeError(
                "MXFP8Linear: `input` must be float32, bfloat16 or float16 like the weight, "
                f"got {x.dtype} and a weight in {weight.dtype}; cast one of them."
            )
        with torch.autocast(device_type, enabled=False) if has_autocast else nullcontext():
            out = _MXFP8Matmul.apply(x.reshape(-1, self.in_features), weight, bias, self.recipe)
        assert isinstance(out, Tensor)
        # A view of the same shape would do nothing, and fully_shard warns of modules that return views.
        return out if x.ndim == 2 else out.view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={self.recipe.name}, backend={self.recipe.resolved_backend}"


class _BF16Matmul(torch.autograd.Function):
    """The three matmuls of a linear layer on a bfloat16 input, with gradients of the parameters in float32.

    ``low_weight`` and ``low_bias`` are the parameters in bfloat16, if somebody has cast them already. A bias may be
    that of the first outputs only.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, low_weight: Tensor | None, low_bias: Tensor | None
    ) -> Tensor:
        if low_weight is None:
            low_weight = weight.to(torch.bfloat16)
            low_bias = None if bias is None else bias.to(torch.bfloat16)
        if low_bias is not None and low_bias.shape[0] < low_weight.shape[0]:
            low_bias = pad(low_bias, (0, low_weight.shape[0] - low_bias.shape[0]))
        rows = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
        ctx.save_for_backward(rows, low_weight)
        ctx.shape = x.shape
        ctx.dtypes = (weight.dtype, None if bias is None else bias.dtype)
        ctx.num_biases = 0 if bias is None else bias.shape[0]
        out = rows @ low_weight.t() if low_bias is None else torch.addmm(low_bias, rows, low_weight.t())
        if x.dim() == 2:
            return out
        # No view: a sharded module must not return one.
        shaped: Tensor = torch.ops.aten._unsafe_view.default(out, (*x.shape[:-1], out.shape[1]))
        return shaped

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight = ctx.saved_tensors
        dy = grads[0].reshape(-1, weight.shape[0])
        weight_dtype, bias_dtype = ctx.dtypes
        dx = dweight = dbias = None
        if ctx.needs_input_grad[0]:
            dx = (dy @ weight).view(ctx.shape)
        if ctx.needs_input_grad[1]:
            if dy.is_cuda and weight_dtype == torch.float32:
                dweight = torch.mm(dy.t(), rows, out_dtype=torch.float32)
            else:
                dweight = (dy.t() @ rows).to(weight_dtype)
        if ctx.needs_input_grad[2]:
            dbias = column_sums(dy[:, : ctx.num_biases]).to(bias_dtype)
        return dx, dweight, dbias, None, None


def _takes_matmul(*tensors: Tensor | None) -> bool:
    """Whether `_BF16Matmul` takes these: plain tensors, no compiler, autocast, transform of functions or forward AD."""
    return (
        not torch.compiler.is_compiling()
        and not any(torch.is_autocast_enabled(device_type) for device_type in cast_once.DEVICES)
        and getattr(forward_ad, "_current_level", 0) < 0
        and torch._C._functorch.peek_interpreter_stack() is None  # type: ignore[attr-defined]
        and all(
            type(x) in (Tensor, nn.Parameter) and x.device.type in cast_once.DEVICES for x in tensors if x is not None
        )
    )


class BF16Linear(nn.Linear):
    """``nn.Linear`` that multiplies in bfloat16, forward and backward, and keeps its parameters as they are.

    Like autocast, but of this layer alone, and unless the recipe says otherwise the result has the dtype of the input.

    On CUDA and with a bfloat16 input, gradients of the parameters are sums in float32 that nothing rounds on the way,
    and there are no second derivatives.

    Args:
        in_features: K.
        out_features: N.
        bias: Whether y = x Wᵀ + b.
        device: Of the parameters.
        dtype: Of the parameters; gradients have it too.
        recipe: Says the dtype of results. Its ``min_features`` speaks to ``convert`` only.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        recipe: BF16Recipe | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.recipe = BF16Recipe() if recipe is None else recipe

    @property
    def operand_dtype(self) -> torch.dtype | None:
        """What input and weight are cast to and the result has, for those who prepare or multiply them themselves.

        None where the result has another dtype, that of the input.
        """
        return torch.bfloat16 if self.recipe.activations == "bfloat16" else None

    def forward(self, input: Tensor) -> Tensor:
        """(..., K) -> (..., N) in the dtype of the input, or in bfloat16 if the recipe has activations in it.

        Raises:
            TypeError: if the input is no tensor, or it or the weight is not float32, bfloat16 or float16: of others the
                cast loses more than precision.
            ValueError: on another number of features.
        """
        _check_input("BF16Linear", input, self.in_features)
        if input.dtype not in _DTYPES or self.weight.dtype not in _DTYPES:
            raise TypeError(
                "BF16Linear: `input` and the weight must be float32, bfloat16 or float16, "
                f"got {input.dtype} and a weight in {self.weight.dtype}; cast them first."
            )
        if input.dtype == torch.bfloat16 and _takes_matmul(input, self.weight, self.bias):
            copies = cast_once.copies_of(self)
            weight, low_bias = (None, None) if copies is None else copies[:2]
            product: Tensor = _BF16Matmul.apply(input, self.weight, self.bias, weight, low_bias)
            return product
        bias = None if self.bias is None else self.bias.to(torch.bfloat16)
        out = linear(input.to(torch.bfloat16), self.weight.to(torch.bfloat16), bias)
        return out if self.recipe.activations == "bfloat16" else out.to(input.dtype)

    def product(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
        """What ``forward`` does of a bfloat16 input on CUDA, by other parameters: of several such layers, joined.

        ``bias`` may be that of the first outputs only. None where ``forward`` would not do the same.
        """
        if (
            input.dtype != torch.bfloat16
            or self.operand_dtype != torch.bfloat16
            or not _takes_matmul(input, weight, bias)
        ):
            return None
        out: Tensor = _BF16Matmul.apply(input, weight, bias, None, None)
        return out

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, recipe={self.recipe.name}"


class HighPrecisionLinear(nn.Linear):
    """``nn.Linear`` that casts its input to the dtype of its weight, and answers in it.

    What a layer becomes that stays in high precision while the activations around it are bfloat16.
    """

    @property
    def operand_dtype(self) -> torch.dtype:
        """What the input is cast to and the result has, for those who prepare or multiply it themselves."""
        return self.weight.dtype

    def forward(self, input: Tensor) -> Tensor:
        """(..., K) -> (..., N) in the dtype of the weight.

        Raises:
            TypeError: if the input is not float32, bfloat16 or float16.
        """
        if input.dtype not in _DTYPES:
            raise TypeError(
                f"HighPrecisionLinear: `input` must be float32, bfloat16 or float16, got {input.dtype}; cast it first."
            )
        return super().forward(input.to(self.weight.dtype))
