"""Tiles of calls in which a tile of the usual shape would hold few valid pairs: short windows, and few queries."""

from __future__ import annotations

from collections.abc import Mapping

from gem_kernels._src.attention.configs import TileConfig
from gem_kernels._src.attention.pairing import Pairing
from gem_kernels._src.jagged_attention.bias import Bias
from gem_kernels._src.tables.attention import Kernel, Sizes

MAX_WINDOW = 256
"""Keys beside the query that a short window holds, both sides together."""
MAX_QUERIES = 64
WINDOW: Mapping[int, Mapping[Kernel, Sizes]] = {
    64: {"forward": (64, 32, 4, 3), "dq": (64, 32, 4, 3), "dkdv": (32, 64, 4, 2)},
    128: {"forward": (64, 32, 4, 2), "dq": (64, 32, 4, 2), "dkdv": (32, 64, 4, 2)},
}
FEW_QUERIES: Mapping[int, Mapping[Kernel, Sizes]] = {
    64: {"forward": (64, 32, 4, 3)},
    128: {"forward": (64, 32, 4, 3)},
}
"""By the largest head dim; timed on Hopper."""


def fit_pairs(
    kernel: Kernel, config: TileConfig, head_dim: int, pairing: Pairing, left: int, right: int, bias: Bias
) -> TileConfig:
    """The configuration for a window or for few queries, if the usual one was chosen and a better is known."""
    # What tuning must not change is of another GPU or dtype, or overridden.
    if bias.is_set or pairing.indexed or config.tunable is None:
        return config
    table: Mapping[int, Mapping[Kernel, Sizes]] = {}
    if left >= 0 and right >= 0 and left + right <= MAX_WINDOW:
        table = WINDOW
    elif left < 0 and right < 0 and pairing.max_seqlen_q <= MAX_QUERIES:
        table = FEW_QUERIES
    found = next((tiles.get(kernel) for limit, tiles in table.items() if head_dim <= limit), None)
    if found is None:
        return config
    block_m, block_n, num_warps, num_stages = found
    return TileConfig(block_m=block_m, block_n=block_n, num_warps=num_warps, num_stages=num_stages)
