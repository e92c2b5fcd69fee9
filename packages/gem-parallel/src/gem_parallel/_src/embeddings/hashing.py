"""A 64-bit mix: rows for unbounded ids, and random bits that depend on place and step only."""

from __future__ import annotations

import torch
from torch import Tensor

from gem_parallel._src.embeddings.config import MAX_ROWS, check_integer

__all__ = ["hash_ids", "mix64", "round_to_bfloat16", "to_int64"]

GOLDEN = 0x9E3779B97F4A7C15
FIRST, SECOND = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB


def _signed(word: int) -> int:
    return word - 2**64 if word >= 2**63 else word


def _shifted(words: Tensor, bits: int) -> Tensor:
    """Right shift of the unsigned word that an int64 stands for."""
    return (words >> bits) & ((1 << (64 - bits)) - 1)


def mix64(words: Tensor) -> Tensor:
    """One output of splitmix64 (Steele, Lea and Flood 2014; constants of Stafford's variant 13) per int64 word.

    A bijection of 64-bit words; products wrap modulo 2 ** 64.
    """
    words = words + _signed(GOLDEN)
    words = (words ^ _shifted(words, 30)) * _signed(FIRST)
    words = (words ^ _shifted(words, 27)) * _signed(SECOND)
    return words ^ _shifted(words, 31)


def to_int64(dtype: torch.dtype) -> str:
    """What to do about ids, offsets and lengths of another dtype: ``.long()`` where it changes none."""
    if dtype.is_floating_point or dtype.is_complex:
        return (
            "keep integers as int64 from where they are read, as .long() would cut fractions and not bring back lost "
            "digits"
        )
    return "use .long()"


def hash_ids(values: Tensor, num_rows: int) -> Tensor:
    """Rows for ids of any size: (splitmix64(id) mod 2 ** 63) mod num_rows.

    Part of the format of a trained table: it does not change between versions, and a reader of raw ids elsewhere can
    compute it from the formula. splitmix64(x): x += 0x9E3779B97F4A7C15; x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9;
    x = (x ^ x >> 27) * 0x94D049BB133111EB; x ^ x >> 31, in unsigned 64-bit words. Ids that share a row share its
    vector.

    Args:
        values: int64 of any shape; negative ids are words like any other.
        num_rows: Rows of the table.

    Returns:
        int64 of the same shape in [0, num_rows).

    Raises:
        TypeError: ``values`` is not an int64 tensor, or ``num_rows`` no int.
        ValueError: ``num_rows`` is below 1 or above 2 ** 60.
    """
    if not isinstance(values, Tensor):
        raise TypeError(f"hash_ids: `values` must be a Tensor, got {type(values).__name__}; pass torch.tensor(values)")
    if values.dtype != torch.int64:
        raise TypeError(f"hash_ids: `values` must be int64, got {values.dtype}; {to_int64(values.dtype)}")
    check_integer("hash_ids", "num_rows", num_rows, 1, MAX_ROWS)
    return (mix64(values) & (2**63 - 1)) % num_rows


def round_to_bfloat16(values: Tensor, rows: Tensor, *, first_column: int, width: int, key: int) -> Tensor:
    """Round float32 to one of the two bfloat16 neighbours, at random and without bias.

    The random bits are a function of (key, row, column) alone, so the result does not depend on how a table is cut,
    and a run that was stopped and resumed repeats it.

    Args:
        values: (U, dim) float32; dim a multiple of 4.
        rows: (U,) int64 row of the table.
        first_column: Column of the table at which ``values`` begin; a multiple of 4.
        width: Columns of the whole table.
        key: 63-bit number of the table and the step.
    """
    dim = values.shape[1]
    blocks = torch.arange(first_column // 4, (first_column + dim) // 4, device=values.device)
    words = mix64(rows.unsqueeze(1) * (width // 4) + blocks ^ key)
    # Four columns take 16 bits each of one word.
    shifts = torch.arange(0, 64, 16, device=values.device)
    noise = ((words.unsqueeze(2) >> shifts) & 0xFFFF).view(values.shape[0], dim).to(torch.int32)
    rounded = ((values.view(torch.int32) + noise) & -65536).view(torch.float32)
    return torch.where(values.isfinite(), rounded, values).to(torch.bfloat16)
