"""What the caller says about tables, features and the sparse optimizer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Literal, get_args

from gem_parallel._src.checks import check_number

__all__ = [
    "CacheAlgorithm",
    "FeatureConfig",
    "Gather",
    "IdPolicy",
    "Location",
    "Placement",
    "Pooling",
    "SparseOptimizerConfig",
    "TableConfig",
    "TableMemory",
    "check_memory",
]

Placement = Literal["auto", "table_wise", "row_wise", "column_wise", "replicated"]
Location = Literal["device", "uvm", "uvm_caching"]
CacheAlgorithm = Literal["lru", "lfu"]
Pooling = Literal["sum", "mean", "none"]
OptimizerKind = Literal["rowwise_adagrad", "adagrad", "adam", "sgd"]
Gather = Literal["tables", "rows"]
IdPolicy = Literal["error", "drop", "clamp"]

MAX_DIM = 1024
"""fbgemm's CUDA kernels hold one row in the registers of one warp; wider rows come back wrong or are refused."""

MAX_ROWS = 2**60
"""Rows of one table over all ranks: positions in all tables together are 64-bit numbers."""

MAX_LOCAL_ROWS = 2**31 - 2
"""Rows of one table on one rank: fbgemm's CPU kernels index rows with 32 bits (one row is kept in reserve)."""


DEFAULT_CACHE_LOAD_FACTOR = 0.2
"""fbgemm's and torchrec's default."""


def check_choice(owner: str, argument: str, value: object, choices: Sequence[str]) -> None:
    if value not in choices:
        raise ValueError(f"{owner}: `{argument}` must be one of {', '.join(choices)}, got {value!r}; name one of them")


def check_name(owner: str, argument: str, value: object) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{owner}: `{argument}` must be a str, got {type(value).__name__}; give a name")
    if not value or value != value.strip():
        raise ValueError(
            f"{owner}: `{argument}` must be a non-empty name without outer blanks, got {value!r}; rename it"
        )


def check_integer(owner: str, argument: str, value: object, low: int | None = None, high: int | None = None) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{owner}: `{argument}` must be an int, got {type(value).__name__}; pass int(x)")
    if low is not None and high is not None and not low <= value <= high:
        raise ValueError(f"{owner}: `{argument}` must lie in [{low}, {high}], got {value}; pass a number in this range")


def check_flag(owner: str, argument: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(
            f"{owner}: `{argument}` must be a bool, got {type(value).__name__} {value!r}; pass True or False"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TableMemory:
    """Where rows lie; tables of one dim that agree in it share an engine, and a cache if there is one."""

    location: Location = "device"
    cache_load_factor: float = 0.0
    """0 without a cache."""
    cache_algorithm: CacheAlgorithm = "lru"


def check_memory(owner: str, location: object, cache_load_factor: object, cache_algorithm: object) -> None:
    """Raise unless the three fields make sense together; None is a field that was left out."""
    check_choice(owner, "location", location, get_args(Location))
    if cache_algorithm is not None:
        check_choice(owner, "cache_algorithm", cache_algorithm, get_args(CacheAlgorithm))
    if cache_load_factor is not None:
        if isinstance(cache_load_factor, bool) or not isinstance(cache_load_factor, (int, float)):
            raise TypeError(
                f"{owner}: `cache_load_factor` must be a number, got {type(cache_load_factor).__name__}; pass a float"
            )
        if not 0 < cache_load_factor <= 1:
            raise ValueError(
                f"{owner}: `cache_load_factor` must lie in (0, 1] (rows in the cache / rows), got {cache_load_factor}; "
                f"the default is {DEFAULT_CACHE_LOAD_FACTOR}"
            )
    for argument, value in (("cache_load_factor", cache_load_factor), ("cache_algorithm", cache_algorithm)):
        if value is not None and location != "uvm_caching":
            raise ValueError(
                f"{owner}: `{argument}` must be left out for location {location!r}, which has no cache, got {value!r}; "
                "use location='uvm_caching'"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class TableConfig:
    """One embedding table."""

    name: str
    """Unique; part of the state dict's keys."""
    num_rows: int
    """Ids of this table lie in [0, num_rows). May exceed 2^31; the rows of one rank may not."""
    dim: int
    """Row length, in elements: a multiple of 4, at most 1024."""
    placement: Placement = "auto"
    """Over the ranks that hold one copy of the tables. table_wise: all rows on one rank; row_wise: equal runs of
    consecutive rows per rank; column_wise: equal runs of columns on as many ranks as divide their number and dim / 4;
    replicated: the whole table on every rank, whose gradients are added densely over all ranks: for small tables;
    auto: row_wise for a table larger than a rank's fair share of all tables, else table_wise."""
    init_std: float | None = None
    """Standard deviation of the normal initial weights; None is dim ** -0.5."""
    hashed: bool = False
    """Ids are any int64 and are mapped to rows by ``hash_ids(values, num_rows)``; none is out of range."""
    location: Location = "device"
    """Memory of a table on a CUDA device. device: all of it there. uvm: in host memory, which the kernels read and
    write in place (CUDA unified memory; fbgemm's MANAGED). uvm_caching: in host memory, with a software cache of rows
    on the device (MANAGED_CACHING), for tables larger than the device whose batches name mostly the same rows.
    Moments of one number per row stay on the device; others lie in host memory, uncached."""
    cache_load_factor: float | None = None
    """Rows in the cache / rows of the table, in (0, 1], for uvm_caching; None is 0.2. Tables of one dim with equal
    factor and algorithm share one cache."""
    cache_algorithm: CacheAlgorithm | None = None
    """What the cache evicts: lru, the row longest unused, or lfu, the one least often used; None is lru."""

    def __post_init__(self) -> None:
        check_name("TableConfig", "name", self.name)
        owner = f"TableConfig {self.name!r}"
        check_integer(owner, "num_rows", self.num_rows, 1, MAX_ROWS)
        check_integer(owner, "dim", self.dim)
        if self.dim < 1:
            raise ValueError(f"{owner}: `dim` must be a multiple of 4 in [4, {MAX_DIM}], got {self.dim}; use 4")
        if self.dim % 4 != 0:
            raise ValueError(
                f"{owner}: `dim` must be a multiple of 4 (fbgemm moves rows in vectors of 4), got {self.dim}; "
                f"use {-(-self.dim // 4) * 4}"
            )
        if self.dim > MAX_DIM:
            parts = -(-self.dim // MAX_DIM)
            raise ValueError(
                f"{owner}: `dim` must be at most {MAX_DIM} (limit of fbgemm's CUDA kernels), got {self.dim}; "
                f"split the columns over {parts} tables and concatenate their outputs"
            )
        check_choice(owner, "placement", self.placement, get_args(Placement))
        check_flag(owner, "hashed", self.hashed)
        if self.init_std is not None:
            check_number(owner, "init_std", self.init_std)
            if not (math.isfinite(self.init_std) and self.init_std >= 0):
                raise ValueError(
                    f"{owner}: `init_std` must be finite and at least 0, got {self.init_std}; leave it out for dim ** "
                    "-0.5"
                )
        check_memory(owner, self.location, self.cache_load_factor, self.cache_algorithm)

    @property
    def memory(self) -> TableMemory:
        """Where the rows lie, with the defaults filled in."""
        if self.location != "uvm_caching":
            return TableMemory(location=self.location)
        return TableMemory(
            location=self.location,
            cache_load_factor=self.cache_load_factor or DEFAULT_CACHE_LOAD_FACTOR,
            cache_algorithm=self.cache_algorithm or "lru",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class FeatureConfig:
    """One stream of ids that is looked up in a table; several features may share a table."""

    name: str
    """Key in the mappings given to ``exchange`` and returned by ``lookup``."""
    table: str
    """Name of the table."""
    pooling: Pooling = "sum"
    """How the rows of one bag combine: sum or mean give (num_bags, dim), none gives (N, dim), one row per id."""

    def __post_init__(self) -> None:
        check_name("FeatureConfig", "name", self.name)
        check_name(f"FeatureConfig {self.name!r}", "table", self.table)
        check_choice(f"FeatureConfig {self.name!r}", "pooling", self.pooling, get_args(Pooling))


@dataclass(frozen=True, kw_only=True, slots=True)
class SparseOptimizerConfig:
    """The optimizer that runs inside backward, on the rows of the batch only.

    With g the gradient of a row, summed over its occurrences in the global batch, D its length and t the number of
    training lookups so far:

    - sgd: w -= lr * g
    - adagrad: s += g ** 2; w -= lr * g / (sqrt(s) + eps)
    - rowwise_adagrad: s += mean(g ** 2), one s per row; w = (1 - lr * weight_decay) * w - lr * g / (sqrt(s) + eps)
    - adam: m = beta1 * m + (1 - beta1) * g; v = beta2 * v + (1 - beta2) * g ** 2;
      w -= lr * (m / (1 - beta1 ** t) / (sqrt(v / (1 - beta2 ** t)) + eps) + weight_decay * w)

    eps stands outside the square root everywhere. Rows that the batch does not name keep weight and state, so Adam's
    moments do not decay and weight decay does not act on them.
    """

    kind: OptimizerKind = "rowwise_adagrad"
    learning_rate: float = 0.01
    """Step size; later ones through ``ShardedEmbeddings.set_learning_rate``."""
    eps: float = 1e-8
    """Added to the root of the second moment, which sgd does not have."""
    beta1: float = 0.9
    """Decay of Adam's first moment, per training lookup that names the row."""
    beta2: float = 0.999
    """Decay of Adam's second moment, per training lookup that names the row."""
    weight_decay: float = 0.0
    """Decoupled weight decay, for adam and rowwise_adagrad."""

    def __post_init__(self) -> None:
        owner = "SparseOptimizerConfig"
        check_choice(owner, "kind", self.kind, get_args(OptimizerKind))
        for argument in ("learning_rate", "eps", "beta1", "beta2", "weight_decay"):
            check_number(owner, argument, getattr(self, argument))
        for argument in ("learning_rate", "weight_decay"):
            value = getattr(self, argument)
            if not (math.isfinite(value) and value >= 0):
                raise ValueError(
                    f"{owner}: `{argument}` must be finite and at least 0, got {value}; {_default(argument)}"
                )
        if not (math.isfinite(self.eps) and self.eps > 0):
            raise ValueError(
                f"{owner}: `eps` must be finite and above 0 (rows without gradient divide by it), got {self.eps}; "
                f"{_default('eps')}"
            )
        for argument in ("beta1", "beta2"):
            value = getattr(self, argument)
            if not 0 <= value < 1:
                raise ValueError(f"{owner}: `{argument}` must lie in [0, 1), got {value}; {_default(argument)}")
        for argument, default in (("beta1", 0.9), ("beta2", 0.999)):
            value = getattr(self, argument)
            if value != default and self.kind != "adam":
                raise ValueError(
                    f"{owner}: `{argument}` must be left out for kind {self.kind!r}, which has no such moment, got "
                    f"{value}; use kind='adam'"
                )
        if self.weight_decay and self.kind not in ("adam", "rowwise_adagrad"):
            raise ValueError(
                f"{owner}: `weight_decay` must be 0 for kind {self.kind!r}, got {self.weight_decay}; "
                "fbgemm decays weights under adam and rowwise_adagrad only"
            )


def _default(argument: str) -> str:
    (default,) = (field.default for field in fields(SparseOptimizerConfig) if field.name == argument)
    return f"the default is {default}"
