"""Settings of the loop are checked by name; the learning rate follows them."""

from __future__ import annotations

import math
from typing import Any

import pytest

from gem_train.config import TrainerConfig
from gem_train.errors import ConfigError
from gem_train.schedule import LearningRateSchedule


@pytest.mark.parametrize(
    ("decay", "step", "expected"),
    [
        ("cosine", 0, 0.25), ("cosine", 3, 1.0), ("cosine", 4, 1.0), ("cosine", 54, 0.55), ("cosine", 104, 0.1),
        ("cosine", 999, 0.1), ("linear", 54, 0.55), ("linear", 29, 0.775), ("constant", 104, 1.0),
    ],
)  # fmt: skip
def test_schedule(decay: Any, step: int, expected: float) -> None:
    schedule = LearningRateSchedule(warmup_steps=4, total_steps=104, decay=decay, final_ratio=0.1)
    assert schedule(step) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("learning_rate", 0.0), ("beta2", 1.0), ("decay", "steps"), ("log_interval", 0), ("max_steps", 0),
        ("max_seconds", -1.0), ("keep_last", 0), ("final_learning_rate_ratio", 2.0), ("learning_rate", math.nan),
        ("step_timeout_s", -1.0), ("step_timeout_s", math.inf), ("step_timeout_s", 1e10), ("eps", math.inf),
        ("learning_rate", math.inf), ("max_seconds", math.inf), ("weight_decay", math.nan),
    ],
)  # fmt: skip
def test_config_names_the_field(field: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=f"TrainerConfig: `{field}` must .*got"):
        TrainerConfig(**{field: value})


@pytest.mark.parametrize(
    ("field", "value", "kind"),
    [
        ("learning_rate", "1e-3", "a finite number"), ("max_steps", 2.0, "a whole number or none"),
        ("log_interval", True, "a whole number"), ("select_best", 1, "true or false"),
    ],
)  # fmt: skip
def test_config_names_the_type(field: str, value: Any, kind: str) -> None:
    with pytest.raises(TypeError, match=f"^TrainerConfig: `{field}` must be {kind}, got {value!r}; the default is "):
        TrainerConfig(**{field: value})
