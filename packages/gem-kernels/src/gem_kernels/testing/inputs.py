"""Random packed inputs, made from explicit lengths and a seed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class AttentionInputs(NamedTuple):
    """Packed attention inputs with the gradient of the output."""

    q: Tensor
    """(T_q, H, D)."""
    k: Tensor
    """(T_k, H_kv, D)."""
    v: Tensor
    """(T_k, H_kv, D_v)."""
    do: Tensor
    """(T_q, H, D_v), gradient of the output."""
    offsets_q: Tensor
    """(B + 1,)."""
    offsets_k: Tensor
    """(B + 1,)."""
    max_seqlen_q: int
    """Tokens."""
    max_seqlen_k: int
    """Tokens."""

    def to(self, *args: torch.device | torch.dtype | str) -> AttentionInputs:
        """Move or cast the float tensors; offsets follow the device only."""
        moved = self
        for arg in args:
            moved = moved._replace(q=moved.q.to(arg), k=moved.k.to(arg), v=moved.v.to(arg), do=moved.do.to(arg))
            if not isinstance(arg, torch.dtype):
                moved = moved._replace(offsets_q=moved.offsets_q.to(arg), offsets_k=moved.offsets_k.to(arg))
        return moved


def make_offsets(
    lengths: Sequence[int] | Tensor, *, dtype: torch.dtype = torch.int64, device: torch.device | str = "cpu"
) -> Tensor:
    """Offsets (B + 1,) of sequences with the given lengths in tokens."""
    lengths = torch.as_tensor(lengths, dtype=torch.int64)
    offsets = torch.zeros(lengths.shape[0] + 1, dtype=torch.int64)
    torch.cumsum(lengths, 0, out=offsets[1:])
    return offsets.to(device=device, dtype=dtype)


def random_lengths(num_sequences: int, max_seqlen: int, *, sparsity: float = 0.5, seed: int = 0) -> Tensor:
    """Lengths (B,) int64 with mean about ``sparsity * max_seqlen``.

    ``sparsity >= 0.5``: uniform in [(2 s - 1) max, max]; below: uniform in [1, 2 s max]; 1: all ``max_seqlen``.
    """
    if not 0.0 < sparsity <= 1.0:
        raise ValueError(f"random_lengths: `sparsity` must be in (0, 1], got {sparsity}; 1 keeps every length.")
    if sparsity == 1.0:
        return torch.full((num_sequences,), max_seqlen, dtype=torch.int64)
    low = max(1, int((2 * sparsity - 1) * max_seqlen))
    high = max(low, min(max_seqlen, int(2 * sparsity * max_seqlen)))
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(low, high + 1, (num_sequences,), generator=generator)


def zipf_lengths(num_sequences: int, max_seqlen: int, *, exponent: float = 1.0, seed: int = 0) -> Tensor:
    """Lengths (B,) int64 of [1, max_seqlen], a length n as often as n**-exponent: many short, a few long."""
    if exponent < 0:
        raise ValueError(f"zipf_lengths: `exponent` must be >= 0, got {exponent}; 0 draws all lengths alike.")
    weights = torch.arange(1, max_seqlen + 1, dtype=torch.float64) ** -exponent
    generator = torch.Generator().manual_seed(seed)
    return torch.multinomial(weights, num_sequences, replacement=True, generator=generator) + 1


def sequence_of_row(offsets: Tensor, row: int) -> int:
    """Index of the sequence that owns a packed row."""
    return int(torch.searchsorted(offsets.cpu(), row, right=True)) - 1


def attention_inputs(
    lengths_q: Sequence[int] | Tensor,
    lengths_k: Sequence[int] | Tensor | None = None,
    *,
    num_heads: int = 2,
    num_heads_kv: int | None = None,
    head_dim: int = 16,
    head_dim_v: int | None = None,
    dtype: torch.dtype = torch.float32,
    offsets_dtype: torch.dtype = torch.int64,
    device: torch.device | str = "cpu",
    seed: int = 0,
    contiguous: bool = True,
) -> AttentionInputs:
    """Standard normal q, k, v and do, drawn on the CPU so that every device and dtype sees the same numbers.

    ``lengths_k=None`` makes self-attention inputs: k and v share q's offsets tensor. ``contiguous=False`` makes each
    tensor a view into a wider buffer whose other entries are NaN, with heads strided further than ``D``.
    """
    generator = torch.Generator().manual_seed(seed)
    offsets_q = make_offsets(lengths_q, dtype=offsets_dtype, device=device)
    offsets_k = offsets_q if lengths_k is None else make_offsets(lengths_k, dtype=offsets_dtype, device=device)
    num_heads_kv = num_heads if num_heads_kv is None else num_heads_kv
    head_dim_v = head_dim if head_dim_v is None else head_dim_v
    lengths_k = lengths_q if lengths_k is None else lengths_k

    def draw(rows: int, heads: int, dim: int) -> Tensor:
        x = torch.randn(rows, heads, dim, generator=generator, dtype=torch.float64).to(device=device, dtype=dtype)
        if contiguous:
            return x
        wide = torch.full((rows + 2, heads + 1, dim + 16), float("nan"), device=device, dtype=dtype)
        view = wide[1 : rows + 1, :heads, :dim]
        view.copy_(x)
        return view

    total_q, total_k = (int(torch.as_tensor(x, dtype=torch.int64).sum()) for x in (lengths_q, lengths_k))
    longest_q, longest_k = (
        int(torch.as_tensor(x, dtype=torch.int64).max()) if len(x) else 0 for x in (lengths_q, lengths_k)
    )
    return AttentionInputs(
        q=draw(total_q, num_heads, head_dim),
        k=draw(total_k, num_heads_kv, head_dim),
        v=draw(total_k, num_heads_kv, head_dim_v),
        do=draw(total_q, num_heads, head_dim_v),
        offsets_q=offsets_q,
        offsets_k=offsets_k,
        max_seqlen_q=longest_q,
        max_seqlen_k=longest_k,
    )
