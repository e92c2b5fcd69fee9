"""The embedding module."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NoReturn, SupportsIndex

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from gem_parallel._src.checks import check_number
from gem_parallel._src.embeddings.arguments import check_configs, check_options, resolve_device
from gem_parallel._src.embeddings.build import Storage, make_engines, make_store, shares_rows
from gem_parallel._src.embeddings.config import (
    FeatureConfig,
    Gather,
    IdPolicy,
    SparseOptimizerConfig,
    TableConfig,
)
from gem_parallel._src.embeddings.engine import Engine
from gem_parallel._src.embeddings.exchange import Exchanger
from gem_parallel._src.embeddings.faults import raise_local, raise_ranks, raise_rates
from gem_parallel._src.embeddings.grid import make_grid, needs_exchange, shape_of
from gem_parallel._src.embeddings.ids import BatchReport, flatten_ids, summarise
from gem_parallel._src.embeddings.initial import fill_initial
from gem_parallel._src.embeddings.joined import check_one_dim, join_rows, joined_keys, split_joined
from gem_parallel._src.embeddings.keyed import KeyedJaggedIds
from gem_parallel._src.embeddings.keyed_path import KeyedBatch, KeyedPath
from gem_parallel._src.embeddings.layout import check_local_rows, make_groups, make_shards
from gem_parallel._src.embeddings.local import LocalPath, make_local
from gem_parallel._src.embeddings.lookup import Flight, Started, by_feature, land_flights, start_flights
from gem_parallel._src.embeddings.memory import check_locations
from gem_parallel._src.embeddings.pending import GroupRequest, LocalBatch, Pending, check_pending
from gem_parallel._src.embeddings.per_table import pooled_outputs
from gem_parallel._src.embeddings.state import LocalTable, load_tables, local_tables, save_tables
from gem_parallel._src.embeddings.stores import ShardedStore, Store, Update
from gem_parallel._src.embeddings.transfer import DeviceVector
from gem_parallel._src.embeddings.update_norm import UpdateMeter
from gem_parallel._src.engine_report import require_fbgemm
from gem_parallel._src.same_settings import check_agreement

__all__ = ["ShardedEmbeddings"]


class ShardedEmbeddings(nn.Module):
    """Embedding tables over the ranks of a mesh, with their optimizer inside backward.

    A step is ``pending = exchange(ids)``, ``outputs = lookup(pending)``, ``loss.backward()``: backward sends the
    gradients to the rows' owners, sums them over the global batch and updates the rows. There is nothing to zero and
    no optimizer to step; ``parameters()`` is empty. Gradients are summed over the ranks, not averaged, so divide the
    loss by the global number of samples.

    In one process there is no collective and no deduplication. Over several ranks all of them must call ``exchange``,
    ``lookup`` and backward together, also with an empty batch, in the same mode (training or not) and with the same
    learning rate, which is compared; a batch that one rank refuses raises on all.

    It is not copied or pickled: the tables are fbgemm's memory, of which a copy would share a part.

    Args:
        tables: The tables; names unique.
        features: The streams of ids; several may share a table.
        optimizer: Fused optimizer of all tables.
        mesh: The ranks that hold the tables (``ParallelMesh.sparse``). With sparse_replicate = M above 1, sparse_shard
            ranks hold a copy of the tables together and each keeps 1 / M of its part at rest. None is one process, also
            where torch.distributed has several: each then has whole tables of its own, whatever their placement, that
            start equal and that nothing keeps equal.
        device: Where the tables live and ids are expected; default: the mesh's device type, else the CPU. ``to()`` does
            not move tables.
        seed: Initial weights depend on (seed, table name, row) only, not on the ranks; in [0, 2^63).
        weight_dtype: float32, float16 or bfloat16. Outputs and moments are float32. fbgemm rounds float16 weights
            stochastically on CUDA and to the nearest on the CPU; bfloat16 weights are rounded stochastically
            everywhere, by random bits that depend on (seed, table name, row, column, step) only.
        id_policy: What an id outside [0, num_rows) does. error: IndexError; drop: the zero vector and no gradient;
            clamp: the nearest row. Counted in every case, see ``out_of_range_counts``.
        wire_dtype: float32, float16, bfloat16 or float8_e4m3fn: what rows and gradients are rounded to while they
            travel between ranks. float16 and float8_e4m3fn rows carry a power of two each, so that none overflows or
            vanishes. Sums and updates are float32. Rows that a rank asks of itself are rounded, too; replicated
            tables and the gather of slices are not.
        gather: What a lookup fetches from the slices of the other copies. tables: all rows of the owner's tables, whose
            bytes do not depend on the batch; rows: those of the batch, with no copy of a table in memory, for large
            tables of which a batch names few rows.
        keep_gathered: With replicas, keep the gathered tables from one lookup to the next update. By default they are
            freed after each lookup; an update needs no gathered copy. Weights that are written through the state dict's
            views show after ``load_state_dict`` or an update.
        timeout_s: Longest that the host waits for the other ranks in one transfer, seconds; None is the process
            groups' own timeout. On CUDA the host waits in ``exchange`` only; NCCL's watchdog ends what hangs later.
        measure_updates: Keep the rows of each training batch as they were, for ``last_update_norm``. For finding out
            whether and how much tables train: the ranks also tell each other all ids, tables behind a cache are written
            back, and on CUDA the host waits once more per batch.

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
        wire_dtype: torch.dtype = torch.float32,
        gather: Gather = "tables",
        keep_gathered: bool = False,
        timeout_s: float | None = None,
        measure_updates: bool = False,
    ) -> None:
        super().__init__()
        check_configs(tables, features)
        check_options(
            optimizer=optimizer,
            mesh=mesh,
            seed=seed,
            weight_dtype=weight_dtype,
            id_policy=id_policy,
            wire_dtype=wire_dtype,
            gather=gather,
            keep_gathered=keep_gathered,
            timeout_s=timeout_s,
            measure_updates=measure_updates,
        )
        require_fbgemm("ShardedEmbeddings")
        self.tables = tuple(tables)
        self.features = tuple(features)
        self.optimizer = optimizer
        self.id_policy = id_policy
        self.wire_dtype = wire_dtype
        self.device = resolve_device(device, mesh)
        self._on_cuda = self.device.type == "cuda"
        several = mesh is not None and needs_exchange(mesh)
        if mesh is not None and several:
            settings = {
                "tables": list(tables),
                "features": list(features),
                "optimizer": optimizer,
                "seed": seed,
                "weight_dtype": weight_dtype,
                "id_policy": id_policy,
                "wire_dtype": wire_dtype,
                "gather": gather,
                "keep_gathered": keep_gathered,
                "measure_updates": measure_updates,
            }
            remedy = "make tables, features and options from the same values on every rank"
            check_agreement("ShardedEmbeddings", mesh, settings, remedy=remedy)
        num_shards, num_replicas = shape_of(mesh) if mesh is not None and several else (1, 1)
        self._shards = make_shards(self.tables, num_shards, num_replicas)
        check_local_rows(self._shards)
        self._groups = make_groups(self._shards, self.features, joint_columns=optimizer.kind == "rowwise_adagrad")
        check_locations(
            self._groups,
            optimizer=optimizer,
            weight_dtype=weight_dtype,
            device=self.device,
            gather=gather,
            num_replicas=num_replicas,
        )
        pieces = [shard.num_pieces for shard in self._shards if shard.num_pieces > 1]
        self._grid = make_grid(mesh, pieces, timeout_s=timeout_s) if mesh is not None and several else None
        self._rank = self._grid.rank if self._grid is not None else 0
        storage = Storage(
            optimizer=optimizer,
            weight_dtype=weight_dtype,
            wire_dtype=wire_dtype,
            gather=gather,
            keep_gathered=keep_gathered,
            device=self.device,
            seed=seed,
        )
        shard_rank = self._grid.shard_rank if self._grid is not None else 0
        replica_rank = self._grid.replica_rank if self._grid is not None else 0
        # Lists of plain objects: fbgemm's parameters and buffers must not become the model's.
        self._engines: list[list[Engine]] = [
            make_engines(group, shard_rank, replica_rank, storage) for group in self._groups
        ]
        self._stores: list[Store] = [
            make_store(group, engines, self._grid, storage)
            for group, engines in zip(self._groups, self._engines, strict=True)
        ]
        # On the CPU, in one process, engines of one table each sum over bags themselves.
        self._pools_per_table = self.device.type == "cpu" and all(
            engine.pools and engine.num_tables == 1 for engines in self._engines for engine in engines
        )
        # Adam's bias correction and stochastic rounding count the updates.
        self._counts_steps = optimizer.kind == "adam" or weight_dtype == torch.bfloat16
        combined = [shares_rows(group, num_shards, num_replicas, storage) for group in self._groups]
        self._exchanger = None
        if self._grid is not None:
            self._exchanger = Exchanger(
                self._groups, self.features, self._grid, self.device, policy=id_policy, combined=combined
            )
        self._local: LocalPath | None = None
        if self._grid is None:
            self._local = make_local(self._groups, self._engines, self.features, policy=id_policy, device=self.device)
        self._step = 0
        self._learning_rate = optimizer.learning_rate
        self._refuses_other_keys = False
        self._meter: UpdateMeter | None = None
        if measure_updates:
            self._meter = UpdateMeter(
                self.tables, self.features, id_policy=id_policy, grid=self._grid, device=self.device
            )
        self._out_of_range = [0] * len(self.features)
        self._anchor = torch.zeros(0, device=self.device, requires_grad=True)
        for table in self._local_tables():
            fill_initial(table.weight, table.shard, table.first_row, table.last_row, seed)

    def exchange(self, ids: Mapping[str, tuple[Tensor, Tensor]] | KeyedJaggedIds) -> Pending:
        """Check a batch's ids and start moving them to the ranks that own their rows.

        May run a batch ahead of ``lookup``, on any CUDA stream: rows are read at ``lookup``. Over several ranks on
        CUDA the host waits here for the current stream once, for the counts, so call it under the stream that copied
        the batch.

        Args:
            ids: Feature -> (values (N,) int64, offsets (num_bags + 1,) int64 from 0 to N), on the tables' device. The
                features' bags may differ in number. A feature left out is not looked up on this rank and is no key of
                what ``lookup`` returns; for zero vectors give it no values and num_bags + 1 zeros as offsets. Or
                ``KeyedJaggedIds``, whose features are joined already: in one process on CUDA with Triton they are
                checked and looked up as they are, if the tables of all keys have one dim, location and pooling and none
                is hashed. Else they are cut into features first, for which the host waits for the device once more.

        Raises:
            IndexError: an id outside its table under ``id_policy="error"``. In one process on CUDA it is raised by
                ``lookup`` of the same batch, before any row is written, so that this call need not wait for the device.
            ValueError: offsets that do not describe bags (raised like IndexError); an unknown feature; a wrong shape or
                device; learning rates that are not equal on all ranks.
            TypeError: a wrong type or dtype.
            RuntimeError: another rank refused its batch.
        """
        keys, joined = None, None
        if isinstance(ids, KeyedJaggedIds):
            keys, joined = ids.keys, self._exchange_joined(ids)
            ids = split_joined(ids, self._exchanger, self.device) if joined is None else {}
        if joined is not None:
            pending = joined
        elif self._local is not None:
            pending = self._exchange_locally(ids, self._local)
        else:
            pending = self._exchange(ids)
        pending.owner, pending.keys = self, keys
        if self._meter is not None:
            pending.named = {name: values for name, (values, _) in ids.items()}
        return pending

    def _exchange_joined(self, ids: KeyedJaggedIds) -> Pending | None:
        """None if features must be looked at one by one."""
        path = None if self._local is None else self._local.keyed
        if path is None or self._meter is not None:
            return None
        stream = torch.cuda.current_stream(self.device) if self._on_cuda else None
        local = path.exchange(ids, stream)
        return None if local is None else self._begun(local, path, stream)

    def _exchange_locally(self, ids: Mapping[str, tuple[Tensor, Tensor]], path: LocalPath) -> Pending:
        stream = torch.cuda.current_stream(self.device) if self._on_cuda else None
        return self._begun(path.exchange(ids, stream), path, stream)

    def _begun(
        self, local: LocalBatch | KeyedBatch, path: LocalPath | KeyedPath, stream: torch.cuda.Stream | None
    ) -> Pending:
        pending = Pending(requests=(), works=[], summary=None, ready=None, local=local, path=path, stream=stream)
        if stream is None:
            self._settle(pending)
        elif local.flag is not None:
            pending.ready = local.flag.event
        return pending

    def _exchange(self, ids: Mapping[str, tuple[Tensor, Tensor]]) -> Pending:
        if self._exchanger is None:
            batch = flatten_ids(ids, self._groups, self.features, policy=self.id_policy, device=self.device)
            requests = tuple(
                GroupRequest(ids=group_ids, rows=group_ids.values, counts=group_ids.counts, route=None)
                for group_ids in batch.groups
            )
            pending = Pending(requests=requests, works=[], summary=DeviceVector(batch.summary), ready=None)
            if self.device.type == "cpu":
                self._settle(pending)
        else:
            found = self._exchanger.exchange(ids, self._learning_rate)
            if found.report is not None:
                self._count(found.report)
            if found.faults:
                raise_ranks(found.faults, self._rank, found.groups, self.features, self.tables)
            if found.rates:
                raise_rates(found.rates)
            pending = Pending(requests=tuple(found.requests), works=found.works, summary=None, ready=None)
        if self.device.type == "cuda":
            pending.ready = torch.cuda.Event()
            pending.ready.record()
            pending.stream = torch.cuda.current_stream(self.device)
        return pending

    def start_lookup(self, pending: Pending) -> None:
        """Read the batch's rows and start sending them home; ``lookup`` of the same batch then only waits for them.

        Call it as soon as the previous batch's backward is done, and run what needs no embeddings in between. All
        ranks call it, or none. With replicas it gathers the slices of the tables first.

        Raises:
            IndexError, ValueError: as ``exchange``, in one process on CUDA.
            ValueError: a batch of another module, or one that was looked up.
            TypeError: ``pending`` is not what ``exchange`` returns.
        """
        check_pending("start_lookup", pending, self)
        if pending.started is not None:
            raise ValueError(
                "start_lookup: `pending` must be a batch that was not looked up, got one that was; exchange the next "
                "one"
            )
        if self._local is None:
            self._settle(pending)
        for work in pending.works:
            work.wait()
        if pending.ready is not None:
            stream = torch.cuda.current_stream(self.device)
            if stream != pending.stream:
                stream.wait_event(pending.ready)
                for tensor in pending.tensors():
                    if tensor.device.type == "cuda":
                        tensor.record_stream(stream)
        training = self.training and torch.is_grad_enabled()
        step = self._step + 1 if training else None
        if self._meter is not None and training:
            self._meter.start(pending.named, self._local_tables())
        if pending.local is not None:
            if pending.local.impossible:
                self._settle(pending)
            if training:
                sums = pending.path.read(pending.local, step)
            else:
                with torch.no_grad():
                    sums = pending.path.read(pending.local, None)
            # The device has work while the host waits for the check.
            self._settle(pending)
            self._step = step or self._step
            pending.started = Started(step=step, learning_rate=self._learning_rate, flights=None, sums=sums)
            return
        self._step = step or self._step
        if self.id_policy == "drop" and self._exchanger is None:
            for engines in self._engines:
                for engine in engines:
                    engine.clear_scratch()
        flights: list[Flight] | None = None
        if self._exchanger is not None or not self._pools_per_table:
            flights = start_flights(
                pending.requests, self._stores, step=step, grid=self._grid, wire_dtype=self.wire_dtype
            )
        pending.started = Started(step=step, learning_rate=self._learning_rate, flights=flights)

    def lookup(self, pending: Pending) -> dict[str, Tensor]:
        """Rows of the batch, pooled.

        Differentiable in training mode with gradients enabled: backward updates the tables. Otherwise (``eval()`` or
        ``torch.no_grad()``) nothing changes and Adam's step is not counted.

        Returns:
            Feature -> (num_bags, dim) for sum and mean, zeros for an empty bag; (N, dim) for none; float32. Features
            that the batch left out are absent. They are views of one tensor per dim, which autograd refuses to change
            in place.

        Raises:
            IndexError, ValueError, TypeError: as ``start_lookup``.
        """
        started = self._begin("lookup", pending)
        if pending.local is None:
            found = self._assemble(pending, started)
        else:
            sums, started.sums = started.sums, []
            training = started.step is not None
            with nullcontext() if torch.is_grad_enabled() is training else torch.set_grad_enabled(training):
                found = pending.path.outputs(pending.local, sums)
        if pending.keys is not None:
            found = {key: found[key] for key in pending.keys}
        if self._meter is not None and started.step is not None:
            self._meter.watch(found.values())
        return found

    def lookup_joined(self, pending: Pending) -> Tensor:
        """Rows of a batch of ``KeyedJaggedIds`` as one tensor, in place of ``lookup``.

        In one process on CUDA (see ``exchange`` for when) it is what the lookup wrote, and its gradient is what the
        update reads: nothing is cut or copied. Elsewhere the features' rows are copied into it.

        Returns:
            (rows, dim) float32: those of the first key, then the second key's, as ``lookup`` gives them. With F keys of
            B bags, pooled, it is (F * B, dim): ``rows.view(F, B, dim).transpose(0, 1)`` is (B, F, dim).

        Raises:
            ValueError: the batch came as a mapping, or the keys' tables have several dims; it can still be looked up.
            IndexError, ValueError, TypeError: as ``start_lookup``.
        """
        check_pending("lookup_joined", pending, self)
        keys = joined_keys(pending)
        if isinstance(pending.local, KeyedBatch):
            started = self._begin("lookup_joined", pending)
            (rows,), started.sums = started.sums, []
            return rows
        check_one_dim(keys, self.features, self.tables)
        return join_rows(keys, self.lookup(pending))

    def _begin(self, function: str, pending: Pending) -> Started:
        """Start the lookup if that is still to be done, and take it."""
        check_pending(function, pending, self)
        if pending.started is None:
            self.start_lookup(pending)
        started: Started = pending.started
        if started.done:
            raise ValueError(
                f"{function}: `pending` must be a batch that was not looked up, got one that was; exchange the next one"
            )
        started.done = True
        return started

    def _assemble(self, pending: Pending, started: Started) -> dict[str, Tensor]:
        """Each feature's rows, where engines do not pool all features at once."""
        flights, started.flights = started.flights, None
        outputs: list[Tensor] = []
        if flights is None:
            for request, engines in zip(pending.requests, self._engines, strict=True):
                outputs += pooled_outputs(request, engines, started.step, self._anchor)
        else:
            update = None
            if started.step is not None:
                update = Update(step=started.step, learning_rate=started.learning_rate)
            outputs += land_flights(flights, self._anchor, update, grid=self._grid, wire_dtype=self.wire_dtype)
        return by_feature(pending.requests, outputs, self.features)

    @property
    def learning_rate(self) -> float:
        """Step size of the next lookup's update."""
        return self._learning_rate

    def set_learning_rate(self, learning_rate: float) -> None:
        """Set the sparse optimizer's step size, from the next lookup on.

        Equal on all ranks: the next ``exchange`` compares it, with the counts that the ranks tell each other anyway.

        Raises:
            TypeError, ValueError: no number, or one that is negative or not finite.
        """
        check_number("set_learning_rate", "learning_rate", learning_rate)
        learning_rate = float(learning_rate)
        if not learning_rate >= 0 or learning_rate == float("inf"):
            raise ValueError(
                f"set_learning_rate: `learning_rate` must be finite and at least 0, got {learning_rate}; pass such a "
                "number"
            )
        self._learning_rate = learning_rate
        for engines in self._engines:
            for engine in engines:
                engine.set_learning_rate(learning_rate)

    def out_of_range_counts(self) -> dict[tuple[str, str], int]:
        """Ids of this rank outside their table since construction: (table, feature) -> count."""
        return {
            (feature.table, feature.name): count
            for feature, count in zip(self.features, self._out_of_range, strict=True)
        }

    @property
    def process_groups(self) -> dict[str, dist.ProcessGroup]:
        """The groups of ranks that transfers run in, named for a ``RankWatch``; none in one process."""
        if self._grid is None:
            return {}
        links = {"tables": self._grid.everyone, "shards": self._grid.shards, "copies": self._grid.copies}
        return {name: link.process_group for name, link in links.items() if link is not None}

    def last_update_norm(self) -> dict[str, float]:
        """2-norm of what the last training batch's update did to each table, by name; 0 where nothing moved.

        Over the rows that the batch names, of all ranks, as the weights are stored. Call it after backward, on all
        ranks together. ``parameters()`` is empty and nothing has a gradient, so this is how to see that tables train.

        Raises:
            RuntimeError: ``measure_updates`` is off, no training lookup has started yet, or backward of the last one
                has reached this module on no rank.
        """
        if self._meter is None:
            raise RuntimeError(
                "last_update_norm: rows must be kept from before the update, got measure_updates=False; construct "
                "ShardedEmbeddings with measure_updates=True"
            )
        return self._meter.norms(self._local_tables())

    def _settle(self, pending: Pending) -> None:
        """Read the check of a batch, if that is still to be done."""
        if self._local is not None:
            assert pending.local is not None
            if pending.local.flag is None:
                return
            try:
                faulty = pending.path.faults(pending.local)
            except ValueError:
                pending.started = Started.refused()
                raise
            report = None if faulty is None else summarise(faulty.summary.tolist())
            batch = () if faulty is None else faulty.groups
        else:
            report = pending.report()
            batch = tuple(request.ids for request in pending.requests)
        if report is not None:
            self._count(report)
            # Whoever catches the error has no batch to look up.
            pending.started = Started.refused()
            raise_local(report, batch, self.features, self.tables, self.id_policy)
            pending.started = None

    def _count(self, report: BatchReport) -> None:
        self._out_of_range = [
            total + count for total, count in zip(self._out_of_range, report.out_of_range, strict=True)
        ]

    def _local_tables(self) -> list[LocalTable]:
        return local_tables(self._groups, self._engines, self._grid)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        step = self._step if self._counts_steps else None
        destination.update(save_tables(self._local_tables(), prefix, self._grid, step))

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Copy a state dict into the tables.

        Args:
            state_dict: As ``state_dict`` gives it: DTensors as they lie here, or whole plain tensors, of any float
                dtype, rounded to the table's. Numbers are taken as they are, NaN and infinity too.
            strict: Refuse missing and unknown keys, and then change nothing. False takes what is there, for example
                weights without an optimizer's state, and returns the keys that were not used or not found.
            assign: Must be False: tables are not replaced.

        Raises:
            RuntimeError: a tensor that does not fit, or as ``strict``; nothing is changed.
            ValueError: ``assign``.
        """
        if assign:
            raise ValueError(
                "load_state_dict: `assign` must be False, as fbgemm holds the tables, got True; leave it out"
            )
        self._refuses_other_keys = strict
        try:
            return super().load_state_dict(state_dict, strict=strict)
        finally:
            self._refuses_other_keys = False

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
        # torch passes strict=True whatever its caller said. Loaded as part of another module, what fits is taken, as by
        # every module of torch, and the outermost call raises.
        strict = self._refuses_other_keys
        loaded = load_tables(self._local_tables(), state_dict, prefix, self._grid, self._counts_steps, strict)
        for store in self._stores:
            if isinstance(store, ShardedStore) and store.gathered is not None:
                store.gathered.stale()
        missing_keys += loaded.missing
        unexpected_keys += loaded.unexpected
        error_msgs += loaded.errors
        if loaded.step is not None:
            self._step = loaded.step

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuse ``copy.copy``, ``copy.deepcopy``, pickle and ``torch.save`` of the module.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            "ShardedEmbeddings: a module must not be copied or pickled, as fbgemm and the process groups hold parts of "
            "it, got copy, deepcopy or pickle; construct a second module and call its "
            "load_state_dict(module.state_dict()), or save module.state_dict()"
        )

    def extra_repr(self) -> str:
        """Tables with their placement, for ``print``."""
        lines = []
        for shard in self._shards:
            columns = f", columns from {shard.first_column}" if shard.num_pieces > 1 else ""
            place = {"rows": "row_wise", "replicated": "replicated", "whole": f"on rank {shard.owner}"}[shard.kind]
            place += "" if shard.config.location == "device" else f", {shard.config.location}"
            lines.append(f"{shard.config.name}: {shard.config.num_rows} x {shard.dim}{columns}, {place}")
        if self._grid is not None:
            lines.append(f"{self._grid.num_shards} ranks hold a copy, {self._grid.num_replicas} replicas")
        return "\n".join([*lines, f"optimizer={self.optimizer.kind}, id_policy={self.id_policy}"])
