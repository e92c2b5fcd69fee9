"""The report's plots, as SVG text to put into HTML."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#7A5C00", "#56B4E9")
"""Okabe and Ito: told apart by colour-blind readers, and dark enough on white."""

_STYLE = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "gem",  # the same run gives the same file
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": "#1a1a1a",
    "axes.labelcolor": "#1a1a1a",
    "axes.edgecolor": "#9a9a9a",
    "xtick.color": "#444444",
    "ytick.color": "#444444",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "axes.axisbelow": True,
    "legend.frameon": False,
}


class Curve(NamedTuple):
    """A line of a plot."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    colour: str
    marked: bool
    """With points, as an evaluation has, or as a plain and fainter line."""


class Level(NamedTuple):
    """A horizontal line to compare with."""

    label: str
    y: float


def curves(title: str, lines: Sequence[Curve], *, ylabel: str, levels: Sequence[Level] = (), alt: str) -> str:
    """Values against samples trained.

    Args:
        title: Of the plot.
        lines: The curves.
        ylabel: Of the y axis.
        levels: Values to compare with; those far outside the curves' range are left out.
        alt: Text for readers who do not see the plot.

    Returns:
        SVG text.
    """
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(5.2, 3.3), layout="constrained")
        axes = figure.add_subplot()
        low, high = _range(lines)
        for line in lines:
            style: dict[str, Any] = {"marker": "o", "markersize": 4} if line.marked else {"alpha": 0.55}
            label = line.label if low <= line.y[0] <= high else f"{line.label} (from {line.y[0]:.3g})"
            axes.plot(line.x, line.y, color=line.colour, linewidth=1.6, label=label, **style)
        shown = [each for each in levels if low - 0.5 * (high - low) <= each.y <= high + 0.3 * (high - low)]
        for level in shown:
            # Two may lie close together: the lower one's label hangs below its line.
            below = len(shown) > 1 and level.y == min(each.y for each in shown)
            axes.axhline(level.y, color="#777777", linewidth=1.0, linestyle=(0, (4, 3)))
            axes.annotate(
                level.label, (0.995, level.y), xycoords=("axes fraction", "data"), xytext=(0, -2 if below else 2),
                textcoords="offset points", ha="right", va="top" if below else "bottom", fontsize=8, color="#555555",
            )  # fmt: skip
        low, high = min([low, *(each.y for each in shown)]), max([high, *(each.y for each in shown)])
        margin = 0.06 * (high - low)
        axes.set_ylim(low - margin, high + margin)
        axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
        axes.set_xlabel("samples trained")
        axes.set_ylabel(ylabel)
        axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: si(x)))
        if len(lines) > 1 or not low <= lines[0].y[0] <= high:
            axes.legend(fontsize=9)
        return _svg(figure, alt)


def calibration(title: str, points: Sequence[dict[str, float]], *, alt: str) -> str:
    """Mean label against mean prediction with 95 % intervals, above the counts.

    An axis is logarithmic when labels are rare and its values far apart.

    Args:
        title: Of the plot.
        points: {count, prediction, label}, as from `BinaryMetrics.compute`.
        alt: Text for readers who do not see the plot.

    Returns:
        SVG text.
    """
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(4.2, 4.4), layout="constrained")
        top, bottom = figure.subplots(2, 1, sharex=True, height_ratios=(4, 1))
        predictions = [p["prediction"] for p in points]
        intervals = [wilson(p["label"] * p["count"], p["count"]) for p in points]
        labels = [p["label"] for p in points]
        # Rare labels lie near zero, where a linear axis shows one point.
        rare = sorted(predictions)[len(predictions) // 2] < 0.05
        # Of each axis for itself: the intervals may be many times as wide as all the predictions.
        left, right = _scale(top, "x", predictions, rare)
        ends = [end for label, interval in zip(labels, intervals, strict=True) for end in interval[label == 0 :]]
        _scale(top, "y", [*predictions, *labels, *ends], rare)
        line = [left + share * (right - left) / 100 for share in range(101)]  # bent where one axis is logarithmic
        top.plot(line, line, color="#777777", linewidth=1.0, linestyle=(0, (4, 3)), label="calibrated")
        errors = [
            [max(0.0, y - lo) for y, (lo, _) in zip(labels, intervals, strict=True)],
            [max(0.0, hi - y) for y, (_, hi) in zip(labels, intervals, strict=True)],
        ]
        top.errorbar(
            predictions, labels, yerr=errors, fmt="o", markersize=4, color=COLOURS[0], elinewidth=1.0, label="observed"
        )
        logarithmic = top.get_xscale() == "log"
        widths: Any = [0.08 * p for p in predictions] if logarithmic else 0.012 * (right - left)
        top.set_ylabel("mean label")
        top.set_title(title, loc="left", fontsize=11, fontweight="bold")
        figure.legend(fontsize=9, loc="outside lower center", ncols=2)
        bottom.bar(predictions, [p["count"] for p in points], width=widths, color=COLOURS[0])
        bottom.set_ylabel("samples")
        bottom.set_xlabel("mean prediction")
        bottom.yaxis.set_major_formatter(FuncFormatter(lambda x, _: si(x)))
        return _svg(figure, alt)


def wilson(positives: float, count: float) -> tuple[float, float]:
    """95 % interval of a rate (E. B. Wilson, JASA 1927); unlike the normal one it is honest for few positives.

    Args:
        positives: Positive samples.
        count: Samples.

    Returns:
        Lower and upper end.
    """
    z = 1.959964
    rate = positives / count
    centre = (rate + z * z / (2 * count)) / (1 + z * z / count)
    half = z / (1 + z * z / count) * math.sqrt(rate * (1 - rate) / count + z * z / (4 * count * count))
    return max(0.0, centre - half), min(1.0, centre + half)


def si(value: float, unit: str = "") -> str:
    """A number with a thousands letter: 1.2 M.

    Args:
        value: The number.
        unit: Set after the letter.

    Returns:
        Three significant digits.
    """
    for factor, letter in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")):
        if abs(value) >= factor:
            return f"{value / factor:.3g} {letter}{unit}"
    return f"{value:.3g} {unit}".rstrip()


def _range(lines: Sequence[Curve]) -> tuple[float, float]:
    """Of the values; without the first tenth of plain curves where the start of training dwarfs the rest."""
    values = [y for line in lines for y in (line.y if line.marked else line.y[len(line.y) // 10 :])]
    low, high = min(values), max(values)
    whole = [y for line in lines for y in line.y]
    if max(whole) - min(whole) <= 2.5 * (high - low):
        low, high = min(whole), max(whole)
    return (low, high) if high > low else (low - 0.05 * abs(low) - 1e-6, high + 0.05 * abs(high) + 1e-6)


def _scale(axes: Axes, name: str, values: Sequence[float], rare: bool) -> tuple[float, float]:
    """Gives the x or y axis the range of rates, logarithmic where they are rare and far apart."""
    low, high = min((v for v in values if v > 0), default=0.0), max(values)
    if rare and high > 5 * low > 0:
        low, high = low / 1.3, min(1.0, high * 1.3)
        axes.set(**{f"{name}scale": "log"})
        axis = axes.xaxis if name == "x" else axes.yaxis
        # Labels of all the ticks of a part of a decade would lie on each other.
        axis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0) if high < 50 * low else (1.0,)))
        axis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}"))
        axis.set_minor_formatter(NullFormatter())
    else:
        margin = max(0.05 * (high - min(values)), 0.01 * high, 1e-6)
        low, high = max(0.0, min(values) - margin), min(1.0, high + margin)
    axes.set(**{f"{name}lim": (low, high)})
    return low, high


def _svg(figure: Figure, alt: str) -> str:
    FigureCanvasSVG(figure)
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None})
    text = buffer.getvalue()
    text = text[text.index("<svg") :]  # without the XML declaration and the DTD's address
    text = re.sub(r"<metadata>.*?</metadata>\s*", "", text, flags=re.DOTALL)
    text = re.sub(r' xmlns(:\w+)?="[^"]*"', "", text)  # HTML knows svg and xlink by itself
    escaped = alt.replace("&", "&amp;").replace('"', "&quot;").replace("<", "&lt;")
    return text.replace("<svg ", f'<svg role="img" aria-label="{escaped}" ', 1)
