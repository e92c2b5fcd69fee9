"""Attention modules in low precision: the modules of ``gem_kernels`` around which operands are cast.

MXFP8 (emulated). Q, K and the gradient dO are quantised in 32x32 blocks of (tokens, channels) of one head, V in 32x1
blocks along tokens, its reduction dim in P V. Token blocks start at each sequence's own start, so no value reaches
another sequence. The probabilities P and their gradient dS stay in high precision: they exist only inside the op.

- Square blocks serve both orientations, so Q, K and dO are quantised once for all the products that read them:
  S = Q Kᵀ, dQ = dS K, dK = dSᵀ Q, dV = Pᵀ dO and dP = dO Vᵀ.
- dP = dO Vᵀ reduces over the channels of V but reads the V of the forward product, quantised along tokens.
- A block of 32 tokens shares scales. With a causal mask a later token of the block can therefore change how an earlier
  one is rounded, by at most one unit of FP8; it never changes which pairs attend. Nor do targets (``num_targets``) that
  lie in one block attend to each other, but they share scales likewise.
- With ``request_index`` the blocks of each side follow its own offsets. Seeds (``offsets_q=None``) are quantised once,
  as one sequence, and their dO as one for each sequence that reads them.
- Bias tables and times stay as they are: they meet the scores, which exist only inside the op.
- A rotation inside the op would read quantised operands and leave unquantised ones, so ``rotary`` is refused.

Block shapes: the 32x32 and 32x1 choices published for GEM's attention kernels.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from gem_kernels.modules import GDPA, BlockAttention, JaggedAttention
from gem_precision._src.jagged_blocks import JaggedBlocks
from gem_precision._src.quantize import quantize_jagged, quantize_jagged_grad
from gem_precision._src.transforms import refuse_transforms
from gem_precision.recipe import BF16Recipe, MXFP8Recipe

__all__ = [
    "BF16GDPA",
    "MXFP8GDPA",
    "BF16BlockAttention",
    "BF16JaggedAttention",
    "MXFP8BlockAttention",
    "MXFP8JaggedAttention",
]

_SQUARE = (32, 32)
_ALONG_TOKENS = (32, 1)
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def _check_dtype(recipe: str, name: str, x: Tensor) -> None:
    """Raise on a dtype of which a cast would lose more than precision."""
    if not isinstance(x, Tensor):
        raise TypeError(f"{recipe} attention: `{name}` must be a Tensor, got {type(x).__name__}; convert it first.")
    if x.dtype not in _DTYPES:
        raise TypeError(
            f"{recipe} attention: `{name}` must be float32, bfloat16 or float16, got {x.dtype}; cast it first."
        )


def _check_operand(name: str, x: Tensor) -> None:
    """Raise on what the MXFP8 casts cannot read; the op itself checks everything else before it computes."""
    _check_dtype("MXFP8", name, x)
    if x.is_nested:
        raise TypeError(f"MXFP8 attention: `{name}` must be a dense Tensor, got a nested one; pass its `values()`.")
    if x.dim() != 3:
        raise ValueError(
            f"MXFP8 attention: `{name}` must have shape (T, H, D), got {tuple(x.shape)}; pack the sequences along dim "
            "0 first."
        )
    refuse_transforms("MXFP8 attention", **{name: x})


def _check_offsets(name: str, offsets: Tensor) -> None:
    """Raise on offsets from which no blocks can be cut."""
    if not isinstance(offsets, Tensor):
        raise TypeError(
            f"MXFP8 attention: `{name}` must be a Tensor of shape (B + 1,), got {type(offsets).__name__}; make it with "
            "lengths_to_offsets of the lengths."
        )
    if offsets.dim() != 1 or offsets.shape[0] < 1:
        raise ValueError(
            f"MXFP8 attention: `{name}` must have shape (B + 1,), got {tuple(offsets.shape)}; make it with "
            "lengths_to_offsets of the lengths."
        )


def _equal_sequences(num_sequences: int, seeds: Tensor) -> JaggedBlocks:
    """Blocks of ``num_sequences`` sequences that each have a row for every one of the seeds."""
    length = seeds.shape[0]
    # From sizes alone and on the device: nothing waits for a copy.
    offsets = torch.arange(num_sequences + 1, device=seeds.device) * length
    return JaggedBlocks.of(offsets, num_sequences * length, length)


class _MXFP8TwoSided:
    """Casts around a module with offsets on both sides."""

    recipe = MXFP8Recipe()

    def __init__(self, *args: Any, recipe: MXFP8Recipe | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.recipe = MXFP8Recipe() if recipe is None else recipe

    def forward(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        offsets_q: Tensor | None,
        offsets_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        **options: Any,
    ) -> Tensor:
        """Map q (T_q, H, D), k (T_k, H_kv, D), v (T_k, H_kv, D_v) to (T_q, H, D_v); ``options`` of the module as is."""
        for name, x in (("q", q), ("k", k), ("v", v)):
            _check_operand(name, x)
        _check_offsets("offsets_k", offsets_k)
        if offsets_q is None:
            blocks_q = _equal_sequences(1, q)
        else:
            _check_offsets("offsets_q", offsets_q)
            blocks_q = JaggedBlocks.of(offsets_q, q.shape[0], max_seqlen_q)
        shared = offsets_k is offsets_q and q.shape[0] == k.shape[0]
        blocks_k = blocks_q if shared else JaggedBlocks.of(offsets_k, k.shape[0], max_seqlen_k)
        out = super().forward(  # type: ignore[misc]
            quantize_jagged(q, blocks_q, _SQUARE, self.recipe),
            quantize_jagged(k, blocks_k, _SQUARE, self.recipe),
            quantize_jagged(v, blocks_k, _ALONG_TOKENS, self.recipe),
            offsets_q=offsets_q,
            offsets_k=offsets_k,
            max_seqlen_q=max_seqlen_q,
            max_seqlen_k=max_seqlen_k,
            **options,
        )
        if offsets_q is None:
            request_index = options.get("request_index")
            num_sequences = offsets_k.shape[0] - 1 if request_index is None else request_index.shape[0]
            blocks_q = _equal_sequences(num_sequences, q)
        return quantize_jagged_grad(out, blocks_q, _SQUARE, self.recipe)


class MXFP8JaggedAttention(_MXFP8TwoSided, JaggedAttention):
    """``gem_kernels.modules.JaggedAttention`` on MXFP8 operands; arguments as there, and ``recipe``."""


class MXFP8GDPA(_MXFP8TwoSided, GDPA):
    """``gem_kernels.modules.GDPA`` on MXFP8 operands; arguments as there, and ``recipe``.

    Without ``norm_block``: the op would make operands of its own behind the casts.
    """

    has_norm_block = False  # type: ignore[assignment]


class MXFP8BlockAttention(BlockAttention):
    """``gem_kernels.modules.BlockAttention`` on MXFP8 operands, without ``rotary``.

    Args:
        block_size: Tokens of an attention block: 32, 64 or 128. Each holds whole blocks of the casts.
        scale: Factor on the scores; default ``D ** -0.5``.
        recipe: Formats of the casts.
    """

    recipe = MXFP8Recipe()

    def __init__(self, block_size: int = 64, scale: float | None = None, *, recipe: MXFP8Recipe | None = None) -> None:
        super().__init__(block_size=block_size, scale=scale)
        self.recipe = MXFP8Recipe() if recipe is None else recipe

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, *, offsets: Tensor, max_seqlen: int, rotary: Tensor | None = None
    ) -> Tensor:
        """Map q (T, H, D), k (T, H_kv, D), v (T, H_kv, D_v) to (T, H, D_v).

        Raises:
            ValueError: if ``rotary`` is given, or as :func:`gem_kernels.block_attention`.
        """
        if rotary is not None:
            got = f"a tensor of shape {tuple(rotary.shape)}" if isinstance(rotary, Tensor) else type(rotary).__name__
            raise ValueError(
                "MXFP8BlockAttention: `rotary` must be None, because the op would rotate operands that are quantised "
                f"already, got {got}; rotate q, k and v before the call, or leave this layer out with "
                "convert(..., filter=...)."
            )
        for name, x in (("q", q), ("k", k), ("v", v)):
            _check_operand(name, x)
        _check_offsets("offsets", offsets)
        blocks = JaggedBlocks.of(offsets, q.shape[0], max_seqlen)
        if k.shape[0] != q.shape[0] or v.shape[0] != q.shape[0]:
            raise ValueError(
                f"MXFP8BlockAttention: `k` and `v` must have the rows of `q`, {q.shape[0]}, got {k.shape[0]} and "
                f"{v.shape[0]}; make all three from the same packed tokens."
            )
        out = super().forward(
            quantize_jagged(q, blocks, _SQUARE, self.recipe),
            quantize_jagged(k, blocks, _SQUARE, self.recipe),
            quantize_jagged(v, blocks, _ALONG_TOKENS, self.recipe),
            offsets=offsets,
            max_seqlen=max_seqlen,
        )
        return quantize_jagged_grad(out, blocks, _SQUARE, self.recipe)


class _BF16Operands:
    """Casts of Q, K and V to bfloat16, and of the result back if the recipe says so, around a module's forward.

    Bias tables, times, targets and indices pass through as they are.
    """

    recipe = BF16Recipe()

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **batch: Any) -> Tensor:
        """The wrapped module's shapes; the result has the dtype of q, or bfloat16 if the recipe's activations have.

        Raises:
            TypeError: if q, k or v is not float32, bfloat16 or float16.
        """
        for name, x in (("q", q), ("k", k), ("v", v)):
            _check_dtype("BF16", name, x)
        q_low, k_low, v_low = (x.to(torch.bfloat16) for x in (q, k, v))
        out: Tensor = super().forward(q_low, k_low, v_low, **batch)  # type: ignore[misc]
        return out if self.recipe.activations == "bfloat16" else out.to(q.dtype)


class BF16JaggedAttention(_BF16Operands, JaggedAttention):
    """``gem_kernels.modules.JaggedAttention`` on bfloat16 operands; arguments as there."""


class BF16GDPA(_BF16Operands, GDPA):
    """``gem_kernels.modules.GDPA`` on bfloat16 operands; arguments as there.

    ``norm_block`` only where activations are bfloat16: elsewhere a cast of its q would round the residual.
    """

    @property
    def has_norm_block(self) -> bool:
        """Whether ``forward`` takes ``norm_block=True``."""
        return super().has_norm_block and self.recipe.activations == "bfloat16"


class BF16BlockAttention(_BF16Operands, BlockAttention):
    """``gem_kernels.modules.BlockAttention`` on bfloat16 operands; arguments as there."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor, **batch: Any) -> Tensor:
        """As ``BlockAttention``; a ``rotary`` table in the dtype of q becomes float32, which bfloat16 operands take."""
        rotary = batch.get("rotary")
        if isinstance(rotary, Tensor) and rotary.dtype == q.dtype != torch.bfloat16:
            batch["rotary"] = rotary.float()
        return super().forward(q, k, v, **batch)
