"""Which tile configurations the kernels of this process take, and whether all ranks of a job take the same.

``python -m gem_kernels warm`` times a few configurations of each kernel and writes what was fastest into a file in
Triton's cache. Every process reads it once, at its first launch; ``GEM_KERNELS_TUNING`` names another file, or is
``off``. Without a file all kernels take their defaults.
"""

from __future__ import annotations

import torch.distributed as dist

from gem_kernels._src.conformance.ranks import RanksDifferError, check_equal, gather
from gem_kernels._src.tuning.choices import digest as _digest
from gem_kernels._src.tuning.state import table

__all__ = ["RanksDifferError", "check_ranks", "digest"]


def digest() -> str:
    """Hash of the choices that hold in this process: equal where kernels take the same configurations.

    Returns:
        16 hexadecimal digits; those of no choices where there is no tuning file or no GPU.

    Raises:
        ValueError: if the tuning file is damaged or missing.
    """
    return _digest(table())


def check_ranks(group: dist.ProcessGroup | None = None) -> str:
    """Raise unless all ranks of a process group have the same choices: for a trainer, before its first step.

    Ranks that choose differently would round differently, and replicas would drift apart.

    Args:
        group: Process group that all its ranks call this with; default the world.

    Returns:
        The digest that all have.

    Raises:
        RanksDifferError: naming the ranks that differ from rank 0.
        ValueError: if the tuning file is damaged or missing.
    """
    own = digest()
    check_equal(dict(enumerate(gather(own, group))), "check_ranks")
    return own
