"""What gem-parallel makes of gem-model's own words: the units it is sharded in, and the cost of a sample from FLOPs."""

from typing import Any

import pytest
import torch

from gem_model import RankingConfig, RankingModel, presets, random_batch
from gem_parallel import LengthCost, ParallelPlan, balance_samples


def make_config(preset: str) -> RankingConfig:
    options: dict[str, Any] = {
        "context_features": ("user", "item"),
        "num_dense": 4,
        "event_features": ("history.item",),
        "num_event_dense": 1,
        "tasks": ("click",),
    }
    config: RankingConfig = getattr(presets, preset)(**options)
    return config


@pytest.mark.parametrize("preset", ["tiny", "small"])
def test_a_model_is_few_units(preset: str) -> None:
    """Each unit is one all-gather and one reduce-scatter: few and large, in the order in which they run."""
    config = make_config(preset)
    with torch.device("meta"):
        model = RankingModel(config)
    plan = ParallelPlan(shard_units=model.shard_units)
    names = [name for name, _ in model.named_modules()]
    assert set(plan.shard_units) <= set(names)
    assert len(plan.shard_units) + 1 <= 12, "with the root"
    total = sum(parameter.numel() for parameter in model.parameters())
    layer_units = [name for name in plan.shard_units if name.startswith("layers.")]
    for name in layer_units:
        size = sum(parameter.numel() for parameter in model.get_submodule(name).parameters())
        assert size > total / (8 * len(layer_units)), f"{name} is too small for a collective of its own"


@pytest.mark.parametrize("preset", ["tiny", "small"])
def test_cost_fitted_to_the_models_flops(preset: str) -> None:
    config = make_config(preset)
    with torch.device("meta"):
        model = RankingModel(config)

    def flops(lengths: list[int]) -> torch.Tensor:
        counted = [model.flops(random_batch(config, 1, lengths={"history": (length,)})[0]).total for length in lengths]
        return torch.tensor(counted, dtype=torch.float64)

    known = [0, 1, 8, 32, 64, 100, 200, 300, 512]
    cost = LengthCost.fit({"history": torch.tensor(known)}, flops(known))
    held_out = [5, 50, 150, 250, 400]
    found, counted = cost({"history": torch.tensor(held_out)}), flops(held_out)
    # Blocks and windows make steps that no polynomial has.
    torch.testing.assert_close(found, counted, rtol=0.08, atol=0.0)
    assert cost.linear["history"] > 0
    report = balance_samples({"history": torch.tensor(held_out)}, cost).report
    assert report.heaviest[0].lengths == {"history": 400}
