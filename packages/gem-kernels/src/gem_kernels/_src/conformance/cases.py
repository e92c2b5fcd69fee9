"""What the conformance run checks: named ops at named sizes, from the built-in list or from a JSON file."""

from __future__ import annotations

import dataclasses
import itertools
import json
import operator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from gem_kernels._src.block_attention.configs import BLOCK_SIZES
from gem_kernels._src.gdpa.names import ACTIVATION_NAMES

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
    head_dim_v: int | None = None
    """None: ``head_dim``."""
    causal: bool = False
    window_size: tuple[int, int] = (-1, -1)
    activation: str = "gelu"
    """Of gdpa and gdpa_norm_block."""
    block_size: int = 64
    rotary: bool = False
    """Of block_attention: with a table of angles."""
    bias: bool = False
    """Of jagged_attention: with tables by position and by time gap."""
    num_seeds: int = 0
    """Of jagged_attention and gdpa: queries that every sequence shares, in place of ``lengths_q``."""
    request_index: tuple[int, ...] | None = None
    """Of the same: the key sequence of each query sequence."""
    num_targets: tuple[int, ...] | None = None
    """Of gdpa: target rows at the end of each sequence."""
    recompute: bool = True
    """Of gdpa_norm_block."""
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
            raise ValueError(f"ConformanceCase: `op` must be one of {known}, got {self.op!r}; name one of them.")
        if self.dtype not in DTYPES:
            known = ", ".join(DTYPES)
            raise ValueError(f"ConformanceCase: `dtype` must be one of {known}, got {self.dtype!r}; name one of them.")
        _check_types(self)
        if self.num_seeds and (self.lengths_q or self.lengths_k is None):
            raise ValueError(
                "ConformanceCase: `num_seeds` must be 0 with `lengths_q`, or without `lengths_k`, whose sequences "
                f"share the seeds, got {self.num_seeds}; give the lengths of one side."
            )
        if self.op in LINEAR_OPS and min(self.in_features, self.out_features) < 1:
            raise ValueError(
                f"ConformanceCase: `in_features` and `out_features` of {self.op} must be at least 1, "
                f"got {self.in_features} and {self.out_features}; give both."
            )

    @property
    def label(self) -> str:
        """The sizes in a few characters, for the table."""
        if self.op in LINEAR_OPS:
            words = [f"M{self.rows} K{self.in_features} N{self.out_features}"]
            words += [self.norm] if self.op == "linear_norm" else []
        else:
            heads = f"H{self.num_heads}" + (f"/{self.num_heads_kv}" if self.num_heads_kv else "")
            lengths_q = self.query_lengths
            longest = "x".join(str(max(x, default=0)) for x in (lengths_q, self.lengths_k) if x is not None)
            words = [f"B{len(lengths_q)} L{longest} {heads} D{self.head_dim}"]
            words[0] += f"/{self.head_dim_v}" if self.head_dim_v else ""
            words += ["causal"] if self.causal else []
            words += [f"window {self.window_size[0]}:{self.window_size[1]}"] if self.window_size != (-1, -1) else []
            words += [self.activation] if self.op in ("gdpa", "gdpa_norm_block") else []
            words += [f"blocks of {self.block_size}"] if self.op == "block_attention" else []
            words += [name for name in ("rotary", "bias") if getattr(self, name)]
            words += [f"seeds {self.num_seeds}"] if self.num_seeds else []
            words += ["requests"] if self.request_index is not None else []
            words += ["targets"] if self.num_targets is not None else []
            words += [] if self.recompute else ["rows kept"]
        return ", ".join([*words, *(["affine"] if self.affine else [])])

    @property
    def query_lengths(self) -> tuple[int, ...]:
        """Rows of the output by query sequence."""
        if not self.num_seeds:
            return self.lengths_q
        pairs = self.lengths_k if self.request_index is None else self.request_index
        return (self.num_seeds,) * len(pairs or ())


def _check_types(case: ConformanceCase) -> None:
    """Raise on a value that no op could be given: a file has no types."""
    for name in (
        "rows", "in_features", "out_features", "num_seeds", "num_heads", "head_dim", "block_size", "num_heads_kv",
        "head_dim_v",
    ):  # fmt: skip
        value, least = getattr(case, name), 1 if name.startswith(("num_heads", "head", "block")) else 0
        if not (_is_int(value, least) or (name in ("num_heads_kv", "head_dim_v") and value is None)):
            raise ValueError(f"ConformanceCase: `{name}` must be an int >= {least}, got {value!r}; give a number.")
    for name, what in (
        ("lengths_q", "tokens"), ("lengths_k", "tokens"), ("request_index", "key sequence"), ("num_targets", "rows"),
    ):  # fmt: skip
        numbers = getattr(case, name)
        if name != "lengths_q" and numbers is None:
            continue
        if not (isinstance(numbers, tuple) and all(_is_int(x, 0) for x in numbers)):
            raise ValueError(
                f"ConformanceCase: `{name}` must be a list of ints >= 0, {what} per sequence, got {numbers!r}; list "
                "them."
            )
    window = case.window_size
    if not (isinstance(window, tuple) and len(window) == 2 and all(_is_int(x, -1) for x in window)):
        raise ValueError(
            f"ConformanceCase: `window_size` must be two ints >= -1, [left, right], got {window!r}; -1 is unbounded."
        )
    _check_choices(case)
    for name in ("causal", "rotary", "affine", "bias", "recompute"):
        if not isinstance(getattr(case, name), bool):
            value = getattr(case, name)
            raise ValueError(f"ConformanceCase: `{name}` must be true or false, got {value!r}; give one of them.")


def _check_choices(case: ConformanceCase) -> None:
    """Raise on values that the op would refuse, before any case runs."""
    choices: tuple[tuple[str, tuple[Any, ...]], ...] = (
        ("activation", ACTIVATION_NAMES), ("block_size", BLOCK_SIZES), ("norm", ("layer", "rms")),
    )  # fmt: skip
    for name, allowed in choices:
        value = getattr(case, name)
        if value not in allowed:
            raise ValueError(
                f"ConformanceCase: `{name}` must be one of {', '.join(map(str, allowed))}, got {value!r}; give another."
            )
    heads = case.num_heads_kv or case.num_heads
    if case.num_heads % heads:
        raise ValueError(
            f"ConformanceCase: `num_heads_kv` must divide `num_heads`, {case.num_heads}, got {heads}; change either."
        )
    if case.rotary and case.head_dim % 2:
        raise ValueError(
            f"ConformanceCase: `head_dim` must be even with `rotary`, got {case.head_dim}; change one of them."
        )
    num_queries = len(case.query_lengths)
    num_keys = num_queries if case.lengths_k is None else len(case.lengths_k)
    if case.request_index is None and num_keys != num_queries:
        raise ValueError(
            f"ConformanceCase: `lengths_k` must have an entry for each of the {num_queries} of `lengths_q`, got "
            f"{num_keys}; give as many, or a `request_index`."
        )
    index = case.request_index or ()
    if case.lengths_q and case.request_index is not None and len(index) != num_queries:
        raise ValueError(
            f"ConformanceCase: `request_index` must have an entry for each of the {num_queries} of `lengths_q`, got "
            f"{len(index)}; give as many."
        )
    if any(a > b for a, b in itertools.pairwise(index)) or max(index, default=0) >= max(num_keys, 1):
        raise ValueError(
            f"ConformanceCase: `request_index` must be key sequences in ascending order, below {num_keys}, got "
            f"{list(index)}; correct it."
        )
    targets = case.num_targets
    if targets is not None and (len(targets) != num_queries or any(map(operator.gt, targets, case.query_lengths))):
        raise ValueError(
            "ConformanceCase: `num_targets` must have an entry for each of `lengths_q`, at most its tokens, got "
            f"{list(targets)}; correct it."
        )


def _is_int(value: Any, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


_PACKED = {"op", "dtype", "lengths_q", "num_heads", "num_heads_kv", "head_dim"}
_TWO_SIDED = _PACKED | {"lengths_k", "head_dim_v", "causal", "window_size", "num_seeds", "request_index"}
_LINEAR = {"op", "dtype", "rows", "in_features", "out_features", "affine"}
FIELDS = {
    "jagged_attention": _TWO_SIDED | {"bias"},
    "gdpa": _TWO_SIDED | {"activation", "num_targets"},
    "block_attention": _PACKED | {"head_dim_v", "block_size", "rotary"},
    "gdpa_norm_block": _PACKED | {"lengths_k", "activation", "recompute", "affine"},
    "rmsnorm_linear": _LINEAR,
    "linear_norm": _LINEAR | {"norm"},
}
"""Fields of a case by op."""


_EXAMPLE = """write [{"op": "gdpa", "lengths_q": [0, 7, 300]}], for example"""


def load_cases(path: Path) -> list[ConformanceCase]:
    """Cases of a JSON file: a list of objects with the fields of ``ConformanceCase``."""
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(
            f"--shapes: must be a file that can be read, got '{path}' ({error.strerror}); name a JSON list of cases."
        ) from error
    except UnicodeDecodeError as error:
        raise ValueError(f"--shapes: `{path}` must be JSON, got bytes that are no text; write it in UTF-8.") from error
    except json.JSONDecodeError as error:
        raise ValueError(
            f"--shapes: `{path}` must be JSON, got an error in line {error.lineno}: {error.msg}; correct it."
        ) from error
    if not isinstance(entries, list) or not entries:
        got = "an empty one" if entries == [] else type(entries).__name__
        raise ValueError(f"--shapes: `{path}` must hold a list of at least one case, got {got}; {_EXAMPLE}.")
    return [_load_case(path, number, entry) for number, entry in enumerate(entries)]


def _load_case(path: Path, number: int, entry: Any) -> ConformanceCase:
    if not isinstance(entry, dict):
        raise ValueError(
            f"--shapes: case {number} of `{path}` must be an object, got {type(entry).__name__}; {_EXAMPLE}."
        )
    fields = {field.name for field in dataclasses.fields(ConformanceCase)}
    unknown = sorted(set(entry) - fields)
    if unknown or "op" not in entry:
        rule, got = ("have known fields only", repr(unknown[0])) if unknown else ("name its `op`", "none")
        raise ValueError(
            f"--shapes: case {number} of `{path}` must {rule}, got {got}; fields are {', '.join(sorted(fields))}."
        )
    foreign = sorted(set(entry) - FIELDS.get(str(entry["op"]), fields))
    if foreign:
        raise ValueError(
            f"--shapes: case {number} of `{path}` must have fields that {entry['op']} takes, got {foreign[0]!r}; leave "
            "it out."
        )
    values: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in entry.items()}
    try:
        case = ConformanceCase(**values)
    except (TypeError, ValueError) as error:
        raise ValueError(f"--shapes: case {number} of `{path}`: {error}") from error
    if case.op in ATTENTION_OPS and "lengths_q" not in entry and not case.num_seeds:
        raise ValueError(
            f"--shapes: case {number} of `{path}` must have `lengths_q`, tokens per sequence, got none; add a list "
            "of ints."
        )
    return case


_EDGES: dict[str, Any] = {"lengths_q": (0, 1, 63, 64, 65, 200), "lengths_k": (8, 64, 1, 0, 128, 130)}
_SELF: dict[str, Any] = {"lengths_q": (0, 1, 63, 64, 65, 200)}


_REQUESTS: dict[str, Any] = {**_EDGES, "lengths_k": (64, 0, 130), "request_index": (0, 0, 0, 1, 2, 2)}


def _options(common: dict[str, Any]) -> list[ConformanceCase]:
    """What the attention ops can do beside masks and grouped heads."""
    seeds: dict[str, Any] = {"num_seeds": 5, "lengths_k": _EDGES["lengths_k"], **common}
    return [
        ConformanceCase(op="jagged_attention", bias=True, causal=True, **_SELF, **common),
        ConformanceCase(op="jagged_attention", **seeds),
        ConformanceCase(op="jagged_attention", head_dim_v=32, **_REQUESTS, **common),
        ConformanceCase(op="gdpa", num_targets=(0, 1, 5, 64, 1, 40), activation="silu", causal=True, **_SELF, **common),
        ConformanceCase(op="gdpa", window_size=(16, 4), **seeds),
        ConformanceCase(op="block_attention", num_heads_kv=2, head_dim_v=32, **_SELF, **common),
        ConformanceCase(op="gdpa", head_dim_v=32, **_REQUESTS, **common),
        ConformanceCase(op="gdpa_norm_block", num_heads_kv=2, activation="silu", recompute=False, **_EDGES, **common),
    ]


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
            # One dtype and head dim: what other ones change is compared above.
            cases += _options(common) if not any(case.bias for case in cases) else []
        sizes: dict[str, Any] = {"rows": rows, "in_features": features[0], "out_features": features[1], "dtype": dtype}
        cases += [
            ConformanceCase(op="rmsnorm_linear", affine=True, **sizes),
            ConformanceCase(op="linear_norm", **sizes),
            ConformanceCase(op="linear_norm", norm="rms", affine=True, **sizes),
        ]
    return cases
