"""Waits in settings: numbers with a unit."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from penstock.config.scheduling import TriggerConfig
from penstock.config.waits import wait_time


@pytest.mark.parametrize(("wait", "seconds"), [("500ms", 0.5), ("2s", 2), ("1.5m", 90), ("1h", 3600), ("0.25x", 10)])
def test_seconds_of_every_unit(wait: str, seconds: float) -> None:
    assert wait_time(wait).seconds(40.0) == pytest.approx(seconds)
    assert wait_time(wait).is_relative == wait.endswith("x")


@given(st.floats(1e-9, 1e9), st.sampled_from(["ms", "s", "m", "h", "x"]))
def test_every_positive_number_is_a_wait(number: float, unit: str) -> None:
    assert TriggerConfig(max_wait=f"{number}{unit}").wait == f"{number}{unit}"


@pytest.mark.parametrize(
    ("wait", "message"),
    [
        (0.5, "'0.5' has no unit: use one of ms, s, m, h, or x"),
        ("0.25", "has no unit"),
        ("3 weeks", "has the unit 'weeks'"),
        ("0s", "not above zero"),
        ("-1s", "a number with a unit"),
        ("1e999s", "not above zero"),
        ("fast", "a number with a unit"),
        (True, "a number with a unit"),
    ],
)
def test_what_is_no_wait_is_refused_with_an_example(wait: object, message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        TriggerConfig.model_validate({"max_wait": wait})
