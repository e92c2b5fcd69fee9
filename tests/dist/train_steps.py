"""One rank of a short training run of the whole tiny model: FSDP2, sharded tables, clipping. Started by the tests.

Arguments: where to write, placement of the tables, number of steps. The first rank writes the full dense weights, the
full tables and the loss of each step.
"""

import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from gem_model import RankingConfig, RankingModel, SequenceTowerConfig
from gem_parallel import (
    FeatureConfig,
    ParallelDims,
    ParallelPlan,
    ShardedEmbeddings,
    SparseOptimizerConfig,
    TableConfig,
    clip_grad_norm_,
    parallelize,
)
from gem_train.data import EventSource, generate
from gem_train.launch import exit_worker


def full(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, DTensor) else value


def main(path: str, placement: str, steps: int) -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    log = generate(num_users=40, num_items=37, mean_events=12.0)
    # 13 samples over 4 ranks, and the last batch of the epoch leaves ranks without any.
    source = EventSource(log, "train", global_batch_size=13, rank=rank, world_size=world_size, max_history=16, epochs=2)
    mesh = ParallelDims.for_world(world_size).build_mesh("cpu")
    tables = ShardedEmbeddings(
        tables=[
            TableConfig(name=table.name, num_rows=table.num_rows, dim=16, placement=placement) for table in log.tables
        ],
        features=[
            FeatureConfig(name=feature.name, table=feature.table, pooling="mean" if feature.multi_valued else "sum")
            for feature in log.features
        ],
        optimizer=SparseOptimizerConfig(kind="rowwise_adagrad", learning_rate=0.05, eps=1e-8),
        mesh=mesh.sparse,
        device=torch.device("cpu"),
    )
    tower = SequenceTowerConfig(
        name="history", event_features=log.event_features, num_event_dense=log.num_event_dense, dim=32, num_heads=2
    )
    torch.manual_seed(0)
    model: Any = RankingModel(
        RankingConfig(
            context_features=log.context_features,
            num_dense=log.num_dense,
            sequences=(tower,),
            tasks=log.tasks,
            embedding_dim=16,
            dim=32,
        )
    )
    model = parallelize(model, ParallelPlan(shard_units=model.shard_units), mesh)
    # Not Adam: it turns a gradient that is zero up to rounding into a whole step, whatever its sign is by chance.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    losses, norms = [], []
    for index, batch in enumerate(source):
        if index == steps:
            break
        loss = model.loss(model(batch, tables.lookup(tables.exchange(batch.ids))), batch)
        total = torch.stack([loss.total.detach(), torch.tensor(float(batch.num_samples))]).double()
        dist.all_reduce(total)
        (loss.total / total[1].float()).backward()
        norms.append(float(full(clip_grad_norm_(model.parameters(), 1.0, mesh))))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(total[0] / total[1]))
    weights = {f"model.{name}": full(value).detach().clone() for name, value in model.state_dict().items()}
    weights |= {name: full(value).detach().clone() for name, value in tables.state_dict().items()}
    # A table that lies whole on one rank is in that rank's state dict only.
    parts: list[Any] = [None] * world_size
    dist.all_gather_object(parts, weights)
    weights = {name: value for part in parts for name, value in part.items()}
    if rank == 0:
        torch.save({"losses": losses, "norms": norms, "weights": weights}, path)
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], int(sys.argv[3]))
    exit_worker(0)
