"""One rank that computes with parameters which travel in MXFP8. Started by the tests; argument: where to write."""

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from gem_model import RankingConfig, RankingModel, SequenceTowerConfig, random_batch
from gem_parallel import ParallelDims, ParallelPlan, parallelize
from gem_precision import MXFP8Recipe, MXFP8Wire, convert
from gem_train.launch import exit_worker

LENGTHS = {"history": [5, 0, 9, 3]}


def ranking_config() -> RankingConfig:
    tower = SequenceTowerConfig(
        name="history", event_features=("history.item",), num_event_dense=2, dim=32, num_heads=2
    )
    return RankingConfig(
        context_features=("user", "item"), num_dense=3, sequences=(tower,), tasks=("click",), embedding_dim=16, dim=32
    )


def ranking_model() -> Any:
    torch.manual_seed(0)
    return RankingModel(ranking_config())


def layers() -> nn.Sequential:
    """Converted layers. On 2 ranks a shard of 96 rows cuts a square block of 32, on 4 one of 64 rows does, too."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(48, 96), nn.GELU(), nn.Linear(96, 64), nn.GELU(), nn.Linear(64, 256))
    # Small rows beside large ones: square blocks of them round otherwise than rows do.
    for layer in (model[0], model[2], model[4]):
        layer.weight.data *= torch.exp2(-torch.arange(layer.out_features).remainder(14).float())[:, None]
    return convert(model, MXFP8Recipe())  # type: ignore[return-value]


@contextmanager
def counted() -> Iterator[list[int]]:
    """Bytes that this rank receives from others, of each all-gather."""
    names = [name for name in ("all_gather_into_tensor", "all_gather_single") if hasattr(dist, name)]
    before: dict[str, Callable[..., Any]] = {name: getattr(dist, name) for name in names}
    found: list[int] = []

    def counting(name: str) -> Callable[..., Any]:
        def call(output_tensor: torch.Tensor, input_tensor: torch.Tensor, **options: Any) -> Any:
            found.append(output_tensor.nbytes - input_tensor.nbytes)
            return before[name](output_tensor, input_tensor, **options)

        return call

    for name in names:
        setattr(dist, name, counting(name))
    try:
        yield found
    finally:
        for name in names:
            setattr(dist, name, before[name])


def gradients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: each.grad.full_tensor() for name, each in model.named_parameters() if each.grad is not None}


def main(path: str) -> None:
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", timeout=timedelta(seconds=120))
    mesh = ParallelDims.for_world(world_size).build_mesh("cpu")
    model = ranking_model()
    batch, rows = random_batch(ranking_config(), 4, lengths=LENGTHS, seed=1)
    model = parallelize(model, ParallelPlan(shard_units=model.shard_units, param_wire=MXFP8Wire()), mesh)
    with counted() as sent:
        outputs = model(batch, rows)
        model.loss(outputs, batch).total.backward()
    result = {"outputs": outputs, "gradients": gradients(model), "sent": sent}

    x = torch.randn(9, 48, generator=torch.Generator().manual_seed(2))
    for name, wire in (("square", MXFP8Wire(block_shape=(32, 32))), ("rows", MXFP8Wire())):
        net = parallelize(layers(), ParallelPlan(shard_units=("0", "2", "4"), param_wire=wire), mesh)
        y = net(x)
        y.square().sum().backward()
        result[name] = (y.detach(), gradients(net))
    torch.save(result, f"{path}.{rank}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1])
    exit_worker(0)
