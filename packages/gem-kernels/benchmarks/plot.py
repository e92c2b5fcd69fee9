"""One SVG chart per op from rows of the benchmarks: the ratio of every provider, by direction and shape, as it was
measured last.

python plot.py kernels-h200.jsonl --output docs/measured     # writes kernels-<op>.svg

Written as text, without a plotting library: a chart is a few kilobytes, and the same rows give the same file.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterable, Iterator
from html import escape
from pathlib import Path
from typing import Any

Row = dict[str, Any]
COLOURS = {
    "torch sdpa cudnn": "#D55E00",
    "torch sdpa flash": "#009E73",
    "torch varlen_attn": "#CC79A7",
    "torch compiled": "#A08A00",
}
OURS, OTHERS = ("#0072B2", "#7FC4EE", "#003B5C"), ("#D55E00", "#009E73", "#CC79A7", "#A08A00", "#888")
"""Okabe and Ito: told apart by colour-blind readers. Ours come first, in blue."""
NAMES = {
    "torch sdpa cudnn": "cuDNN (torch sdpa)",
    "torch sdpa flash": "FlashAttention 2 (torch sdpa)",
    "torch compiled": "single ops, compiled",
}
_MATMUL = "matmul bfloat16 8192"
_CUDNN, _VARLEN = "torch sdpa cudnn", "torch varlen_attn"
AIMS: dict[tuple[str, str, str], tuple[tuple[str, float], ...]] = {
    ("gdpa", "forward", "B1152-q256-k256"): ((_MATMUL, 0.68),),
    ("gdpa", "forward", "B1152-q1024-k256"): ((_MATMUL, 0.80),),
    ("gdpa", "forward", "B576-q2048-k256"): ((_MATMUL, 0.80),),
    ("gdpa", "forward", "B576-q1024-k1024"): ((_MATMUL, 0.85),),
    ("gdpa", "forward", "B288-q2048-k2048"): ((_MATMUL, 0.85),),
    ("gdpa", "forward", "B1152-uniform1024"): ((_MATMUL, 0.75),),
    ("gdpa", "backward", "B1152-q256-k256"): ((_MATMUL, 0.55),),
    ("gdpa", "backward", "B1152-q1024-k256"): ((_MATMUL, 0.60),),
    ("gdpa", "backward", "B576-q1024-k1024"): ((_MATMUL, 0.65),),
    ("block_attention", "forward", "B1152-2000-s0.7-H4-D128"): (("device copy", 0.85),),
    ("block_attention", "backward", "B1152-2000-s0.7-H4-D128"): (("device copy", 0.75),),
    ("gdpa_norm_block", "forward+backward", "B768-1024-s0.5-K128-H4-D128"): (("single ops, compiled", 1.35),),
    ("rmsnorm_linear", "forward", "M262144-K512-N512"): (("torch compiled", 1.3),),
    ("linear_norm", "forward", "M262144-K512-N512"): (("torch compiled", 1.3),),
} | {
    ("jagged_attention", direction, shape): aims
    for direction in ("forward", "backward")
    for shape, aims in {
        "B576-q1024-k1024": ((_CUDNN, 1.0),),
        "B288-q2048-k2048": ((_CUDNN, 1.0),),
        "B1152-uniform1024": ((f"{_CUDNN}, padded", 2.5), (_VARLEN, 1.6)),
    }.items()
}
"""What we set out to reach: times as fast as all of these, a provider or what the rows are compared with."""
_DIRECTIONS = ("forward", "backward", "forward+backward")
_BAR, _GAP, _LABELS, _PANEL, _SPACE = 11, 9, 118, 330, 34
"""Pixels: height of a bar, distance of groups, width of the shapes' names and of a panel, and what is right of it."""


def distinct(values: Iterable[str]) -> list[str]:
    """The values in the order of their first appearance."""
    return list(dict.fromkeys(values))


def newest(rows: list[Row]) -> list[Row]:
    """Of each direction, shape and provider the last row, if its ratio is to what that of the last of all is to."""
    latest: dict[tuple[str, str], Row] = {}
    for row in sorted(rows, key=lambda row: row["date"]):
        latest[row["direction"], row["shape"]] = row
    kept: dict[tuple[str, str, str], Row] = {}
    for row in sorted(rows, key=lambda row: row["date"]):
        if row["ratio_to"] == latest[row["direction"], row["shape"]]["ratio_to"]:
            kept[row["direction"], row["shape"], row["provider"]] = row
    return [row for row in rows if row is kept.get((row["direction"], row["shape"], row["provider"]))]


def is_ours(op: str, provider: str) -> bool:
    """Whether a provider is the op itself, by whichever kernel."""
    return provider.removeprefix("gem_kernels.").split(" ")[0].rstrip(",") == op


def aim_of(op: str, direction: str, shape: str, rows: list[Row]) -> float | None:
    """The ratio that was aimed at; None where nothing was, or what it refers to was not measured."""
    ratios = {row["provider"]: row["ratio"] for row in rows} | {row["ratio_to"]: 1.0 for row in rows}
    aims = AIMS.get((op, direction, shape), ())
    if not aims or any(base not in ratios for base, _ in aims):
        return None
    return max(factor * ratios[base] for base, factor in aims)


def shape_lines(shape: str) -> list[str]:
    """What a reader calls a shape."""
    if found := re.fullmatch(r"B(\d+)-q(\d+)-k(\d+)", shape):
        batch, queries, keys = found.groups()
        lengths = f"Q = KV = {keys}" if queries == keys else f"Q = {queries}, KV = {keys}"
    elif found := re.fullmatch(r"B(\d+)-(uniform|zipf)(\d+)", shape):
        batch, kind, longest = found.groups()
        lengths = f"{kind.replace('zipf', 'Zipf')} 1..{longest}"
    else:
        return [shape] if len(shape) < 20 else [shape[: shape.rindex("-H")], shape[shape.rindex("-H") + 1 :]]
    return [lengths, f"B = {batch}"]


def text(x: float, y: float, content: str, anchor: str = "", **style: str) -> str:
    """A line of text; ``anchor`` is "end" or "middle"."""
    if anchor:
        style["text-anchor"] = anchor
    more = "".join(f' {key}="{value}"' for key, value in style.items())
    return f'<text x="{x:.4g}" y="{y:.4g}"{more}>{escape(content)}</text>'


def bar(x: float, y: float, width: float, height: float, colour: str) -> str:
    """A filled rectangle."""
    return f'<rect x="{x:.4g}" y="{y:.4g}" width="{width:.4g}" height="{height:.4g}" fill="{colour}"/>'


def mark(x: float, y: float, end: float) -> str:
    """The line at what was aimed at."""
    return f'<path stroke="#000" stroke-width="2" d="M{x:.4g} {y:.4g}V{end:.4g}"/>'


def step_of(largest: float) -> float:
    """Distance of grid lines: at most eight of them."""
    return next(step for step in (0.1, 0.2, 0.25, 0.5, 1.0, 2.0, 5.0) if largest / step <= 8)


class Chart:
    """The chart of one op."""

    def __init__(self, op: str, rows: list[Row]) -> None:
        self.op = op
        # The matmul's own rows are what the ratios are to.
        self.rows = [row for row in rows if row["provider"].split(",")[0] != _MATMUL]
        self.directions = [d for d in _DIRECTIONS if any(row["direction"] == d for row in self.rows)]
        self.shapes = distinct(row["shape"] for row in self.rows)
        kinds = distinct(row["provider"].removesuffix(", padded") for row in self.rows)
        self.kinds = sorted(kinds, key=lambda kind: not is_ours(op, kind))
        ours = [kind for kind in self.kinds if is_ours(op, kind)]
        left = [colour for colour in OTHERS if colour not in {COLOURS.get(kind) for kind in self.kinds}]
        self.colours = {
            kind: COLOURS.get(kind) or left[i % len(left)] for i, kind in enumerate(self.kinds[len(ours) :])
        }
        self.colours |= {kind: OURS[i % len(OURS)] for i, kind in enumerate(ours)}

    def group(self, direction: str, shape: str) -> list[Row]:
        """Rows of one direction and shape, ours first."""
        rows = [row for row in self.rows if (row["direction"], row["shape"]) == (direction, shape)]
        return sorted(rows, key=lambda row: self.kinds.index(row["provider"].removesuffix(", padded")))

    def tops(self, first: float) -> tuple[dict[str, float], float]:
        """Where each shape's group begins, and where the last ends."""
        tops = {}
        for shape in self.shapes:
            tops[shape] = first
            first += _BAR * max(2, *(len(self.group(d, shape)) for d in self.directions)) + _GAP
        return tops, first

    def panel(self, direction: str, left: float, tops: dict[str, float], top: float, bottom: float) -> Iterator[str]:
        """The bars of one direction."""
        groups = {shape: self.group(direction, shape) for shape in self.shapes}
        aims = {shape: aim_of(self.op, direction, shape, rows) for shape, rows in groups.items()}
        largest = max([row["ratio"] for rows in groups.values() for row in rows] + [aim or 0 for aim in aims.values()])
        scale = _PANEL / largest
        yield text(left, top - 20, direction, **{"font-weight": "bold"})
        bases = distinct(row["ratio_to"] for rows in groups.values() for row in rows)
        yield text(left, top - 8, f"ratio to {', '.join(bases)}", fill="#666")
        step = step_of(largest)
        ticks = [i * step for i in range(int(largest / step) + 1)]
        yield f'<path stroke="#ddd" d="{"".join(f"M{left + t * scale:.4g} {top}V{bottom:.4g}" for t in ticks)}"/>'
        for tick in ticks:
            yield text(left + tick * scale, bottom + 11, f"{tick:g}", "middle", fill="#666")
        for shape, rows in groups.items():
            places = [(row, tops[shape] + i * _BAR) for i, row in enumerate(rows)]
            for row, y in places:
                colour = self.colours[row["provider"].removesuffix(", padded")]
                yield bar(left, y, row["ratio"] * scale, _BAR - 1, colour)
            if (aim := aims[shape]) is not None:
                yield mark(left + aim * scale, tops[shape] - 3, tops[shape] + _BAR * len(rows) + 1)
            for row, y in places:
                label = f"{row['ratio']:.2f}{' padded' if row['provider'].endswith(', padded') else ''}"
                yield text(left + row["ratio"] * scale + 3, y + 8.5, label, **{"class": "v"})

    def legend(self, y: float, width: float) -> tuple[list[str], float]:
        """Colours and names in rows of the chart's width, and where they end."""
        names = list(self.kinds)
        if any(aim_of(self.op, d, s, self.group(d, s)) for d in self.directions for s in self.shapes):
            names.append("aim")
        parts, x = [], 8.0
        for kind in names:
            name = NAMES.get(kind, kind).replace("gem_kernels.", "")
            advance = 26 + 5.7 * len(name)
            if x + advance > width:
                x, y = 8.0, y + 15
            parts.append(mark(x + 5, y, y + 10) if kind == "aim" else bar(x, y, 10, 9, self.colours[kind]))
            parts.append(text(x + 14, y + 8.5, name))
            x += advance
        return parts, y + 15

    def draw(self) -> str:
        """The SVG file."""
        width = _LABELS + len(self.directions) * (_PANEL + _SPACE) + 26
        where = self.rows[-1]
        title = f"{self.op}, {where['dtype']}, {where['gpu']}, torch {where['torch']}, triton {where['triton']}"
        legend, top = self.legend(26, width)
        top += 32
        tops, bottom = self.tops(top + 5)
        parts = [text(8, 16, title, **{"font-size": "12"}), *legend]
        for shape, y in tops.items():
            for i, line in enumerate(shape_lines(shape)):
                parts.append(text(_LABELS - 6, y + 9 + 12 * i, line, "end", **({"fill": "#666"} if i else {})))
        for i, direction in enumerate(self.directions):
            parts += self.panel(direction, _LABELS + i * (_PANEL + _SPACE), tops, top, bottom)
        height = bottom + 18
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height:g}" width="{width:g}" '
            f'height="{height:g}" font-family="sans-serif" font-size="10">'
        )
        # A value stays legible on a line.
        style = "<style>.v{paint-order:stroke;stroke:#fff;stroke-width:3px}</style>"
        return "\n".join([head, style, '<rect width="100%" height="100%" fill="#fff"/>', *parts, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("rows", type=Path)
    parser.add_argument("--output", type=Path, required=True, help="folder")
    arguments = parser.parse_args()
    rows = [json.loads(line) for line in arguments.rows.read_text().splitlines()]
    for op in distinct(row["op"] for row in rows):
        chart = Chart(op, newest([row for row in rows if row["op"] == op and row["dtype"] == "bfloat16"]))
        path = arguments.output / f"kernels-{op.replace(', ', '-').replace('_', '-')}.svg"
        path.write_text(chart.draw())
        print(path)


if __name__ == "__main__":
    main()
