"""All-gather and reduce-scatter by what the hardware has: SMs, copy engines, or copies through symmetric memory."""

from gem_parallel._src.collectives.base import Collectives, DefaultCollectives
from gem_parallel._src.collectives.choose import choose_collectives, collectives_status, group_status
from gem_parallel._src.collectives.fully_shard import set_fully_shard_collectives
from gem_parallel._src.collectives.low_contention import LowContentionCollectives
from gem_parallel._src.collectives.zero_cta import ZeroCtaCollectives, zero_cta_options

__all__ = [
    "Collectives",
    "DefaultCollectives",
    "LowContentionCollectives",
    "ZeroCtaCollectives",
    "choose_collectives",
    "collectives_status",
    "group_status",
    "set_fully_shard_collectives",
    "zero_cta_options",
]
