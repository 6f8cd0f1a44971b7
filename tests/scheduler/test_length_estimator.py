"""Predictions are judged by their rank correlation, and a replayed estimator is the one that lived through it."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config import LengthConfig
from penstock.scheduler.length.correlation import RankCorrelation, kendall_tau
from penstock.scheduler.length.estimator import LengthEstimator
from penstock.scheduler.length.predictor import length_predictor
from penstock.types import Task

TASK = Task(task_id="t", tag="play", index=0)


def estimator_of(name: str = "heuristic", **settings: object) -> LengthEstimator:
    config = LengthConfig.model_validate({"predictor": name, **settings})
    return LengthEstimator(length_predictor(config, max_new_tokens=500, temperature=1.0), config)


def feed(estimator: LengthEstimator, pairs: Sequence[tuple[float, int]]) -> None:
    for predicted, length in pairs:
        estimator.finished(TASK, predicted, [length])


def agreeing(count: int) -> list[tuple[float, int]]:
    return [(float(value), value) for value in range(1, count + 1)]


def contrary(count: int) -> list[tuple[float, int]]:
    return [(-float(value), value) for value in range(1, count + 1)]


def tau_by_definition(pairs: Sequence[tuple[float, float]]) -> float:
    def sign(value: float) -> int:
        return (value > 0) - (value < 0)

    indices = [(i, j) for i in range(len(pairs)) for j in range(i)]
    first = [sign(pairs[i][0] - pairs[j][0]) for i, j in indices]
    second = [sign(pairs[i][1] - pairs[j][1]) for i, j in indices]
    norm = sum(map(abs, first)) * sum(map(abs, second))
    return sum(a * b for a, b in zip(first, second, strict=True)) / norm**0.5 if norm else 0.0


@given(st.lists(st.tuples(st.integers(0, 9).map(float), st.integers(0, 9).map(float)), max_size=40))
def test_kendall_tau_is_tau_b(pairs: list[tuple[float, float]]) -> None:
    assert kendall_tau(pairs) == pytest.approx(tau_by_definition(pairs))


def test_correlation_needs_sixteen_pairs_and_slides() -> None:
    correlation = RankCorrelation(window=32)
    for value in range(15):
        correlation.add(value, value)
    assert correlation.tau is None
    correlation.add(15, 15)
    assert correlation.tau == 1.0
    for value in range(32):
        correlation.add(value, -value)
    assert correlation.tau == -1.0 and len(correlation) == 32


def test_trust_is_given_lost_and_won_back_with_a_margin() -> None:
    estimator = estimator_of(min_tau=0.2, window=32)
    assert estimator.trust.trusted and "too few groups" in estimator.trust.reason
    feed(estimator, agreeing(16))
    assert estimator.trust.trusted and estimator.trust.reason.startswith(
        "Kendall tau 1.00 over 16 groups is at least 0.2"
    )
    feed(estimator, contrary(32))
    assert not estimator.trust.trusted
    assert estimator.trust.reason == "Kendall tau -1.00 over 32 groups is below 0.2: first come, first served"
    feed(estimator, agreeing(32))
    assert estimator.trust.trusted


def test_a_tau_within_the_margin_keeps_what_was() -> None:
    pairs = [(float(value), value) for value in range(10)] + [(float(value), 25 - value) for value in range(10, 16)]
    tau = kendall_tau([(predicted, float(length)) for predicted, length in pairs])
    before = estimator_of(min_tau=tau - 0.02, window=16)
    feed(before, pairs)
    assert before.trust.trusted
    feed(before, contrary(16))
    assert not before.trust.trusted
    feed(before, pairs)
    assert not before.trust.trusted and "+ 0.05, needed to be trusted again" in before.trust.reason


def test_metrics_and_groups_without_lengths() -> None:
    estimator = estimator_of()
    assert estimator.trust.tau is None and estimator.predict_us is None
    estimator.finished(TASK, 3.0, [])
    feed(estimator, agreeing(16))
    assert len(estimator.estimate([TASK, TASK])) == 2
    assert estimator.trust.tau == 1.0
    assert estimator.predict_us is not None and estimator.predict_us > 0


@pytest.mark.parametrize("name", ["heuristic", "classifier", "history"])
def test_a_replayed_estimator_is_the_one_that_lived_through_it(name: str) -> None:
    draw = random.Random(1)
    texts = [f"{draw.choice(['Prove', 'Compute', '计算'])} {' + '.join('7' * draw.randint(1, 9))}" for _ in range(70)]
    tasks = [Task(task_id="t", tag="play", index=i, payload={"question": text}) for i, text in enumerate(texts)]
    settings = {"refit_every": 50, "window": 32, "max_entries": 40}
    lived, past = estimator_of(name, **settings), []
    for _ in range(150):
        task = draw.choice(tasks)
        lengths = [round(len(task.payload["question"]) * draw.uniform(1, 4)) for _ in range(4)]
        lived.finished(task, lived.estimate([task])[0], lengths)
        past.append((task, lengths))
        if fit := lived.due():
            lived.adopt(fit())
    replayed = estimator_of(name, **settings)
    replayed.replay(past)
    assert replayed.estimate(tasks) == lived.estimate(tasks)
    assert (replayed.trust.trusted, replayed.trust.reason) == (lived.trust.trusted, lived.trust.reason)
    assert replayed.trust.tau == lived.trust.tau is not None
