"""Everything about one layout: placement, memory, traffic, step time, MFU, and what to change."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from gem_parallel._src.mesh import ParallelDims
from gem_parallel._src.param_wire import ParamWire
from gem_parallel._src.planner.description import ModelDescription, SparseTable, TableKind, Workload, check_ranks
from gem_parallel._src.planner.hardware import Hardware
from gem_parallel._src.planner.locations import check_host_memory, check_locations, locate_tables
from gem_parallel._src.planner.memory import MemoryPlan, plan_memory
from gem_parallel._src.planner.network import Collective
from gem_parallel._src.planner.tables import Strategy, TablePlan, check_rows, place_tables
from gem_parallel._src.planner.timeline import ComputeSeconds, Scales, StepPlan, compute_seconds, simulate
from gem_parallel._src.planner.traffic import SparseTraffic, UnitTraffic, sparse_traffic, unit_traffic
from gem_parallel._src.topology import Topology

__all__ = ["Change", "PlanReport", "Term", "explain"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Term:
    """One thing that takes time."""

    name: str
    gain: float
    """Seconds that the step would be shorter if this took half its time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Change:
    """Something that could be done differently."""

    name: str
    seconds: float
    """Predicted step."""
    peak_bytes: float
    """Predicted peak memory."""
    fits: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanReport:
    """What a layout costs. Times in seconds, sizes in bytes, of the heaviest rank unless said otherwise."""

    model: ModelDescription
    topology: Topology
    dims: ParallelDims
    workload: Workload
    hardware: Hardware
    strategy: Strategy
    """How tables left to ``auto`` were placed."""
    tables: TablePlan
    units: tuple[UnitTraffic, ...]
    sparse: SparseTraffic
    memory: MemoryPlan
    compute: ComputeSeconds
    """Of the heaviest rank."""
    mean_compute: ComputeSeconds
    step: StepPlan
    balanced_seconds: float
    """The step if all ranks had the mean's work."""
    terms: tuple[Term, ...]
    """Largest gain first: the first is the limiting term."""
    changes: tuple[Change, ...]
    """Shortest step first; only those that are shorter than this step."""

    @property
    def collectives(self) -> tuple[Collective, ...]:
        """All collectives of a step."""
        return (*self.sparse.all(), *(each for unit in self.units for each in unit.all()))

    @property
    def flops_per_rank(self) -> float:
        """Model FLOPs of one step on the mean rank."""
        return self.model.model_flops * self.workload.samples_per_rank

    @property
    def local_mfu(self) -> float:
        """Of the dense layers alone on one device: no recomputation, no communication, mean work."""
        dense = self.mean_compute.dense
        return self.flops_per_rank / (dense * self.hardware.peak_flops.value) if dense else 0.0

    @property
    def mfu(self) -> float:
        """End to end: local MFU times the scaling ratio."""
        return self.flops_per_rank / (self.step.seconds * self.hardware.peak_flops.value)

    @property
    def scaling_ratio(self) -> float:
        """Dense time of the mean rank / step."""
        return self.mean_compute.dense / self.step.seconds

    @property
    def samples_per_second(self) -> float:
        """Over all ranks."""
        return self.workload.samples_per_rank * self.dims.world_size / self.step.seconds

    def losses(self) -> dict[str, float]:
        """Where the seconds of a step go; they sum to the step."""
        mean = self.mean_compute
        parts = {
            "dense forward and backward": mean.dense,
            "recomputation": sum(mean.recompute),
            "casts of parameters on the wire": mean.wire,
            "lookup, pooling and table update": mean.lookup + mean.update + 2 * mean.pooling,
            "dense optimizer": mean.optimizer,
            "waiting for the heaviest rank": self.compute.total - mean.total,
            "compute lost to collectives": max(0.0, self.step.compute - self.compute.total),
        }
        return parts | {f"exposed on {tier}": seconds for tier, seconds in self.step.exposed.items()}


def explain(
    model: ModelDescription,
    topology: Topology,
    dims: ParallelDims,
    workload: Workload,
    *,
    hardware: Hardware | None = None,
    strategy: Strategy = "size",
    kinds: Sequence[TableKind] = ("table_wise", "row_wise"),
    changes: bool = True,
    tables: TablePlan | None = None,
    wires: Sequence[ParamWire] = (),
) -> PlanReport:
    """Predict a step without a GPU or a process.

    Step = max over ranks of (compute, with what communication it cannot hide), as in Meta's post on GEM training of
    2026-08-03; transfer times by latency + bytes / bandwidth of each tier; E2E MFU = local MFU * scaling ratio.

    Args:
        model: The model.
        topology: As many GPUs as ``dims`` has ranks. An axis may leave its tier; the report's tiers say so.
        dims: The layout. In a model without experts the ranks of ep only shard, as those of dp_shard.
        workload: Batch and precision.
        hardware: Measured rates; default: those of an H200.
        strategy: Placement of tables, see ``place_tables``.
        kinds: What the placement may choose under ``cost``.
        changes: Whether to search for what would help most.
        tables: The placement, if it was made before, by ``place_tables`` with the same arguments.
        wires: Forms of parameters between ranks to try among the changes.

    Raises:
        ValueError: more than 65,536 GPUs, another number of them than ranks, more ranks of ep than experts, more rows
            of a table on one rank than fbgemm can index, or tables in host memory that are larger than it or cannot
            lie there.
    """
    check_ranks("explain", topology.num_gpus)
    if topology.num_gpus != dims.world_size:
        raise ValueError(
            f"explain: `topology` must have as many GPUs as `dims` has ranks, {dims.world_size}, got "
            f"{topology.num_gpus}; use topology.resized({dims.world_size})"
        )
    few = [unit for unit in model.units if 1 < unit.num_experts < dims.ep]
    if few:
        raise ValueError(
            f"explain: `dims.ep` must be at most the {few[0].num_experts} experts of unit {few[0].name!r}, "
            f"got {dims.ep}; lower ep"
        )
    hardware = hardware or Hardware.load()
    capacities = hardware.memory_bytes.value, hardware.host_memory_bytes.value

    def place(described: Sequence[SparseTable]) -> TablePlan:
        return place_tables(
            described,
            dims.sparse_shard,
            workload,
            hardware,
            strategy=strategy,
            kinds=kinds,
            memory_bytes=0.5 * hardware.memory_bytes.value,
            replicas=dims.sparse_replicate,
        )

    def memory_of(plan: TablePlan) -> MemoryPlan:
        return plan_memory(model, plan, dims, workload, *capacities)

    plan = tables or place(model.tables)
    if any(table.location == "auto" for table in model.tables):
        plan = locate_tables(
            model.tables,
            plan,
            dims,
            workload,
            place=place,
            peak=lambda plan: memory_of(plan).peak.total,
            limit=0.9 * capacities[0],
        )
    check_rows(plan, dims.sparse_shard, dims.sparse_replicate)
    check_locations(plan, dims, workload)
    memory = memory_of(plan)
    check_host_memory(memory, dims)
    units = tuple(unit_traffic(unit, dims, workload, topology) for unit in model.units)
    sparse = sparse_traffic(model, plan, dims, workload, topology)
    heavy = compute_seconds(model, plan, dims, workload, hardware, heaviest=True)
    mean = compute_seconds(model, plan, dims, workload, hardware, heaviest=False)

    def run(seconds: ComputeSeconds, scales: Scales | None = None) -> StepPlan:
        return simulate(model, dims, topology, seconds, units, sparse, workload, scales)

    step = run(heavy)
    balanced = run(mean).seconds
    terms: list[Term] = []
    if changes:
        halves = {
            "dense compute": Scales(dense=0.5),
            "lookup and table update": Scales(tables=0.5),
            "dense optimizer": Scales(optimizer=0.5),
            "links inside hosts": Scales(host=0.5),
            "links inside zones": Scales(zone=0.5),
            "links between zones": Scales(cluster=0.5),
            "latency of collectives": Scales(latency=0.5),
        }
        terms = [Term(name=name, gain=step.seconds - run(heavy, scales).seconds) for name, scales in halves.items()]
        terms.append(Term(name="imbalance of ranks", gain=(step.seconds - balanced) / 2))
        terms.sort(key=lambda term: -term.gain)
    report = PlanReport(
        model=model,
        topology=topology,
        dims=dims,
        workload=workload,
        hardware=hardware,
        strategy=strategy,
        tables=plan,
        units=units,
        sparse=sparse,
        memory=memory,
        compute=heavy,
        mean_compute=mean,
        step=step,
        balanced_seconds=balanced,
        terms=tuple(terms),
        changes=(),
    )
    return replace(report, changes=_changes(report, strategy, kinds, wires)) if changes else report


def _changes(
    report: PlanReport, strategy: Strategy, kinds: Sequence[TableKind], wires: Sequence[ParamWire]
) -> tuple[Change, ...]:
    """Predict every neighbour of a plan; keep the shorter ones."""
    model, topology, dims, workload = report.model, report.topology, report.dims, report.workload

    def predict(
        *,
        model: ModelDescription = model,
        dims: ParallelDims = dims,
        workload: Workload = workload,
        strategy: Strategy = strategy,
    ) -> PlanReport:
        return explain(
            model,
            topology,
            dims,
            workload,
            hardware=report.hardware,
            strategy=strategy,
            kinds=kinds,
            changes=False,
        )

    tries: dict[str, Callable[[], PlanReport]] = {}
    if workload.gather_bytes == 4:
        tries["gather parameters in bfloat16"] = lambda: predict(workload=replace(workload, gather_bytes=2))
    for wire in wires if workload.param_wire is None else ():
        tries[f"gather parameters as {wire.name}"] = lambda wire=wire: predict(  # type: ignore[misc]
            workload=replace(workload, param_wire=wire)
        )
    if workload.reduce_bytes == 4:
        tries["reduce gradients in bfloat16"] = lambda: predict(workload=replace(workload, reduce_bytes=2))
    if workload.row_bytes == 4 and model.tables:
        tries["embedding rows in 16 bits on the wire"] = lambda: predict(workload=replace(workload, row_bytes=2))
    if workload.table_gather == "tables" and dims.sparse_replicate > 1 and model.tables:
        tries["fetch the batch's rows of table copies, not whole tables"] = lambda: predict(
            workload=replace(workload, table_gather="rows")
        )
    if workload.imbalance > 1:
        tries["balance the lengths of histories over ranks"] = lambda: predict(
            workload=replace(workload, imbalance=1.0)
        )
    if workload.recompute > 0:
        tries["keep activations instead of recomputing them"] = lambda: predict(
            workload=replace(workload, recompute=0.0)
        )
    if workload.contention > 0:
        tries["collectives on copy engines (no SMs)"] = lambda: predict(workload=replace(workload, contention=0.0))
    if strategy == "size" and model.tables and dims.sparse_shard > 1:
        tries["place tables by cost"] = lambda: predict(strategy="cost")
    if not report.memory.fits and any(table.location == "device" for table in model.tables):
        located = tuple(
            replace(table, location="auto") if table.location == "device" else table for table in model.tables
        )
        tries["the least used tables in host memory behind a cache (uvm_caching)"] = lambda: predict(
            model=replace(model, tables=located)
        )
    experts = [unit.num_experts for unit in model.units if unit.num_experts > 1]
    for name, other in _neighbours(dims, min(experts, default=1)).items():
        try:
            other.check(topology)
        except ValueError:
            continue
        tries[name] = lambda other=other: predict(dims=other)  # type: ignore[misc]
    found = []
    for name, attempt in tries.items():
        try:
            result = attempt()
        except ValueError:
            # What would be refused is no remedy.
            continue
        if result.step.seconds < 0.995 * report.step.seconds or (result.memory.fits and not report.memory.fits):
            found.append(
                Change(
                    name=name,
                    seconds=result.step.seconds,
                    peak_bytes=result.memory.peak.total,
                    fits=result.memory.fits,
                )
            )
    return tuple(sorted(found, key=lambda change: (not change.fits, change.seconds)))


def _neighbours(dims: ParallelDims, num_experts: int) -> dict[str, ParallelDims]:
    """Layouts that double or halve one degree at the cost of another."""
    degrees = {axis: getattr(dims, axis) for axis in ("dp_replicate", "dp_shard", "ep")}
    sparse = {"sparse_replicate": dims.sparse_replicate, "sparse_shard": dims.sparse_shard}
    found = {}
    for group in (degrees, sparse):
        for up in group:
            for down in group:
                if up == down or group[down] % 2 or (up == "ep" and 2 * dims.ep > num_experts):
                    continue
                other = {**degrees, **sparse, up: group[up] * 2, down: group[down] // 2}
                found[f"{up} {group[up] * 2}, {down} {group[down] // 2}"] = ParallelDims(**other)
    return found
