"""Arguments of `gem plan`."""

import argparse

from gem_train.config import PRECISIONS

__all__ = ["add_plan"]

Commands = argparse._SubParsersAction  # the type has no public name


def add_plan(commands: "Commands[argparse.ArgumentParser]") -> None:
    """Adds `plan explain` and `plan sweep`.

    Args:
        commands: Sub-commands of `gem`.
    """
    from gem_train.cli.plan import run_explain, run_sweep

    text = "Predict memory, traffic, step time and MFU of a layout, with no GPU and no process."
    plan = commands.add_parser("plan", help=text, description=text)
    actions = plan.add_subparsers(required=True, metavar="ACTION")
    explain = _action(
        actions,
        "explain",
        "Explain one layout: placement, memory, bytes per tier, step, what limits it and what would help.",
        "examples:\n"
        "  gem plan explain cluster-4096\n"
        "  gem plan explain ml-latest-small --ranks 64 --dims dp_replicate=2,sparse_replicate=8\n"
        "  gem plan explain cluster-4096 --topology pod.toml --picture step.svg --json > plan.json",
    )
    explain.add_argument(
        "--dims",
        metavar="AXIS=N,...",
        help="degrees of dp_replicate, ep and sparse_replicate; the others follow (default: one replica per zone)",
    )
    explain.add_argument(
        "--picture", metavar="FILE", help="draw the step to a .svg or .png file; one of that name is replaced"
    )
    explain.set_defaults(run=run_explain)
    sweep = _action(
        actions,
        "sweep",
        "Predict every layout of a cluster; print those that no other beats in both step time and memory.",
        "examples:\n  gem plan sweep cluster-4096\n  gem plan sweep synthetic --ranks 16",
    )
    sweep.set_defaults(run=run_sweep)


def _action(
    actions: "Commands[argparse.ArgumentParser]", name: str, text: str, details: str
) -> argparse.ArgumentParser:
    parser = actions.add_parser(
        name, help=text, description=f"{text}\n\n{details}", formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("recipe", metavar="RECIPE", help="name of a recipe; `gem recipes` lists them")
    parser.add_argument("--topology", metavar="FILE", help=".json or .toml file of gem_parallel.Topology")
    parser.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help="GPUs (default: those of the topology, or 8); more than the topology has are planned as more of its zones",
    )
    parser.add_argument("--samples", type=int, metavar="N", help="samples of a step on one rank")
    parser.add_argument("--rates", metavar="FILE", help=".json file of measured rates (default: an H200's)")
    parser.add_argument("--placement", choices=("size", "cost"), help="how tables are placed (default: size)")
    parser.add_argument(
        "--location",
        choices=("device", "auto", "uvm", "uvm_caching"),
        help="memory of all tables; auto: the host's, behind a cache, for those that the device has no room for",
    )
    parser.add_argument(
        "--gather",
        choices=("float32", "bfloat16", "mxfp8"),
        help="dtype of parameters when gathered; mxfp8: only on the wire, as parallel.dense_wire=mxfp8",
    )
    for option, what in (("--reduce", "gradients when reduced"), ("--rows", "embedding rows on the wire")):
        parser.add_argument(option, choices=("float32", "bfloat16"), help=f"dtype of {what}")
    parser.add_argument(
        "--copies", choices=("tables", "rows"), help="what a lookup fetches from the other copies of a table"
    )
    parser.add_argument(
        "--recompute", type=float, metavar="SHARE", help="part of forward that backward repeats, 0 to 1"
    )
    parser.add_argument("--imbalance", type=float, metavar="X", help="dense work of the heaviest rank / mean")
    parser.add_argument(
        "--contention", type=float, metavar="SHARE", help="compute lost while a collective runs under it, 0 to 1"
    )
    parser.add_argument(
        "--precision",
        choices=PRECISIONS,
        help="that of training, which decides what is saved for backward; the rates are bf16's (default: bf16)",
    )
    parser.add_argument("--data", metavar="DIR", help="directory of the data (default: that of the recipe)")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        dest="assignments",
        help="change a field of the recipe",
    )
    parser.add_argument(
        "--json", action="store_true", help="print the plan as JSON; docs/planning.md has the unit of each field"
    )
    parser.add_argument("--traceback", action="store_true", help="show the Python traceback of an error")
    return parser
