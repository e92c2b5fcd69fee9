"""A wrong config is refused when it is made, with a sentence that says what to change."""

import dataclasses
from dataclasses import dataclass

import pytest

from gem_model import RankingConfig, SequenceTowerConfig

TOWER = SequenceTowerConfig(name="history", event_features=("history.item",))
CONFIG = RankingConfig(
    context_features=("item",), num_dense=1, sequences=(TOWER,), tasks=("click", "buy"), embedding_dim=8
)


@dataclass(frozen=True)
class Case:
    id: str
    changes: dict[str, object]
    message: str
    error: type[Exception] = ValueError


TOWER_CASES = [
    Case("name-dot", {"name": "a.b"}, "`name` must be identifiers"),
    Case("name-of-a-method", {"name": "forward"}, "got 'forward'; rename it"),
    Case("prefix", {"event_features": ("item",)}, "must start with 'history.'"),
    Case("twice", {"event_features": ("history.a", "history.a")}, "must not repeat a name"),
    Case("not-a-tuple", {"event_features": "history.item"}, "must be a tuple of str", TypeError),
    Case("heads", {"dim": 64, "num_heads": 3}, "`dim` must be a multiple of `num_heads` = 3, got 64"),
    Case("no-width", {"dim": 0}, "`dim` must be >= 1, got 0"),
    Case("float", {"num_seeds": 2.5}, "`num_seeds` must be an int, got 2.5", TypeError),
    Case("window", {"window": -1}, "`window` must be >= 0, got -1"),
    Case("kind", {"self_attention": ("full", "none")}, "must be one of window, block, none, got 'full'"),
    Case("kinds", {"self_attention": "window"}, "one entry per layer", TypeError),
    Case("block", {"block_size": 48}, "`block_size` must be 32, 64 or 128, got 48"),
    Case("block-float", {"block_size": 64.0}, "`block_size` must be 32, 64 or 128, got 64.0"),
    Case("flag", {"project_pooling": "no"}, "`project_pooling` must be a bool, got 'no'", TypeError),
    Case("dropout-str", {"dropout": "no"}, "`dropout` must be a number, got 'no'", TypeError),
    Case("activation", {"pffn_activation": "softmax"}, "`pffn_activation` must be one of raw"),
    Case("one-knot", {"num_age_buckets": 1}, "`num_age_buckets` must be >= 2, got 1"),
    Case("dropout", {"dropout": 1.0}, "`dropout` must lie in [0, 1), got 1.0"),
]
CONFIG_CASES = [
    Case("no-task", {"tasks": ()}, "at least one task"),
    Case("task-name", {"tasks": ("a b",)}, "`tasks` must be identifiers"),
    Case("no-features", {"context_features": (), "num_dense": 0}, "got neither; add one"),
    Case("no-layers", {"num_layers": 0}, "`num_layers` must be >= 1, got 0"),
    Case("no-experts", {"num_experts": 0}, "`num_experts` must be >= 1, got 0"),
    Case("kinds-per-layer", {"num_layers": 3}, "must have `num_layers` = 3 entries, got 2"),
    Case("same-name", {"sequences": (TOWER, TOWER)}, "`sequences` must not repeat a name, got ['history']"),
    Case("sequences", {"sequences": ("history",)}, "must be a tuple of SequenceTowerConfig", TypeError),
    Case("weights", {"task_weights": (1.0,)}, "one entry for each of the 2 tasks or be empty, got 1"),
    Case("weight", {"task_weights": (1.0, 0.0)}, "must be positive, got 0.0"),
    Case("priors", {"priors": (0.5,)}, "`priors` must have one entry for each of the 2 tasks"),
    Case("prior", {"priors": (0.5, 1.0)}, "must lie between 0 and 1, got 1.0"),
    Case("activation", {"activation": "tanh"}, "must be one of relu, gelu, silu, got 'tanh'"),
    Case("head", {"head_hidden": (64, 0)}, "`head_hidden` must be >= 1, got 0"),
    Case("head-list", {"head_hidden": [64]}, "must be a tuple of int", TypeError),
    Case("dropout", {"dropout": -0.1}, "must lie in [0, 1), got -0.1"),
]


@pytest.mark.parametrize("case", TOWER_CASES, ids=lambda case: case.id)
def test_wrong_tower(case):
    with pytest.raises(case.error) as info:
        dataclasses.replace(TOWER, **case.changes)
    assert str(info.value).startswith("SequenceTowerConfig: ")
    assert case.message in str(info.value)


@pytest.mark.parametrize("case", CONFIG_CASES, ids=lambda case: case.id)
def test_wrong_config(case):
    with pytest.raises(case.error) as info:
        dataclasses.replace(CONFIG, **case.changes)
    assert str(info.value).startswith("RankingConfig: ")
    assert case.message in str(info.value)


def test_token_counts():
    assert CONFIG.num_input_tokens == 1 + CONFIG.num_dense_tokens
    assert dataclasses.replace(CONFIG, num_dense=0).num_input_tokens == 1
    assert CONFIG.num_tokens == CONFIG.num_fm_tokens + CONFIG.num_linear_tokens
    assert TOWER.num_pooled_tokens == TOWER.num_context_tokens + TOWER.num_seed_tokens + TOWER.num_recent
    assert dataclasses.replace(TOWER, num_seeds=0, num_recent=0).num_pooled_tokens == TOWER.num_context_tokens
    assert CONFIG.num_pooled_tokens == TOWER.num_pooled_tokens
    assert TOWER.head_dim * TOWER.num_heads == TOWER.dim


def test_configs_are_values():
    assert dataclasses.replace(CONFIG) == CONFIG
    assert hash(dataclasses.replace(CONFIG)) == hash(CONFIG)
    with pytest.raises(dataclasses.FrozenInstanceError):
        CONFIG.dim = 3
