"""Context embeddings and dense features to the tokens that the first layer reads."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from gem_model._src.blocks import MLP, normalize
from gem_model.config import RankingConfig
from gem_model.flops import BatchSizes, ModuleFlops, linear_flops, nest


class ContextTokens(nn.Module):
    """One token per context feature, and a few made from the dense features together."""

    def __init__(self, config: RankingConfig) -> None:
        super().__init__()
        self._names = config.context_features
        self._dim = config.dim
        self._num_dense_tokens = config.num_dense_tokens if config.num_dense else 0
        self.features = nn.ModuleList(nn.Linear(config.embedding_dim, config.dim) for _ in config.context_features)
        if config.num_dense:
            widths = (config.num_dense, config.dense_hidden, config.num_dense_tokens * config.dim)
            self.dense = MLP(widths, config.activation)

    def forward(self, embeddings: Mapping[str, Tensor], dense: Tensor) -> Tensor:
        """Embeddings (B, E) by name and dense (B, num_dense) -> normalised tokens (B, n, d)."""
        tokens = [
            linear(embeddings[name]).unsqueeze(1) for name, linear in zip(self._names, self.features, strict=True)
        ]
        if self._num_dense_tokens:
            tokens.append(self.dense(dense).view(dense.shape[0], self._num_dense_tokens, self._dim))
        return normalize(torch.cat(tokens, dim=1))

    def flops(self, sizes: BatchSizes) -> dict[str, ModuleFlops]:
        """FLOPs by module."""
        rows = sizes.num_samples
        children = {
            f"features.{index}": {"": ModuleFlops(gemm=linear_flops(linear, rows))}
            for index, linear in enumerate(self.features)
            if isinstance(linear, nn.Linear)
        }
        if self._num_dense_tokens:
            children["dense"] = self.dense.flops(rows)
        return nest(children)
