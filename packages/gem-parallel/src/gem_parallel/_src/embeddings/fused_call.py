"""fbgemm's lookup without the Python that stands around it.

``SplitTableBatchedEmbeddingBagsCodegen.forward`` measured half of a lookup's time on the host: statistics, caches and
input formats that these tables do not have. Its arguments are the same at every step but for ids, bags and the step's
number, so they are collected once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["FusedCall"]

SAME = (
    "placeholder_autograd_tensor",
    "lxu_cache_weights",
    "weights_placements",
    "weights_offsets",
    "D_offsets",
    "total_D",
    "max_D",
    "hash_size_cumsum",
    "total_hash_size_bits",
    "pooling_mode",
    "output_dtype",
    "is_experimental",
    "use_uniq_cache_locations_bwd",
    "use_homogeneous_placements",
    "learning_rate_tensor",
    "info_B_num_bits",
    "info_B_mask",
)
"""Arguments that have the name of the module's attribute."""

MOMENTS = {"sgd": 0, "adagrad": 1, "rowwise_adagrad": 1, "adam": 2}


class FusedCall:
    """What the forward of a module without a cache hands to fbgemm's generated lookup.

    Args:
        tbe: SplitTableBatchedEmbeddingBagsCodegen; its weights and moments must stay the same tensors.
        kind: Its optimizer, as in SparseOptimizerConfig.
        pooling_mode: fbgemm's; default: the module's. A module of one table may be called with any.
    """

    def __init__(self, tbe: Any, kind: str, *, pooling_mode: Any = None) -> None:
        from fbgemm_gpu import split_embedding_codegen_lookup_invokers as invokers

        args = invokers.lookup_args
        self._common: Any = args.CommonArgs(
            **{name: getattr(tbe, name) for name in SAME},
            dev_weights=tbe.weights_dev,
            host_weights=tbe.weights_host,
            uvm_weights=tbe.weights_uvm,
            lxu_cache_locations=tbe.lxu_cache_locations_empty,
            uvm_cache_stats=None,
            indices=None,
            offsets=None,
            indice_weights=None,
            feature_requires_grad=None,
            vbe_metadata=args.VBEMetadata(None, None, None),
        )
        if pooling_mode is not None:
            self._common = self._common._replace(pooling_mode=pooling_mode)
        self._rest: list[Any] = [tbe.optimizer_args]
        for number in range(1, MOMENTS[kind] + 1):
            parts = ("dev", "host", "uvm", "offsets", "placements")
            self._rest.append(args.Momentum(*(getattr(tbe, f"momentum{number}_{part}") for part in parts)))
        self._counts_steps = kind == "adam"
        # Without one, fbgemm makes an empty counter in the weights' dtype, and its backward refuses float16.
        self._counter: Any = None
        if kind == "adam":
            empty = tbe.weights_dev.new_empty(0, dtype=torch.float32)
            offsets, placements = empty.to(torch.int64), empty.to(torch.int32)
            self._counter = args.Momentum(dev=empty, host=empty, uvm=empty, offsets=offsets, placements=placements)
        self._invoke: Any = getattr(invokers, f"lookup_{kind}").invoke

    def __call__(self, ids: Tensor, bags: Tensor, step: int) -> Tensor:
        """Sums over bags, in the graph; ``step`` is what Adam's bias correction counts, from 1."""
        common = self._common._replace(indices=ids, offsets=bags)
        rows: Tensor = (
            self._invoke(common, *self._rest, step, row_counter=self._counter)
            if self._counts_steps
            else self._invoke(common, *self._rest)
        )
        return rows
