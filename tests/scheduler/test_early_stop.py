"""When training ends because nothing more is learnt."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config import EarlyStopConfig
from penstock.scheduler.early_stop import EarlyStop
from penstock.scheduler.filters import Dropped
from penstock.types import LearnerState

EQUAL = Dropped(name="zero_variance", reason="all rewards are 1")


def after(groups: Sequence[bool], config: EarlyStopConfig) -> EarlyStop:
    """`groups`: whether each was filtered."""
    stop = EarlyStop(config)
    for filtered in groups:
        stop.observe_group(EQUAL if filtered else None)
    return stop


def step(entropy: float) -> LearnerState:
    return LearnerState(policy_version=1, entropy=entropy)


def test_a_kept_group_in_a_hundred_does_not_keep_a_run_going() -> None:
    config = EarlyStopConfig(groups=400)
    groups = [number % 100 != 0 for number in range(400)]
    assert after(groups[:-1], config).reason() is None
    assert after(groups, config).reason() == (
        "396 of the latest 400 groups were filtered, 396 of them by zero_variance (all rewards are 1)"
    )


def test_an_alarm_comes_before_the_end() -> None:
    config = EarlyStopConfig(groups=400)
    assert after([True] * 39, config).alarm() is None
    alarm = after([True] * 40, config).alarm()
    assert alarm is not None and "40 of the latest 40 groups" in alarm and "scheduler.early_stop" in alarm
    assert after([True] * 40 + [False] * 3, config).alarm() is None


@given(st.lists(st.booleans(), max_size=60), st.integers(1, 20), st.floats(0.1, 1.0))
def test_only_the_latest_groups_count(groups: list[bool], size: int, share: float) -> None:
    stop = after(groups, EarlyStopConfig(groups=size, filtered_share=share))
    latest = groups[-size:]
    assert (stop.reason() is not None) == (len(latest) == size and sum(latest) >= share * size)


def test_low_entropy_ends_a_run_only_if_it_lasts() -> None:
    stop = EarlyStop(EarlyStopConfig(steps=3, min_entropy=0.01))
    for entropy in (0.5, 0.006, 0.006, 0.02, 0.006, 0.006):
        stop.observe_step(step(entropy))
        assert stop.reason() is None
    stop.observe_step(step(0.005))
    assert stop.reason() == "the policy's entropy was below 0.01 nats per token in the latest 3 steps, now 0.005"


@pytest.mark.parametrize("entropy", [0.0, 1.0])
def test_null_trains_to_the_last_step(entropy: float) -> None:
    stop = EarlyStop(None)
    for _ in range(5000):
        stop.observe_group(EQUAL)
        stop.observe_step(step(entropy))
    assert stop.reason() is None and stop.alarm() is None
