"""Trained lengths against those of the data."""

from collections.abc import Iterable

import numpy as np
import pytest

from penstock.scheduler.bias import LATEST_STEPS, LengthBias


def lengths(count: int, seed: int = 0) -> list[int]:
    return np.ceil(np.random.default_rng(seed).lognormal(4.6, 0.8, count)).astype(int).tolist()


def bias_of(played: Iterable[int], trained: Iterable[int], *, window: int = 2048) -> LengthBias:
    """Groups of one."""
    bias = LengthBias(group_size=1, look_ahead=0, window=window)
    for group, length in enumerate(played):
        bias.admitted(group, None)
        bias.played(group, [length])
    bias.trained(trained)
    return bias


def test_percentiles_and_distances_are_exact() -> None:
    report = bias_of(range(1, 101), range(1, 81)).report()
    assert report["length_p50_admitted"] == 50.5 and report["length_p50_trained"] == 40.5
    assert report["length_p90_admitted"] == pytest.approx(90.1) and report["length_p90_trained"] == pytest.approx(72.1)
    assert report["length_ks"] == pytest.approx(0.2)  # at 80: all of the trained, 80 % of the played
    assert report["length_ks_played"] == pytest.approx(0.2)


def test_too_few_say_nothing() -> None:
    assert set(bias_of([], []).report().values()) == {None}
    bias = bias_of(range(1000), [1] * 63)
    assert bias.report()["length_ks"] is None and bias.check_step() is None
    bias.trained([1])
    assert bias.report()["length_ks"] == pytest.approx(0.998) and bias.check_step() is not None


def test_ties_count_once() -> None:
    assert bias_of([5] * 100, [5] * 70).report()["length_ks"] == 0


def test_the_same_lengths_raise_no_alarm() -> None:
    for seed in range(40):
        played = lengths(640, seed)
        assert bias_of(played, played[::2]).check_step() is None


def test_training_the_short_ones_alone_does_and_says_by_how_much() -> None:
    played = lengths(2000)
    bias = bias_of(played, sorted(played)[:1200])
    reason = bias.check_step()
    assert reason is not None and reason.startswith(
        "trained answers differ in length from the data's: mean KS distance"
    )
    assert bias.report()["length_ks"] == pytest.approx(0.4, abs=0.01)
    assert bias.check_step(threshold=0.5) is None


def test_a_distance_that_does_not_last_is_no_alarm() -> None:
    bias, played = LengthBias(group_size=1, look_ahead=0), lengths(2048)
    for group, length in enumerate(played):
        bias.admitted(group, None)
        bias.played(group, [length])
    found = []
    for part in (played, sorted(played)[:1200], played, played):
        bias.trained(part)
        found += [bias.check_step() for _ in range(LATEST_STEPS)]
        bias.trained(played)
    assert found[:LATEST_STEPS] == [None] * LATEST_STEPS
    assert found[LATEST_STEPS] is None, "one step is not enough"
    assert found[2 * LATEST_STEPS - 1] is not None and found[-1] is None


def test_a_distance_that_chance_explains_is_no_alarm() -> None:
    bias = bias_of(range(100), range(10, 80))
    distance = bias.report()["length_ks"]
    assert distance == pytest.approx(0.2) and bias.check_step() is None  # the 1 % critical value is 0.25


def test_only_the_latest_count() -> None:
    assert bias_of([1] * 500 + [9] * 100, [], window=100).report()["length_p50_admitted"] == 9


def test_groups_that_starve_are_seen_by_what_is_predicted_of_them() -> None:
    bias = LengthBias(group_size=2, look_ahead=10)
    for group in range(210):
        long = group % 4 == 0
        bias.admitted(group, 90.0 if long else 10.0)
        if not long:
            bias.played(group, [9, 11])
            bias.trained([9, 11])
    report = bias.report()
    assert report["length_ks_played"] == 0, "everything that was played was trained"
    assert report["length_ks"] == pytest.approx(0.25) and bias.check_step() is not None


def test_groups_within_the_look_ahead_are_not_held_against_the_order() -> None:
    bias = LengthBias(group_size=1, look_ahead=100)
    for group in range(200):
        bias.admitted(group, float(group))
    bias.trained(range(100))
    assert bias.report()["length_ks"] == 0


def test_groups_of_equal_rewards_are_not_held_against_the_filter() -> None:
    bias = LengthBias(group_size=2, look_ahead=0)
    for group in range(200):
        solved = group % 2 == 0
        bias.admitted(group, None)
        bias.played(group, [5, 5] if solved else [10, 10])
        if solved:
            bias.equal_rewards(group)
        else:
            bias.trained([10, 10])
    report = bias.report()
    assert report["length_ks"] == 0 and bias.check_step() is None
    assert report["length_ks_played"] == 0.5
