"""Losses and gradients that are not finite stay out of the weights; the dense optimizer."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from trainer_toys import CONFIG, Flops, Loss, ToyModel, assert_same, make_trainer, weights

from gem_train.checkpoint import Checkpointer
from gem_train.data import EventLog
from gem_train.errors import NonFiniteError
from gem_train.guard import GradientGuard
from gem_train.optimizer import build_adamw


class Poisoned(nn.Module):
    """Passes everything to a model, and spoils one thing at one step."""

    def __init__(self, inner: ToyModel, at: int, what: str) -> None:
        super().__init__()
        self.inner, self.at, self.what, self.calls = inner, at, what, 0

    def forward(self, batch: Any, embeddings: Mapping[str, Tensor]) -> dict[str, Tensor]:
        poisoned = self.training and self.calls == self.at
        self.calls += self.training
        if poisoned and self.what == "rows":
            embeddings["topics"].register_hook(lambda g: torch.full_like(g, math.nan))
        if poisoned and self.what == "parameter":
            handle = self.inner.mlp[3].weight.register_hook(lambda g: torch.full_like(g, math.inf))
            self.handle = handle
        outputs = self.inner(batch, embeddings)
        return {"click": outputs["click"] * math.nan} if poisoned and self.what == "loss" else outputs

    def loss(self, outputs: Mapping[str, Tensor], batch: Any) -> Loss:
        return self.inner.loss(outputs, batch)

    def flops(self, batch: Any) -> Flops:
        return self.inner.flops(batch)


@pytest.mark.parametrize(
    ("what", "named"),
    [
        pytest.param("loss", "the loss is NaN", id="loss"),
        pytest.param("parameter", r"parameter inner\.mlp\.3\.weight is NaN", id="parameter"),
    ],
)
def test_a_nan_stops_the_run_before_the_update(events: EventLog, tmp_path: Path, what: str, named: str) -> None:
    config = dataclasses.replace(CONFIG, checkpoint_interval=2)
    clean = make_trainer(
        events,
        dataclasses.replace(config, max_steps=5, decay="constant", checkpoint_interval=0),
        model=lambda n: Poisoned(ToyModel(n), -1, what),
    )
    clean.run()
    trainer = make_trainer(
        events, dataclasses.replace(config, decay="constant"), model=lambda n: Poisoned(ToyModel(n), 5, what),
        checkpointer=Checkpointer(tmp_path),
    )  # fmt: skip
    with pytest.raises(NonFiniteError, match=rf"^step 6: .*{named}"):
        trainer.run()
    assert Checkpointer(tmp_path).steps() == (2, 4)
    dense = {k: v for k, v in weights(trainer).items() if k.startswith("model.")}
    assert_same(dense, {k: v for k, v in weights(clean).items() if k.startswith("model.")})
    if what == "loss":
        assert all(torch.isfinite(v).all() for v in weights(trainer).values())


def test_guard_zeroes_the_rows_gradient_it_refuses() -> None:
    model = nn.Linear(2, 1)
    guard = GradientGuard(model, build_adamw(model, CONFIG), torch.device("cpu"))
    source = torch.ones(3, 2, requires_grad=True)
    rows = source * 1.0
    guard.watch({"item": rows})
    (rows * torch.tensor([[1.0, math.nan]])).sum().backward()
    assert torch.equal(source.grad, torch.zeros(3, 2))
    guard.arm()
    with pytest.raises(NonFiniteError, match="step 5: the gradient of the looked-up rows of feature item is NaN"):
        guard.check(4)


def test_guard_skips_the_update_on_the_device() -> None:
    model = nn.Linear(2, 1)
    optimizer = build_adamw(model, CONFIG)
    guard = GradientGuard(model, optimizer, torch.device("cpu"))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    guard.watch({})
    (model(torch.ones(1, 2)) * math.inf).sum().backward()
    guard.inspect_parameters()
    guard.arm()
    optimizer.step()
    assert_same(model.state_dict(), before)
    assert float(optimizer.state[model.weight]["step"]) == 0.0


@pytest.mark.gpu
def test_guard_on_a_gpu_skips_at_once_and_reports_one_step_later() -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    model = nn.Linear(2, 1).to(device)
    optimizer = build_adamw(model, CONFIG)
    guard = GradientGuard(model, optimizer, device)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    for step, factor in enumerate((math.inf, 1.0)):
        guard.watch({})
        (model(torch.ones(1, 2, device=device)) * factor).sum().backward()
        guard.inspect_parameters()
        guard.arm()
        if step == 0:
            guard.check(step)
        optimizer.step()
        optimizer.zero_grad()
    assert_same(model.state_dict(), before)
    with pytest.raises(NonFiniteError, match=r"^step 1: the gradient of parameter weight is NaN or infinite"):
        guard.check(1)


def test_weight_decay_spares_biases() -> None:
    model = nn.Linear(3, 2)
    optimizer = build_adamw(model, dataclasses.replace(CONFIG, weight_decay=0.5, learning_rate=1.0))
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    weight, bias = model.weight.detach().clone(), model.bias.detach().clone()
    optimizer.step()
    torch.testing.assert_close(model.weight.detach(), 0.5 * weight)
    assert torch.equal(model.bias.detach(), bias)
