"""Block-diagonal softmax attention as a plain loop: the oracle of ``gem_kernels.block_attention``.

Works in the dtype of its inputs on any device; float64 gives the oracle, the kernel's dtype gives the eager error that
the tests' tolerance is derived from. The backward is the closed form, not autograd.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor


def _blocks(offsets: Tensor, block_size: int) -> Iterator[tuple[int, int]]:
    """First and last + 1 row of every block; blocks are cut from each sequence's own start."""
    bounds = offsets.tolist()
    for b in range(len(bounds) - 1):
        for start in range(bounds[b], bounds[b + 1], block_size):
            yield start, min(start + block_size, bounds[b + 1])


def _heads_first(x: Tensor, start: int, stop: int, repeat: int = 1) -> Tensor:
    """(T, H, D) rows of one block as (H * repeat, n, D), each head repeated for its group of query heads."""
    return x[start:stop].transpose(0, 1).repeat_interleave(repeat, dim=0)


def _rotate(x: Tensor, table: Tensor | None, sign: float = 1.0) -> Tensor:
    """Each pair of channels of (T, H, D) as a complex number, times exp(i sign angle) of its row."""
    if table is None:
        return x
    sin, cos = table.double()[:, None].chunk(2, dim=-1)
    pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * torch.complex(cos, sign * sin)).flatten(-2).to(x.dtype)


def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    offsets: Tensor,
    block_size: int = 64,
    scale: float | None = None,
    rotary: Tensor | None = None,
) -> Tensor:
    """Output (T, H, D_v) in the dtype of q; arguments as in ``gem_kernels.block_attention``."""
    q, k, v = (_rotate(x, rotary) for x in (q, k, v))
    scale = q.shape[2] ** -0.5 if scale is None else scale
    repeat = q.shape[1] // k.shape[1]
    out = q.new_zeros(q.shape[0], q.shape[1], v.shape[2])
    for start, stop in _blocks(offsets, block_size):
        qs = _heads_first(q, start, stop)
        ks, vs = (_heads_first(x, start, stop, repeat) for x in (k, v))
        p = torch.softmax(qs @ ks.transpose(1, 2) * scale, dim=-1)
        out[start:stop] = (p @ vs).transpose(0, 1)
    return out


def block_attention_backward(
    do: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    offsets: Tensor,
    block_size: int = 64,
    scale: float | None = None,
    rotary: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients dq, dk, dv from ``do`` (T, H, D_v).

    With P the probabilities of a block: dV = Pᵀ dO, dP = dO Vᵀ, dS = scale P ⊙ (dP - rowsum(P ⊙ dP)), dQ = dS K,
    dK = dSᵀ Q. A rotation of the inputs is orthogonal: their gradients are turned back by the same angles.
    """
    q, k, v = (_rotate(x, rotary) for x in (q, k, v))
    scale = q.shape[2] ** -0.5 if scale is None else scale
    repeat = q.shape[1] // k.shape[1]
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for start, stop in _blocks(offsets, block_size):
        qs, dos = (_heads_first(x, start, stop) for x in (q, do))
        ks, vs = (_heads_first(x, start, stop, repeat) for x in (k, v))
        p = torch.softmax(qs @ ks.transpose(1, 2) * scale, dim=-1)
        dp = dos @ vs.transpose(1, 2)
        ds = scale * p * (dp - (p * dp).sum(dim=-1, keepdim=True))
        dq[start:stop] = (ds @ ks).transpose(0, 1)
        dk[start:stop] = (ds.transpose(1, 2) @ qs).unflatten(0, (-1, repeat)).sum(1).transpose(0, 1)
        dv[start:stop] = (p.transpose(1, 2) @ dos).unflatten(0, (-1, repeat)).sum(1).transpose(0, 1)
    return _rotate(dq, rotary, -1.0), _rotate(dk, rotary, -1.0), _rotate(dv, rotary, -1.0)
