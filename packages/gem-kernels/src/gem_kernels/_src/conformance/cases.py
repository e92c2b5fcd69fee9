"""What the conformance run checks: named ops at named sizes, from the built-in list or from a JSON file."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ATTENTION_OPS = ("jagged_attention", "gdpa", "block_attention", "gdpa_norm_block")
LINEAR_OPS = ("rmsnorm_linear", "linear_norm")
DTYPES = {
    "float64": torch.float64,
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True, kw_only=True, slots=True)
class ConformanceCase:
    """One op at one size, its forward and its backward."""

    op: str
    """A name in ``gem_kernels``."""
    dtype: str = "bfloat16"
    """Of every floating point tensor."""
    lengths_q: tuple[int, ...] = ()
    """Attention: tokens per query sequence."""
    lengths_k: tuple[int, ...] | None = None
    """Attention: tokens per key sequence; None where they are those of the queries."""
    num_heads: int = 4
    num_heads_kv: int | None = None
    """None: as many as ``num_heads``."""
    head_dim: int = 64
    causal: bool = False
    window_size: tuple[int, int] = (-1, -1)
    activation: str = "gelu"
    """Of gdpa and gdpa_norm_block."""
    block_size: int = 64
    rotary: bool = False
    """Of block_attention: with a table of angles."""
    rows: int = 0
    """Linear layers: rows of the input."""
    in_features: int = 0
    out_features: int = 0
    norm: str = "layer"
    """Of linear_norm."""
    affine: bool = False
    """Give every optional weight and bias that the op takes."""

    def __post_init__(self) -> None:
        if self.op not in ATTENTION_OPS + LINEAR_OPS:
            known = ", ".join(ATTENTION_OPS + LINEAR_OPS)
            raise ValueError(f"ConformanceCase: `op` must be one of {known}, got {self.op!r}.")
        if self.dtype not in DTYPES:
            raise ValueError(f"ConformanceCase: `dtype` must be one of {', '.join(DTYPES)}, got {self.dtype!r}.")
        _check_types(self)
        if self.op in LINEAR_OPS and min(self.in_features, self.out_features) < 1:
            raise ValueError(
                f"ConformanceCase: {self.op} needs `in_features` and `out_features` of at least 1, "
                f"got {self.in_features} and {self.out_features}."
            )

    @property
    def label(self) -> str:
        """The sizes in a few characters, for the table."""
        if self.op in LINEAR_OPS:
            words = [f"M{self.rows} K{self.in_features} N{self.out_features}"]
            words += [self.norm] if self.op == "linear_norm" else []
        else:
            heads = f"H{self.num_heads}" + (f"/{self.num_heads_kv}" if self.num_heads_kv else "")
            longest = "x".join(
                str(max(lengths, default=0)) for lengths in (self.lengths_q, self.lengths_k) if lengths is not None
            )
            words = [f"B{len(self.lengths_q)} L{longest} {heads} D{self.head_dim}"]
            words += ["causal"] if self.causal else []
            words += [f"window {self.window_size[0]}:{self.window_size[1]}"] if self.window_size != (-1, -1) else []
            words += [self.activation] if self.op in ("gdpa", "gdpa_norm_block") else []
            words += [f"blocks of {self.block_size}"] if self.op == "block_attention" else []
            words += ["rotary"] if self.rotary else []
        return ", ".join([*words, *(["affine"] if self.affine else [])])


def _check_types(case: ConformanceCase) -> None:
    """Raise on a value that no op could be given: a file has no types."""
    for name in ("rows", "in_features", "out_features", "num_heads", "head_dim", "block_size", "num_heads_kv"):
        value, least = getattr(case, name), 1 if name.startswith(("num", "head", "block")) else 0
        if not (_is_int(value, least) or (name == "num_heads_kv" and value is None)):
            raise ValueError(f"ConformanceCase: `{name}` must be an int >= {least}, got {value!r}.")
    for name in ("lengths_q", "lengths_k"):
        lengths = getattr(case, name)
        if name == "lengths_k" and lengths is None:
            continue
        if not (isinstance(lengths, tuple) and all(_is_int(x, 0) for x in lengths)):
            raise ValueError(
                f"ConformanceCase: `{name}` must be a list of ints >= 0, tokens per sequence, got {lengths!r}."
            )
    window = case.window_size
    if not (isinstance(window, tuple) and len(window) == 2 and all(_is_int(x, -1) for x in window)):
        raise ValueError(f"ConformanceCase: `window_size` must be two ints >= -1, [left, right], got {window!r}.")
    for name in ("causal", "rotary", "affine"):
        if not isinstance(getattr(case, name), bool):
            raise ValueError(f"ConformanceCase: `{name}` must be true or false, got {getattr(case, name)!r}.")


def _is_int(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


_OF_LINEAR = {"rows", "in_features", "out_features", "norm"}
_OF_ATTENTION = {
    "lengths_q", "lengths_k", "num_heads", "num_heads_kv", "head_dim", "causal", "window_size", "activation",
    "block_size", "rotary",
}  # fmt: skip


def load_cases(path: Path) -> list[ConformanceCase]:
    """Cases of a JSON file: a list of objects with the fields of ``ConformanceCase``."""
    try:
        entries = json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"check: `{path}` must be JSON, got an error in line {error.lineno}: {error.msg}.") from error
    if not isinstance(entries, list) or not entries:
        raise ValueError(f"check: `{path}` must hold a list of at least one case, got {type(entries).__name__}.")
    return [_load_case(path, number, entry) for number, entry in enumerate(entries)]


def _load_case(path: Path, number: int, entry: Any) -> ConformanceCase:
    if not isinstance(entry, dict):
        raise ValueError(f"check: case {number} of `{path}` must be an object, got {type(entry).__name__}.")
    fields = {field.name for field in dataclasses.fields(ConformanceCase)}
    unknown = sorted(set(entry) - fields)
    if unknown or "op" not in entry:
        problem = f"unknown field {unknown[0]!r}" if unknown else "no `op`"
        raise ValueError(f"check: case {number} of `{path}` has {problem}; fields are {', '.join(sorted(fields))}.")
    linear = entry["op"] in LINEAR_OPS
    foreign = sorted(set(entry) & (_OF_ATTENTION if linear else _OF_LINEAR))
    if foreign:
        raise ValueError(f"check: case {number} of `{path}` has {foreign[0]!r}, which {entry['op']} does not take.")
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in entry.items()}
    try:
        case = ConformanceCase(**values)
    except (TypeError, ValueError) as error:
        raise ValueError(f"check: case {number} of `{path}`: {error}") from error
    if not linear and "lengths_q" not in entry:
        raise ValueError(f"check: case {number} of `{path}` needs `lengths_q`, tokens per sequence: a list of ints.")
    return case


_EDGES: dict[str, Any] = {"lengths_q": (0, 1, 63, 64, 65, 200), "lengths_k": (8, 64, 1, 0, 128, 130)}
_SELF: dict[str, Any] = {"lengths_q": (0, 1, 63, 64, 65, 200)}


def default_cases(device: torch.device) -> list[ConformanceCase]:
    """Every op with its main options, in the dtypes that the device trains in; larger sizes on a GPU."""
    on_cuda = device.type == "cuda"
    head_dims = (64, 128) if on_cuda else (16,)
    features, rows = ((512, 512), 1000) if on_cuda else ((48, 40), 70)
    cases = []
    for dtype in ("bfloat16", "float16", "float32") if on_cuda else ("bfloat16", "float32"):
        for head_dim in head_dims:
            common: dict[str, Any] = {"dtype": dtype, "head_dim": head_dim}
            cases += [
                ConformanceCase(op="jagged_attention", **_EDGES, **common),
                ConformanceCase(op="jagged_attention", num_heads_kv=2, causal=True, **_SELF, **common),
                ConformanceCase(op="jagged_attention", window_size=(16, 4), **_SELF, **common),
                ConformanceCase(op="gdpa", **_EDGES, **common),
                ConformanceCase(op="gdpa", activation="silu", num_heads_kv=2, causal=True, **_SELF, **common),
                ConformanceCase(op="block_attention", **_SELF, **common),
                ConformanceCase(op="block_attention", block_size=32, rotary=True, **_SELF, **common),
                ConformanceCase(op="gdpa_norm_block", affine=True, **_EDGES, **common),
            ]
        sizes: dict[str, Any] = {"rows": rows, "in_features": features[0], "out_features": features[1], "dtype": dtype}
        cases += [
            ConformanceCase(op="rmsnorm_linear", affine=True, **sizes),
            ConformanceCase(op="linear_norm", **sizes),
            ConformanceCase(op="linear_norm", norm="rms", affine=True, **sizes),
        ]
    return cases
