"""One of the ranks of test_fully_shard.py: `python fsdp_rank.py <folder> <rank> <world size> <recipe>`."""

import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from gem_precision import convert, describe, get_recipe


def build() -> nn.Sequential:
    """Rows that neither 32 nor two ranks divide into whole blocks."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(48, 72), nn.GELU(), nn.Linear(72, 42), nn.LayerNorm(42))


def batch() -> torch.Tensor:
    return torch.randn(33, 48, generator=torch.Generator().manual_seed(1))


def main() -> None:
    folder, rank, world_size, recipe = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    model = convert(build(), get_recipe(recipe))
    mesh = init_device_mesh("cpu", (world_size,))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    y = model(batch())
    y.square().sum().backward()
    result = {
        "y": y.detach(),
        "gradients": {name: parameter.grad.full_tensor() for name, parameter in model.named_parameters()},
        "state": {name: value.full_tensor() for name, value in model.state_dict().items()},
        "reports": [(r.fqn, r.kind, r.precision) for r in describe(model)],
    }
    torch.save(result, folder / f"{rank}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
    sys.stdout.flush()
    # FSDP keeps the group's threads alive; one at work while the interpreter finalizes would abort the process.
    os._exit(0)
