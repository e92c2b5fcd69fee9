"""Embedding tables sharded over ranks, with fused sparse optimizers."""

from gem_parallel._src.embeddings.config import FeatureConfig, SparseOptimizerConfig, TableConfig
from gem_parallel._src.embeddings.hashing import hash_ids
from gem_parallel._src.embeddings.keyed import KeyedJaggedIds
from gem_parallel._src.embeddings.module import ShardedEmbeddings
from gem_parallel._src.embeddings.pending import Pending

__all__ = [
    "FeatureConfig",
    "KeyedJaggedIds",
    "Pending",
    "ShardedEmbeddings",
    "SparseOptimizerConfig",
    "TableConfig",
    "hash_ids",
]
