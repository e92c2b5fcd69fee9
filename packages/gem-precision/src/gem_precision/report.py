"""What every layer of a module computes in, and why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

import torch
from torch import nn

from gem_precision._src import bypass, layers
from gem_precision.recipe import BF16Recipe, MXFP8Recipe

__all__ = ["LayerReport", "PrecisionSummary", "describe", "format_report", "summarize"]

_SHORT = {
    torch.float64: "fp64",
    torch.float32: "fp32",
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
}
_ENGINE = {"Linear": "torch", "JaggedAttention": "gem_kernels", "GDPA": "gem_kernels", "BlockAttention": "gem_kernels"}


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerReport:
    """One layer."""

    fqn: str
    """Name within the described module; "" is the module itself."""
    kind: str
    """Class of the layer before conversion."""
    precision: str
    """What the layer multiplies in: "mxfp8" or "bf16" for converted layers; for an nn.Linear, whose input must have the
    dtype of its weight, that dtype; "input" for attention, which computes in that of its inputs. Of all others only
    what they hold is known, "fp32 parameters" for example: a norm with such parameters may well read and return
    bfloat16. Autocast and the mixed precision of ``fully_shard`` cast at the call and are not seen here."""
    backend: str
    """What runs the layer: "emulated", "torch" or "gem_kernels"."""
    reason: str
    """Why this precision and this backend."""
    is_converted: bool
    """Whether a recipe changed the layer."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionSummary:
    """How many layers compute in what."""

    num_layers: int
    num_converted: int
    by_precision: tuple[tuple[str, int], ...]
    """(precision, number of layers), the most frequent first."""


def _converted(fqn: str, layer: nn.Module) -> LayerReport:
    kind, recipe = layers.kind_of(layer), layer.recipe
    assert isinstance(recipe, MXFP8Recipe | BF16Recipe)
    if isinstance(recipe, MXFP8Recipe):
        backend = recipe.resolved_backend
        reason = "operands are quantised, dequantised and multiplied in high precision"
        if recipe.backend == "auto":
            reason = f"no native MXFP8 product in this version: {reason}"
        if kind == "Linear" and recipe.wgrad == "high_precision":
            reason += "; weight gradient in high precision"
        return LayerReport(fqn=fqn, kind=kind, precision=recipe.name, backend=backend, reason=reason, is_converted=True)
    return LayerReport(
        fqn=fqn,
        kind=kind,
        precision="bf16",
        backend=_ENGINE[kind],
        reason="operands are cast to bfloat16, parameters "
        + ("and result keep their dtype" if recipe.activations == "input" else "keep their dtype, the result does not"),
        is_converted=True,
    )


def _untouched(fqn: str, layer: nn.Module) -> LayerReport | None:
    kind = layers.kind_of(layer)
    dtypes = sorted({_SHORT.get(p.dtype, str(p.dtype).removeprefix("torch.")) for p in layer.parameters(recurse=False)})
    if isinstance(layer, layers.CONVERTIBLE):
        reason = layers.noted(layer) or "not converted"
    elif dtypes:
        reason = f"no recipe covers {kind}: its code and its input decide what it computes in"
    else:
        return None
    precision = "+".join(dtypes) if dtypes else "input"
    if dtypes and not layers.computes_in_its_weight(layer):
        precision += " parameters"
    return LayerReport(
        fqn=fqn, kind=kind, precision=precision, backend=_ENGINE.get(kind, "torch"), reason=reason, is_converted=False
    )


def describe(module: nn.Module) -> tuple[LayerReport, ...]:
    """A line for every layer: all linear and attention layers, and every other module that owns parameters.

    Args:
        module: Converted or not, before or after ``fully_shard``.

    Returns:
        The layers in the order of ``named_modules``; a layer that stands in several places comes once.

    Raises:
        TypeError: if ``module`` is no nn.Module.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"describe: `module` must be an nn.Module, got {type(module).__name__}; pass the model.")
    reports = []
    bypassed = bypass.bypassed(module)
    for fqn, layer in module.named_modules():
        report = _converted(fqn, layer) if layers.is_converted(layer) else _untouched(fqn, layer)
        if report is not None and report.is_converted and id(layer) in bypassed:
            reason = f"NOT where {bypassed[id(layer)]} reads its weight; convert that module whole: {report.reason}"
            report = replace(report, reason=reason)
        if report is not None:
            reports.append(report)
    return tuple(reports)


def summarize(reports: Iterable[LayerReport]) -> PrecisionSummary:
    """Count the layers by precision.

    Args:
        reports: From ``describe``.
    """
    reports = tuple(reports)
    return PrecisionSummary(
        num_layers=len(reports),
        num_converted=sum(report.is_converted for report in reports),
        by_precision=tuple(Counter(report.precision for report in reports).most_common()),
    )


def format_report(reports: Iterable[LayerReport]) -> str:
    """A table for people, a line per layer and one of counts at the end.

    Layers are modules. Attention or products that a model's code calls as functions stay what they are, also where they
    read the weight of a converted layer, and nothing from outside can count them; the last line says so.

    Args:
        reports: From ``describe``.
    """
    reports = tuple(reports)
    header = ("layer", "kind", "precision", "backend", "reason")
    rows = [header] + [(r.fqn or "(module)", r.kind, r.precision, r.backend, r.reason) for r in reports]
    widths = [max(len(row[column]) for row in rows) for column in range(len(header) - 1)]
    lines = [
        "  ".join([*(cell.ljust(width) for cell, width in zip(row, widths, strict=False)), row[-1]]) for row in rows
    ]
    summary = summarize(reports)
    counts = ", ".join(f"{count} {precision}" for precision, count in summary.by_precision)
    lines.append(
        f"{summary.num_converted} of {summary.num_layers} layers converted: {counts or 'none'}; attention and products "
        "that the model calls as functions, with weights of a layer or not, stay what they are and are not counted"
    )
    return "\n".join(lines)
