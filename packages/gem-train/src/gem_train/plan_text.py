"""A plan as text."""

from __future__ import annotations

from collections.abc import Sequence

from gem_parallel.planner import CATEGORIES, Collective, PlanReport, Rate

__all__ = ["digits", "format_front", "format_plan"]

TIERS = ("host", "zone", "cluster")
UNITS = {
    "peak_flops": "FLOP/s",
    "memory_bytes": "B",
    "host_memory_bytes": "B",
    "activation_passes": "bytes moved / saved",
}
"""Of the fields of Hardware that are no bytes a second."""
MAX_CHANGES = 5


def format_plan(report: PlanReport) -> str:
    """All that a plan says, in sections.

    Args:
        report: From gem_parallel.planner.explain.
    """
    model, work = report.model, report.workload
    head = (
        f"{model.name}: {_count(model.num_dense_parameters)} dense and {_count(model.num_sparse_parameters)} table "
        f"parameters, {_count(model.model_flops)}FLOP a sample forward and backward\n"
        f"{work.samples_per_rank} samples a rank, {work.samples_per_rank * report.dims.world_size:,} a step"
    )
    sections = [
        ("", head),
        ("layout", report.dims.describe(report.topology)),
        ("links (GB/s per GPU and direction, us)", _links(report)),
        ("tables", _tables(report)),
        (f"memory of the heaviest rank at its peak, {report.memory.peak.when}", _memory(report)),
        ("sent by one rank in a step", _traffic(report)),
        ("step", _step(report)),
        ("what limits it (gain if it took half the time)", _terms(report)),
        ("what would help", _changes(report)),
        (f"rates and sizes: {report.hardware.name}", _rates(report)),
    ]
    return "\n\n".join(f"{title}\n{_indent(body)}" if title else body for title, body in sections)


def format_front(front: Sequence[PlanReport], num_layouts: int) -> str:
    """The Pareto front of a sweep, fastest first.

    Args:
        front: From gem_parallel.planner.pareto_front.
        num_layouts: How many were predicted.
    """
    rows = [
        (
            digits(1e3 * report.step.seconds),
            digits(report.memory.peak.total / 1e9),
            "yes" if report.memory.fits else "no",
            digits(100 * report.mfu),
            f"{report.samples_per_second:,.0f}",
            str(report.dims.dp_replicate),
            str(report.dims.dp_shard),
            str(report.dims.ep),
            str(report.dims.sparse_replicate),
            str(report.dims.sparse_shard),
            report.strategy,
            f"{report.workload.recompute:g}",
        )
        for report in front
    ]
    header = (
        "step, ms",
        "peak, GB",
        "fits",
        "MFU, %",
        "samples/s",
        "dp_replicate",
        "dp_shard",
        "ep",
        "sparse_replicate",
        "sparse_shard",
        "tables by",
        "recompute",
    )
    return (
        f"{front[0].model.name} on {front[0].dims.world_size} ranks: {len(front)} of {num_layouts} layouts are not "
        f"beaten in both step time and peak memory\n\n{_table(header, rows)}"
    )


def digits(value: float) -> str:
    """Two decimals, and three digits of what is too small for them.

    Args:
        value: A number above 0.
    """
    return f"{value:.2f}" if value >= 1 else f"{value:.3g}"


def _links(report: PlanReport) -> str:
    rows = []
    for tier in TIERS:
        link = getattr(report.topology, tier)
        rows.append((tier, f"{link.bandwidth:g}", f"{link.latency:g}", link.source))
    return _table(("tier", "bandwidth", "latency", "from"), rows)


def _tables(report: PlanReport) -> str:
    plan = report.tables
    if not plan.placed:
        return "none"
    kinds = [each.kind for each in plan.placed]
    counts = ", ".join(f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds))
    rows = [
        (
            each.table.name,
            f"{each.table.num_rows:,}",
            str(each.table.dim),
            each.kind + ("" if each.table.memory.location == "device" else f", {each.table.memory.location}"),
            "all" if each.num_owners == len(plan.served_bytes) else str(each.num_owners),
            _bytes(each.table.rest_bytes),
        )
        for each in sorted(plan.placed, key=lambda each: -each.table.rest_bytes)[:8]
    ]
    more = len(plan.placed) - len(rows)
    return (
        f"{counts}; placed by {report.strategy}; rows served by the heaviest rank / mean: {plan.balance:.2f}\n"
        + _table(("table", "rows", "dim", "kind", "owners", "weights"), rows)
        + (f"\n... and {more} smaller ones" if more else "")
    )


def _memory(report: PlanReport) -> str:
    memory = report.memory
    rows = [
        (name, _bytes(amount), f"{100 * amount / memory.peak.total:.1f} %")
        for name, amount in zip(CATEGORIES, memory.peak.bytes, strict=True)
        if amount
    ]
    verdict = "fits" if memory.fits else "DOES NOT FIT"
    rows.append(("in all", _bytes(memory.peak.total), f"{verdict}: 90 % of {_bytes(memory.capacity)} may be used"))
    if memory.host_bytes:
        share = f"of {_bytes(memory.host_capacity)} per device; weights and moments of tables"
        rows.append(("host memory", _bytes(memory.host_bytes), share))
    return _table(("what", "bytes", ""), rows)


def _traffic(report: PlanReport) -> str:
    if not report.collectives:
        return "nothing: one rank"
    wire = report.workload.param_wire
    groups: dict[tuple[str, ...], list[Collective]] = {}
    for each in report.collectives:
        what = (
            each.name
            if each.kind == "all_to_all" or each.name in ("table slices", "replicated tables")
            else each.name.split(" ", 1)[1]
        )
        if wire is not None and what == "parameters":
            what = f"parameters, {wire.name}"
        groups.setdefault((what, each.when, each.kind, each.axis, str(each.degree)), []).append(each)
    rows = []
    for key, members in groups.items():
        by_tier = [sum(each.tier_bytes[at] for each in members) for at in range(3)]
        messages = sum(sum(each.tier_messages) for each in members)
        seconds = sum(each.seconds(report.topology) for each in members)
        rows.append((*key, str(len(members)), *map(_bytes, by_tier), f"{messages:,.0f}", f"{1e3 * seconds:.3f}"))
    header = ("what", "when", "collective", "axis", "ranks", "calls", *TIERS, "messages", "ms")
    return _table(header, rows)


def _step(report: PlanReport) -> str:
    total = report.step.seconds
    rows = [
        (name, f"{1e3 * seconds:.3f}", f"{100 * seconds / total:.1f} %")
        for name, seconds in report.losses().items()
        if seconds > 1e-9
    ]
    rows.append(("step", f"{1e3 * total:.3f}", f"{report.samples_per_second:,.0f} samples/s"))
    return (
        _table(("where the time goes", "ms", ""), rows)
        + f"\nE2E MFU {digits(100 * report.mfu)} % = local MFU {digits(100 * report.local_mfu)} % "
        + f"x scaling ratio {report.scaling_ratio:#.3g}"
        + f" (of {report.hardware.peak_flops.value / 1e12:g} TFLOP/s dense bf16)"
    )


def _terms(report: PlanReport) -> str:
    rows = [(term.name, f"{1e3 * term.gain:.3f}") for term in report.terms if term.gain > 1e-3 * report.step.seconds]
    return _table(("term", "ms"), rows[:4]) if rows else "nothing stands out"


def _changes(report: PlanReport) -> str:
    if not report.changes:
        return "none of the changes that were tried makes the step shorter"
    rows = [
        (
            change.name,
            f"{1e3 * change.seconds:.3f}",
            f"{100 * (1 - change.seconds / report.step.seconds):+.1f} %",
            _bytes(change.peak_bytes) + ("" if change.fits else ", does not fit"),
        )
        for change in report.changes[:MAX_CHANGES]
    ]
    return _table(("change", "step, ms", "shorter by", "peak memory"), rows)


def _rates(report: PlanReport) -> str:
    hardware = report.hardware
    rows = [(f"gemm, width {width}", f"{_count(rate.value)}FLOP/s", rate.source) for width, rate in hardware.gemm]
    for name in hardware.__dataclass_fields__:
        rate = getattr(hardware, name)
        if isinstance(rate, Rate):
            rows.append((name, f"{_count(rate.value)}{UNITS.get(name, 'B/s')}", rate.source))
    return _table(("what", "value", "from"), rows)


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    cells = [header, *rows]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = ["  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in cells]
    return "\n".join(lines)


def _indent(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())


def _bytes(amount: float) -> str:
    for unit, size in (("TB", 1e12), ("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if amount >= size:
            return f"{amount / size:.2f} {unit}"
    return f"{amount:.0f} B" if amount else "-"


def _count(number: float) -> str:
    for unit, size in (("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.2f} {unit}"
    return f"{number:g} "
