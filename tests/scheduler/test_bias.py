"""Trained against played lengths."""

import numpy as np
import pytest

from penstock.scheduler.bias import LengthBias


def lengths(count: int, seed: int = 0) -> list[int]:
    return np.ceil(np.random.default_rng(seed).lognormal(4.6, 0.8, count)).astype(int).tolist()


def test_percentiles_and_distance_are_exact() -> None:
    bias = LengthBias()
    bias.dispatched(range(1, 101))
    bias.trained(range(1, 81))
    report = bias.report()
    assert report["length_p50_played"] == 50.5 and report["length_p50_trained"] == 40.5
    assert report["length_p90_played"] == pytest.approx(90.1) and report["length_p90_trained"] == pytest.approx(72.1)
    assert report["length_ks"] == pytest.approx(0.2)  # at 80: all of the trained, 80 % of the played


def test_too_few_say_nothing() -> None:
    bias = LengthBias()
    assert set(bias.report().values()) == {None}
    bias.dispatched(range(1000))
    bias.trained([1] * 63)
    assert bias.report()["length_ks"] is None and bias.alarm() is None
    bias.trained([1])
    assert bias.report()["length_ks"] == pytest.approx(0.998) and bias.alarm() is not None


def test_ties_count_once() -> None:
    bias = LengthBias()
    bias.dispatched([5] * 100)
    bias.trained([5] * 70)
    assert bias.report()["length_ks"] == 0


def test_the_same_lengths_raise_no_alarm() -> None:
    bias = LengthBias()
    for seed in range(40):
        played = lengths(64, seed)
        bias.dispatched(played)
        bias.trained(played[::2])
        assert bias.alarm() is None


def test_training_the_short_ones_alone_does_and_says_by_how_much() -> None:
    bias = LengthBias()
    played = lengths(2000)
    bias.dispatched(played)
    bias.trained(sorted(played)[:1200])
    reason = bias.alarm()
    assert reason is not None and reason.startswith("trained answers differ in length from those played: KS distance")
    assert bias.report()["length_ks"] == pytest.approx(0.4, abs=0.01)
    assert bias.alarm(threshold=0.5) is None


def test_a_distance_that_chance_explains_is_no_alarm() -> None:
    bias = LengthBias()
    bias.dispatched(range(100))
    bias.trained(range(10, 80))
    distance = bias.report()["length_ks"]
    assert distance == pytest.approx(0.2) and bias.alarm() is None  # the 1 % critical value is 0.25


def test_only_the_latest_count() -> None:
    bias = LengthBias(window=100)
    bias.dispatched([1] * 500)
    bias.dispatched([9] * 100)
    assert bias.report()["length_p50_played"] == 9
