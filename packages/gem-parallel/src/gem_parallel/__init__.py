"""One mesh for dense and sparse: FSDP2 for the dense part, sharded embedding tables on fbgemm-gpu."""

from gem_parallel._version import __version__
from gem_parallel.balance import LengthCost, balance_samples
from gem_parallel.collectives import choose_collectives
from gem_parallel.embeddings import (
    FeatureConfig,
    KeyedJaggedIds,
    Pending,
    ShardedEmbeddings,
    SparseOptimizerConfig,
    TableConfig,
)
from gem_parallel.engines import FeatureStatus, engine_report
from gem_parallel.experts import ExpertParallel
from gem_parallel.gradients import clip_grad_norm_, grad_norm
from gem_parallel.mesh import ParallelDims, ParallelMesh
from gem_parallel.plan import ParallelPlan, ParamWire, defer_all_reduce, parallelize
from gem_parallel.topology import Link, Topology

__all__ = [
    "ExpertParallel",
    "FeatureConfig",
    "FeatureStatus",
    "KeyedJaggedIds",
    "LengthCost",
    "Link",
    "ParallelDims",
    "ParallelMesh",
    "ParallelPlan",
    "ParamWire",
    "Pending",
    "ShardedEmbeddings",
    "SparseOptimizerConfig",
    "TableConfig",
    "Topology",
    "__version__",
    "balance_samples",
    "choose_collectives",
    "clip_grad_norm_",
    "defer_all_reduce",
    "engine_report",
    "grad_norm",
    "parallelize",
]
