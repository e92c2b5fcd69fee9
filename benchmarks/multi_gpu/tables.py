"""Rows as tables for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = ["print_tables"]

COLUMNS: dict[str, tuple[str, ...]] = {
    "correctness": ("name", "status", "loss_error", "loss_bound", "weight_error", "weight_bound", "worst_tensor"),
    "collectives": ("name", "engine", "mib", "ms", "bus_gb_per_s", "matmul_ms", "matmul_slowdown", "covered"),
    "scaling": (
        "workload",
        "name",
        "step_ms",
        "samples_per_second",
        "of_base",
        "of_one_gpu",
        "local_mfu",
        "e2e_mfu",
        "scaling_ratio",
        "imbalance",
        "peak_gib",
    ),
    "wires": (
        "name",
        "mib",
        "dtype",
        "status",
        "sent_mib",
        "gather_ms",
        "cast_ms",
        "encode_ms",
        "all_gather_ms",
        "decode_ms",
        "step_ms",
    ),
    "prediction": (
        "workload",
        "name",
        "predicted_ms",
        "measured_ms",
        "error",
        "predicted_peak_gib",
        "measured_peak_gib",
        "predicted_limit",
        "rates",
    ),
}


def print_tables(rows: Sequence[dict[str, Any]]) -> None:
    """One table for each part, then what is not there and why."""
    for part, columns in COLUMNS.items():
        here = [row for row in rows if row["part"] == part and "reason" not in row]
        if not here:
            continue
        cells = [list(columns), *([_shown(row.get(column)) for column in columns] for row in here)]
        widths = [max(len(line[index]) for line in cells) for index in range(len(columns))]
        print(f"\n{part}")
        for line in cells:
            print("  " + "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    reasons = [row for row in rows if "reason" in row]
    if reasons:
        print("\nnot measured")
        for row in reasons:
            print(f"  {row['part']}, {row['name']}: {row['status']}, {row['reason']}")
    print(flush=True)


def _shown(value: Any) -> str:
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3g}" if abs(value) < 1e5 else f"{value:.0f}"
    return str(value)
