"""What the planner is told: a model and how a step uses it, as plain numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from gem_parallel._src.embeddings.config import (
    DEFAULT_CACHE_LOAD_FACTOR,
    MAX_DIM,
    CacheAlgorithm,
    TableMemory,
    check_memory,
)
from gem_parallel._src.param_wire import ParamWire, check_wire

__all__ = [
    "MAX_RANKS",
    "MAX_SAMPLES",
    "DenseUnit",
    "ModelDescription",
    "SparseTable",
    "TableKind",
    "TableLocation",
    "Workload",
    "check_ranks",
]

TableKind = Literal["auto", "table_wise", "row_wise", "column_wise", "replicated"]
TABLE_KINDS: tuple[TableKind, ...] = get_args(TableKind)
TableLocation = Literal["auto", "device", "uvm", "uvm_caching"]
MAX_RANKS = 65_536
"""GPUs of a plan: placement goes over ranks and tables, seconds at this number and beyond any memory far above it."""
MAX_SAMPLES = 2**31 - 2
"""Of one rank's step: a rank's batch names at most as many ids, and every sample has some."""


def check_ranks(function: str, num_gpus: int) -> None:
    """Refuse more GPUs than a plan is made for.

    Raises:
        ValueError: naming the function and the limit.
    """
    if num_gpus > MAX_RANKS:
        raise ValueError(
            f"{function}: `topology` must have at most {MAX_RANKS:,} GPUs, got {num_gpus:,}; plan a smaller cluster"
        )


def _require(owner: str, name: str, value: object, *, low: float, integer: bool = False) -> None:
    kinds: tuple[type, ...] = (int,) if integer else (int, float)
    if isinstance(value, bool) or not isinstance(value, kinds):
        raise TypeError(
            f"{owner}: `{name}` must be {'an int' if integer else 'a number'}, got {type(value).__name__}; pass a "
            "number"
        )
    assert isinstance(value, (int, float))
    if not math.isfinite(value) or value < low:
        raise ValueError(
            f"{owner}: `{name}` must be finite and at least {low}, got {value}; pass a number in this range"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseUnit:
    """Modules whose parameters are gathered together (one unit of FSDP), or a layer of experts.

    FLOPs and bytes are those of the forward pass of one sample; a multiply-add is 2 FLOPs.
    """

    name: str
    """Fully qualified name of the module; "" is the root, which owns what no unit holds."""
    shapes: tuple[tuple[int, ...], ...]
    """Shapes of the parameters, those of inner units left out; of one expert if there are several."""
    gemm_flops: float = 0.0
    """Matrix products, of all experts together."""
    gemm_width: int = 1024
    """Typical smaller side of the products: it chooses the measured rate."""
    attention_flops: float = 0.0
    """Attention over unmasked pairs."""
    attention_width: int = 128
    """Width of its heads: it chooses the measured rate."""
    activation_bytes: float = 0.0
    """Saved for backward, of all experts together."""
    num_experts: int = 1
    """Experts whose outputs are summed, every expert over every sample; above 1 the unit is cut over the axis ep."""
    expert_input_bytes: float = 0.0
    """What each sample's rows to the experts weigh on the wire."""
    expert_output_bytes: float = 0.0
    """What each sample's rows from the experts weigh on the wire."""
    reshard_after_forward: bool = True
    """Whether FSDP drops the gathered parameters after forward and gathers them again; it keeps the root's."""

    def __post_init__(self) -> None:
        owner = f"DenseUnit {self.name!r}"
        if not isinstance(self.name, str):
            raise TypeError(f"DenseUnit: `name` must be a str, got {type(self.name).__name__}; give a name")
        if not isinstance(self.shapes, tuple):
            raise TypeError(
                f"{owner}: `shapes` must be a tuple of shapes, got {type(self.shapes).__name__}; put them in a tuple"
            )
        for shape in self.shapes:
            if not isinstance(shape, tuple) or not shape or not all(isinstance(n, int) and n > 0 for n in shape):
                raise ValueError(
                    f"{owner}: `shapes` must hold tuples of positive ints, none of them empty (FSDP refuses scalars), "
                    f"got {shape!r}; give the shapes of the parameters"
                )
        for name in (
            "gemm_flops",
            "attention_flops",
            "activation_bytes",
            "expert_input_bytes",
            "expert_output_bytes",
        ):
            _require(owner, name, getattr(self, name), low=0)
        for name in ("gemm_width", "attention_width", "num_experts"):
            _require(owner, name, getattr(self, name), low=1, integer=True)

    @property
    def num_parameters(self) -> int:
        """Of all experts."""
        return self.num_experts * sum(math.prod(shape) for shape in self.shapes)


@dataclass(frozen=True, kw_only=True, slots=True)
class SparseTable:
    """One embedding table and how a batch uses it."""

    name: str
    num_rows: int
    dim: int
    """Row length, in elements: a multiple of 4, at most 1024."""
    ids_per_sample: float = 1.0
    """Ids over all its features."""
    unique_fraction: float = 1.0
    """Distinct ids / ids in a rank's batch; a repeated id travels once."""
    pooling: Literal["sum", "mean", "none"] = "none"
    """none: each id's row goes into the model."""
    bags_per_sample: float = 1.0
    """Pooled vectors that go into the model, if it pools."""
    weight_bytes: int = 4
    """Per element at rest: 4 is float32, 2 is float16."""
    kind: TableKind = "auto"
    """Placement, auto leaves it to the planner."""
    location: TableLocation = "device"
    """Device or host memory, as ``TableConfig.location``. auto: on the device if the plan fits; else the tables go
    to host memory behind a cache (uvm_caching), those of which a batch names the smallest part first, until it does."""
    cache_load_factor: float | None = None
    """Rows in the cache / rows, of uvm_caching and what auto makes so; None is 0.2."""
    cache_algorithm: CacheAlgorithm | None = None
    """lru or lfu; None is lru."""
    cache_hit_rate: float | None = None
    """Part of a step's distinct ids whose rows are in the cache; None is cache_load_factor: ids even over the rows."""

    def __post_init__(self) -> None:
        owner = f"SparseTable {self.name!r}"
        for name in ("num_rows", "dim"):
            _require(owner, name, getattr(self, name), low=1, integer=True)
        if self.dim % 4 or self.dim > MAX_DIM:
            parts = -(-self.dim // MAX_DIM)
            remedy = f"split the columns over {parts} tables" if parts > 1 else f"use {-(-self.dim // 4) * 4}"
            raise ValueError(
                f"{owner}: `dim` must be a multiple of 4 and at most {MAX_DIM} (limits of fbgemm's kernels), "
                f"got {self.dim}; {remedy}"
            )
        for name in ("ids_per_sample", "bags_per_sample"):
            _require(owner, name, getattr(self, name), low=0)
        _require(owner, "unique_fraction", self.unique_fraction, low=0)
        if self.unique_fraction > 1:
            raise ValueError(
                f"{owner}: `unique_fraction` must be at most 1, got {self.unique_fraction}; it is distinct ids / ids"
            )
        if self.pooling not in ("sum", "mean", "none"):
            raise ValueError(
                f"{owner}: `pooling` must be one of sum, mean, none, got {self.pooling!r}; name one of them"
            )
        if self.weight_bytes not in (2, 4):
            raise ValueError(f"{owner}: `weight_bytes` must be 2 or 4, got {self.weight_bytes}; 4 is float32")
        if self.kind not in TABLE_KINDS:
            raise ValueError(
                f"{owner}: `kind` must be one of {', '.join(TABLE_KINDS)}, got {self.kind!r}; name one of them"
            )
        # What auto may make of the table has a cache.
        location = "uvm_caching" if self.location == "auto" else self.location
        check_memory(owner, location, self.cache_load_factor, self.cache_algorithm)
        if self.cache_hit_rate is not None:
            _require(owner, "cache_hit_rate", self.cache_hit_rate, low=0)
            if self.cache_hit_rate > 1:
                raise ValueError(
                    f"{owner}: `cache_hit_rate` must be at most 1, got {self.cache_hit_rate}; it is ids in the cache / "
                    "ids"
                )
            if location != "uvm_caching":
                raise ValueError(
                    f"{owner}: `cache_hit_rate` must be left out for location {location!r}, which has no cache, got "
                    f"{self.cache_hit_rate}; use location='uvm_caching'"
                )

    @property
    def memory(self) -> TableMemory:
        """Where the rows lie; a table left to auto is on the device."""
        if self.location in ("auto", "device"):
            return TableMemory()
        if self.location == "uvm":
            return TableMemory(location="uvm")
        return TableMemory(
            location="uvm_caching",
            cache_load_factor=self.cache_load_factor or DEFAULT_CACHE_LOAD_FACTOR,
            cache_algorithm=self.cache_algorithm or "lru",
        )

    @property
    def missed(self) -> float:
        """Part of a step's distinct ids whose rows come from host memory."""
        if self.memory.location != "uvm_caching":
            return 0.0 if self.memory.location == "device" else 1.0
        return 1.0 - (self.memory.cache_load_factor if self.cache_hit_rate is None else self.cache_hit_rate)

    @property
    def outputs_per_sample(self) -> float:
        """Vectors that go into the model."""
        return self.ids_per_sample if self.pooling == "none" else self.bags_per_sample

    @property
    def rest_bytes(self) -> int:
        """Of the whole table's weights."""
        return self.num_rows * self.dim * self.weight_bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelDescription:
    """A ranking model as the planner sees it."""

    name: str
    units: tuple[DenseUnit, ...]
    """In the order in which they run; the root, if it owns anything, is first."""
    tables: tuple[SparseTable, ...] = ()

    def __post_init__(self) -> None:
        for argument, kind in (("units", DenseUnit), ("tables", SparseTable)):
            values = getattr(self, argument)
            if not isinstance(values, tuple) or not all(isinstance(value, kind) for value in values):
                raise TypeError(
                    f"ModelDescription: `{argument}` must be a tuple of {kind.__name__}, got {values!r}; put them in a "
                    "tuple"
                )
            names = [value.name for value in values]
            repeated = sorted({name for name in names if names.count(name) > 1}) if len(names) < 4096 else []
            if repeated:
                raise ValueError(
                    f"ModelDescription: names in `{argument}` must be unique, got {repeated} twice; rename one"
                )
        if not self.units:
            raise ValueError("ModelDescription: `units` must hold at least one DenseUnit, got none; add one")

    @property
    def num_dense_parameters(self) -> int:
        return sum(unit.num_parameters for unit in self.units)

    @property
    def num_sparse_parameters(self) -> int:
        return sum(table.num_rows * table.dim for table in self.tables)

    @property
    def model_flops(self) -> float:
        """Model FLOPs of one sample, forward and backward: a product's backward is 2 products, an attention's is 2.5
        of its forward. No recomputation, norm, lookup or optimizer.
        """
        return sum(3.0 * unit.gemm_flops + 3.5 * unit.attention_flops for unit in self.units)


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """How the model is trained."""

    samples_per_rank: int
    """Samples of one step on one rank (local batch)."""
    gather_bytes: int = 4
    """Per element of a gathered parameter: 4 is float32, 2 is bfloat16 (``ParallelPlan.param_dtype``)."""
    param_wire: ParamWire | None = None
    """Form in which parameters travel (``ParallelPlan.param_wire``); None is the dtype of ``gather_bytes``, which
    they have when they have come."""
    reduce_bytes: int = 4
    """Per element of a reduced gradient (``ParallelPlan.reduce_dtype``)."""
    row_bytes: int = 4
    """Per element of an embedding row on the wire."""
    table_gather: Literal["tables", "rows"] = "tables"
    """What a lookup fetches from the other copies' slices: all rows, or those of the batch (``ShardedEmbeddings``'
    ``gather``)."""
    dense_state_bytes: int = 8
    """Optimizer state per dense parameter; AdamW in float32 holds two moments."""
    sparse_optimizer: Literal["rowwise_adagrad", "adagrad", "adam", "sgd"] = "rowwise_adagrad"
    recompute: float = 0.0
    """Part of each unit's forward that backward repeats instead of having saved it, 0 to 1."""
    imbalance: float = 1.0
    """Dense work of the heaviest rank / mean over ranks (lengths of histories)."""
    contention: float = 0.0
    """Share of compute lost while a collective runs under it; 0 where copy engines move the data. Collective kernels
    that take 24 of 132 SMs cost up to 0.15 (Meta's post on GEM training of 2026-08-03)."""

    def __post_init__(self) -> None:
        owner = "Workload"
        _require(owner, "samples_per_rank", self.samples_per_rank, low=1, integer=True)
        if self.samples_per_rank > MAX_SAMPLES:
            raise ValueError(
                f"{owner}: `samples_per_rank` must be at most {MAX_SAMPLES:,}, got {self.samples_per_rank:,}; plan a "
                "smaller batch"
            )
        for name in ("gather_bytes", "reduce_bytes", "row_bytes"):
            if getattr(self, name) not in (1, 2, 4):
                raise ValueError(f"{owner}: `{name}` must be 1, 2 or 4, got {getattr(self, name)}; 4 is float32")
        if self.param_wire is not None:
            check_wire(owner, self.param_wire)
        if self.table_gather not in ("tables", "rows"):
            raise ValueError(
                f"{owner}: `table_gather` must be one of tables, rows, got {self.table_gather!r}; name one of them"
            )
        _require(owner, "dense_state_bytes", self.dense_state_bytes, low=0, integer=True)
        if self.sparse_optimizer not in ("rowwise_adagrad", "adagrad", "adam", "sgd"):
            raise ValueError(
                f"{owner}: `sparse_optimizer` must be one of rowwise_adagrad, adagrad, adam, sgd, got "
                f"{self.sparse_optimizer!r}; name one of them"
            )
        _require(owner, "imbalance", self.imbalance, low=1)
        for name in ("recompute", "contention"):
            value = getattr(self, name)
            _require(owner, name, value, low=0)
            if value > 1 or (name == "contention" and value == 1):
                raise ValueError(
                    f"{owner}: `{name}` must be below 1{' or 1' * (name == 'recompute')}, got {value}; it is a share"
                )

    def state_bytes(self, table: SparseTable) -> int:
        """Optimizer state of one row of a table."""
        per_row = {"rowwise_adagrad": 4, "adagrad": 4 * table.dim, "adam": 8 * table.dim, "sgd": 0}
        return per_row[self.sparse_optimizer]

    def host_state_bytes(self, table: SparseTable) -> int:
        """The part of it in host memory: one number per row stays on the device."""
        kept = table.memory.location == "device" or self.sparse_optimizer == "rowwise_adagrad"
        return 0 if kept else self.state_bytes(table)
