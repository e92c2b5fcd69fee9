"""Experts of one layer spread over ranks: every expert sees the whole batch, their outputs are summed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from zlib import crc32

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from gem_parallel._src.agree import agree, runs_on_host
from gem_parallel._src.checks import check_group
from gem_parallel._src.collectives.base import Collectives, DefaultCollectives
from gem_parallel._src.embeddings.wire import WIRE_DTYPES
from gem_parallel._src.expert_exchange import Exchange, gather_rows, scatter_rows

__all__ = ["ExpertParallel", "exchange_counts", "is_expert_parameter", "local_experts", "mark_expert_parameters"]

_MARK = "_gem_parallel_expert"


def is_expert_parameter(parameter: Tensor) -> bool:
    """The parameter is an expert's: ranks of another ep coordinate hold other ones in its place."""
    return getattr(parameter, _MARK, False)


@torch.compiler.disable
def mark_expert_parameters(module: nn.Module) -> None:
    """Let ``is_expert_parameter`` know the module's parameters, as they are now."""
    for parameter in module.parameters():
        setattr(parameter, _MARK, True)


def local_experts(num_experts: int, degree: int, rank: int) -> range:
    """Positions of the experts that one rank holds: consecutive ones, counts differ by at most one."""
    return range(num_experts * rank // degree, num_experts * (rank + 1) // degree)


def exchange_counts(counts: Sequence[int], group: dist.ProcessGroup | DeviceMesh | None) -> tuple[tuple[int, ...], ...]:
    """Numbers of every rank, as ``rows`` of ``ExpertParallel`` takes them: once per batch, for all its layers.

    Over a group with gloo (``"gloo"`` or ``"cpu:gloo,cuda:nccl"``) no GPU is waited for. All ranks call it.

    Args:
        counts: Of this rank, for example samples and tokens; as many on every rank.
        group: The ranks; None is one process.

    Returns:
        Per count, that of every rank in rank order.

    Raises:
        TypeError: ``counts`` are no ints, or ``group`` is no group.
        ValueError: ``group`` is a mesh of several axes, a count is negative, or another number of counts than on
            other ranks.
        RuntimeError: another rank refuses its counts.
    """
    group = _group("exchange_counts", group)
    refusal: Exception | None = None
    if isinstance(counts, str) or not isinstance(counts, Sequence) or not all(map(_is_int, counts)):
        refusal = TypeError(
            f"exchange_counts: `counts` must be a list of ints, got {counts!r}; pass len(x) and the like"
        )
    elif any(count < 0 for count in counts):
        refusal = ValueError(f"exchange_counts: `counts` must be at least 0, got {list(counts)}; pass numbers of rows")
    table = agree("exchange_counts", "`counts`", group, refusal, () if refusal else counts)
    others = [rank for rank, each in enumerate(table) if len(each) != len(counts)]
    if others:
        raise ValueError(
            f"exchange_counts: `counts` must hold as many on every rank of the group, got {len(counts)} here and "
            f"{len(table[others[0]])} on ranks {others}; pass the same counts on all"
        )
    return tuple(zip(*table, strict=True))


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _group(owner: str, group: dist.ProcessGroup | DeviceMesh | None) -> dist.ProcessGroup | None:
    check_group(owner, group)
    return group.get_group() if isinstance(group, DeviceMesh) else group


class ExpertParallel(nn.Module):
    """Sum of experts over the whole batch, each rank of the group holding some of the experts.

    out = sum over e of expert_e(x), for x = the samples of all ranks of the group in rank order; a rank gets the rows
    of its own samples. No token is routed: experts differ by parameters (and by what they read of x), as in Meta's post
    on GEM training of 2026-08-03. Forward all-gathers the activations in the group, runs the rank's experts on them and
    reduce-scatters the outputs; backward all-gathers the output gradients and reduce-scatters the input gradients. So
    each rank computes with its experts' parameters only, and their gradients are complete in the group without a
    reduction; over other groups with other samples they are summed by FSDP (``parallelize``).

    Numbers of rows may differ between the ranks, zero included: shorter parts travel padded to the longest.

    Jagged input goes as values and lengths, each gathered along its own dim 0: sequences of rank r follow those of rank
    r - 1 in both, so the gathered lengths describe the gathered values.

    All ranks of the group call forward and backward together. The loss of every rank depends on its output, also when
    it has no rows, and an input needs a gradient on all ranks or on none.

    Args:
        experts: All experts of the layer, built alike on every rank (on the meta device if one rank cannot hold them).
            The others' are dropped; parameters keep the names ``experts.<position>.*`` of a list of all.
        group: The ranks that hold the experts (``ParallelMesh.ep_group``, or a mesh of one axis); None is one process.
        collectives: Engine that moves the rows; default: the group's backend.
        reduce_dtype: dtype in which outputs and input gradients travel and are summed; None is their own.
        gather_dtype: float16, bfloat16 or float8_e4m3fn: what floating point inputs and output gradients are rounded to
            while they are gathered, as ``wire_dtype`` of ``ShardedEmbeddings``; experts get them in their own dtype.
            float16 and float8_e4m3fn rows carry a power of two each. A rank's own rows are rounded, too, so that all
            experts see the same, and the rounding counts as the identity in backward. None is their own dtype; what
            would not become smaller keeps it.

    Raises:
        TypeError: ``experts`` is no list or holds something that is no module, or another argument is of another kind.
        ValueError: fewer experts than ranks, a module that is two experts, a mesh of several axes, ``reduce_dtype`` is
            no floating point dtype, or ``gather_dtype`` another one.
    """

    def __init__(
        self,
        experts: Sequence[nn.Module] | nn.ModuleList,
        group: dist.ProcessGroup | DeviceMesh | None = None,
        *,
        collectives: Collectives | None = None,
        reduce_dtype: torch.dtype | None = None,
        gather_dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(experts, (Sequence, nn.ModuleList, nn.Sequential)) or isinstance(experts, str):
            raise TypeError(
                f"ExpertParallel: `experts` must be a list of modules, got {type(experts).__name__}; pass all experts "
                "of the layer"
            )
        for expert in experts:
            if not isinstance(expert, nn.Module):
                raise TypeError(
                    f"ExpertParallel: `experts` must hold modules, got {type(expert).__name__}; pass nn.Modules"
                )
        first: dict[int, int] = {}
        for position, expert in enumerate(experts):
            if first.setdefault(id(expert), position) != position:
                raise ValueError(
                    f"ExpertParallel: `experts` must hold a module of its own at every position, got one module at "
                    f"{first[id(expert)]} and {position}, which would be two experts on two ranks; use copy.deepcopy"
                )
        if collectives is not None and not isinstance(collectives, Collectives):
            raise TypeError(
                f"ExpertParallel: `collectives` must be an engine or None, got {type(collectives).__name__} "
                f"{collectives!r}; pass choose_collectives(group, name)"
            )
        for argument, dtype in (("reduce_dtype", reduce_dtype), ("gather_dtype", gather_dtype)):
            if dtype is not None and not isinstance(dtype, torch.dtype):
                raise TypeError(
                    f"ExpertParallel: `{argument}` must be a torch.dtype or None, got {type(dtype).__name__} "
                    f"{dtype!r}; for example torch.bfloat16"
                )
        group = _group("ExpertParallel", group)
        degree = 1 if group is None else dist.get_world_size(group)
        if len(experts) < degree:
            raise ValueError(
                f"ExpertParallel: `experts` must hold at least one expert for each of the {degree} ranks of `group`, "
                f"got {len(experts)}; lower the ep degree"
            )
        if reduce_dtype is not None and not reduce_dtype.is_floating_point:
            raise ValueError(
                f"ExpertParallel: `reduce_dtype` must be a floating point dtype, got {reduce_dtype}; name one such as "
                "torch.float32"
            )
        if gather_dtype is not None and gather_dtype not in WIRE_DTYPES[1:]:
            raise ValueError(
                f"ExpertParallel: `gather_dtype` must be one of {', '.join(map(str, WIRE_DTYPES[1:]))} or None, got "
                f"{gather_dtype}; choose one of them"
            )
        self.num_experts = len(experts)
        self.degree = degree
        self._group = group
        self._collectives = collectives or DefaultCollectives()
        self._reduce_dtype, self._gather_dtype = reduce_dtype, gather_dtype
        self._compared = False
        mine = local_experts(len(experts), degree, 0 if group is None else dist.get_rank(group))
        self.experts = nn.ModuleDict({str(position): experts[position] for position in mine})
        mark_expert_parameters(self)

    def extra_repr(self) -> str:
        """Which experts are here."""
        return f"num_experts={self.num_experts}, degree={self.degree}, local={list(self.experts)}"

    def forward(self, *inputs: Tensor, rows: Sequence[Sequence[int]] | None = None, **constants: Any) -> Tensor:
        """Apply all experts to the rows of all ranks.

        Args:
            inputs: Tensors (n, ...) of this rank, at least one; n may differ between inputs and ranks, what follows it
                only between inputs. Floating point ones are differentiable.
            rows: Per input, n on every rank of the group in rank order, where the caller knows it, for example from
                ``exchange_counts``. None exchanges them, and on CUDA waits for that. Compared between the ranks where
                the group runs on the CPU; with NCCL in the first call, and then each rank checks its own only, so as
                not to wait.
            constants: Passed on to the experts as they are; equal on all ranks.

        Returns:
            (n, ...) with n of the first input: this rank's rows of the sum.

        Raises:
            TypeError: an input is no tensor, or ``rows`` are no ints.
            ValueError: no input, one of no dims, ``rows`` that do not describe the inputs, inputs that differ between
                ranks in number, dtype, another dim than 0 or in whether they need a gradient, an expert that does not
                return one row for each row of its first input, or ranks whose numbers of experts, ``gather_dtype`` or
                ``reduce_dtype`` differ.
            RuntimeError: another rank refuses its inputs (where the ranks compare them, see ``rows``).
        """
        # Parameters may have been replaced since (to_empty, fully_shard).
        mark_expert_parameters(self.experts)
        refusal = self._refusal(inputs, rows)
        if self._group is None or self.degree == 1:
            if refusal is not None:
                raise refusal
            return self._local(inputs, constants, inputs[0].shape[0])
        counts = self._rows_of_all(inputs, rows, refusal)
        exchange = Exchange(self._group, self._collectives, counts, self._reduce_dtype, self._gather_dtype)
        gathered = gather_rows(exchange, inputs)
        partial = self._local(gathered, constants, sum(counts[0]))
        return scatter_rows(exchange, partial, gathered)

    def _local(self, inputs: Sequence[Tensor], constants: dict[str, Any], num_rows: int) -> Tensor:
        total: Tensor | None = None
        for position, expert in self.experts.items():
            output = expert(*inputs, **constants)
            if not isinstance(output, Tensor) or output.ndim == 0 or output.shape[0] != num_rows:
                got = tuple(output.shape) if isinstance(output, Tensor) else type(output).__name__
                raise ValueError(
                    f"ExpertParallel: expert {position} must return a tensor with one row for each of the {num_rows} "
                    f"rows of its first input, got {got}; let it return a row for each"
                )
            total = output if total is None else total + output
        assert total is not None
        return total

    def _refusal(self, inputs: Sequence[Tensor], rows: Sequence[Sequence[int]] | None) -> Exception | None:
        """What this rank alone can find wrong."""
        if not inputs:
            return ValueError(
                "ExpertParallel: `inputs` must hold at least one tensor, got none; pass the samples' rows"
            )
        for position, tensor in enumerate(inputs):
            if not isinstance(tensor, Tensor):
                return TypeError(
                    f"ExpertParallel: `inputs` must be tensors, got {type(tensor).__name__} at position {position}; "
                    "pass what is no tensor by its name"
                )
            if tensor.ndim == 0:
                return ValueError(
                    f"ExpertParallel: `inputs` must have rows along their first dim, got a scalar at position "
                    f"{position}; pass it by its name"
                )
        if rows is None:
            return None
        rank = 0 if self._group is None else dist.get_rank(self._group)
        try:
            counts = tuple(tuple(each) for each in rows)
        except TypeError:
            counts = ()
        if not counts or not all(_is_int(count) for each in counts for count in each):
            return TypeError(f"ExpertParallel: `rows` must hold lists of ints, got {rows!r}; take exchange_counts")
        fits = len(counts) == len(inputs) and all(
            len(each) == self.degree and min(each) >= 0 and each[rank] == tensor.shape[0]
            for each, tensor in zip(counts, inputs, strict=True)
        )
        if fits:
            return None
        return ValueError(
            f"ExpertParallel: `rows` must hold, for each of {len(inputs)} inputs, the rows of {self.degree} ranks, "
            f"and at rank {rank} those given, {[tensor.shape[0] for tensor in inputs]}, got {counts}; "
            "take exchange_counts"
        )

    @torch.compiler.disable
    def _rows_of_all(
        self, inputs: Sequence[Tensor], rows: Sequence[Sequence[int]] | None, refusal: Exception | None
    ) -> tuple[tuple[int, ...], ...]:
        """Per input the rows of every rank."""
        assert self._group is not None
        if rows is not None and self._compared and not runs_on_host(self._group):
            if refusal is not None:
                raise refusal
            return tuple(map(tuple, rows))
        counts = self._agreed_rows(inputs, rows, refusal)
        self._compared = True
        return counts

    def _agreed_rows(
        self, inputs: Sequence[Tensor], rows: Sequence[Sequence[int]] | None, refusal: Exception | None
    ) -> tuple[tuple[int, ...], ...]:
        """Per input the rows of every rank; also finds inputs that would make the exchange hang or mix up bytes."""
        grad = torch.is_grad_enabled()
        mine: list[int] = []
        if refusal is None:
            mine += [self._settings(), -1 if rows is None else _digest(tuple(map(tuple, rows)))]
            for tensor in inputs:
                needs = int(grad and tensor.requires_grad)
                mine += [tensor.shape[0], needs, _digest(f"{tensor.dtype} {tensor.shape[1:]}")]
        found = agree("ExpertParallel", "inputs and `rows`", self._group, refusal, mine)
        self._check_settings([each[0] for each in found])
        others = [rank for rank, each in enumerate(found) if len(each) != len(mine)]
        if others:
            raise ValueError(
                f"ExpertParallel: `inputs` must be as many on every rank of the group, got {len(inputs)} here and "
                f"{len(found[others[0]]) // 3} on ranks {others} of the group; pass the same inputs on all"
            )
        for position, tensor in enumerate(inputs):
            for what, column, have in (
                ("whether it needs a gradient", 3 * position + 3, bool(mine[3 * position + 3])),
                ("dtype or in a dim after the first", 3 * position + 4, f"{tensor.dtype} {tuple(tensor.shape)}"),
            ):
                others = [rank for rank, each in enumerate(found) if each[column] != mine[column]]
                if others:
                    raise ValueError(
                        f"ExpertParallel: input {position} must not differ between the ranks of the group in {what}, "
                        f"got {have} here and another on ranks {others} of the group; make them alike"
                    )
        counts = tuple(tuple(each[3 * position + 2] for each in found) for position in range(len(inputs)))
        wrong = [rank for rank, each in enumerate(found) if each[1] not in (-1, _digest(counts))]
        if wrong:
            raise ValueError(
                f"ExpertParallel: `rows` must be those of every rank, {counts}, got others on ranks {wrong} of the "
                "group; take exchange_counts once per batch, on all ranks"
            )
        return counts

    def _settings(self) -> int:
        """What has to be equal on all ranks, as one number."""
        codes = map(_DTYPES.index, (self._gather_dtype, self._reduce_dtype))
        return sum(code * len(_DTYPES) ** at for at, code in enumerate((*codes, self.num_experts)))

    def _check_settings(self, found: Sequence[int]) -> None:
        """Refuse ranks that were built otherwise: they would wait for each other or read other numbers than were sent.

        Raises:
            ValueError: names the setting, and the ranks with each value.
        """
        if len(set(found)) == 1:
            return
        base = len(_DTYPES)
        settings: dict[str, list[object]] = {
            "`gather_dtype`": [_DTYPES[each % base] for each in found],
            "`reduce_dtype`": [_DTYPES[each // base % base] for each in found],
            "the number of `experts`": [each // base**2 for each in found],
        }
        name, values = next((name, values) for name, values in settings.items() if len(set(values)) > 1)
        got = ", ".join(
            f"{value} on ranks {[rank for rank, each in enumerate(values) if each == value]}"
            for value in dict.fromkeys(values)
        )
        raise ValueError(
            f"ExpertParallel: {name} must be equal on all ranks of the group, got {got} of the group; build the layer "
            "from the same values on every rank"
        )


_DTYPES: list[torch.dtype | None] = [
    None,
    *sorted({each for each in vars(torch).values() if isinstance(each, torch.dtype)}, key=str),
]
"""Numbered alike by every rank of one torch."""


def _digest(value: object) -> int:
    return crc32(str(value).encode())
