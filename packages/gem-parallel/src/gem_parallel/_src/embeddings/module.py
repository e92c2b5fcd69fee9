"""The embedding module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from gem_parallel._src.embeddings.config import (
    FeatureConfig,
    IdPolicy,
    SparseOptimizerConfig,
    TableConfig,
    check_choice,
    check_configs,
)
from gem_parallel._src.embeddings.engine import Engine, FbgemmEngine
from gem_parallel._src.embeddings.exchange import Exchanger
from gem_parallel._src.embeddings.faults import raise_local, raise_ranks
from gem_parallel._src.embeddings.ids import BatchReport, flatten_ids
from gem_parallel._src.embeddings.initial import fill_initial
from gem_parallel._src.embeddings.layout import Group, TableShard, check_local_rows, make_groups, make_shards
from gem_parallel._src.embeddings.local import pooled_outputs
from gem_parallel._src.embeddings.lookup import Assemble, RowBlock
from gem_parallel._src.embeddings.pending import GroupRequest, Pending
from gem_parallel._src.embeddings.state import load_tables, save_tables
from gem_parallel._src.embeddings.torch_engine import TorchEngine, needs_torch_engine
from gem_parallel._src.embeddings.transfer import DeviceVector
from gem_parallel._src.engine_report import require_fbgemm

__all__ = ["ShardedEmbeddings"]


class ShardedEmbeddings(nn.Module):
    """Embedding tables over the ranks of a mesh, with their optimizer inside backward.

    A step is ``pending = exchange(ids)``, ``outputs = lookup(pending)``, ``loss.backward()``: backward sends the
    gradients to the rows' owners, sums them over the global batch and updates the rows. There is nothing to zero and
    no optimizer to step; ``parameters()`` is empty. Gradients are summed over the ranks, not averaged, so divide the
    loss by the global number of samples.

    In one process there is no collective and no deduplication. Over several ranks all of them must call ``exchange``,
    ``lookup`` and backward together, also with an empty batch; a batch that one rank refuses raises on all.

    Args:
        tables: The tables; names unique.
        features: The streams of ids; several may share a table.
        optimizer: Fused optimizer of all tables.
        mesh: Mesh of the ranks that share the tables (``ParallelMesh.sparse``); None is one process.
        device: Where the tables live and ids are expected; default: the mesh's device type, else the CPU. ``to()`` does
            not move tables.
        seed: Initial weights depend on (seed, table name, row) only, not on the ranks.
        weight_dtype: float32, float16 or bfloat16. Outputs and moments are float32. fbgemm rounds float16 weights
            stochastically on CUDA and to the nearest on the CPU; bfloat16 weights are rounded stochastically
            everywhere, by random bits that depend on (seed, table name, row, column, step) only.
        id_policy: What an id outside [0, num_rows) does. error: IndexError; drop: the zero vector and no gradient;
            clamp: the nearest row. Counted in every case, see ``out_of_range_counts``.

    Raises:
        ImportError: fbgemm-gpu is missing or does not load; the message has the pip line.
        ValueError, TypeError: a bad argument.
    """

    def __init__(
        self,
        tables: Sequence[TableConfig],
        features: Sequence[FeatureConfig],
        *,
        optimizer: SparseOptimizerConfig,
        mesh: DeviceMesh | None = None,
        device: torch.device | str | None = None,
        seed: int = 0,
        weight_dtype: torch.dtype = torch.float32,
        id_policy: IdPolicy = "error",
    ) -> None:
        super().__init__()
        check_configs(tables, features)
        check_choice("ShardedEmbeddings", "id_policy", id_policy, ("error", "drop", "clamp"))
        if weight_dtype not in (torch.float32, torch.float16, torch.bfloat16):
            raise ValueError(
                "ShardedEmbeddings: `weight_dtype` must be torch.float32, torch.float16 or torch.bfloat16, "
                f"got {weight_dtype}"
            )
        if mesh is not None and mesh.ndim == 2 and mesh.size(0) == 1:
            mesh = mesh[(mesh.mesh_dim_names or ())[1]]
        if mesh is not None and mesh.ndim != 1:
            raise ValueError(
                "ShardedEmbeddings: `mesh` must have one axis, or two of which the first has one rank, got "
                f"{mesh.ndim} axes of {tuple(mesh.shape)}; pass ParallelMesh.sparse with sparse_replicate=1"
            )
        require_fbgemm("ShardedEmbeddings")
        self.tables = tuple(tables)
        self.features = tuple(features)
        self.optimizer = optimizer
        self.id_policy = id_policy
        self.device = _resolve_device(device, mesh)
        several = mesh is not None and needs_exchange(mesh)
        self._mesh = mesh if several else None
        self._rank = mesh.get_local_rank() if mesh is not None and several else 0
        self._shards = make_shards(self.tables, mesh.size() if mesh is not None else 1)
        check_local_rows(self._shards)
        self._groups = make_groups(self._shards, self.features)
        # Lists of plain objects: fbgemm's parameters and buffers must not become the model's.
        self._engines: list[list[Engine]] = [
            _make_engines(group, self._rank, optimizer, weight_dtype, self.device, seed) for group in self._groups
        ]
        # Adam's bias correction and stochastic rounding count the updates.
        self._counts_steps = optimizer.kind == "adam" or weight_dtype == torch.bfloat16
        self._exchanger = (
            Exchanger(self._groups, mesh.get_group(), self.device) if mesh is not None and several else None
        )
        self._step = 0
        self._out_of_range = [0] * len(self.features)
        self._anchor = torch.zeros(0, device=self.device, requires_grad=True)
        for shard, weight, _ in self._local_tables():
            fill_initial(weight, shard, self._rank, seed)

    def exchange(self, ids: Mapping[str, tuple[Tensor, Tensor]]) -> Pending:
        """Check a batch's ids and start moving them to the ranks that own their rows.

        May run a batch ahead of ``lookup``, on any CUDA stream: rows are read at ``lookup``. Over several ranks on
        CUDA the host waits here for the current stream once, for the counts, so call it under the stream that copied
        the batch.

        Args:
            ids: Feature -> (values (N,) int64, offsets (num_bags + 1,) int64 from 0 to N), on the tables' device. The
                features' bags may differ in number. A feature left out is not looked up on this rank.

        Raises:
            IndexError: an id outside its table under ``id_policy="error"``. In one process on CUDA it is raised by
                ``lookup`` of the same batch, before any row is read, so that this call need not wait for the device.
            ValueError: offsets that do not describe bags (raised like IndexError); an unknown feature; a wrong shape or
                device.
            TypeError: a wrong type or dtype.
            RuntimeError: another rank refused its batch.
        """
        try:
            batch = flatten_ids(ids, self._groups, self.features, policy=self.id_policy, device=self.device)
        except (TypeError, ValueError):
            if self._exchanger is not None:
                self._exchanger.refuse()
            raise
        if self._exchanger is None:
            requests = tuple(
                GroupRequest(ids=group_ids, rows=group_ids.values, counts=group_ids.counts, route=None)
                for group_ids in batch.groups
            )
            pending = Pending(requests=requests, works=[], summary=DeviceVector(batch.summary), ready=None)
            if self.device.type == "cpu":
                self._settle(pending)
        else:
            found, works, report, faults = self._exchanger.exchange(batch, report_ids=self.id_policy == "error")
            self._count(report)
            if faults:
                raise_ranks(faults, self._rank, self.features, self.tables)
            pending = Pending(requests=tuple(found), works=works, summary=None, ready=None)
        if self.device.type == "cuda":
            pending.ready = torch.cuda.Event()
            pending.ready.record()
        return pending

    def lookup(self, pending: Pending) -> dict[str, Tensor]:
        """Rows of the batch, pooled.

        Differentiable in training mode with gradients enabled: backward updates the tables. Otherwise (``eval()`` or
        ``torch.no_grad()``) nothing changes and Adam's step is not counted.

        Returns:
            Feature -> (num_bags, dim) for sum and mean, zeros for an empty bag; (N, dim) for none; float32. Features
            that the batch left out are absent.

        Raises:
            IndexError, ValueError: as ``exchange``, in one process on CUDA.
        """
        self._settle(pending)
        for work in pending.works:
            work.wait()
        if pending.ready is not None:
            stream = torch.cuda.current_stream(self.device)
            stream.wait_event(pending.ready)
            for tensor in pending.tensors():
                if tensor.device.type == "cuda":
                    tensor.record_stream(stream)
        training = self.training and torch.is_grad_enabled()
        if training:
            self._step += 1
        step = self._step if training else None
        if self.id_policy == "drop" and self._exchanger is None:
            for engines in self._engines:
                for engine in engines:
                    engine.clear_scratch()
        outputs: list[Tensor] = []
        if self._exchanger is None and engines_pool(self.device):
            for request, engines in zip(pending.requests, self._engines, strict=True):
                outputs += pooled_outputs(request, engines, step, self._anchor)
        else:
            outputs += self._assembled_outputs(pending, step)
        names = [feature.slot.config.name for request in pending.requests for feature in request.ids.features]
        by_name = dict(zip(names, outputs, strict=True))
        return {feature.name: by_name[feature.name] for feature in self.features if feature.name in by_name}

    def _assembled_outputs(self, pending: Pending, step: int | None) -> Sequence[Tensor]:
        blocks, rows = [], []
        for index, (request, engines) in enumerate(zip(pending.requests, self._engines, strict=True)):
            for block, found in self._lookup_group(index, request, engines, step):
                blocks.append(block)
                rows.append(found)
        group = None if self._exchanger is None else self._exchanger.process_group
        with torch.set_grad_enabled(step is not None):
            return Assemble.apply(self._anchor, pending.requests, blocks, group, *rows)

    def _lookup_group(
        self, index: int, request: GroupRequest, engines: Sequence[Engine], step: int | None
    ) -> list[tuple[RowBlock, Tensor]]:
        ids = request.rows
        if request.route is not None and request.route.by_table is not None:
            ids = ids.index_select(0, request.route.by_table)
        found = []
        table = start = 0
        for engine in engines:
            counts = list(request.counts[table : table + engine.num_tables])
            total = sum(counts)
            block = RowBlock(group=index, first_table=table, num_tables=engine.num_tables, start=start)
            if total:
                rows = engine.lookup(ids[start : start + total], counts, None, step)
            else:
                # No kernel sees an empty batch.
                rows = torch.zeros(0, request.ids.group.dim, device=self.device)
            found.append((block, rows))
            table += engine.num_tables
            start += total
        return found

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the sparse optimizer's step size, from the next lookup on."""
        if not learning_rate >= 0 or learning_rate == float("inf"):
            raise ValueError(f"set_learning_rate: `learning_rate` must be finite and at least 0, got {learning_rate}")
        for engines in self._engines:
            for engine in engines:
                engine.set_learning_rate(learning_rate)

    def out_of_range_counts(self) -> dict[tuple[str, str], int]:
        """Ids of this rank outside their table since construction: (table, feature) -> count."""
        return {
            (feature.table, feature.name): count
            for feature, count in zip(self.features, self._out_of_range, strict=True)
        }

    def _settle(self, pending: Pending) -> None:
        """Read the check of a batch, if that is still to be done."""
        report = pending.report()
        if report is not None:
            self._count(report)
            raise_local(report, self.features, self.tables, self.id_policy)

    def _count(self, report: BatchReport) -> None:
        self._out_of_range = [
            total + count for total, count in zip(self._out_of_range, report.out_of_range, strict=True)
        ]

    def _local_tables(self) -> list[tuple[TableShard, Tensor, dict[str, Tensor]]]:
        """Every table with this rank's weight (rows, dim), perhaps of no rows, and optimizer state."""
        found = []
        for group, engines in zip(self._groups, self._engines, strict=True):
            weights = [weight for engine in engines for weight in engine.weights()]
            states = [state for engine in engines for state in engine.states()]
            found += list(zip(group.tables, weights, states, strict=True))
        return found

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        step = self._step if self._counts_steps else None
        destination.update(save_tables(self._local_tables(), prefix, self._rank, self._mesh, step))

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: dict[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        loaded = load_tables(
            self._local_tables(), state_dict, prefix, self._rank, self._mesh, self._counts_steps, strict
        )
        missing_keys += loaded.missing
        unexpected_keys += loaded.unexpected
        error_msgs += loaded.errors
        if loaded.step is not None:
            self._step = loaded.step

    def extra_repr(self) -> str:
        """Tables with their placement, for ``print``."""
        lines = [
            f"{shard.config.name}: {shard.config.num_rows} x {shard.config.dim}, "
            + ("row_wise" if shard.row_wise else f"table_wise on rank {shard.owner}")
            for shard in self._shards
        ]
        return "\n".join([*lines, f"optimizer={self.optimizer.kind}, id_policy={self.id_policy}"])


def _resolve_device(device: torch.device | str | None, mesh: DeviceMesh | None) -> torch.device:
    if device is None:
        device = mesh.device_type if mesh is not None else "cpu"
    resolved = torch.device(device)
    if resolved.type not in ("cpu", "cuda"):
        raise ValueError(f"ShardedEmbeddings: `device` must be a CPU or CUDA device, got {resolved}")
    if resolved.type == "cuda" and resolved.index is None:
        resolved = torch.device("cuda", torch.cuda.current_device())
    return resolved


def needs_exchange(mesh: DeviceMesh) -> bool:
    """Whether ids travel."""
    return mesh.size() > 1


def engines_pool(device: torch.device) -> bool:
    """Whether each table has an engine of its own, which sums over bags; else one unpooled engine per dim."""
    return device.type == "cpu"


def _make_engines(
    group: Group,
    rank: int,
    optimizer: SparseOptimizerConfig,
    weight_dtype: torch.dtype,
    device: torch.device,
    seed: int,
) -> list[Engine]:
    rows = [shard.num_local_rows(rank) for shard in group.tables]
    if needs_torch_engine(optimizer, weight_dtype, device):
        return [
            TorchEngine(
                num_rows=[shard.num_local_rows(rank)],
                dim=group.dim,
                optimizer=optimizer,
                weight_dtype=weight_dtype,
                device=device,
                name=shard.config.name,
                seed=seed,
                first_row=shard.rows_of(rank)[0],
            )
            for shard in group.tables
        ]
    pools = engines_pool(device)
    return [
        FbgemmEngine(
            num_rows=part, dim=group.dim, optimizer=optimizer, weight_dtype=weight_dtype, device=device, pools=pools
        )
        for part in ([[each] for each in rows] if pools else [rows])
    ]
