"""One step on the CPU and on a GPU: logits, gradients and updated rows agree to the rounding of the matrix units."""

import copy

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


@pytest.mark.parametrize("recipe", ["fp32", "bf16", "mxfp8"])
def test_a_step_on_the_gpu_is_the_step_on_the_cpu(config, make_batch, make_tables, recipe: str) -> None:
    torch.manual_seed(0)
    here = RankingModel(config)
    there = gem_precision.convert(copy.deepcopy(here).cuda(), gem_precision.get_recipe(recipe))
    here = gem_precision.convert(here, gem_precision.get_recipe(recipe))
    batch = make_batch(LENGTHS)
    results = []
    for model, device, own in ((here, "cpu", batch), (there, "cuda", to_cuda(batch))):
        tables = make_tables(device=device)
        outputs = model(own, tables.lookup(tables.exchange(own.ids)))
        (model.loss(outputs, own).total / own.num_samples).backward()
        gradients = {name: parameter.grad.cpu() for name, parameter in model.named_parameters()}
        rows = {name: value.cpu() for name, value in tables.state_dict().items()}
        results.append(({task: logits.detach().cpu() for task, logits in outputs.items()}, gradients, rows))
    # fp32 attention on tensor cores rounds its operands to TF32 (2**-11); the others to bf16 (2**-8) or e4m3 (2**-4).
    bound = {"fp32": 5e-3, "bf16": 5e-2, "mxfp8": 0.2}[recipe]
    for ours, theirs in zip(*results, strict=True):
        assert ours.keys() == theirs.keys()
        for name, value in ours.items():
            distance = (theirs[name].double() - value.double()).norm()
            assert distance <= bound * value.double().norm() + 1e-4, f"{name}: {float(distance)}"
