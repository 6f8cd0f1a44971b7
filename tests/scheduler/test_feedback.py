"""What moves the thresholds, and how often."""

import json
import math
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.config import Config
from penstock.config.scheduling import FeedbackConfig, TriggerConfig
from penstock.scheduler.feedback import Adjustment, Feedback, RunningReference, preference
from penstock.scheduler.scheduler import Scheduler
from penstock.scheduler.trigger import Trigger, TriggerState
from penstock.types import LearnerState

SIGNALS = ["none", "entropy", "time", "noise_scale"]
STEPS = 100


def trigger_config(signal: str, **options: Any) -> TriggerConfig:
    config = FeedbackConfig(**{"signal": signal} | options)
    return TriggerConfig(min_samples=32, max_wait_s=0.5, feedback=config)


def feedback_for(signal: str, **options: Any) -> Feedback:
    return Feedback(trigger_config(signal, **options).feedback, entropy_gain=1.0, total_steps=STEPS, min_samples=32)


def learner(entropy: float = 1.0, **metrics: float) -> LearnerState:
    return LearnerState(policy_version=1, entropy=entropy, metrics={"tokens": 100.0, **metrics})


def observe(subject: Feedback, entropies: Iterable[float]) -> list[Adjustment]:
    return [subject.observe(learner(entropy)) for entropy in entropies]


def ratio_of(reference: RunningReference, entropy: float) -> float:
    reference.observe(entropy, steps=4)
    return reference.ratio


# --- entropy ---------------------------------------------------------------------------------------------------------


def test_the_ratio_uses_the_reference_from_before() -> None:
    reference = RunningReference()
    assert ratio_of(reference, 2.0) == 1.0
    assert ratio_of(reference, 3.0) == 1.5
    assert ratio_of(reference, 2.5) == 1.0  # the plain mean while there are fewer than four
    for _ in range(40):
        ratio_of(reference, 1.0)
    assert reference.value == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("nothing", [math.nan, math.inf, -math.inf, -0.1])
def test_what_is_no_entropy_changes_nothing(nothing: float) -> None:
    reference = RunningReference()
    for entropy in (2.0, 3.0):
        ratio_of(reference, entropy)
    before = msgspec.structs.asdict(reference)
    assert ratio_of(reference, nothing) == 1.5
    assert msgspec.structs.asdict(reference) == before


def test_a_policy_that_is_nearly_certain_has_no_volatile_entropy() -> None:
    reference = RunningReference()
    for entropy in (0.0, 1e-9, 1e-5, 1e-12):
        assert ratio_of(reference, entropy) == 1.0


@given(st.floats(0, 1e300), st.floats(0, 1e300))
def test_the_preference_is_bounded_and_grows_with_the_entropy(ratio: float, gain: float) -> None:
    found = preference(ratio, gain)
    assert 0.25 <= found <= 4.0
    assert found >= 1 if ratio >= 1 or gain == 0 else found <= 1
    assert preference(2 * ratio, gain) >= found


def test_preference_is_a_power() -> None:
    assert preference(1.5, 2.0) == pytest.approx(2.25)
    assert preference(1.5, 0.0) == 1.0
    assert preference(3.0, 2.0) == 4.0 and preference(0.0, 1.0) == 0.25


def test_high_entropy_halves_the_thresholds_and_low_entropy_doubles_them() -> None:
    config = trigger_config("entropy", reference_steps=1000, hold_steps=0)
    subject = Feedback(config.feedback, entropy_gain=1.0, total_steps=STEPS, min_samples=32)
    trigger = Trigger(config, group_size=8, groups_per_step=32)
    observe(subject, [1.0] * 50)

    def thresholds(entropy: float) -> tuple[str, int, float]:
        found = subject.observe(learner(entropy))
        state = TriggerState(num_ready=0, num_accumulated=0, waiting_since=None, factor=found.factor)
        limits = trigger.thresholds(state)
        return found.reason.split(":")[0].removeprefix("entropy is "), limits.min_groups * 8, limits.max_wait_s * 1000

    assert thresholds(1.00) == ("normal", 32, 500)
    assert thresholds(1.20) == ("high", 16, 250)
    assert thresholds(1.07) == ("high", 16, 250)  # hysteresis: not yet half of the way back
    assert thresholds(1.02) == ("normal", 32, 500)
    assert thresholds(0.80) == ("low", 64, 1000)
    assert thresholds(0.93) == ("low", 64, 1000)
    assert thresholds(0.98) == ("normal", 32, 500)
    assert thresholds(1.20) == ("high", 16, 250)
    assert thresholds(0.80) == ("low", 64, 1000)


def test_a_step_without_tokens_has_no_entropy() -> None:
    subject = feedback_for("entropy", hold_steps=0)
    observe(subject, [1.0] * 5)
    found = subject.observe(learner(0.0, tokens=0.0))
    assert (found.factor, found.preference) == (1.0, 1.0)


@given(st.floats(1e-3, 20), st.integers(1, 100))
def test_constant_entropy_is_normal_for_ever(entropy: float, reference_steps: int) -> None:
    for found in observe(feedback_for("entropy", reference_steps=reference_steps), [entropy] * 60):
        assert found.factor == 1.0
        assert found.preference == pytest.approx(1.0)


@given(st.lists(st.floats(-0.045, 0.045), min_size=1, max_size=60))
def test_oscillation_inside_the_band_changes_nothing(wobble: list[float]) -> None:
    for found in observe(feedback_for("entropy", hold_steps=0), [1.0 + w for w in wobble]):
        assert found.factor == 1.0


# --- time ------------------------------------------------------------------------------------------------------------


def test_time_goes_geometrically_from_the_first_step_to_the_last() -> None:
    subject = feedback_for("time", hold_steps=0)
    in_force = [subject.adjustment, *observe(subject, [1.0] * (STEPS - 1))]
    factors = [found.factor for found in in_force]
    assert factors[0] == 0.5 and factors[-1] == pytest.approx(2.0)
    assert [b / a for a, b in pairwise(factors)] == pytest.approx([4 ** (1 / 99)] * 99)
    assert subject.observe(learner()).factor == pytest.approx(2.0)  # and stays there


@given(st.integers(1, 60), st.integers(0, 9))
def test_time_reaches_its_end_in_stairs(total_steps: int, hold_steps: int) -> None:
    config = trigger_config("time", hold_steps=hold_steps)
    subject = Feedback(config.feedback, entropy_gain=1.0, total_steps=total_steps, min_samples=32)
    factors = [subject.adjustment.factor] + [f.factor for f in observe(subject, [1.0] * total_steps)]
    assert factors[0] == 0.5 and factors == sorted(factors)
    if total_steps > hold_steps + 1:
        assert factors[total_steps - 1] == pytest.approx(2.0)


# --- noise scale -----------------------------------------------------------------------------------------------------


def test_n_min_follows_the_noise_scale_outside_the_band() -> None:
    subject = feedback_for("noise_scale", hold_steps=0, reference_steps=1000, band=0.1)
    found = subject.observe(learner(noise_trace=128.0, noise_signal=2.0))
    assert found.factor == 2.0
    assert found.inputs["noise_trace"] == 128.0
    found = subject.observe(learner(noise_trace=140.0, noise_signal=2.0))  # 67 samples on average: within the band
    assert found.factor == 2.0
    found = subject.observe(learner(noise_trace=140.0, noise_signal=14.0))  # 408 / 18
    assert found.factor == pytest.approx(408 / 18 / 32)


def test_no_noise_scale_without_a_signal() -> None:
    subject = feedback_for("noise_scale", hold_steps=0)
    for metrics in ({}, {"noise_trace": 5.0, "noise_signal": -1.0}, {"noise_trace": math.nan, "noise_signal": 1.0}):
        found = subject.observe(learner(**metrics))
        assert found.factor == 1.0
    json.dumps(found.inputs, allow_nan=False)


# --- all of them -----------------------------------------------------------------------------------------------------

NUMBER = st.one_of(st.floats(-1e3, 1e3), st.sampled_from([math.nan, math.inf, 0.0, 1e-300, 1e300]))
OBSERVATIONS = st.lists(st.tuples(NUMBER, NUMBER, NUMBER), max_size=40)


@settings(max_examples=50)
@given(st.sampled_from(SIGNALS), OBSERVATIONS, st.integers(0, 5))
def test_any_history_is_bounded_held_and_resumable(
    signal: str, observations: list[tuple[float, float, float]], hold_steps: int
) -> None:
    subject, since_change = feedback_for(signal, hold_steps=hold_steps), hold_steps
    for entropy, trace, strength in observations:
        before = subject.adjustment.factor
        resumed = feedback_for(signal, hold_steps=hold_steps)
        resumed.load_state_dict(json.loads(json.dumps(subject.state_dict(), allow_nan=False)))
        state = learner(entropy, noise_trace=trace, noise_signal=strength)
        found = subject.observe(state)
        assert resumed.observe(state) == found
        changed = found.factor != before
        assert not changed or since_change >= hold_steps
        since_change = 0 if changed else since_change + 1
        assert 0.25 <= found.preference <= 4
        assert found.factor > 0 and math.isfinite(found.factor)
        if signal != "noise_scale":
            assert 0.5 <= found.factor <= 2
        assert found.reason
        json.dumps(found.inputs, allow_nan=False)


def test_without_a_signal_only_the_preference_moves() -> None:
    subject = feedback_for("none")
    found = observe(subject, [1.0, 1.0, 2.0])[-1]
    assert found.factor == 1.0
    assert found.preference == pytest.approx(2.0)


def test_another_signals_state_gives_only_the_reference() -> None:
    before, after = feedback_for("entropy", hold_steps=0), feedback_for("time")
    observe(before, [1.0] * 10 + [2.0])
    after.load_state_dict(before.state_dict())
    assert after.adjustment.factor == 0.5 and after.adjustment.preference == pytest.approx(2.0)


def test_what_a_scheduler_restores_is_in_force_at_once() -> None:
    config = Config.model_validate(
        {"trainer": {"steps": STEPS}, "scheduler": {"trigger": {"feedback": {"signal": "time", "hold_steps": 0}}}}
    )
    before, after = (Scheduler(config, now=lambda: 0.0, log_decision=lambda *_: None) for _ in range(2))
    for version in range(1, STEPS):
        before.complete_step(LearnerState(policy_version=version, entropy=1.0, metrics={"tokens": 100.0}))
    fresh = after.health.metrics()["trigger_min_samples"]
    after.restoring.load_state_dict(before.restoring.state_dict())
    assert after.health.metrics()["trigger_min_samples"] == before.health.metrics()["trigger_min_samples"] != fresh
