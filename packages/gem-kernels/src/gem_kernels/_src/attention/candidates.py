"""Tiles that ``python -m gem_kernels warm`` times beside the default ones, where a block has 227 KiB of shared memory.

Few, because each costs a compilation and a measurement for every op, head dim and class of lengths: whole tiles, and
smaller ones with half the warps, of which more fit on a multiprocessor, or a deeper pipeline. All but the default are
built for sm_90 and sm_100 by the compile test. Which is faster depends on lengths and masks, so none is so everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping

from gem_kernels._src.attention.configs import Kernel, Sizes

CANDIDATES: Mapping[Kernel, Mapping[int, tuple[Sizes, ...]]] = {
    "forward": {
        64: ((128, 128, 8, 3), (128, 64, 4, 3), (64, 128, 4, 3), (64, 64, 4, 3)),
        128: ((128, 128, 8, 2), (128, 64, 8, 3), (64, 64, 4, 3)),
    },
    "dq": {
        64: ((128, 64, 8, 2), (64, 64, 4, 2), (64, 64, 4, 3)),
        128: ((128, 64, 8, 2), (64, 64, 4, 2), (128, 32, 8, 3)),
    },
    "dkdv": {
        64: ((64, 128, 8, 2), (32, 128, 8, 3), (32, 64, 4, 3)),
        128: ((32, 128, 8, 3), (32, 64, 4, 3)),
    },
    # All keys must lie in one tile, so its rows are those of the default.
    "dqdkdv": {64: ((32, 128, 8, 3),), 128: ((32, 128, 8, 3), (16, 128, 8, 2))},
}
"""By kernel and by the largest head dim they serve, in ascending order; in half precision, of both ops."""
