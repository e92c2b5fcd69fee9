"""Tiles of the packed attention kernels, by kernel and by the largest head dim they serve, in ascending order.

All that tuning chooses from lies in this folder, whose tables a tuning file is made for. ``python -m gem_kernels warm``
times the candidates beside the defaults, where a block has 227 KiB of shared memory. They are few, because each costs a
compilation and a measurement for every op, head dim and class of lengths: whole tiles, and smaller ones with half the
warps, of which more fit on a multiprocessor, or a deeper pipeline. All but the default are built for sm_90 and sm_100
by the compile test. Which is faster depends on lengths and masks, so none is so everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

Kernel = Literal["forward", "dq", "dkdv", "dqdkdv"]
"""``dqdkdv`` is the dK/dV kernel that writes dQ too."""
Sizes = tuple[int, int, int, int]
"""(block_m, block_n, num_warps, num_stages)."""
Table = Mapping[Kernel, Mapping[int, Sizes]]
"""Sizes by kernel and by the largest head dim they serve, in ascending order."""

# Full float32 products run on the ordinary arithmetic units with operands in registers: small tiles, on every GPU.
FLOAT32: Table = {
    "forward": {64: (32, 32, 4, 1), 256: (16, 16, 4, 1)},
    "dq": {64: (32, 32, 4, 1), 256: (16, 16, 4, 1)},
    "dkdv": {32: (32, 32, 4, 1), 256: (16, 16, 4, 1)},
    "dqdkdv": {32: (32, 32, 4, 1), 128: (16, 16, 4, 1)},
}
LARGE: Table = {
    "forward": {64: (128, 128, 8, 3), 96: (128, 64, 8, 3), 128: (128, 128, 8, 2), 256: (128, 64, 8, 2)},
    "dq": {64: (128, 64, 8, 2), 128: (128, 64, 8, 2), 256: (64, 32, 8, 2)},
    "dkdv": {64: (64, 128, 8, 2), 96: (32, 128, 8, 2), 128: (64, 128, 8, 2), 256: (16, 64, 8, 2)},
    "dqdkdv": {64: (64, 128, 8, 2), 128: (32, 128, 8, 2)},
}
SMALL: Table = {
    "forward": {64: (128, 64, 4, 2), 128: (128, 32, 8, 2), 256: (64, 32, 8, 1)},
    "dq": {64: (64, 64, 4, 2), 128: (64, 32, 8, 2), 256: (32, 16, 4, 1)},
    "dkdv": {64: (64, 64, 4, 2), 128: (32, 64, 8, 2), 256: (16, 32, 4, 1)},
    "dqdkdv": {64: (64, 64, 4, 2), 128: (32, 64, 8, 1)},
}
"""What fits 99 KiB a block (sm_86, sm_89, sm_120), and so sm_80 as well."""
HOPPER: Mapping[str, Table] = {
    "gdpa": {
        "forward": {128: (64, 64, 4, 3), 256: (128, 64, 8, 2)},
        "dq": {64: (64, 64, 4, 3), 128: (64, 64, 4, 2), 256: (64, 32, 8, 2)},
        "dkdv": {64: (32, 64, 4, 3), 96: (32, 128, 8, 2), 128: (64, 128, 8, 2), 256: (16, 64, 8, 2)},
        "dqdkdv": {64: (64, 128, 8, 2), 128: (32, 128, 8, 2)},
    },
    "jagged_attention": {
        "forward": {128: (64, 64, 4, 3), 256: (128, 64, 8, 2)},
        "dq": {64: (64, 64, 4, 3), 128: (64, 64, 4, 2), 256: (64, 32, 8, 2)},
        "dkdv": {64: (32, 64, 4, 3), 128: (32, 64, 4, 3), 256: (16, 64, 8, 2)},
        "dqdkdv": {64: (64, 128, 8, 2), 128: (32, 128, 8, 2)},
    },
}
"""By op: what calls take that Hopper's own kernels do not serve, timed with masks."""
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
