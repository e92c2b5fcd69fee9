import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from fsdp_rank import batch, build

from gem_precision import convert, describe, get_recipe

SCRIPT = Path(__file__).with_name("fsdp_rank.py")


@pytest.mark.dist
@pytest.mark.parametrize("recipe", ["mxfp8", "bf16"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_sharded_layers_equal_one_process_bit_by_bit(recipe: str, world_size: int, tmp_path: Path) -> None:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(tmp_path), str(rank), str(world_size), recipe],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world_size)
    ]
    outputs = [rank.communicate(timeout=240)[0] for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0] * world_size, "\n".join(outputs)
    # fully_shard warns of outputs that are views from torch 2.13 on.
    assert not any("returned a view" in output for output in outputs)

    model = convert(build(), get_recipe(recipe))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as the ranks: the norms' gradients are summed in another order by more
    try:
        y = model(batch())
        y.square().sum().backward()
    finally:
        torch.set_num_threads(threads)
    for rank in range(world_size):
        result = torch.load(tmp_path / f"{rank}.pt", weights_only=True)
        # Blocks are cut after the all-gather, so no shard border cuts one.
        assert torch.equal(result["y"], y)
        # Every rank has the same batch and FSDP averages: sums of two equal numbers, halved.
        for name, parameter in model.named_parameters():
            assert torch.equal(result["gradients"][name], parameter.grad), name
        assert {name: value.shape for name, value in result["state"].items()} == {
            name: value.shape for name, value in model.state_dict().items()
        }
        assert result["reports"] == [(r.fqn, r.kind, r.precision) for r in describe(model)]
