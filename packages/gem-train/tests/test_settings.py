"""Every key of a run's settings with values that no field takes, and with those at its edges, before data is read."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest

from gem_train.data import EventLog, generate
from gem_train.errors import ConfigError
from gem_train.overrides import field_values
from gem_train.recipes import RunConfig, get, names

RECIPE = get("synthetic")
KEYS = sorted(field_values(RunConfig.resolve(RECIPE, RECIPE.schema, {})))

NEVER = ("nan", "inf", "-inf", "abc", "[1,2]", "9223372036854775808000000000.5.1", "-1")
"""What no field takes."""
SOMETIMES = ("0", "", "1e30", "1000000000")
"""What some fields take; where one does, the settings hold it."""


@pytest.mark.parametrize("key", KEYS)
def test_what_no_field_takes_is_refused_in_one_line_that_names_it(key: str) -> None:
    for text in NEVER:
        with pytest.raises(ConfigError) as refused:
            RunConfig.resolve(RECIPE, RECIPE.schema, {key: text})
        message = str(refused.value)
        assert message.startswith(f"--set {key}={text}: "), message
        assert "\n" not in message
        # A rule, and then what to do: the value to go back to, or another remedy.
        assert re.search(r" (must|the data has) .+; .+", message), message


def resolved(key: str, text: str) -> Any:
    """The value that the settings hold, or the error."""
    try:
        return field_values(RunConfig.resolve(RECIPE, RECIPE.schema, {key: text}))[key]
    except ConfigError as error:
        return str(error)


@pytest.mark.parametrize("key", KEYS)
def test_what_a_field_takes_is_what_the_run_gets(key: str) -> None:
    for text in SOMETIMES:
        found = resolved(key, text)
        if isinstance(found, str):
            assert f"{key}={text}" in found
            assert "\n" not in found
        elif text == "":
            assert found == ()
        else:
            assert found in (float(text), (float(text),))


def test_all_keys_are_fuzzed() -> None:
    assert len(KEYS) > 70
    assert {key.split(".")[0] for key in KEYS} == {field.name for field in dataclasses.fields(RunConfig)}


@pytest.fixture(scope="module")
def log() -> EventLog:
    return generate(num_users=30, num_items=20, mean_events=10.0)


def test_a_schema_says_the_settings_of_its_data_but_for_the_priors(log: EventLog) -> None:
    before, after = (RunConfig.resolve(RECIPE, source, {"model.dim": "32"}) for source in (RECIPE.schema, log))
    assert before.model.priors == (0.5,)
    assert dataclasses.replace(after, model=dataclasses.replace(after.model, priors=(0.5,))) == before
    for name in names():
        recipe = get(name)
        assert RunConfig.resolve(recipe, recipe.schema, {}).model.tasks == recipe.schema.tasks
