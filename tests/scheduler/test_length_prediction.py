"""Predictions are judged by their rank correlation, and a replay restores the predictions of the run."""

import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config import Config, LengthConfig
from penstock.scheduler.active_group import ActiveGroup
from penstock.scheduler.ledger import Ledger
from penstock.scheduler.length.trust import Trust, kendall_tau
from penstock.scheduler.length_prediction import LengthPrediction, run_now
from penstock.types import Task

TASK = Task(task_id="t", tag="play", index=0)


def prediction_of(name: str = "heuristic", **settings: object) -> LengthPrediction:
    scheduler = {"length": {"predictor": name, **settings}, "dispatch": {"policy": "sjf"}}
    config = Config.model_validate({"scheduler": scheduler, "env": {"max_new_tokens": 500}})
    return LengthPrediction(config, log_decision=lambda *decision: None, background=run_now)


def learn(prediction: LengthPrediction, task: Task, predicted: float, lengths: Sequence[int]) -> None:
    group = ActiveGroup(number=0, task=task, size=1, ledger=Ledger(), admitted_at=0.0, predicted_tokens=predicted)
    prediction.learn_group(group, lengths)


def feed(prediction: LengthPrediction, pairs: Sequence[tuple[float, int]]) -> None:
    for predicted, length in pairs:
        learn(prediction, TASK, predicted, [length])


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
    trust = Trust(LengthConfig(window=32))
    for value in range(15):
        trust.add(value, value)
    assert trust.tau is None
    trust.add(15, 15)
    assert trust.tau == 1.0
    for value in range(32):
        trust.add(value, -value)
    assert trust.tau == -1.0 and "over 32 groups" in trust.reason


def test_trust_is_given_lost_and_won_back_with_a_margin() -> None:
    prediction = prediction_of(min_tau=0.2, window=32)
    assert prediction.trusted and "too few groups" in prediction.trust.reason
    feed(prediction, agreeing(16))
    assert prediction.trusted and prediction.trust.reason.startswith("Kendall tau 1.00 over 16 groups is at least 0.2")
    young = prediction_of(min_tau=0.2, window=32)
    feed(young, contrary(16))
    assert not young.trusted and young.trust.alarm is None, "a predictor that learns begins with nothing"
    feed(prediction, contrary(32))
    assert not prediction.trusted and prediction.trust.alarm == prediction.trust.reason
    assert prediction.trust.reason == "Kendall tau -1.00 over 32 groups is below 0.2: first come, first served"
    feed(prediction, agreeing(32))
    assert prediction.trusted


def test_a_tau_within_the_margin_keeps_what_was() -> None:
    pairs = [(float(value), value) for value in range(10)] + [(float(value), 25 - value) for value in range(10, 16)]
    tau = kendall_tau([(predicted, float(length)) for predicted, length in pairs])
    before = prediction_of(min_tau=tau - 0.02, window=16)
    feed(before, pairs)
    assert before.trusted
    feed(before, contrary(16))
    assert not before.trusted
    feed(before, pairs)
    assert not before.trusted and "+ 0.05, needed to be trusted again" in before.trust.reason


def test_few_groups_without_a_relation_prove_nothing() -> None:
    """Of 16 groups tau varies by 0.19 around its mean, of 256 by 0.04."""
    draw = random.Random(14)
    pairs = [(draw.random(), draw.randint(1, 1000)) for _ in range(256)]
    prediction = prediction_of(min_tau=0.1)
    feed(prediction, pairs[:16])
    assert prediction.trusted
    feed(prediction, pairs[16:])
    assert not prediction.trusted


def test_metrics() -> None:
    prediction = prediction_of()
    assert prediction.metrics() == {"length_tau": None, "length_predict_us": None}
    feed(prediction, agreeing(16))
    assert len(prediction.estimate([TASK, TASK])) == 2
    metrics = prediction.metrics()
    assert metrics["length_tau"] == 1.0
    assert metrics["length_predict_us"] is not None and metrics["length_predict_us"] > 0


@pytest.mark.parametrize("name", ["heuristic", "classifier", "history"])
def test_a_replayed_prediction_is_the_one_that_lived_through_it(name: str) -> None:
    draw = random.Random(1)
    texts = [f"{draw.choice(['Prove', 'Compute', '计算'])} {' + '.join('7' * draw.randint(1, 9))}" for _ in range(70)]
    tasks = [Task(task_id="t", tag="play", index=i, payload={"question": text}) for i, text in enumerate(texts)]
    settings = {"refit_every": 50, "window": 32, "max_entries": 40}
    lived, past = prediction_of(name, **settings), []
    for _ in range(150):
        task = draw.choice(tasks)
        lengths = [round(len(task.payload["question"]) * draw.uniform(1, 4)) for _ in range(4)]
        learn(lived, task, lived.estimate([task])[0] or 0.0, lengths)
        past.append((task, lengths))
    replayed = prediction_of(name, **settings)
    replayed.learn_lengths(past)
    assert replayed.estimate(tasks) == lived.estimate(tasks)
    assert replayed.trust.reason == lived.trust.reason
    assert replayed.metrics()["length_tau"] == lived.metrics()["length_tau"] is not None
