"""Small parts used all over the model. Shapes: B samples, n tokens, d width, T events."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gem_kernels.gate import gate
from gem_kernels.layer_norm_rows import layer_norm_rows, layer_norm_rows_backward
from gem_kernels.token_linear import serves_token_linear, token_linear
from gem_kernels.transpose_tokens import transpose_tokens
from gem_model.flops import ModuleFlops, linear_flops

_ACTIVATIONS: dict[str, type[nn.Module]] = {"relu": nn.ReLU, "gelu": nn.GELU, "silu": nn.SiLU}


def activation_module(name: str) -> nn.Module:
    """The activation of that name."""
    return _ACTIVATIONS[name]()


NORM_DEVICES = ("cuda",)
"""Where the norms of gem_kernels run: torch's own has a whole block of threads for each short row there."""
_MAX_NORM = 16384
_MIN_NORM, _MIN_TRANSPOSE = 2**24, 2**25
"""Elements from which a kernel of gem_kernels is worth its launch, which costs the host more than one of torch's."""


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        normalized, mean, rstd = layer_norm_rows(rows)
        ctx.save_for_backward(rows, mean, rstd)
        # No view: a sharded module must not return one.
        out: Tensor = torch.ops.aten._unsafe_view.default(normalized, x.shape)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        rows, mean, rstd = ctx.saved_tensors
        dx: Tensor = layer_norm_rows_backward([grad.reshape(rows.shape)], rows, mean, rstd).view(grad.shape)
        return dx


def uses_own_norm(x: Tensor) -> bool:
    """Whether a LayerNorm of x runs in gem_kernels: not where a compiler fuses it or autocast widens it."""
    return (
        not torch.compiler.is_compiling()
        and x.device.type in NORM_DEVICES
        and 0 < x.shape[-1] <= _MAX_NORM
        and x.numel() >= max(_MIN_NORM, 1)
        and not torch.is_autocast_enabled(x.device.type)
    )


def normalize(x: Tensor) -> Tensor:
    """LayerNorm over the last axis without parameters: the weights that read it hold scale and shift already."""
    return _Normalize.apply(x) if uses_own_norm(x) else F.layer_norm(x, (x.shape[-1],))


class MLP(nn.Sequential):
    """Linear layers with an activation, and dropout, between them.

    Args:
        widths: Input, hidden and output widths.
        activation: Name of the activation.
        dropout: Probability, after each activation.
    """

    def __init__(self, widths: Sequence[int], activation: str, dropout: float = 0.0) -> None:
        layers: list[nn.Module] = []
        for index, (fan_in, fan_out) in enumerate(itertools.pairwise(widths)):
            if index:
                layers.append(activation_module(activation))
                if dropout:
                    layers.append(nn.Dropout(dropout))
            layers.append(nn.Linear(fan_in, fan_out))
        super().__init__(*layers)

    def flops(self, rows: int) -> dict[str, ModuleFlops]:
        """FLOPs over ``rows`` vectors."""
        return {"": ModuleFlops(gemm=sum(linear_flops(x, rows) for x in self if isinstance(x, nn.Linear)))}


TRANSPOSE_DEVICES = ("cuda",)
"""Where torch copies a transposed tensor element by element."""


def _is_transposed(x: Tensor) -> bool:
    return not torch.compiler.is_compiling() and x.device.type in TRANSPOSE_DEVICES and x.numel() >= _MIN_TRANSPOSE


def token_columns(x: Tensor) -> Tensor:
    """(B, n, d) -> (B, d, n), contiguous: the rows that linear layers over the token axis read."""
    return transpose_tokens(x) if _is_transposed(x) else x.transpose(1, 2).contiguous()


class TokenLinear(nn.Module):
    """A linear map of the token axis, the same for every column: (B, n_in, d) -> (B, n_out, d).

    The result is no wider than x: a map between few tokens, which a recipe leaves in float32, would otherwise widen
    all that follows.
    """

    def __init__(self, num_inputs: int, num_outputs: int, *, bias: bool = True) -> None:
        super().__init__()
        self.linear = nn.Linear(num_inputs, num_outputs, bias=bias)

    @property
    def exact(self) -> bool | None:
        """How the layer multiplies x in half precision by its weight: as it is, True, or rounded to the dtype of x.

        None if only the layer itself can tell: a recipe may have replaced it, or somebody watches its calls.
        """
        linear = self.linear
        if linear._forward_hooks or linear._forward_pre_hooks:
            return None
        if type(linear) is nn.Linear:
            # It takes no input of another dtype.
            return False
        dtype: torch.dtype | None = getattr(linear, "operand_dtype", None)
        return None if dtype is None else dtype == torch.float32

    def forward(self, x: Tensor, columns: Tensor | None = None) -> Tensor:
        """Mix the tokens; ``columns`` are `token_columns` of x, if several maps read them."""
        exact = self.exact if columns is None and mixes_rows(x, self) else None
        if exact is not None:
            mixed: Tensor = token_linear(x, self.linear.weight, self.linear.bias, exact=exact)
            return mixed
        out: Tensor = self.linear(token_columns(x) if columns is None else columns)
        if torch.promote_types(out.dtype, x.dtype) != x.dtype:
            out = out.to(x.dtype)
        # Transposed in memory where that is fast, so that what follows reads whole rows.
        return transpose_tokens(out) if _is_transposed(out) else out.transpose(1, 2)

    def flops(self, num_samples: int, width: int) -> dict[str, ModuleFlops]:
        """FLOPs over samples whose tokens have ``width`` columns."""
        return {"": ModuleFlops(gemm=linear_flops(self.linear, num_samples * width))}


def mixes_rows(x: Tensor, *maps: TokenLinear) -> bool:
    """Whether these maps of x run in gem_kernels, on rows as they lie, in the precision of their layers."""
    return (
        serves_token_linear(x, *(each.linear.weight for each in maps))
        and not torch.is_autocast_enabled(x.device.type)
        and all(each.exact is not None for each in maps)
    )


class Gating(nn.Module):
    """x ⊙ sigmoid(W x + b): each token decides how much of each of its columns passes.

    InterFormer gates summaries with σ(x ⊙ MLP(x)); here the sigmoid is on the gate alone, so that sign and scale of
    what passes are kept.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.gate = nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """(..., d) -> (..., d)."""
        z = self.gate(x)
        # Autocast may have made it narrower.
        return gate(x, z) if z.dtype == x.dtype else x * torch.sigmoid(z)

    def flops(self, rows: int) -> dict[str, ModuleFlops]:
        """FLOPs over ``rows`` tokens."""
        return {"": ModuleFlops(gemm=linear_flops(self.gate, rows))}


class SumKronLinear(nn.Module):
    """A linear map of whole (n_in, d) matrices as a sum of Kronecker products: Y = Σ_i Z_iᵀ X W_i (Kunlun).

    With ``rank`` terms it has rank (n_in n_out + d²) weights where a full map has n_in n_out d². The token maps Z_i run
    first, since n_out < n_in; the sum over i is the reduction of the one linear layer that holds all W_i.
    """

    def __init__(self, num_inputs: int, num_outputs: int, dim: int, rank: int) -> None:
        super().__init__()
        self._shape = (num_outputs, rank * dim)
        self.tokens = TokenLinear(num_inputs, num_outputs * rank, bias=False)
        self.columns = nn.Linear(rank * dim, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, n_in, d) -> (B, n_out, d)."""
        return self.columns(self.tokens(x).reshape(x.shape[0], *self._shape))

    def flops(self, num_samples: int) -> dict[str, ModuleFlops]:
        """FLOPs over ``num_samples`` matrices."""
        tokens = self.tokens.flops(num_samples, self.columns.out_features)[""].gemm
        return {"": ModuleFlops(gemm=tokens + linear_flops(self.columns, num_samples * self._shape[0]))}
