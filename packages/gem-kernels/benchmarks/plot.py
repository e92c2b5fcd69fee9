"""One SVG chart per op from rows of the benchmarks: the ratio of every provider, by direction and shape, each at the
last commit that it was measured at.

python plot.py kernels-h200.jsonl --output docs/measured     # writes kernels-<op>.svg; needs matplotlib
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure

Row = dict[str, Any]
COLOURS = ("#0072B2", "#56B4E9", "#D55E00", "#009E73", "#CC79A7", "#7A5C00", "#999999")
"""Okabe and Ito: told apart by colour-blind readers. Ours come first, in blue."""
REACH = {
    ("gdpa", "forward", "B1152-q256-k256"): 0.68,
    ("gdpa", "forward", "B1152-q1024-k256"): 0.80,
    ("gdpa", "forward", "B1152-q1024-k1024"): 0.85,
    ("gdpa", "forward", "B576-q1024-k1024"): 0.85,
    ("gdpa", "forward", "B1152-uniform1024"): 0.75,
    ("gdpa", "forward", "B576-q2048-k2048"): 0.85,
    ("gdpa", "forward", "B288-q2048-k2048"): 0.85,
    ("gdpa", "backward", "B1152-q256-k256"): 0.55,
    ("gdpa", "backward", "B1152-q1024-k256"): 0.60,
    ("gdpa", "backward", "B1152-q1024-k1024"): 0.65,
    ("gdpa", "backward", "B576-q1024-k1024"): 0.65,
    ("block_attention", "forward", "B1152-2000-s0.7-H4-D128"): 0.85,
    ("block_attention", "backward", "B1152-2000-s0.7-H4-D128"): 0.75,
    ("gdpa_norm_block", "forward+backward", "B768-1024-s0.5-K128-H4-D128"): 1.35,
    ("rmsnorm_linear", "forward", "M262144-K512-N512"): 1.3,
    ("linear_norm", "forward", "M262144-K512-N512"): 1.3,
}
"""What we set out to reach, as a ratio to the base that the benchmark compares with."""
_BASES = {
    "gdpa": "matmul bfloat16 8192",
    "block_attention": "device copy",
    "gdpa_norm_block": "single ops, compiled",
    "rmsnorm_linear": "torch compiled",
    "linear_norm": "torch compiled",
}
_DIRECTIONS = ("forward", "backward", "forward+backward")
_STYLE = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "gem",  # the same rows give the same file
    "font.family": "sans-serif",
    "font.size": 9,
    "axes.edgecolor": "#9a9a9a",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "x",
    "grid.color": "#e6e6e6",
    "axes.axisbelow": True,
    "legend.frameon": False,
}


def distinct(values: Iterable[str]) -> list[str]:
    """The values in the order of their first appearance."""
    return list(dict.fromkeys(values))


def newest(rows: list[Row]) -> list[Row]:
    """Of each direction and shape, the rows of the commit that was measured last."""
    latest: dict[tuple[str, str], Row] = {}
    for row in sorted(rows, key=lambda row: row["date"]):
        latest[row["direction"], row["shape"]] = row
    return [row for row in rows if row["commit"] == latest[row["direction"], row["shape"]]["commit"]]


def is_ours(op: str, provider: str) -> bool:
    """Whether a provider is the op itself, by whichever kernel."""
    return provider.removeprefix("gem_kernels.").split(" ")[0].rstrip(",") == op


def draw(op: str, rows: list[Row]) -> Figure:
    """A panel per direction; in it a group of bars per shape, one bar per provider, and a mark at what was aimed at."""
    directions = [d for d in _DIRECTIONS if any(row["direction"] == d for row in rows)]
    providers = sorted(distinct(row["provider"] for row in rows), key=lambda p: not is_ours(op, p))
    shapes = distinct(row["shape"] for row in rows)
    height = 1.2 + 0.17 * len(shapes) * (len(providers) + 1.5)
    figure = Figure(figsize=(2.2 + 3.6 * len(directions), height), layout="constrained")
    panels = figure.subplots(1, len(directions), sharey=True, squeeze=False)[0]
    for panel, direction in zip(panels, directions, strict=True):
        for i, shape in enumerate(shapes):
            for j, provider in enumerate(providers):
                found = [r for r in rows if (r["direction"], r["shape"], r["provider"]) == (direction, shape, provider)]
                if not found:
                    continue
                y = i * (len(providers) + 1.5) + j
                panel.barh(y, found[-1]["ratio"], height=0.86, color=COLOURS[j % len(COLOURS)])
                panel.annotate(
                    f"{found[-1]['ratio']:.2f}", (found[-1]["ratio"], y), xytext=(2, 0), textcoords="offset points",
                    va="center", fontsize=7,
                    bbox={"facecolor": "white", "edgecolor": "none", "pad": 0.6},
                )  # fmt: skip
            bases = distinct(row["ratio_to"] for row in rows if row["direction"] == direction)
            aim = REACH.get((op, direction, shape))
            if aim is not None and bases == [_BASES[op]]:
                first = i * (len(providers) + 1.5)
                panel.plot([aim, aim], [first - 0.6, first + len(providers) - 0.4], color="#1a1a1a", linewidth=1.2)
        panel.set_title(direction, fontsize=9)
        panel.set_xlabel(f"ratio to {', '.join(bases)}")
        panel.margins(x=0.12)
    panels[0].set_yticks([i * (len(providers) + 1.5) + (len(providers) - 1) / 2 for i in range(len(shapes))], shapes)
    panels[0].invert_yaxis()
    handles = [mpl.patches.Patch(color=COLOURS[j % len(COLOURS)], label=p) for j, p in enumerate(providers)]
    if any((op, row["direction"], row["shape"]) in REACH and row["ratio_to"] == _BASES[op] for row in rows):
        handles.append(mpl.lines.Line2D([], [], color="#1a1a1a", linewidth=1.2, label="aim"))
    figure.legend(handles=handles, loc="outside lower center", ncols=2 if len(directions) == 1 else 3, fontsize=8)
    where = rows[-1]
    figure.suptitle(
        f"{op}, {where['dtype']}, {where['gpu']}, torch {where['torch']}, triton {where['triton']}", fontsize=9
    )
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--output", type=Path, required=True, help="folder")
    arguments = parser.parse_args()
    rows = [json.loads(line) for line in arguments.rows.read_text().splitlines()]
    for op in distinct(row["op"] for row in rows):
        with mpl.rc_context(_STYLE):
            figure = draw(op, newest([row for row in rows if row["op"] == op and row["dtype"] == "bfloat16"]))
            path = arguments.output / f"kernels-{op.replace(', ', '-').replace('_', '-')}.svg"
            FigureCanvasSVG(figure).print_svg(path, metadata={"Date": None})
        print(path)


if __name__ == "__main__":
    main()
