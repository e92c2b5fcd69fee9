"""Parameters that travel in MXFP8: the same bits on any number of ranks, and the bytes of the plan."""

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from gem_parallel import ParallelDims, Topology
from gem_parallel.planner import ModelDescription, Workload, explain
from gem_precision import MXFP8Wire
from gem_train.recipes.describe import describe_dense

sys.path.insert(0, str(Path(__file__).parent))
from wire_steps import LENGTHS, layers, random_batch, ranking_config, ranking_model

pytestmark = [pytest.mark.dist]


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    """As the ranks: the order of sums depends on the number of threads."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def expected() -> dict[str, Any]:
    """Of this process alone, without FSDP: weights rounded by hand, and layers without a wire."""
    wire, model = MXFP8Wire(), ranking_model()
    covered = 0
    for parameter in model.parameters():
        if wire.covers(tuple(parameter.shape)):
            matrix = parameter.data.reshape(-1, parameter.shape[-1])
            rounded = wire.decode(wire.encode(matrix), matrix.shape[1], torch.float32)
            assert not torch.equal(rounded, matrix)
            parameter.data = rounded.view(parameter.shape)
            covered += 1
    assert 10 < covered < len(list(model.parameters()))
    batch, rows = random_batch(ranking_config(), 4, lengths=LENGTHS, seed=1)
    outputs = model(batch, rows)
    model.loss(outputs, batch).total.backward()
    net = layers()
    y = net(torch.randn(9, 48, generator=torch.Generator().manual_seed(2)))
    y.square().sum().backward()
    units = describe_dense(ranking_config(), LENGTHS)
    return {"outputs": outputs, "model": model, "y": y.detach(), "net": net, "units": units}


@pytest.mark.parametrize("world_size", [2, 4])
def test_same_bits_and_planned_bytes(launch: Any, expected: dict[str, Any], tmp_path: Path, world_size: int) -> None:
    launch(world_size, "wire_steps.py", str(tmp_path / "result"))
    results = [torch.load(tmp_path / f"result.{rank}", weights_only=False) for rank in range(world_size)]
    dims, topology = ParallelDims.for_world(world_size), Topology(gpus_per_host=world_size)
    model = ModelDescription(name="tiny", units=expected["units"])
    planned = {
        wire: sorted(
            each.payload
            for each in explain(model, topology, dims, Workload(samples_per_rank=4, param_wire=wire)).collectives
            if each.kind == "all_gather"
        )
        for wire in (None, MXFP8Wire())
    }
    assert sum(planned[MXFP8Wire()]) <= 0.35 * sum(planned[None])
    for result in results:
        for task, value in result["outputs"].items():
            assert torch.equal(value, expected["outputs"][task])
        # Every rank has the whole batch, so that sums are multiples by a power of two.
        for name, parameter in expected["model"].named_parameters():
            if parameter.grad is not None:
                assert torch.equal(result["gradients"][name], world_size * parameter.grad), name
        assert sorted(result["sent"]) == planned[MXFP8Wire()]
        y, gradients = result["square"]
        # What converted layers find is quantised as they would themselves.
        assert torch.equal(y, expected["y"])
        for name, parameter in expected["net"].named_parameters():
            assert torch.equal(gradients[name], world_size * parameter.grad), name
        assert not torch.equal(result["rows"][0], expected["y"])
        assert torch.equal(result["rows"][0], results[0]["rows"][0])
