"""Plan only: a GEM-class model on 4,096 GPUs in three tiers, 2.1 trillion table parameters, 12 billion dense ones.

Sizes are of the class that Meta's posts on GEM of 2025-11-10 and 2026-08-03 describe, not those of their model, which
are not published: zones of 256 GPUs, shard groups of a zone, expert parallelism in a host, 1K samples a step and GPU.
"""

from dataclasses import replace

from gem_model import RankingConfig, SequenceTowerConfig
from gem_parallel import ParallelDims, Topology
from gem_parallel.planner import DenseUnit, ModelDescription, SparseTable, Workload
from gem_train.recipes.describe import describe_dense
from gem_train.recipes.plan_recipe import PlanRecipe

__all__ = ["RECIPE"]

NUM_LAYERS = 8
NUM_CONTEXT = 160
"""Context features with a table each, of one id per sample."""
NUM_LISTS = 20
"""Context features with LIST_IDS ids per sample, pooled."""
LIST_IDS = 30
NUM_EXPERTS = 8
"""Interaction experts per layer."""
LENGTHS = {"clicks": (64, 256, 512, 1184), "views": (32, 128, 256, 608)}
"""Four typical samples: events of each history."""


def _tower(name: str, num_features: int, dim: int) -> SequenceTowerConfig:
    return SequenceTowerConfig(
        name=name,
        event_features=tuple(f"{name}.f{index}" for index in range(num_features)),
        num_event_dense=8,
        dim=dim,
        num_heads=dim // 128,
        self_attention=tuple("none" if index % 2 else "block" for index in range(NUM_LAYERS)),
        num_context_tokens=16,
        num_seeds=32,
        num_seed_tokens=16,
        project_pooling=False,
        num_recent=16,
        event_hidden=2 * dim,
    )


def _config() -> RankingConfig:
    return RankingConfig(
        context_features=tuple(f"context{index}" for index in range(NUM_CONTEXT)),
        num_dense=512,
        sequences=(_tower("clicks", 6, 512), _tower("views", 4, 256)),
        tasks=("click", "conversion"),
        embedding_dim=128,
        dim=512,
        num_layers=NUM_LAYERS,
        num_dense_tokens=16,
        dense_hidden=2048,
        num_fm_tokens=48,
        num_linear_tokens=48,
        fm_rank=32,
        fm_compressed_tokens=16,
        fm_hidden=4096,
        head_hidden=(2048, 1024),
    )


def _with_experts(unit: DenseUnit, config: RankingConfig) -> DenseUnit:
    """An interaction of NUM_EXPERTS experts, whose inputs and outputs travel in bf16."""
    if not unit.name.endswith(".interaction"):
        return unit
    first = unit.name.startswith("layers.0.")
    tokens_in = (config.num_input_tokens if first else config.num_tokens) + config.num_pooled_tokens
    return replace(
        unit,
        gemm_flops=NUM_EXPERTS * unit.gemm_flops,
        activation_bytes=NUM_EXPERTS * unit.activation_bytes,
        num_experts=NUM_EXPERTS,
        expert_input_bytes=2.0 * tokens_in * config.dim,
        expert_output_bytes=2.0 * config.num_tokens * config.dim,
    )


def _tables(config: RankingConfig) -> tuple[SparseTable, ...]:
    """Rows fall with the rank of the table; the histories read the largest ones."""
    found = []
    events = {name: sum(lengths) / len(lengths) for name, lengths in LENGTHS.items()}
    ids = [(feature, events[tower.name], 0.3) for tower in config.sequences for feature in tower.event_features]
    ids += [(f"list{index}", float(LIST_IDS), 0.5) for index in range(NUM_LISTS)]
    ids += [(name, 1.0, 0.6) for name in config.context_features]
    for index, (name, per_sample, unique) in enumerate(ids):
        found.append(
            SparseTable(
                name=name,
                num_rows=int(2.2e9 / (1 + index) ** 0.9),
                dim=128,
                ids_per_sample=per_sample,
                unique_fraction=unique,
                pooling="sum" if name.startswith("list") else "none",
                weight_bytes=2,
            )
        )
    return tuple(found)


def _describe() -> ModelDescription:
    config = _config()
    units = tuple(_with_experts(unit, config) for unit in describe_dense(config, LENGTHS, precision="bf16_activations"))
    return ModelDescription(name="cluster-4096", units=units, tables=_tables(config))


RECIPE = PlanRecipe(
    name="cluster-4096",
    summary="plan only: 4,096 GPUs in zones of 256, 2.1 trillion table parameters, 12 billion dense ones",
    describe=_describe,
    topology=Topology(gpus_per_host=8, hosts_per_zone=32, zones=16),
    dims=ParallelDims(dp_replicate=16, dp_shard=32, ep=8, sparse_replicate=8, sparse_shard=512),
    workload=Workload(
        samples_per_rank=1024,
        gather_bytes=2,
        reduce_bytes=4,
        row_bytes=2,
        table_gather="rows",
        recompute=0.4,
        imbalance=1.05,
        contention=0.15,
    ),
)
