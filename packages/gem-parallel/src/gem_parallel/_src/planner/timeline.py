"""One step as a schedule: compute in order, collectives beside it on the links of each tier."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from gem_parallel._src.mesh import ParallelDims
from gem_parallel._src.planner.description import DenseUnit, ModelDescription, Workload
from gem_parallel._src.planner.hardware import Hardware
from gem_parallel._src.planner.network import Collective, Group, all_reduce
from gem_parallel._src.planner.tables import TablePlan
from gem_parallel._src.planner.traffic import SparseTraffic, UnitTraffic, dense_groups, gathered_bytes, shard_elements
from gem_parallel._src.topology import TIERS, Tier, Topology

__all__ = ["ComputeSeconds", "Interval", "Scales", "StepPlan", "compute_seconds", "simulate"]

OPTIMIZER_BYTES = 28
"""Per parameter: AdamW in float32 reads weight, gradient and two moments and writes three of them."""
ENCODE_BYTES = 7
"""Per element of a shard: the master weight is read, the code written, and copied into its row."""
DECODE_BYTES = 3
"""Per element of a whole parameter: codes are copied out of their rows and read. The value is written, and copied to
where the parameter lies."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scales:
    """Factors on times, for what-ifs."""

    dense: float = 1.0
    tables: float = 1.0
    optimizer: float = 1.0
    host: float = 1.0
    zone: float = 1.0
    cluster: float = 1.0
    latency: float = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """Something that runs, in seconds from the start of the step."""

    lane: str
    """compute, or the widest tier of a collective."""
    name: str
    start: float
    end: float


@dataclass(frozen=True, kw_only=True, slots=True)
class StepPlan:
    """A scheduled step of one rank."""

    intervals: tuple[Interval, ...]
    seconds: float
    compute: float
    """Seconds in which compute runs."""
    exposed: dict[str, float]
    """Tier -> seconds in which compute waits for a collective of it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ComputeSeconds:
    """One rank's work, nothing in its way."""

    forward: tuple[float, ...]
    """By unit."""
    backward: tuple[float, ...]
    recompute: tuple[float, ...]
    lookup: float
    update: float
    pooling: float
    optimizer: float
    casts: tuple[float, ...]
    """By unit, of one gather of parameters that travel in a form of their own."""
    num_gathers: tuple[int, ...]
    """By unit."""

    @property
    def wire(self) -> float:
        """All casts of a step."""
        return sum(each * times for each, times in zip(self.casts, self.num_gathers, strict=True))

    @property
    def dense(self) -> float:
        """Forward and backward of the model's layers: what local MFU divides by."""
        return sum(self.forward) + sum(self.backward)

    @property
    def total(self) -> float:
        """All of it."""
        tables = self.lookup + self.update + 2 * self.pooling
        return self.dense + sum(self.recompute) + tables + self.optimizer + self.wire


def _unit_seconds(unit: DenseUnit, samples: float, hardware: Hardware) -> tuple[float, float]:
    gemm = unit.gemm_flops * samples / hardware.gemm_rate(unit.gemm_width)
    moved = unit.activation_bytes * samples * hardware.activation_passes.value / hardware.copy.value
    attention = unit.attention_flops * samples
    rate_forward, rate_backward = hardware.attention_rates(unit.attention_width)
    forward = gemm + attention / rate_forward + moved
    return forward, 2 * gemm + 2.5 * attention / rate_backward + 2 * moved


def compute_seconds(
    model: ModelDescription,
    plan: TablePlan,
    dims: ParallelDims,
    workload: Workload,
    hardware: Hardware,
    *,
    heaviest: bool,
) -> ComputeSeconds:
    """Seconds by measured rates, of the heaviest rank or of the mean."""
    samples = workload.samples_per_rank * (workload.imbalance if heaviest else 1.0)
    pairs = [_unit_seconds(unit, samples, hardware) for unit in model.units]
    serving = [
        (
            rows / hardware.embedding_read.value + read / hardware.host_read.value,
            rows / hardware.embedding_update.value + updated / hardware.host_update.value,
        )
        for rows, read, updated in zip(plan.served_bytes, plan.host_read_bytes, plan.host_update_bytes, strict=True)
    ]
    lookup, update = (
        max(serving, key=sum) if heaviest else [sum(each) / len(serving) for each in zip(*serving, strict=True)]
    )
    outputs = sum(table.outputs_per_sample * table.dim * 4 for table in model.tables) * samples
    owned = sum(shard_elements(unit, dims) for unit in model.units)
    return ComputeSeconds(
        forward=tuple(forward for forward, _ in pairs),
        backward=tuple(backward for _, backward in pairs),
        recompute=tuple(workload.recompute * forward for forward, _ in pairs),
        lookup=lookup + plan.local_bytes / hardware.embedding_read.value,
        update=update + plan.local_bytes / hardware.embedding_update.value,
        # Every output row is read from where the exchange put it, and written.
        pooling=2 * outputs / hardware.copy.value,
        optimizer=owned * OPTIMIZER_BYTES / hardware.copy.value,
        casts=tuple(_cast_seconds(unit, dims, workload, hardware) for unit in model.units),
        num_gathers=tuple(1 + unit.reshard_after_forward for unit in model.units),
    )


def _cast_seconds(unit: DenseUnit, dims: ParallelDims, workload: Workload, hardware: Hardware) -> float:
    """To encode a rank's shard and to decode what came, by the copy rate."""
    encoded = gathered_bytes(unit, dims, workload)[1]
    narrowed = 2 * workload.gather_bytes if workload.gather_bytes < 4 else 0
    shard = encoded * (ENCODE_BYTES + narrowed)
    whole = encoded * dense_groups(unit, dims)[0].degree * (DECODE_BYTES + 3 * workload.gather_bytes)
    return (shard + whole) / hardware.copy.value


class _Clock:
    """Times at which compute, each link and each stream of collectives are free."""

    def __init__(self, topology: Topology, scales: Scales, slowdown: float) -> None:
        self._topology = topology
        self._scales = scales
        self._slowdown = slowdown
        self._compute = 0.0
        self._links = dict.fromkeys(TIERS, 0.0)
        self._streams: dict[str, float] = {}
        self.intervals: list[Interval] = []
        self.exposed: dict[str, float] = dict.fromkeys(TIERS, 0.0)
        self.busy = 0.0
        self._cause: dict[float, tuple[float, Tier]] = {}
        """End of a collective -> its start and slowest tier."""

    def compute(self, name: str, seconds: float, after: Iterable[float] = ()) -> float:
        """Run on the compute stream; returns the end."""
        ready = max(after, default=0.0)
        self._blame(ready)
        start = max(self._compute, ready)
        self._compute = start + seconds * self._slowdown
        self.busy += self._compute - start
        if seconds:
            self.intervals.append(Interval(lane="compute", name=name, start=start, end=self._compute))
        return self._compute

    def send(self, collective: Collective | None, stream: str, after: float = 0.0) -> float:
        """Run a collective when its stream and links are free; returns the end."""
        if collective is None:
            return after
        scale = {tier: getattr(self._scales, tier) for tier in TIERS}
        busy = {
            tier: seconds * scale[tier]
            for tier, seconds in zip(TIERS, collective.busy(self._topology), strict=True)
            if seconds
        }
        start = max([after, self._streams.get(stream, 0.0), *(self._links[tier] for tier in busy)])
        for tier, seconds in busy.items():
            self._links[tier] = start + seconds
        latency = collective.latency(self._topology) * self._scales.latency
        end = start + latency + max(busy.values(), default=0.0)
        self._streams[stream] = end
        slowest = max(busy, key=lambda tier: busy[tier]) if busy else collective.tier
        self._cause[end] = (start, slowest)
        self.intervals.append(Interval(lane=slowest, name=collective.name, start=start, end=end))
        return end

    def _blame(self, ready: float) -> None:
        """Book the wait for ``ready`` on the collectives that it is a chain of, last one first."""
        until = ready
        while until > self._compute:
            start, tier = self._cause.get(until, (self._compute, "host"))
            since = max(start, self._compute)
            if since not in self._cause:
                # It started when a link came free: the rest of the wait is for the same tier.
                since = self._compute
            self.exposed[tier] += until - since
            until = since

    @property
    def now(self) -> float:
        return self._compute


def simulate(
    model: ModelDescription,
    dims: ParallelDims,
    topology: Topology,
    seconds: ComputeSeconds,
    units: tuple[UnitTraffic, ...],
    sparse: SparseTraffic,
    workload: Workload,
    scales: Scales | None = None,
) -> StepPlan:
    """Schedule one step in the order of the trainer.

    Lookup, forward with the next unit's parameters gathered one unit ahead, backward with gradients reduced beside it,
    row gradients home and into the tables, norm, optimizer. The next batch's ids travel during forward. Where
    collectives take compute from the kernels, the slowdown is that of the overlapped share, found in a second pass.
    """
    scales = scales or Scales()
    clock = _schedule(model, dims, topology, seconds, units, sparse, scales, 1.0)
    if workload.contention:
        hidden = _overlap(clock.intervals)
        share = hidden / clock.busy if clock.busy else 0.0
        slowdown = 1 + share * workload.contention / (1 - workload.contention)
        clock = _schedule(model, dims, topology, seconds, units, sparse, scales, slowdown)
    return StepPlan(
        intervals=tuple(clock.intervals), seconds=clock.now, compute=clock.busy, exposed=dict(clock.exposed)
    )


def _schedule(
    model: ModelDescription,
    dims: ParallelDims,
    topology: Topology,
    seconds: ComputeSeconds,
    units: tuple[UnitTraffic, ...],
    sparse: SparseTraffic,
    scales: Scales,
    slowdown: float,
) -> _Clock:
    clock = _Clock(topology, scales, slowdown)
    last = len(model.units) - 1
    names = [unit.name or "(root)" for unit in model.units]
    gathered = [0.0] * len(units)
    gathered[0] = clock.send(units[0].forward_gather, "gather")
    slices = clock.send(sparse.slices, "copies")
    asked = clock.send(sparse.slice_ids, "copies")
    ready = slices if sparse.slice_rows is None else asked
    looked_up = clock.compute("lookup", seconds.lookup * scales.tables, [ready])
    rows = clock.send(sparse.rows, "sparse", clock.send(sparse.slice_rows, "copies", looked_up))
    counted = clock.send(sparse.copy_counts, "copies", clock.send(sparse.counts, "sparse", rows))
    clock.send(sparse.ids, "sparse", counted)
    clock.compute("pooling", seconds.pooling * scales.tables, [rows])
    before = 0.0
    for at, traffic in enumerate(units):
        if at < last:
            # One unit ahead: its buffer is free once the unit before this one is done.
            gathered[at + 1] = clock.send(units[at + 1].forward_gather, "gather", before)
        before = clock.now
        ready = gathered[at]
        if traffic.expert_forward is not None:
            ready = max(ready, clock.send(traffic.expert_forward[0], "ep", clock.now))
        clock.compute(f"{names[at]} wire", seconds.casts[at] * scales.dense, [gathered[at]])
        end = clock.compute(f"{names[at]} forward", seconds.forward[at] * scales.dense, [ready])
        if traffic.expert_forward is not None:
            clock.compute("", 0.0, [clock.send(traffic.expert_forward[1], "ep", end)])
    ends: list[float] = []
    gathered[last] = clock.send(units[last].backward_gather, "gather", clock.now)
    before = clock.now
    for at in range(last, -1, -1):
        traffic = units[at]
        if at:
            gathered[at - 1] = clock.send(units[at - 1].backward_gather, "gather", before)
        before = clock.now
        ready = gathered[at]
        if traffic.expert_backward is not None:
            ready = max(ready, clock.send(traffic.expert_backward[0], "ep", clock.now))
        if seconds.num_gathers[at] > 1:
            clock.compute(f"{names[at]} wire", seconds.casts[at] * scales.dense, [gathered[at]])
        work = (seconds.backward[at] + seconds.recompute[at]) * scales.dense
        end = clock.compute(f"{names[at]} backward", work, [ready])
        reduced = clock.send(traffic.reduce, "reduce", end)
        ends += [reduced, clock.send(traffic.replicate, "replicate", reduced)]
        if traffic.expert_backward is not None:
            clock.compute("", 0.0, [clock.send(traffic.expert_backward[1], "ep", end)])
    pooled = clock.compute("pooling backward", seconds.pooling * scales.tables)
    home = clock.send(sparse.gradients, "sparse", pooled)
    ends.append(clock.send(sparse.replicated, "replicate", pooled))
    home = clock.send(sparse.slice_gradients, "copies", home)
    clock.compute("table update", seconds.update * scales.tables, [home])
    clock.compute("", 0.0, ends)
    if dims.world_size > 1:
        group = Group(axis="dp_shard", degree=dims.dp_shard * dims.ep)
        if group.degree > 1:
            norm = all_reduce("gradient norm", "update", group, 8, topology)
            clock.compute("", 0.0, [clock.send(norm, "reduce", clock.now)])
    clock.compute("optimizer", seconds.optimizer * scales.optimizer)
    return clock


def _overlap(intervals: list[Interval]) -> float:
    """Seconds of compute under which a collective runs."""
    sent = sorted((each.start, each.end) for each in intervals if each.lane != "compute")
    merged: list[list[float]] = []
    for start, end in sent:
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    total, at = 0.0, 0
    for each in (interval for interval in intervals if interval.lane == "compute"):
        while at < len(merged) and merged[at][1] <= each.start:
            at += 1
        index = at
        while index < len(merged) and merged[index][0] < each.end:
            total += min(each.end, merged[index][1]) - max(each.start, merged[index][0])
            index += 1
    return total
