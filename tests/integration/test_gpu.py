"""One step on the CPU and on a GPU: logits, gradients and updated rows agree to the rounding of the matrix units."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import gem_precision
from gem_model import RankingModel

pytestmark = pytest.mark.gpu

LENGTHS = (0, 1, 5, 63, 64, 65, 3, 0, 130, 2)


def to_cuda(batch):
    def move(ids: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        return ids[0].cuda(), ids[1].cuda()

    return type(batch)(
        num_samples=batch.num_samples,
        ids={name: move(ids) for name, ids in batch.ids.items()},
        dense=batch.dense.cuda(),
        sequences={
            name: type(s)(s.offsets.cuda(), s.max_seqlen, s.dense.cuda(), s.age.cuda())
            for name, s in batch.sequences.items()
        },
        labels={name: label.cuda() for name, label in batch.labels.items()},
        sample_index=batch.sample_index.cuda(),
    )


def one_step(model: RankingModel, batch, tables, recipe: str) -> dict[str, Tensor]:
    """Logits, gradients and updated rows of a copy of the model in a recipe, on the host."""
    model = gem_precision.convert(copy.deepcopy(model).to(batch.dense.device), gem_precision.get_recipe(recipe))
    outputs = model(batch, tables.lookup(tables.exchange(batch.ids)))
    (model.loss(outputs, batch).total / batch.num_samples).backward()
    found = {f"logits.{task}": logits.detach() for task, logits in outputs.items()}
    found |= {f"gradient.{name}": parameter.grad for name, parameter in model.named_parameters()}
    return {name: value.double().cpu() for name, value in {**found, **tables.state_dict()}.items()}


@pytest.mark.parametrize("recipe", ["fp32", "bf16", "mxfp8"])
def test_a_step_on_the_gpu_is_the_step_on_the_cpu(config, make_batch, make_tables, recipe: str) -> None:
    torch.manual_seed(0)
    # ReLU would switch a unit on here and off there by a rounding, and with it a row of gradients.
    model, batch = RankingModel(replace(config, activation="silu")), make_batch(LENGTHS)
    exact = one_step(model, batch, make_tables(), "fp32")
    here = one_step(model, batch, make_tables(), recipe)
    there = one_step(model, to_cuda(batch), make_tables(device="cuda"), recipe)
    assert here.keys() == there.keys()
    # A recipe rounds; the GPU may round otherwise than the CPU, but not worse: of all gradients together not twice as
    # far from fp32, and of one tensor, where few roundings do not average out, four times. The rest is fp32 in another
    # order, and, for a gradient that is zero in exact arithmetic, nothing but rounding.
    distances = {name: ((there[name] - x).norm(), (here[name] - x).norm(), x.norm()) for name, x in exact.items()}
    for name, (gpu, cpu, size) in distances.items():
        assert gpu <= 4 * cpu + 5e-3 * size + 1e-5, f"{name}: {gpu:.2e} from fp32 on the GPU, {cpu:.2e} on the CPU"
    gpu, cpu, size = (
        sum(values[i] ** 2 for name, values in distances.items() if name.startswith("gradient.")) ** 0.5
        for i in range(3)
    )
    assert gpu <= 2 * cpu + 5e-3 * size
