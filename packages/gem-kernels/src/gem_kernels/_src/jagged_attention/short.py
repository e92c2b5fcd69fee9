"""Tiles of calls in which a tile of the usual shape would hold few valid pairs: short windows, and few queries."""

from __future__ import annotations

from collections.abc import Mapping

from gem_kernels._src.attention.configs import Kernel, Sizes, TileConfig
from gem_kernels._src.attention.pairing import Pairing
from gem_kernels._src.jagged_attention.bias import Bias
from gem_kernels._src.jagged_attention.configs import LARGE

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
"""By the largest head dim, as in ``LARGE``; timed on Hopper."""


def fit_pairs(
    kernel: Kernel, config: TileConfig, head_dim: int, pairing: Pairing, left: int, right: int, bias: Bias
) -> TileConfig:
    """The configuration for a window or for few queries, if the usual one was chosen and a better is known."""
    if bias.is_set or pairing.indexed:
        return config
    limit = next((limit for limit in LARGE[kernel] if head_dim <= limit), None)
    sizes = (config.block_m, config.block_n, config.num_warps, config.num_stages)
    # Another GPU's or dtype's table and an overridden configuration are what they are.
    if limit is None or sizes != LARGE[kernel][limit]:
        return config
    table: Mapping[int, Mapping[Kernel, Sizes]] = {}
    if left >= 0 and right >= 0 and left + right <= MAX_WINDOW:
        table = WINDOW
    elif left < 0 and right < 0 and pairing.max_seqlen_q <= MAX_QUERIES:
        table = FEW_QUERIES
    found = table.get(limit, {}).get(kernel)
    if found is None:
        return config
    block_m, block_n, num_warps, num_stages = found
    return TileConfig(block_m=block_m, block_n=block_n, num_warps=num_warps, num_stages=num_stages)
