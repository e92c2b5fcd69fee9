"""Units that a user compiles one by one compute what the plain model does, once compiled for all sizes of a batch."""

import copy
import dataclasses
import types

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from gem_model import RankingModel, random_batch

LENGTHS = ((9, 1, 30, 0, 4), (3, 0, 20), (0, 40))
"""No batch of one sample or of no event, which would compile once more; nor one whose sizes equal each other or one of
the model's at first, which the compiler would take for one size until the next batch."""


@pytest.fixture
def config(two_towers):
    """One layer, one tower, one task: tracing takes seconds per unit."""
    (clicks, _) = two_towers.sequences
    tower = dataclasses.replace(clicks, self_attention=("window",), num_seeds=0, project_pooling=False)
    return dataclasses.replace(two_towers, num_layers=1, sequences=(tower,), tasks=("click",), task_weights=())


@pytest.fixture
def counter():
    torch.compiler.reset()
    yield CompileCounterWithBackend("aot_eager")
    torch.compiler.reset()


def run(model, config, lengths, seed):
    """Logits and all gradients of one batch."""
    batch, embeddings = random_batch(config, len(lengths), lengths={"clicks": lengths}, seed=seed)
    model.zero_grad()
    outputs = model(batch, embeddings)
    model.loss(outputs, batch).total.backward()
    grads = (p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters())
    return [*outputs.values(), *grads, *(x.grad for x in embeddings.values())]


@pytest.mark.slow
# Dynamo looks at .grad of whatever enters a unit.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_compiled_and_sharded_units_are_the_plain_model_at_all_sizes(config, counter, tmp_path):
    torch.manual_seed(0)
    plain = RankingModel(config)
    compiled = copy.deepcopy(plain)
    for name in compiled.shard_units:
        unit = compiled.get_submodule(name)
        unit.forward = types.MethodType(torch.compile(type(unit).forward, dynamic=True, backend=counter), unit)
    graphs = []
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        for unit in compiled.shard_units:
            fully_shard(compiled.get_submodule(unit), mesh=mesh)
        fully_shard(compiled, mesh=mesh)
        for seed, lengths in enumerate(LENGTHS):
            for x, y in zip(run(compiled, config, lengths, seed), run(plain, config, lengths, seed), strict=True):
                torch.testing.assert_close(x, y, rtol=1e-4, atol=1e-5)
            graphs.append(counter.frame_count)
    finally:
        dist.destroy_process_group()
    assert len(plain.shard_units) <= graphs[0] <= 2 * len(plain.shard_units)
    assert graphs == graphs[:1] * len(LENGTHS)
