"""Expert parallelism without token routing: every expert sees the whole batch, outputs are summed."""

from gem_parallel._src.experts import ExpertParallel, exchange_counts

__all__ = ["ExpertParallel", "exchange_counts"]
