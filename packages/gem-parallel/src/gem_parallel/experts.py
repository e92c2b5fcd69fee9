"""Expert parallelism without token routing: every expert sees the whole batch, outputs are summed."""

from gem_parallel._src.experts import ExpertParallel

__all__ = ["ExpertParallel"]
