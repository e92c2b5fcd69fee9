"""Compute rates of one device, each with where it was measured."""

from __future__ import annotations

import difflib
import json
import math
from bisect import bisect_left
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Hardware", "Rate"]

_RATES = (
    "peak_flops",
    "memory_bytes",
    "host_memory_bytes",
    "host_read",
    "host_update",
    "copy",
    "embedding_read",
    "embedding_update",
    "activation_passes",
)
_BY_WIDTH = ("gemm", "attention_forward", "attention_backward")

_JSON = {list: "list", str: "string", int: "number", float: "number", bool: "boolean", type(None): "null"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """A number and where it is from."""

    value: float
    source: str

    def __post_init__(self) -> None:
        if isinstance(self.value, bool) or not isinstance(self.value, (int, float)):
            raise TypeError(f"Rate: `value` must be a number, got {type(self.value).__name__}; pass a float")
        if not (math.isfinite(self.value) and self.value > 0):
            raise ValueError(f"Rate: `value` must be finite and above 0, got {self.value}; measure it")
        if not isinstance(self.source, str) or not self.source:
            raise ValueError(
                f"Rate: `source` must say where {self.value} was measured, got {self.source!r}; write where it is from"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Hardware:
    """What one device does."""

    name: str
    peak_flops: Rate
    """FLOP/s of dense bf16 products by the datasheet: the denominator of MFU."""
    memory_bytes: Rate
    host_memory_bytes: Rate
    """Memory of the host, per device in it."""
    host_read: Rate
    """Bytes of rows per second that the device reads from host memory (UVM)."""
    host_update: Rate
    """Bytes of rows in host memory per second that the device reads, changes and writes back."""
    copy: Rate
    """Bytes per second of a copy, read and write counted."""
    gemm: tuple[tuple[int, Rate], ...]
    """(width, FLOP/s) of bf16 products whose smaller side is ``width``, by width."""
    attention_forward: tuple[tuple[int, Rate], ...]
    """(width, FLOP/s) of attention over unmasked pairs with heads of ``width``, by width: a model's mix of kinds."""
    attention_backward: tuple[tuple[int, Rate], ...]
    embedding_read: Rate
    """Bytes of looked-up rows per second."""
    embedding_update: Rate
    """Bytes of row gradients per second, backward and optimizer."""
    activation_passes: Rate
    """Times that forward moves the bytes it saves, in what is neither product nor attention (norms, gates, sums);
    backward twice as often."""

    def gemm_rate(self, width: int) -> float:
        """FLOP/s at a width: linear in its logarithm between measured ones, proportional to it below the smallest."""
        return _rate_at(self.gemm, width)

    def attention_rates(self, width: int) -> tuple[float, float]:
        """(FLOP/s forward, backward) with heads of a width, continued as ``gemm_rate``."""
        return _rate_at(self.attention_forward, width), _rate_at(self.attention_backward, width)

    @classmethod
    def load(cls, path: str | Path | None = None) -> Hardware:
        """Read a rates file.

        Args:
            path: JSON; default: the H200 rates that ship with the package.

        Raises:
            ValueError: the file is no rates file: a field is missing, unknown or without a source.
            TypeError: ``path`` is no path.
            OSError: it cannot be read.
        """
        if path is not None and not isinstance(path, (str, Path)):
            raise TypeError(
                f"Hardware.load: `path` must be a path or None, got {type(path).__name__} {path!r}; name a .json file "
                "of rates, or leave it out for the H200's"
            )
        path = Path(path) if path is not None else Path(__file__).with_name("nvidia-h200.json")
        try:
            values: Any = json.loads(path.read_text(encoding="utf-8"))
        except ValueError as error:
            raise ValueError(f"Hardware.load: {path} must be valid JSON, got {error}; correct it") from error
        expected = {"name", *_BY_WIDTH, *_RATES}
        if not isinstance(values, dict):
            raise ValueError(
                f"Hardware.load: {path} must hold a JSON object with a field for each rate, got a "
                f"{_JSON[type(values)]}; begin with a copy of {Path(__file__).with_name('nvidia-h200.json')}"
            )
        missing, unknown = sorted(expected - set(values)), sorted(set(values) - expected)
        if missing or unknown:
            got = [f"unknown {', '.join(_with_nearest(name, missing) for name in unknown)}"] if unknown else []
            got += [f"none of {', '.join(missing)}"] if missing else []
            raise ValueError(
                f"Hardware.load: {path} must hold the fields {', '.join(sorted(expected))}, got {' and '.join(got)}; "
                "add what is missing, correct or drop the others"
            )
        try:
            by_width: dict[str, Any] = {
                name: tuple(
                    sorted(
                        (int(each["width"]), Rate(value=each["value"], source=each["source"])) for each in values[name]
                    )
                )
                for name in _BY_WIDTH
            }
            rates: dict[str, Any] = {name: Rate(**values[name]) for name in _RATES}
        except (TypeError, KeyError) as error:
            raise ValueError(
                f"Hardware.load: {path}: every rate must hold value and source only, got an entry of others ({error}); "
                "correct it"
            ) from error
        for name, found in by_width.items():
            if not found or len({width for width, _ in found}) != len(found) or found[0][0] < 1:
                raise ValueError(
                    f"Hardware.load: {path}: `{name}` must hold rates at different widths, got {len(found)}; list one "
                    "rate per width"
                )
        return cls(name=str(values["name"]), **by_width, **rates)


def _with_nearest(name: str, missing: list[str]) -> str:
    """An unknown name, and the missing one that it may stand for."""
    near = difflib.get_close_matches(name, missing, 1)
    return name + (f" (did you mean {near[0]}?)" if near else "")


def _rate_at(rates: tuple[tuple[int, Rate], ...], width: int) -> float:
    widths = [each for each, _ in rates]
    at = bisect_left(widths, width)
    if at == 0:
        return rates[0][1].value * min(1.0, width / widths[0])
    if at == len(widths):
        return rates[-1][1].value
    (low, slow), (high, fast) = rates[at - 1], rates[at]
    share = math.log(width / low) / math.log(high / low)
    return slow.value + share * (fast.value - slow.value)
