"""One mesh for dense and sparse: FSDP2 for the dense part, sharded embedding tables on fbgemm-gpu."""

from gem_parallel._version import __version__
from gem_parallel.embeddings import FeatureConfig, Pending, ShardedEmbeddings, SparseOptimizerConfig, TableConfig
from gem_parallel.engines import FeatureStatus, engine_report

__all__ = [
    "FeatureConfig",
    "FeatureStatus",
    "Pending",
    "ShardedEmbeddings",
    "SparseOptimizerConfig",
    "TableConfig",
    "__version__",
    "engine_report",
]
