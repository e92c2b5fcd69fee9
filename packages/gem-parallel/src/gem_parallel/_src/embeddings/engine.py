"""Tables of one device: rows out, fused optimizer in.

fbgemm-gpu's table-batched embedding holds the weights and runs the optimizer in its backward. Every table gets one row
more than it needs: a scratch row that stands for dropped ids. It is set to zero before a lookup, so it gives the zero
vector whatever it learnt, and dropping needs no dynamic shapes and no device sync.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from gem_parallel._src.embeddings.config import SparseOptimizerConfig, TableMemory
from gem_parallel._src.embeddings.fused_call import FusedCall
from gem_parallel._src.embeddings.limits import MAX_BAGS
from gem_parallel._src.embeddings.memory import cache_sets
from gem_parallel._src.embeddings.transfer import to_device
from gem_parallel._src.engine_report import require_fbgemm

__all__ = ["Engine", "FbgemmEngine", "state_names"]

IDS_PER_BAG = 8
"""On CUDA one warp walks a bag serially: short bags fill the device. The number is free, results do not depend on
it."""

DEVICE_MEMORY = TableMemory()

MAX_IDS_PER_BAG = 256
"""Bound for the largest table of a skewed group, whose bag count all its tables share."""


def _silence_notes() -> None:
    """Ignore notes, sent as warnings at each use, that fbgemm's Adam is not optimised and a Blackwell path is off.

    They say nothing about the result, and would stop a program that treats warnings as errors inside backward.
    """
    warnings.filterwarnings(
        "ignore", message=r"\s*\S*\s*\[FBGEMM_GPU\] NOTE: The training optimizer", category=UserWarning
    )
    warnings.filterwarnings("ignore", message="TBE B200 optimization", category=UserWarning)


def state_names(kind: str) -> tuple[str, ...]:
    """State dict suffixes of an optimizer's per-row moments, in fbgemm's order."""
    return {"sgd": (), "adagrad": ("sum",), "rowwise_adagrad": ("sum",), "adam": ("exp_avg", "exp_avg_sq")}[kind]


class Engine(Protocol):
    """Local tables of one dim on one device."""

    num_tables: int

    pools: bool
    """Whether ``lookup`` takes bags."""

    def lookup(self, ids: Tensor, counts: Sequence[int], bags: Tensor | None, step: int | None) -> Tensor:
        """Rows of ``ids``, sorted by table, or their sums; backward updates the rows.

        Args:
            ids: (N,) int64 local rows, N > 0; ids of table t follow those of table t - 1.
            counts: Ids of each table; they sum to N.
            bags: (num_bags + 1,) int64 offsets, if the engine pools; None is one bag per id.
            step: Number of this training lookup, from 1; None gives rows without a gradient.

        Returns:
            (N, dim) or (num_bags, dim) float32.
        """

    def update(self, ids: Tensor, counts: Sequence[int], grad: Tensor, step: int, learning_rate: float) -> None:
        """One optimizer step without a lookup of its own.

        Args:
            ids: As for ``lookup``.
            counts: As for ``lookup``.
            grad: (N, dim) float32, one row per id; those of equal ids are added in their order.
            step: Number of the training lookup that the gradients belong to.
            learning_rate: Step size of that lookup.
        """

    def clear_scratch(self) -> None:
        """Set the scratch rows to zero."""

    def weights(self) -> list[Tensor]:
        """(rows, dim) views, scratch rows left out."""

    def states(self) -> list[dict[str, Tensor]]:
        """Per table: state name -> view, (rows,) or (rows, dim) float32."""

    def set_learning_rate(self, learning_rate: float) -> None:
        """Step size from the next lookup on."""


class FbgemmEngine:
    """One SplitTableBatchedEmbeddingBagsCodegen.

    Unpooled (PoolingMode.NONE) over all tables of a dim, for CUDA; or pooling, for the CPU: one table, and sums over
    bags, of one id each where single rows are asked for: fbgemm's unpooled CPU backward collects gradients in a hash
    map, which measured 20 to 70 times slower.
    """

    def __init__(
        self,
        *,
        num_rows: Sequence[int],
        dim: int,
        optimizer: SparseOptimizerConfig,
        weight_dtype: torch.dtype,
        device: torch.device,
        pools: bool,
        memory: TableMemory = DEVICE_MEMORY,
    ) -> None:
        require_fbgemm("ShardedEmbeddings")
        from fbgemm_gpu.split_embedding_configs import EmbOptimType, SparseType
        from fbgemm_gpu.split_table_batched_embeddings_ops_common import (
            BoundsCheckMode,
            CacheAlgorithm,
            EmbeddingLocation,
            PoolingMode,
        )
        from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
            ComputeDevice,
            SplitTableBatchedEmbeddingBagsCodegen,
            WeightDecayMode,
        )

        on_cpu = device.type == "cpu"
        assert not pools or len(num_rows) == 1
        self.num_tables = len(num_rows)
        self.pools = pools
        self._kind = optimizer.kind
        self._device = device
        assert memory.location == "device" or not on_cpu
        location = {
            "device": EmbeddingLocation.HOST if on_cpu else EmbeddingLocation.DEVICE,
            "uvm": EmbeddingLocation.MANAGED,
            "uvm_caching": EmbeddingLocation.MANAGED_CACHING,
        }[memory.location]
        compute = ComputeDevice.CPU if on_cpu else ComputeDevice.CUDA
        kinds = {
            "sgd": EmbOptimType.EXACT_SGD,
            "adagrad": EmbOptimType.EXACT_ADAGRAD,
            "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            "adam": EmbOptimType.ADAM,
        }
        decay: dict[str, Any] = {}
        if optimizer.weight_decay:
            decay["weight_decay"] = optimizer.weight_decay
            if optimizer.kind == "rowwise_adagrad":
                decay["weight_decay_mode"] = WeightDecayMode.DECOUPLE
        cache: dict[str, Any] = {}
        if memory.location == "uvm_caching":
            cache["cache_sets"] = cache_sets(sum(rows + 1 for rows in num_rows), memory.cache_load_factor)
            cache["cache_algorithm"] = {"lru": CacheAlgorithm.LRU, "lfu": CacheAlgorithm.LFU}[memory.cache_algorithm]
        _silence_notes()
        self._tbe: Any = SplitTableBatchedEmbeddingBagsCodegen(
            [(rows + 1, dim, location, compute) for rows in num_rows],
            optimizer=kinds[optimizer.kind],
            learning_rate=optimizer.learning_rate,
            eps=optimizer.eps,
            beta1=optimizer.beta1,
            beta2=optimizer.beta2,
            weights_precision=SparseType.from_dtype(weight_dtype),
            output_dtype=SparseType.FP32,
            pooling_mode=PoolingMode.SUM if pools else PoolingMode.NONE,
            # Ids are checked before they get here; fbgemm's own check would send bad ones to row 0.
            bounds_check_mode=BoundsCheckMode.NONE,
            device=device,
            **decay,
            **cache,
        )
        self.max_bags = min(MAX_BAGS, int(self._tbe.info_B_mask) - 1)
        """Of one lookup of one table."""
        self._learning_rate = optimizer.learning_rate
        self._arange: dict[torch.dtype, Tensor] = {}
        self._scratch = [weight[-1] for weight in self._tbe.split_embedding_weights()]
        # With a cache a forward must fetch rows first.
        self._call: FusedCall | None = None
        self._call_unpooled: FusedCall | None = None
        if pools and memory.location != "uvm_caching":
            self._call = FusedCall(self._tbe, optimizer.kind)
            if not on_cpu:
                self._call_unpooled = FusedCall(self._tbe, optimizer.kind, pooling_mode=PoolingMode.NONE)

    def lookup(self, ids: Tensor, counts: Sequence[int], bags: Tensor | None, step: int | None) -> Tensor:
        assert bags is None or self.pools
        tbe = self._tbe
        if self._call is not None:
            with torch.set_grad_enabled(step is not None):
                return self.pooled(ids, bags, step or 1)
        if self._kind == "adam":
            # fbgemm counts every forward, evaluation too; the number of training lookups is ours.
            before = 0 if step is None else step - 1
            tbe.iter.fill_(before)
            if hasattr(tbe, "iter_cpu"):
                tbe.iter_cpu.fill_(before)
        with torch.set_grad_enabled(step is not None):
            rows: Tensor = tbe(ids, self._bag_offsets(counts) if bags is None else bags)
        return rows

    def pooled(self, ids: Tensor, bags: Tensor | None, step: int) -> Tensor:
        """``lookup`` of one table without a cache, in the graph if gradients are enabled."""
        call = self._call
        if call is None:
            return self.lookup(ids, [ids.numel()], bags, step if torch.is_grad_enabled() else None)
        if bags is None:
            call = self._call_unpooled or call
            bags = self._single_offsets(ids.numel(), ids.dtype)
        return call(ids, bags, step)

    def update(self, ids: Tensor, counts: Sequence[int], grad: Tensor, step: int, learning_rate: float) -> None:
        # fbgemm runs its optimizer in the backward of a lookup only.
        current = self._learning_rate
        self._tbe.set_learning_rate(learning_rate)
        rows = self.lookup(ids, counts, None, step)
        torch.autograd.backward([rows], [grad])
        self._tbe.set_learning_rate(current)

    def _single_offsets(self, total: int, dtype: torch.dtype = torch.int64) -> Tensor:
        """Offsets for rows of their own: bags of one id; where nothing is summed, of ``IDS_PER_BAG``."""
        size = 1 if self._call_unpooled is None else IDS_PER_BAG
        num_bags = -(-total // size)
        if num_bags > self.max_bags:
            # fbgemm has no numbers for so many bags; nothing is summed, so they may be longer.
            size = -(-total // self.max_bags)
            return torch.arange(0, total + size, size, device=self._device).clamp_(max=total).to(dtype)
        found = self._arange.get(dtype)
        if found is None or found.numel() <= num_bags:
            found = torch.arange(0, (2 * num_bags + 1) * size, size, device=self._device)
            # Those that do not fit lie beyond any batch, and become its end.
            found = self._arange[dtype] = found.clamp_(max=torch.iinfo(dtype).max).to(dtype)
        offsets = found[: num_bags + 1]
        return offsets if total % size == 0 else offsets.clamp(max=total)

    def _bag_offsets(self, counts: Sequence[int]) -> Tensor:
        if self.pools:
            return self._single_offsets(sum(counts))
        total = sum(counts)
        num_bags = max(-(-total // (IDS_PER_BAG * self.num_tables)), -(-max(counts) // MAX_IDS_PER_BAG), 1)
        per_table = to_device(counts, self._device)
        ends = per_table.cumsum(0)
        bags = torch.arange(num_bags, device=self._device)
        starts = (ends - per_table).unsqueeze(1) + per_table.unsqueeze(1) * bags // num_bags
        return torch.cat([starts.flatten(), ends[-1:]])

    def clear_scratch(self) -> None:
        torch._foreach_zero_(self._scratch)

    def weights(self) -> list[Tensor]:
        return [weight[:-1] for weight in self._tbe.split_embedding_weights()]

    def whole_weight(self) -> Tensor:
        """(rows + 1, dim) of the one table, with its scratch row."""
        (weight,) = self._tbe.split_embedding_weights()
        whole: Tensor = weight
        return whole

    def empty_cache(self) -> None:
        """Write cached rows back to where ``weights`` shows them, and forget them; nothing without a cache."""
        self._tbe.flush()
        self._tbe.reset_cache_states()

    def states(self) -> list[dict[str, Tensor]]:
        names = state_names(self._kind)
        if not names:
            return [{} for _ in range(self.num_tables)]
        return [
            {name: state[:-1] for name, state in zip(names, states, strict=True)}
            for states in self._tbe.split_optimizer_states()
        ]

    def set_learning_rate(self, learning_rate: float) -> None:
        self._learning_rate = learning_rate
        self._tbe.set_learning_rate(learning_rate)
