"""Floating point operations of attention over packed sequences, from the true lengths."""

from __future__ import annotations

from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from gem_kernels._src.attention.pairing import num_query_sequences
from gem_kernels._src.attention.window import count_pairs


def num_pairs(
    q: Tensor,
    k: Tensor,
    offsets_q: Tensor | None,
    offsets_k: Tensor,
    left: int,
    right: int,
    *,
    request_index: Tensor | None = None,
    num_targets: Tensor | None = None,
) -> int:
    """Valid (query, key) pairs; of average lengths, all history, when the offsets carry no data (fake or meta)."""
    if not (isinstance(offsets_k, FakeTensor) or offsets_k.is_meta):
        return count_pairs(
            offsets_q,
            offsets_k,
            left,
            right,
            num_seeds=q.shape[0],
            request_index=request_index,
            num_targets=num_targets,
        )
    num_sequences = int(num_query_sequences(offsets_q, offsets_k, request_index))
    len_q = int(q.shape[0]) if offsets_q is None else int(q.shape[0]) // max(num_sequences, 1)
    len_k = int(k.shape[0]) // max(int(offsets_k.shape[0]) - 1, 1)
    # Plain integers: a tensor made here would be fake too.
    lows = (max(0, i - left) if left >= 0 else 0 for i in range(len_q))
    highs = (min(len_k, i + right + 1) if right >= 0 else len_k for i in range(len_q))
    return max(num_sequences, 1) * sum(max(0, high - low) for low, high in zip(lows, highs, strict=True))


def forward_flops(pairs: int, num_heads: int, head_dim: int, head_dim_v: int) -> int:
    """Two matmuls per pair: q kᵀ and p v. With D = D_v this is 4 H D pairs."""
    return 2 * pairs * num_heads * (head_dim + head_dim_v)


def backward_flops(pairs: int, num_heads: int, head_dim: int, head_dim_v: int) -> int:
    """Five matmuls per pair: q kᵀ again, do vᵀ, pᵀ do, ds k and dsᵀ q. With D = D_v this is 2.5 times the forward."""
    return 2 * pairs * num_heads * (3 * head_dim + 2 * head_dim_v)
