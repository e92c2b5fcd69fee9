"""`gem plan explain` and `gem plan sweep`."""

from __future__ import annotations

import argparse
import json
import os
import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from gem_train.cli.output import complain, say, unwritable
from gem_train.errors import ConfigError

if TYPE_CHECKING:
    from gem_parallel import ParallelDims, ParamWire, Topology
    from gem_parallel.planner import Hardware, ModelDescription, Workload

__all__ = ["run_explain", "run_sweep"]

DEFAULT_RANKS = 8
BYTES = {"float32": 4, "bfloat16": 2}
DIM_AXES = ("dp_replicate", "ep", "sparse_replicate")


class Inputs(NamedTuple):
    """What a plan is made from."""

    model: ModelDescription
    topology: Topology
    dims: ParallelDims
    workload: Workload
    hardware: Hardware


def run_explain(args: argparse.Namespace) -> int:
    """Explains one layout.

    Args:
        args: Parsed arguments.

    Returns:
        The exit code.
    """
    from gem_parallel.planner import explain, plan_record
    from gem_train.plan_text import format_plan

    if args.picture is not None:
        _check_picture(args.picture)
    inputs = _inputs(args)
    report = explain(
        inputs.model,
        inputs.topology,
        inputs.dims,
        inputs.workload,
        hardware=inputs.hardware,
        strategy=args.placement or "size",
        wires=_wires(args.precision),
    )
    say(json.dumps(plan_record(report)) if args.json else format_plan(report))
    if args.picture is not None:
        from gem_train.plan_picture import draw_plan

        try:
            complain(f"picture: {draw_plan(report, args.picture)}")
        except OSError as error:  # a disk that is full, say
            raise _not_a_place(args.picture, error.strerror or str(error)) from error
    return 0


def _wires(precision: str | None) -> tuple[ParamWire, ...]:
    """Forms of parameters between ranks that a change may be."""
    from gem_train.recipes import ParallelConfig

    try:
        wire = ParallelConfig(dense_wire="mxfp8").param_wire(precision or "bf16")
    except ConfigError:  # a plan of numbers needs no gem-precision
        return ()
    return () if wire is None else (wire,)


def run_sweep(args: argparse.Namespace) -> int:
    """Predicts every layout of a cluster and prints the best.

    Args:
        args: Parsed arguments.

    Returns:
        The exit code.
    """
    from gem_parallel.planner import pareto_front, plan_record, sweep
    from gem_train.plan_text import format_front

    args.dims = None
    inputs = _inputs(args)
    recompute = (0.0, 0.25, 0.5, 0.75, 1.0) if args.recompute is None else (args.recompute,)
    reports = sweep(
        inputs.model,
        inputs.topology,
        inputs.workload,
        hardware=inputs.hardware,
        strategies=(args.placement,) if args.placement else ("size", "cost"),
        recompute=recompute,
    )
    front = pareto_front(reports)
    if args.json:
        records = [plan_record(report) for report in front]
        for record in records:
            # One step's schedule is for `explain`.
            del record["step"]["timeline"]
        say(json.dumps({"schema": records[0]["schema"], "layouts": len(reports), "front": records}))
    else:
        say(format_front(front, len(reports)))
    return 0


def _check_picture(path: str) -> None:
    """Refuses what no picture can be written to, before the plan is made and printed."""
    if not path.endswith((".svg", ".png")):
        raise ConfigError(f"--picture: the file must end with .svg or .png, got {path!r}; name it so")
    directory = Path(path).parent
    if directory.exists() and not directory.is_dir():
        raise ConfigError(f"--picture: the file must lie in a directory, got {path!r}; name another")
    if not directory.is_dir():
        raise ConfigError(f"--picture: the directory of the file must exist, got {path!r}; make {directory} first")
    reason = unwritable(Path(path))
    if reason is not None:
        raise _not_a_place(path, reason)


def _not_a_place(path: str, reason: str) -> ConfigError:
    return ConfigError(f"--picture: must be a file that can be written, got {path!r} ({reason}); name another")


def _check_file(option: str, path: str, what: str) -> None:
    if not Path(path).is_file() or not os.access(path, os.R_OK):
        raise ConfigError(f"--{option}: must be a file that can be read, got {path!r}; name {what}")


def _topology(path: str) -> Topology:
    from gem_parallel import Topology

    _check_file("topology", path, "a .json or .toml file of gem_parallel.Topology")
    try:
        return Topology.load(path)
    except (TypeError, ValueError) as error:
        raise ConfigError(f"--topology {path}: {error}") from error


def _rates(path: str | None) -> Hardware:
    from gem_parallel.planner import Hardware

    if path is None:
        return Hardware.load()
    _check_file("rates", path, "a .json file of measured rates")
    try:
        if not Path(path).read_text(encoding="utf-8", errors="replace").lstrip().startswith("{"):
            raise ConfigError(
                "--rates: the file must hold a JSON object, one field per rate, got something else in "
                f"{path!r}; name a file of measured rates"
            )
        return Hardware.load(path)
    except ConfigError:
        raise
    except (TypeError, ValueError) as error:
        raise ConfigError(f"--rates {path}: {error}") from error


def _inputs(args: argparse.Namespace) -> Inputs:
    from gem_parallel import ParallelDims
    from gem_parallel.planner import MAX_RANKS, MAX_SAMPLES, Workload
    from gem_train import recipes
    from gem_train.overrides import parse_assignments

    for name, most in (("ranks", MAX_RANKS), ("samples", MAX_SAMPLES)):
        value = getattr(args, name)
        if value is not None and not 1 <= value <= most:
            bound = "at least 1" if value < 1 else f"at most {most:,}"
            raise ConfigError(f"--{name}: must be {bound}, got {value}; give another")
    plan = recipes.get_plan(args.recipe)
    cluster = _topology(args.topology) if args.topology else plan.topology if plan else None
    if cluster is None:
        from gem_parallel import Topology

        cluster = _resized(Topology(hosts_per_zone=32, zones=32), args.ranks or DEFAULT_RANKS)
    topology = _resized(cluster, args.ranks) if args.ranks else cluster
    ranks = topology.num_gpus
    if ranks > MAX_RANKS:
        raise ConfigError(
            f"--topology {args.topology}: a plan is of at most {MAX_RANKS:,} GPUs, got {ranks:,}; add --ranks N"
        )
    # Whatever the arguments alone decide comes before the data.
    degrees = _degrees(args.dims, topology, plan.dims if plan else ParallelDims())
    hardware = _rates(args.rates)
    assignments = parse_assignments(args.assignments)
    given: dict[str, Any] = {
        "gather_bytes": BYTES.get(args.gather),
        "reduce_bytes": BYTES.get(args.reduce),
        "row_bytes": BYTES.get(args.rows),
        "table_gather": args.copies,
        "recompute": args.recompute,
        "imbalance": args.imbalance,
        "contention": args.contention,
    }
    if args.gather == "mxfp8":
        given["param_wire"] = recipes.ParallelConfig(dense_wire="mxfp8").param_wire(args.precision or "bf16")
    changes = {name: value for name, value in given.items() if value is not None}
    try:
        replace(plan.workload if plan else Workload(samples_per_rank=1), **changes)  # checked here, used below
    except ValueError as error:
        # The options are named as the fields.
        raise ConfigError(re.sub(r"^Workload: `(\w+)`", r"--\1:", str(error))) from error
    if plan is not None:
        if args.assignments or args.data:
            raise ConfigError(f"--set and --data: recipe {plan.name} is numbers without data; leave them out")
        if args.precision not in (None, "mxfp8"):
            raise ConfigError(
                f"--precision: recipe {plan.name} is numbers, of which only mxfp8 changes any (blocks of mxfp8 on the "
                f"wire), got {args.precision}; leave it out"
            )
        model, workload = plan.describe(), plan.workload
        experts = min((unit.num_experts for unit in model.units if unit.num_experts > 1), default=1)
        if degrees["ep"] > experts:
            raise ConfigError(
                f"--dims: each of the {degrees['ep']} ranks of ep needs an expert of its own in every layer, and "
                f"{plan.name} has {experts}; give ep at most {experts}"
            )
        dims = _dims(degrees, ranks)
        if args.samples:
            workload = replace(workload, samples_per_rank=args.samples)
    else:
        recipe = recipes.get(args.recipe, plans=True)
        config = recipes.RunConfig.resolve(recipe, recipe.schema, assignments)
        if degrees["ep"] > config.model.num_experts:
            raise ConfigError(
                f"--dims: each of the {degrees['ep']} ranks of ep needs an expert of its own in every layer, and the "
                f"model has model.num_experts={config.model.num_experts}; add --set "
                f"model.num_experts={degrees['ep']}, or leave ep out"
            )
        dims = _dims(degrees, ranks)
        log = recipe.load(recipe.directory(args.data))
        config = recipes.RunConfig.resolve(recipe, log, assignments)
        samples = args.samples or max(1, -(-config.data.global_batch_size // ranks))
        model = recipes.describe_run(config, log, samples, precision=args.precision or "bf16")
        wire = config.parallel.param_wire(args.precision or "bf16")
        workload = Workload(samples_per_rank=samples, sparse_optimizer=config.sparse.kind, param_wire=wire)
    if args.location:
        model = replace(model, tables=tuple(replace(table, location=args.location) for table in model.tables))
    if cluster.num_gpus < ranks:
        complain(
            f"note: --ranks {ranks:,} is more than the {cluster.num_gpus:,} GPUs of {args.topology or args.recipe}: "
            f"planned as {topology.zones:,} such zones of {topology.gpus_per_zone:,} GPUs, where it has "
            f"{cluster.zones:,}"
        )
    if args.dims is not None:
        try:
            dims.check(topology)
        except ValueError as error:
            # Still explained: what it costs is the point.
            complain(f"note: {_rule(error)}")
    return Inputs(model, topology, dims, replace(workload, **changes), hardware)


def _rule(error: Exception) -> str:
    """What an error of gem_parallel says, without the function that said it."""
    return re.sub(r"^\w+(\.\w+)?: ", "", str(error))


def _resized(topology: Topology, ranks: int) -> Topology:
    try:
        return topology.resized(ranks)
    except ValueError as error:
        raise ConfigError(f"--ranks: {_rule(error).removeprefix('`num_ranks` ')}") from error


def _degrees(text: str | None, topology: Topology, wanted: ParallelDims) -> dict[str, int]:
    """Degrees of DIM_AXES: those that the user names, else the recipe's as far as a topology of another size has room.

    They make no layout before the experts are counted: it names the nearest ones when they do not fit.
    """
    if text is None and wanted.world_size == topology.num_gpus:
        return {axis: getattr(wanted, axis) for axis in DIM_AXES}
    degrees = {
        "dp_replicate": topology.zones,
        "ep": min(wanted.ep, topology.gpus_per_host),
        "sparse_replicate": min(wanted.sparse_replicate, topology.gpus_per_host),
    }
    given = set()
    for part in text.split(",") if text is not None else ():
        name, _, value = part.partition("=")
        if name not in DIM_AXES or not re.fullmatch(r"[+-]?\d+", value, re.ASCII):
            raise ConfigError(
                f"--dims: must be AXIS=N,... with axes {', '.join(DIM_AXES)} (the others follow), got {part!r}; for "
                f"example {DIM_AXES[0]}=2"
            )
        if name in given:
            raise ConfigError(f"--dims: {name} is given twice, got {text!r}; give it once")
        if int(value) < 1:
            raise ConfigError(f"--dims: {name} must be at least 1, got {value}; leave it out for the recipe's")
        given.add(name)
        degrees[name] = int(value)
    return degrees


def _dims(degrees: dict[str, int], ranks: int) -> ParallelDims:
    from gem_parallel import ParallelDims

    try:
        return ParallelDims.for_world(ranks, **degrees)
    except ValueError as error:
        raise ConfigError(f"--dims: {_rule(error).replace('`world_size`', 'the number of GPUs')}") from error
