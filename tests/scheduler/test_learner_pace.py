"""What a learner's timings say about its best micro-batch and its steps."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.scheduler.learner_pace import FEWEST_CALLS, LearnerPace


def pace_of(
    groups: list[int], *, call_s: float, group_s: float, counts_steps: bool = False, noise: float = 0.0
) -> LearnerPace:
    """Return a pace after one call per number of groups, with a second of waiting before each."""
    pace, now, draw = LearnerPace(groups_per_step=64, counts_steps=counts_steps), 0.0, random.Random(0)
    for count in groups:
        pace.begin_wait(now)
        now += 1.0
        pace.end_wait(now, num_groups=count, num_tokens=100 * count, step=counts_steps)
        now += (call_s + group_s * count) * (1 + noise * draw.uniform(-1, 1))
    pace.begin_wait(now)
    return pace


@given(st.floats(1e-3, 10), st.floats(1e-3, 1), st.booleans())
def test_the_best_call_reaches_nine_tenths_of_the_highest_rate(call_s: float, group_s: float, steps: bool) -> None:
    best = pace_of([1, 2, 4, 8] * 4, call_s=call_s, group_s=group_s, counts_steps=steps).best_groups
    assert best is not None

    def rate(count: int) -> float:
        return count / (call_s + group_s * count)

    assert rate(best) >= 0.899 / group_s
    assert best == 1 or rate(best - 1) <= 0.901 / group_s


def test_noise_moves_it_little() -> None:
    best = pace_of([1, 2, 4, 8, 16, 32] * 10, call_s=1.0, group_s=1.0, noise=0.1).best_groups
    assert best is not None and 5 <= best <= 13


def test_it_is_unknown_without_enough_different_calls() -> None:
    assert pace_of([1, 2] * (FEWEST_CALLS // 2 - 1), call_s=1.0, group_s=1.0).best_groups is None
    assert pace_of([4] * 40, call_s=1.0, group_s=1.0).best_groups is None
    assert pace_of([1, 9] * 40, call_s=1.0, group_s=-0.05).best_groups is None


def test_calls_with_a_step_count_only_if_every_call_has_one() -> None:
    pace = LearnerPace(groups_per_step=8, counts_steps=False)
    for number in range(40):
        pace.begin_wait(float(number))
        pace.end_wait(float(number), num_groups=1 + number % 3, num_tokens=100, step=True)
    assert pace.best_groups is None


def test_idle_from_the_question_to_the_answer() -> None:
    pace = LearnerPace(groups_per_step=8, counts_steps=False)
    assert pace.idle_since is None
    pace.begin_wait(3.0)
    assert pace.idle_since == 3.0
    pace.end_wait(5.0, num_groups=1, num_tokens=100, step=False)
    assert pace.idle_since is None


def test_the_time_of_a_whole_step_is_that_of_its_groups() -> None:
    pace = LearnerPace(groups_per_step=8, counts_steps=True)
    pace.complete_step(10.0, num_groups=8)
    assert pace.whole_step_s is None
    pace.complete_step(12.0, num_groups=2)
    pace.complete_step(16.0, num_groups=4)
    assert pace.whole_step_s == pytest.approx(8.0)
