"""fbgemm's lookup without the Python that stands around it.

``SplitTableBatchedEmbeddingBagsCodegen.forward`` measured half of a lookup's time on the host: statistics, caches and
input formats that these tables do not have. What it hands to the operator at its end is the same at every step but for
ids, bags and, for Adam, the step's number; so that is written down once, by fbgemm's own Python, and handed over again.
"""

from __future__ import annotations

from enum import Enum
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch.overrides import TorchFunctionMode

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


class _Recorder(TorchFunctionMode):
    """Keeps the arguments of the last operator called by name in place of running it."""

    def __init__(self) -> None:
        super().__init__()
        self.packet: OpOverloadPacket | None = None
        self.given: dict[str, Any] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not isinstance(func, OpOverloadPacket):
            return func(*args, **(kwargs or {}))
        self.packet = func
        names = [argument.name for argument in func.default._schema.arguments]
        self.given = {**dict(zip(names, args, strict=False)), **(kwargs or {})}
        return torch.empty(0)


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
        # Without one, fbgemm makes an empty counter in the weights' dtype, and its backward refuses float16.
        self._counter: Any = None
        if kind == "adam":
            empty = tbe.weights_dev.new_empty(0, dtype=torch.float32)
            offsets, placements = empty.to(torch.int64), empty.to(torch.int32)
            self._counter = args.Momentum(dev=empty, host=empty, uvm=empty, offsets=offsets, placements=placements)
        self._invoke: Any = getattr(invokers, f"lookup_{kind}").invoke
        self._op: OpOverload | None = None
        self._given: list[Any] = []
        self._ids_at = self._bags_at = 0
        if kind != "adam":
            self._record()

    def _record(self) -> None:
        """Write down the operator and its arguments, in order."""
        recorder = _Recorder()
        with recorder:
            self._invoke(self._common, *self._rest)
        assert recorder.packet is not None
        self._op = recorder.packet.default
        arguments = self._op._schema.arguments
        names = [argument.name for argument in arguments]
        assert set(recorder.given) <= set(names)
        # Positions, not names: that alone is a quarter of the call's time.
        self._given = [_plain(recorder.given.get(each.name, each.default_value)) for each in arguments]
        self._ids_at, self._bags_at = names.index("indices"), names.index("offsets")

    def __call__(self, ids: Tensor, bags: Tensor, step: int) -> Tensor:
        """Sums over bags, in the graph; ``step`` is what Adam's bias correction counts, from 1."""
        if self._op is None:
            common = self._common._replace(indices=ids, offsets=bags)
            rows: Tensor = self._invoke(common, *self._rest, step, row_counter=self._counter)
            return rows
        given = self._given.copy()
        given[self._ids_at], given[self._bags_at] = ids, bags
        rows = self._op(*given)
        return rows


def _plain(value: Any) -> Any:
    """Enums as the numbers they are."""
    return value.value if isinstance(value, Enum) else value
