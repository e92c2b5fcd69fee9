"""Tiles of columns of a small contiguous matrix, all rows of which a tile holds."""

import triton
import triton.language as tl


@triton.jit
def load_matrix(ptr, column, ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr):
    """(BLOCK_R, BLOCK_D) from ``column`` on of the matrix (ROWS, DIM) at ``ptr``, zero outside of it."""
    rows, columns = tl.arange(0, BLOCK_R), column + tl.arange(0, BLOCK_D)
    mask = (rows < ROWS)[:, None] & (columns < DIM)[None, :]
    return tl.load(ptr + rows[:, None] * DIM + columns[None, :], mask=mask, other=0.0)


@triton.jit
def store_matrix(
    ptr, tile, column, ROWS: tl.constexpr, DIM: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr
):
    """Inverse of ``load_matrix``: writes nothing outside of the matrix."""
    rows, columns = tl.arange(0, BLOCK_R), column + tl.arange(0, BLOCK_D)
    mask = (rows < ROWS)[:, None] & (columns < DIM)[None, :]
    tl.store(ptr + rows[:, None] * DIM + columns[None, :], tile.to(ptr.dtype.element_ty), mask=mask)
