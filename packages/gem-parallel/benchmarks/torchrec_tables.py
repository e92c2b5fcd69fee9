"""The same tables and batches for gem-parallel and for torchrec, on gloo ranks.

torchrec is no dependency of the package: `nox -s torchrec` installs the pinned one that goes with the tested torch and
fbgemm. It divides gradients by the number of ranks where gem-parallel sums them; here it is told not to.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from gem_parallel import FeatureConfig, ShardedEmbeddings, SparseOptimizerConfig, TableConfig

LEARNING_RATE, EPS = 0.125, 1e-6
KINDS = ("sgd", "adagrad", "rowwise_adagrad")
"""Optimizers of fbgemm's CPU kernels, which torchrec's fused tables run on."""

Bags = tuple[Tensor, Tensor]
"""Ids (N,) int64 and the lengths of their bags (num_bags,) int64."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """Tables with one feature each, of the same name."""

    rows: tuple[int, ...]
    dims: tuple[int, ...]
    poolings: tuple[str, ...]
    """sum and mean, or none for all."""
    placement: str
    """table_wise or row_wise."""
    kind: str

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(f"t{index}" for index in range(len(self.rows)))

    @property
    def unpooled(self) -> bool:
        return "none" in self.poolings


def start_rank(rank: int, world_size: int, folder: Path) -> None:
    """One thread, one gloo process group over the loopback device, and no chatter."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/store",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=120),
    )


class GemTables:
    """ShardedEmbeddings over all ranks."""

    def __init__(self, case: Case, world_size: int) -> None:
        tables = [
            TableConfig(name=name, num_rows=rows, dim=dim, placement=case.placement)
            for name, rows, dim in zip(case.names, case.rows, case.dims, strict=True)
        ]
        features = [
            FeatureConfig(name=name, table=name, pooling=pooling)
            for name, pooling in zip(case.names, case.poolings, strict=True)
        ]
        self._module = ShardedEmbeddings(
            tables,
            features,
            optimizer=SparseOptimizerConfig(kind=case.kind, learning_rate=LEARNING_RATE, eps=EPS),
            mesh=init_device_mesh("cpu", (world_size,), mesh_dim_names=("sparse_shard",)),
        )

    def prepare(self, batch: Mapping[str, Bags]) -> Any:
        """What a reader would hand over."""
        return {
            name: (ids, torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])) for name, (ids, lengths) in batch.items()
        }

    def forward(self, prepared: Any) -> dict[str, Tensor]:
        return self._module.lookup(self._module.exchange(prepared))

    def load(self, weights: Mapping[str, Tensor]) -> None:
        state = {f"tables.{name}.weight": weight for name, weight in weights.items()}
        for name, value in self._module.state_dict().items():
            if not name.endswith(".weight"):
                state[name] = torch.zeros(value.shape, dtype=value.dtype)
        # A rank that holds nothing of a table does not ask for its moments.
        self._module.load_state_dict(state, strict=False)

    def state(self) -> dict[str, Tensor]:
        """table.weight, and table.sum if there is a moment -> the whole tensor, where this rank has it."""
        found = {}
        for name, value in self._module.state_dict().items():
            whole = value.full_tensor() if hasattr(value, "full_tensor") else value
            found[name.removeprefix("tables.")] = whole.clone()
        return found


class TorchrecTables:
    """torchrec's EmbeddingBagCollection, or EmbeddingCollection if nothing is pooled, sharded over all ranks."""

    def __init__(self, case: Case, world_size: int) -> None:
        from fbgemm_gpu.split_embedding_configs import EmbOptimType
        from torchrec import (
            EmbeddingBagCollection,
            EmbeddingBagConfig,
            EmbeddingCollection,
            EmbeddingConfig,
            PoolingType,
        )
        from torchrec.distributed.comm_ops import set_gradient_division
        from torchrec.distributed.embedding import EmbeddingCollectionSharder
        from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
        from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
        from torchrec.distributed.types import ShardingEnv

        set_gradient_division(False)
        self._case = case
        kinds = {
            "sgd": EmbOptimType.EXACT_SGD,
            "adagrad": EmbOptimType.EXACT_ADAGRAD,
            "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
        }
        fused = {"optimizer": kinds[case.kind], "learning_rate": LEARNING_RATE, "eps": EPS}
        cpu = torch.device("cpu")
        shapes = list(zip(case.names, case.rows, case.dims, case.poolings, strict=True))
        module: Any
        sharder: Any
        if case.unpooled:
            configs = [
                EmbeddingConfig(name=name, num_embeddings=rows, embedding_dim=dim, feature_names=[name])
                for name, rows, dim, _ in shapes
            ]
            module, sharder = EmbeddingCollection(configs, device=cpu), EmbeddingCollectionSharder(fused_params=fused)
        else:
            pooling = {"sum": PoolingType.SUM, "mean": PoolingType.MEAN}
            bag_configs = [
                EmbeddingBagConfig(
                    name=name, num_embeddings=rows, embedding_dim=dim, feature_names=[name], pooling=pooling[each]
                )
                for name, rows, dim, each in shapes
            ]
            module = EmbeddingBagCollection(bag_configs, device=cpu)
            sharder = EmbeddingBagCollectionSharder(fused_params=fused)
        places: dict[str, Any] = {}
        for index, name in enumerate(case.names):
            # On the CPU the kernel defaults to a dense one, with an optimizer outside backward.
            places[name] = (
                row_wise(compute_kernel="fused")
                if case.placement == "row_wise"
                else table_wise(rank=index % world_size, compute_kernel="fused")
            )
        plan = construct_module_sharding_plan(
            module, places, sharder=sharder, local_size=world_size, world_size=world_size, device_type="cpu"
        )
        self._module = sharder.shard(module, plan, ShardingEnv.from_process_group(dist.group.WORLD), cpu)

    def prepare(self, batch: Mapping[str, Bags]) -> Any:
        """What a reader would hand over."""
        from torchrec import KeyedJaggedTensor

        return KeyedJaggedTensor.from_lengths_sync(
            keys=list(batch),
            values=torch.cat([ids for ids, _ in batch.values()]),
            lengths=torch.cat([lengths for _, lengths in batch.values()]),
        )

    def forward(self, prepared: Any) -> dict[str, Tensor]:
        found = self._module(prepared).wait()
        if self._case.unpooled:
            return {name: each.values() for name, each in found.items()}
        return dict(found.to_dict())

    def load(self, weights: Mapping[str, Tensor]) -> None:
        for name, value in self._module.state_dict().items():
            for shard in value.local_shards():
                (row, column), (rows, columns) = shard.metadata.shard_offsets, shard.metadata.shard_sizes
                whole = weights[name.split(".")[-2]]
                shard.tensor.detach().copy_(whole[row : row + rows, column : column + columns])

    def state(self) -> dict[str, Tensor]:
        """table.weight and table.sum -> the whole tensor, with zeros where other ranks hold it."""
        found = {}
        tensors = {f"{name.split('.')[-2]}.weight": value for name, value in self._module.state_dict().items()}
        for states in self._module.fused_optimizer.state_dict()["state"].values():
            for name, value in states.items():
                tensors[name.replace(".momentum1", ".sum")] = value
        for name, value in tensors.items():
            whole = torch.zeros(value.metadata().size)
            for shard in value.local_shards():
                at = zip(shard.metadata.shard_offsets, shard.metadata.shard_sizes, strict=True)
                whole[tuple(slice(start, start + size) for start, size in at)] = shard.tensor.detach()
            found[name] = whole
        return found


PROVIDERS: dict[str, Callable[[Case, int], GemTables | TorchrecTables]] = {"gem": GemTables, "torchrec": TorchrecTables}
