"""The Wukong layer: factorization machine block and linear compression block over all tokens of a sample."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from gem_kernels.token_linear import token_linear
from gem_kernels.token_products import token_products
from gem_model._src.blocks import MLP, TokenLinear, mixes_rows, normalize, token_columns
from gem_model.config import RankingConfig
from gem_model.flops import BatchSizes, ModuleFlops, nest


class FactorizationMachineBlock(nn.Module):
    """FMB(X) = reshape(MLP(LN(flatten(X (Xᵀ Y))))): all pairwise products, projected to k columns (Wukong).

    Y (n, k) is attentive: an MLP over linearly compressed tokens gives each sample its own. Computing Xᵀ Y first makes
    the cost linear in the number of tokens.
    """

    def __init__(self, config: RankingConfig, num_inputs: int) -> None:
        super().__init__()
        self._dim, self._num_inputs = config.dim, num_inputs
        self._rank, self._num_outputs = config.fm_rank, config.num_fm_tokens
        self._num_compressed = config.fm_compressed_tokens
        self.compress = TokenLinear(num_inputs, config.fm_compressed_tokens)
        self.projection = MLP(
            (config.fm_compressed_tokens * config.dim, config.fm_hidden, num_inputs * config.fm_rank),
            config.activation,
            config.dropout,
        )
        self.output = MLP(
            (num_inputs * config.fm_rank, config.fm_hidden, config.num_fm_tokens * config.dim),
            config.activation,
            config.dropout,
        )

    def forward(self, x: Tensor, columns: Tensor | None = None, compressed: Tensor | None = None) -> Tensor:
        """(B, n, d), and its `token_columns`, or what `compress` makes of it, if they exist -> (B, n_F, d)."""
        num_samples = x.shape[0]
        if compressed is None:
            compressed = self.compress(x, columns)
        compressed = compressed.reshape(num_samples, self._num_compressed * self._dim)
        y = self.projection(compressed).view(num_samples, self._num_inputs, self._rank)
        y = y.to(x.dtype)
        products = token_products(x, y)
        flat = normalize(products.reshape(num_samples, self._num_inputs * self._rank))
        return self.output(flat).view(num_samples, self._num_outputs, self._dim)

    def flops(self, sizes: BatchSizes) -> dict[str, ModuleFlops]:
        """FLOPs by module."""
        rows = sizes.num_samples
        children = {
            "compress": self.compress.flops(rows, self._dim),
            "projection": self.projection.flops(rows),
            "output": self.output.flops(rows),
        }
        return nest(children, ModuleFlops(gemm=4 * rows * self._num_inputs * self._dim * self._rank))


class _AddToFirst(torch.autograd.Function):
    """Add to the first tokens in place: nobody else reads them, and the sum's gradient is that of both."""

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, first: Tensor) -> Tensor:
        ctx.mark_dirty(tokens)
        ctx.num_first = first.shape[1]
        tokens[:, : first.shape[1]].add_(first)
        return tokens

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor]:
        return grads[0], grads[0][:, : ctx.num_first]


class Interaction(nn.Module):
    """One Wukong layer: LN([FMB(X) ‖ W_L X] + W_R X), with W_R the linearly compressed residual."""

    def __init__(self, config: RankingConfig, num_inputs: int) -> None:
        super().__init__()
        self._dim, self._num_fm_tokens = config.dim, config.num_fm_tokens
        self.factorization = FactorizationMachineBlock(config, num_inputs)
        self.compression = TokenLinear(num_inputs, config.num_linear_tokens)
        self.residual = TokenLinear(num_inputs, config.num_tokens, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, n, d) -> (B, n_F + n_L, d)."""
        maps = (self.factorization.compress, self.compression, self.residual)
        if mixes_rows(x, *maps):
            compressed, tokens = self._mix_rows(x)
            tokens = _AddToFirst.apply(tokens, self.factorization(x, compressed=compressed))
            return normalize(tokens)
        columns = token_columns(x)
        tokens = torch.cat((self.factorization(x, columns), self.compression(x, columns)), dim=1)
        return normalize(tokens + self.residual(x, columns))

    def _mix_rows(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Compressed tokens for the factorization machine, and W_R X + [0 ‖ W_L X], by one map of all.

        Where outputs are added, so are weights: in their own precision, before any rounding.
        """
        compress, compression = self.factorization.compress, self.compression
        added = F.pad(compression.linear.weight, (0, 0, self._num_fm_tokens, 0)) + self.residual.linear.weight
        weight = torch.cat((compress.linear.weight, added))
        bias = torch.cat((compress.linear.bias, F.pad(compression.linear.bias, (self._num_fm_tokens, 0))))
        exact = any(each.exact for each in (compress, compression, self.residual))
        return token_linear(x, weight, bias, exact=exact, first=compress.linear.out_features)

    def flops(self, sizes: BatchSizes) -> dict[str, ModuleFlops]:
        """FLOPs by module."""
        return nest(
            {
                "factorization": self.factorization.flops(sizes),
                "compression": self.compression.flops(sizes.num_samples, self._dim),
                "residual": self.residual.flops(sizes.num_samples, self._dim),
            }
        )
