"""Small pieces of HTML: escaped text, tables and bars."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence
from typing import Any

STYLE = """
:root { color-scheme: light; }
body { margin: 0 auto; max-width: 1060px; padding: 28px 24px 60px; background: #fff; color: #1a1a1a;
  font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", sans-serif; }
h1 { font-size: 26px; margin: 0 0 2px; } h2 { font-size: 19px; margin: 40px 0 10px; padding-top: 14px;
  border-top: 1px solid #ddd; } h3 { font-size: 15px; margin: 18px 0 6px; }
p { margin: 6px 0 12px; max-width: 76ch; } .sub { color: #555; margin: 0 0 16px; }
.verdict { font-size: 18px; margin: 14px 0 18px; padding: 10px 14px; background: #eef5fa;
  border-left: 4px solid #0072B2; }
.warn { background: #fdf1ea; border-left-color: #D55E00; }
.cards { display: flex; flex-wrap: wrap; gap: 10px; margin: 12px 0; }
.card { flex: 1 1 130px; border: 1px solid #ddd; border-radius: 6px; padding: 8px 12px; }
.card b { display: block; font-size: 22px; font-variant-numeric: tabular-nums; line-height: 1.3; }
.card span { color: #555; font-size: 13px; }
.wide { overflow-x: auto; } details { margin: 8px 0 14px; } summary { cursor: pointer; }
table { border-collapse: collapse; margin: 8px 0 14px; } caption { text-align: left; color: #555; padding-bottom: 4px; }
th, td { padding: 4px 14px 4px 0; text-align: left; border-bottom: 1px solid #eee; vertical-align: top; }
th { color: #444; font-weight: 600; border-bottom: 1px solid #bbb; }
td.n, th.n { text-align: right; font-variant-numeric: tabular-nums; white-space: nowrap; }
tr.this td { background: #eef5fa; font-weight: 600; }
td.bar { min-width: 220px; } .bar div { height: 11px; margin-top: 6px; background: #0072B2; border-radius: 2px; }
.bar div.other { background: #b7c4cd; }
.plots { display: flex; flex-wrap: wrap; gap: 18px; align-items: flex-start; }
.plots svg { max-width: 100%; height: auto; } h1, p, summary { overflow-wrap: anywhere; }
code { font: 13px ui-monospace, Menlo, Consolas, monospace; } footer { color: #666; font-size: 13px; margin-top: 40px; }
@media print { body { max-width: none; padding: 0; } h2 { break-after: avoid; } table, svg { break-inside: avoid; } }
"""


class Raw(str):
    """Text that is HTML already."""

    __slots__ = ()


def text(value: Any) -> str:
    """A value as escaped HTML; None is a dash.

    Args:
        value: Any value; `Raw` passes as it is.
    """
    if isinstance(value, Raw):
        return value
    return "–" if value is None else html.escape(str(value))


def number(value: float | None, digits: int = 4) -> str:
    """A number with fixed digits; None is a dash.

    Args:
        value: The number.
        digits: After the point.
    """
    return "–" if value is None else f"{value:,.{digits}f}"


def percent(value: float | None, digits: int = 1) -> str:
    """A share in per cent; None is a dash.

    Args:
        value: The share, 1 for all.
        digits: After the point.
    """
    return "–" if value is None else f"{100 * value:.{digits}f} %"


def table(
    head: Sequence[str], rows: Iterable[Sequence[Any]], *, numeric: Iterable[int] = (), this: Iterable[int] = ()
) -> Raw:
    """A table.

    Args:
        head: Column titles.
        rows: Cells; a `Raw` cell that begins with <td is a whole cell.
        numeric: Columns that are right-aligned.
        this: Rows that stand out.
    """
    right, marked = set(numeric), set(this)
    out = ["<div class=wide><table><thead><tr>"]  # on a narrow screen a table scrolls, and not the page
    out += [f"<th{' class=n' if k in right else ''}>{text(title)}</th>" for k, title in enumerate(head)]
    out.append("</tr></thead><tbody>")
    for r, row in enumerate(rows):
        out.append("<tr class=this>" if r in marked else "<tr>")
        for k, cell in enumerate(row):
            if isinstance(cell, Raw) and cell.startswith("<td"):
                out.append(cell)
            else:
                out.append(f"<td{' class=n' if k in right else ''}>{text(cell)}</td>")
        out.append("</tr>")
    out.append("</tbody></table></div>")
    return Raw("".join(out))


def folded(title: str, content: Raw) -> Raw:
    """What is shown on request.

    Args:
        title: Always seen.
        content: Seen once it is opened.
    """
    return Raw(f"<details><summary>{text(title)}</summary>{content}</details>")


def bar(share: float, *, other: bool = False) -> Raw:
    """A table cell with a bar.

    Args:
        share: Its length, between 0 and 1.
        other: In the paler colour.
    """
    width = 100 * min(1.0, max(0.0, share))
    return Raw(f'<td class=bar><div{" class=other" if other else ""} style="width:{width:.1f}%"></div></td>')


def card(title: str, value: str, note: str = "") -> Raw:
    """A number in large type.

    Args:
        title: What it is.
        value: The number.
        note: Said after the title.
    """
    return Raw(
        f"<div class=card><b>{text(value)}</b><span>{text(title)}{' · ' + text(note) if note else ''}</span></div>"
    )
