"""A linear map of the token axis, the same for every column: (B, n, d) to (B, m, d).

``nn.Linear`` over tokens asks for them in the last dim: torch transposes before and behind its product, and small
weights keep that product from the rate of memory. On CUDA, in half precision, one kernel each way reads and writes
rows as they lie.
"""

from __future__ import annotations

from typing import Any, overload

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from gem_kernels._src.eager import launches_directly
from gem_kernels._src.validate import DtypeError, check_bool, check_device, check_float, check_int, check_tensor

__all__ = ["serves_token_linear", "token_linear"]

MAX_TOKENS = 128
"""Tokens on either side up to which a kernel of its own computes the map."""
_DTYPES = (torch.bfloat16, torch.float16)


def serves_token_linear(x: Tensor, *weights: Tensor) -> bool:
    """Whether ``token_linear`` runs in its own kernels, of these weights joined: CUDA, x in half precision, few tokens.

    Elsewhere, and under compilers and modes that count, fake or record ops, it is composed of torch's.
    """
    num_out = sum(weight.shape[0] for weight in weights)
    return launches_directly(x, *weights) and x.dtype in _DTYPES and max(x.shape[1], num_out) <= MAX_TOKENS


class _TokenLinear(torch.autograd.Function):
    """Both kernels without torch.library between."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, exact: bool, first: int | None
    ) -> Tensor | tuple[Tensor, Tensor]:
        from gem_kernels._src.token_linear.kernels import launch_forward

        weight = weight.contiguous()
        ctx.save_for_backward(x, weight)
        ctx.exact, ctx.dtypes = exact, (weight.dtype, None if bias is None else bias.dtype)
        out, rest = launch_forward(x, weight, bias, exact=exact, first=first)
        return out if rest is None else (out, rest)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        from gem_kernels._src.token_linear.kernels import launch_backward

        x, weight = ctx.saved_tensors
        dout, drest = grads if len(grads) == 2 else (grads[0], None)
        dx, dweight, dbias = launch_backward(x, dout, weight, exact=ctx.exact, drest=drest)
        weight_dtype, bias_dtype = ctx.dtypes
        return dx, dweight.to(weight_dtype), None if bias_dtype is None else dbias.to(bias_dtype), None, None


@overload
def token_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, exact: bool = False, first: None = None
) -> Tensor: ...
@overload
def token_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, exact: bool = False, first: int
) -> tuple[Tensor, Tensor]: ...
def token_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, exact: bool = False, first: int | None = None
) -> Tensor | tuple[Tensor, Tensor]:
    """Mix the tokens of every sample: ``out[b] = weight @ x[b] + bias[:, None]``.

    Args:
        x: (B, n, d), any float dtype.
        weight: (m, n), the dtype of x or float32.
        bias: (m,), likewise, or None.
        exact: False rounds weight and bias to the dtype of x before the product. True keeps a float32 weight: where x
            is in half precision the product is with the weight's rounding and with what that left, 16 bits in all.
        first: Give that many tokens, 0 < first < m, and the others as two tensors.

    Returns:
        (B, m, d) in the dtype of x, contiguous on CUDA; with ``first`` (B, first, d) and (B, m - first, d),
        neither a view.

    Raises:
        ValueError: on shapes or devices that do not fit.
        TypeError: on a dtype or argument type that does not fit.

    Numerics: sums in float32, one rounding at the end; gradients of weight and bias in float32 until they are cast to
    the dtypes of weight and bias, the same bits on every run.
    """
    op = "token_linear"
    for name, tensor in (("x", x), ("weight", weight), *((("bias", bias),) if bias is not None else ())):
        check_tensor(op, name, tensor)
        check_float(op, name, tensor)
        check_device(op, name, tensor, "x", x)
    check_bool(op, exact=exact)
    if x.dim() != 3:
        raise ValueError(f"{op}: `x` must have shape (B, n, d), got {tuple(x.shape)}; add or flatten dims.")
    if weight.dim() != 2 or weight.shape[1] != x.shape[1]:
        raise ValueError(
            f"{op}: `weight` must have shape (m, n) with the n = {x.shape[1]} tokens of `x`, got "
            f"{tuple(weight.shape)}; give one column per token of `x`."
        )
    if bias is not None and bias.shape != weight.shape[:1]:
        raise ValueError(
            f"{op}: `bias` must have shape (m,) = ({weight.shape[0]},) like `weight`, got {tuple(bias.shape)}; give "
            "one number per row of `weight`."
        )
    for name, tensor in (("weight", weight), *((("bias", bias),) if bias is not None else ())):
        if tensor.dtype not in (x.dtype, torch.float32):
            raise DtypeError(f"{op}: `{name}` must be {x.dtype} like `x` or float32, got {tensor.dtype}; cast it.")
    if first is not None:
        check_int(op, "first", first)
    if first is not None and not 0 < first < weight.shape[0]:
        raise ValueError(
            f"{op}: `first` must lie between 0 and the {weight.shape[0]} tokens of `weight`, got {first}; count the "
            "tokens from 0."
        )
    if serves_token_linear(x, weight) and (bias is None or launches_directly(bias)):
        out: Tensor | tuple[Tensor, Tensor] = _TokenLinear.apply(x, weight, bias, exact, first)
        return out
    dtype = torch.promote_types(x.dtype, weight.dtype) if exact else x.dtype
    mixed = torch.matmul(weight.to(dtype), x.to(dtype))
    if bias is not None:
        mixed = mixed + bias.to(dtype)[:, None]
    mixed = mixed.to(x.dtype)
    # In memory of their own, as those of the kernel.
    return mixed if first is None else (mixed[:, :first].clone(), mixed[:, first:].clone())
