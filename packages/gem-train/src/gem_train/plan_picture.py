"""One planned step as a picture: compute, and the links of each tier under it."""

from __future__ import annotations

from pathlib import Path

import matplotlib as mpl
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from gem_parallel.planner import Interval, PlanReport
from gem_train.plan_text import digits

__all__ = ["draw_plan"]

LANES = {
    "compute": "compute",
    "host": "links in hosts\n(NVLink)",
    "zone": "links in zones\n(RoCE)",
    "cluster": "links between\nzones",
}
# Okabe and Ito: told apart by colour-blind readers.
COLOURS = {
    "forward": "#0072B2",
    "backward": "#D55E00",
    "tables": "#009E73",
    "optimizer": "#7A5C00",
    "parameters": "#56B4E9",
    "gradients": "#CC79A7",
    "experts": "#E69F00",
}


def draw_plan(report: PlanReport, path: str | Path) -> Path:
    """Write the timeline of one step.

    Args:
        report: From gem_parallel.planner.explain.
        path: A .svg or .png file.

    Returns:
        The file.

    Raises:
        ValueError: another suffix.
    """
    path = Path(path)
    if path.suffix not in (".svg", ".png"):
        raise ValueError(f"draw_plan: `path` must end with .svg or .png, got {path.name!r}; name it so")
    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "gem", "font.family": "sans-serif", "font.size": 10}):
        # A tier that nothing crosses, such as the links between the hosts of one host, has no lane.
        lanes = [lane for lane in LANES if any(each.lane == lane for each in report.step.intervals)]
        figure = Figure(figsize=(11, 1.2 + 0.6 * len(lanes)), layout="constrained")
        canvas = FigureCanvasSVG(figure) if path.suffix == ".svg" else FigureCanvasAgg(figure)
        axes = figure.add_subplot()
        used: set[str] = set()
        for row, lane in enumerate(lanes):
            for interval in (each for each in report.step.intervals if each.lane == lane):
                kind = _kind(interval)
                used.add(kind)
                span = (1e3 * interval.start, 1e3 * (interval.end - interval.start))
                axes.broken_barh([span], (row + 0.2, 0.6), facecolors=COLOURS[kind], edgecolor="white", lw=0.2)
        axes.set_yticks([row + 0.5 for row in range(len(lanes))], [LANES[lane] for lane in lanes])
        axes.set_ylim(len(lanes), 0)
        axes.set_xlabel("ms from the start of the step")
        axes.set_xlim(0, 1e3 * report.step.seconds)
        axes.set_title(
            f"{report.model.name}, {report.dims.world_size:,} ranks: step {digits(1e3 * report.step.seconds)} ms, "
            f"E2E MFU {digits(100 * report.mfu)} % = local MFU {digits(100 * report.local_mfu)} % x scaling ratio "
            f"{report.scaling_ratio:#.3g}",
            loc="left",
            fontsize=10,
        )
        for side in ("top", "right", "left"):
            axes.spines[side].set_visible(False)
        handles = [Patch(color=colour, label=kind) for kind, colour in COLOURS.items() if kind in used]
        figure.legend(handles=handles, loc="outside lower center", ncols=len(handles), frameon=False)
        metadata = {"Date": None} if path.suffix == ".svg" else None
        canvas.print_figure(path, dpi=150, metadata=metadata)
    return path


def _kind(interval: Interval) -> str:
    name = interval.name
    if interval.lane == "compute":
        if name == "optimizer":
            return "optimizer"
        if name.startswith(("lookup", "pooling", "table update")):
            return "tables"
        return "backward" if name.endswith("backward") else "forward"
    if "expert" in name:
        return "experts"
    if name.endswith("parameters"):
        return "parameters"
    if name.startswith("row gradients"):
        return "tables"
    return "gradients" if name == "gradient norm" or name.endswith((" gradients", " of replicas")) else "tables"
