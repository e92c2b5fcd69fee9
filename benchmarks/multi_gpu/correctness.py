"""One rank against all of them: the same losses and weights, up to the order of float32 sums.

The bound is not a constant. One rank trains on the batches as they are, then with each batch's samples in another
order, then with the dense model run on each batch in N pieces. In exact arithmetic nothing changes, so what does change
is rounding. A layout over N ranks also only sums in another order and multiplies smaller matrices, so it may differ by
``SAFETY`` times as much, or by the probabilistic bound sqrt(n) u of one sum of n terms (Higham and Mary, 2019) in each
of the steps if that is more. A bound above ``CEILING`` is itself a failure: a sample that is lost or counted twice
moves the loss by 1e-2.
"""

from __future__ import annotations

import gc
import math
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from gem_model.random_batch import RandomBatch
from gem_parallel import ParallelDims, ParallelMesh, ParallelPlan, clip_grad_norm_, parallelize
from multi_gpu.launch import Rank
from multi_gpu.workload import ExpertRanker, Rows, Samples, draw_samples, make_config, make_tables, take

__all__ = ["CEILING", "Run", "deviation", "layouts", "run"]

STEPS = 5
LEARNING_RATE = 0.1
MAX_NORM = 1.0
SAFETY = 16.0
UNIT = 2.0**-24
CEILING = 1e-3
ROWS = Rows(item=1_000)


class Run(NamedTuple):
    """What a training run computed."""

    losses: list[float]
    """Mean loss of each step."""
    weights: dict[str, Tensor]
    """Name -> whole tensor on the CPU: dense parameters, tables and their moments."""


def layouts(size: int) -> dict[str, ParallelDims]:
    """Name -> degrees, as far as the number of ranks allows."""
    if size == 1:
        return {"one rank": ParallelDims.for_world(1)}
    copies = 2 if size % 2 == 0 else size
    inner = copies if size >= copies * copies else size
    outer = size // (inner * copies) if size >= copies * copies else 1
    shard = size // (inner * outer)
    return {
        "fsdp": ParallelDims.for_world(size),
        "hsdp": ParallelDims.for_world(size, dp_replicate=copies),
        "ep": ParallelDims.for_world(size, ep=size),
        "sparse 2d": ParallelDims.for_world(size, sparse_replicate=copies),
        "all axes": ParallelDims(
            dp_replicate=outer, dp_shard=shard, ep=inner, sparse_replicate=copies, sparse_shard=size // copies
        ),
    }


def deviation(run: Run, reference: Run) -> tuple[float, float, str]:
    """(largest relative difference of a loss, of a tensor in the 2-norm, that tensor's name).

    Dense gradients are clipped to one norm over all of them, so rounding moves even a parameter near zero (the bias of
    a head, whose gradient cancels over the samples) in proportion to ``LEARNING_RATE * MAX_NORM``: the scale of a dense
    tensor is at least that. Tables and moments are compared with their own norm.

    Raises:
        ValueError: the runs do not hold the same tensors.
    """
    if run.weights.keys() != reference.weights.keys() or len(run.losses) != len(reference.losses):
        missing = sorted(run.weights.keys() ^ reference.weights.keys())
        raise ValueError(f"deviation: `run` must hold the steps and tensors of `reference`, differs in {missing}")
    pairs = zip(run.losses, reference.losses, strict=True)
    loss = max(_finite(abs(ours - theirs) / abs(theirs)) for ours, theirs in pairs)
    worst, where = 0.0, ""
    for name, theirs in reference.weights.items():
        difference = float((run.weights[name].double() - theirs.double()).norm())
        least = LEARNING_RATE * MAX_NORM if name.startswith("model.") else 1e-30
        error = _finite(difference / max(float(theirs.double().norm()), least))
        if error > worst:
            worst, where = error, name
    return loss, worst, where


def _finite(error: float) -> float:
    """A NaN is larger than anything."""
    return error if math.isfinite(error) else math.inf


def run(rank: Rank, num_samples: int, max_length: int) -> None:
    """Compare every layout with one rank; a row for each.

    Args:
        rank: This process.
        num_samples: Of a global batch; best a number that the ranks do not divide.
        max_length: Longest history, in events.
    """
    torch.set_float32_matmul_precision("highest")
    config = make_config("tiny")
    batches = [draw_samples(config, ROWS, num_samples, max_length, seed) for seed in range(STEPS)]
    terms = max(int(batch.lengths.sum()) for batch in batches)
    rank.say("one rank; again in another order, and in pieces")
    reference = _train(rank, batches, num_samples, None)
    generator = torch.Generator().manual_seed(1)
    shuffled = [take(batch, torch.randperm(num_samples, generator=generator).tolist()) for batch in batches]
    again = (
        _train(rank, shuffled, num_samples, None),
        _train(rank, batches, num_samples, None, pieces=max(2, rank.size)),
    )
    noise = [max(pair) for pair in zip(*(deviation(each, reference)[:2] for each in again), strict=True)]
    least = STEPS * math.sqrt(terms) * UNIT
    loss_bound, weight_bound = (max(SAFETY * each, least) for each in noise)
    rank.say(f"bounds: losses {loss_bound:.1e}, weights {weight_bound:.1e}")
    for name, dims in layouts(rank.size).items():
        check = partial(_compare, rank, name, dims, batches, reference, (loss_bound, weight_bound))
        rank.attempt(check, name=name)


def _compare(
    rank: Rank,
    name: str,
    dims: ParallelDims,
    batches: list[Samples],
    reference: Run,
    bounds: tuple[float, float],
) -> None:
    num_samples = batches[0].batch.num_samples
    first, last = (each * num_samples // rank.size for each in (rank.rank, rank.rank + 1))
    mesh = dims.build_mesh(rank.device.type) if rank.size > 1 else None
    result = _train(rank, [take(batch, range(first, last)) for batch in batches], num_samples, mesh)
    errors = deviation(result, reference)
    passed = all(error <= bound <= CEILING for error, bound in zip(errors[:2], bounds, strict=True))
    # Every rank compares, as each has gathered all: a rank that sees something else fails all.
    passed = rank.reduce(float(passed), op=dist.ReduceOp.MIN)[0] == 1.0
    rank.row(
        name=name,
        status="pass" if passed else "fail",
        steps=STEPS,
        loss_error=errors[0],
        loss_bound=bounds[0],
        weight_error=errors[1],
        weight_bound=bounds[1],
        worst_tensor=errors[2],
        losses=result.losses,
        **{axis: getattr(dims, axis) for axis in dims.__dataclass_fields__},
    )
    rank.say(f"{'PASS' if passed else 'FAIL'} {name}: losses {errors[0]:.1e}, weights {errors[1]:.1e} ({errors[2]})")


def _train(rank: Rank, batches: list[Samples], num_samples: int, mesh: ParallelMesh | None, *, pieces: int = 1) -> Run:
    """Losses and weights of one run; ``batches`` are this rank's parts of batches of ``num_samples``."""
    config = make_config("tiny")
    tables = make_tables(config, ROWS, rank.device, mesh.sparse if mesh else None)
    torch.manual_seed(0)
    model: Any = ExpertRanker(config, mesh.ep_group if mesh else None).to(rank.device)
    if mesh is not None:
        model = parallelize(model, ParallelPlan(shard_units=model.shard_units), mesh)
    # Not Adam: it turns a gradient that is zero up to rounding into a whole step, whatever its sign is by chance.
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE, momentum=0.9, foreach=False)
    losses = []
    for samples in batches:
        here = samples.to(rank.device)
        embeddings = tables.lookup(tables.exchange(here.ids))
        parts = [(here.batch, embeddings)] if pieces == 1 else _cut(rank, samples, embeddings, pieces)
        loss = torch.stack([model.loss(model(batch, rows), batch).total for batch, rows in parts]).sum()
        (loss / num_samples).backward()
        clip_grad_norm_(model.parameters(), MAX_NORM, mesh)
        optimizer.step()
        optimizer.zero_grad()
        total = float(loss.detach())
        losses.append((rank.reduce(total, op=dist.ReduceOp.SUM)[0] if mesh else total) / num_samples)
    weights = _whole({f"model.{name}": value for name, value in model.state_dict().items()})
    weights |= _whole(tables.state_dict())
    del tables, model, optimizer
    gc.collect()
    if mesh is not None:
        # Experts, and tables that lie whole on one rank, are in that rank's state dict only.
        gathered: list[Any] = [None] * rank.size
        dist.all_gather_object(gathered, weights, group=rank.control)
        weights = {name: value for each in gathered for name, value in each.items()}
    return Run(losses, weights)


def _whole(state: dict[str, Any]) -> dict[str, Tensor]:
    return {
        name: (value.full_tensor() if isinstance(value, DTensor) else value).detach().cpu().clone()
        for name, value in state.items()
        if isinstance(value, Tensor)
    }


def _cut(
    rank: Rank, samples: Samples, embeddings: dict[str, Tensor], pieces: int
) -> list[tuple[RandomBatch, dict[str, Tensor]]]:
    """A batch and its embeddings as several batches of consecutive samples."""
    offsets: list[int] = samples.batch.sequences["history"].offsets.tolist()
    count = samples.batch.num_samples
    found = []
    for piece in range(pieces):
        first, last = piece * count // pieces, (piece + 1) * count // pieces
        rows = {
            name: value[offsets[first] : offsets[last]] if "." in name else value[first:last]
            for name, value in embeddings.items()
        }
        found.append((take(samples, range(first, last)).batch.to(rank.device), rows))
    return found
