"""What moves the thresholds, and how often."""

import itertools
import json
import math
import random
from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from penstock.config import Config
from penstock.config.scheduling import FeedbackConfig, TriggerConfig
from penstock.scheduler.feedback import Adjustment, Feedback, Reference, preference
from penstock.scheduler.scheduler import Scheduler
from penstock.scheduler.trigger import Trigger, TriggerState
from penstock.types import LearnerState

SIGNALS = ["none", "entropy", "time", "noise_scale"]
STEPS = 100


def trigger_config(signal: str, **options: Any) -> TriggerConfig:
    config = FeedbackConfig(**{"signal": signal, "longest_wait": "60s"} | options)
    return TriggerConfig(min_samples=32, max_wait="500ms", feedback=config)


def feedback_for(signal: str, **options: Any) -> Feedback:
    return Feedback(trigger_config(signal, **options).feedback, entropy_gain=1.0, total_steps=STEPS, min_samples=32)


def learner(entropy: float = 1.0, **metrics: float) -> LearnerState:
    return LearnerState(policy_version=1, entropy=entropy, metrics={"tokens": 100.0, **metrics})


def observe(subject: Feedback, entropies: Iterable[float]) -> list[Adjustment]:
    return [subject.observe(learner(entropy)) for entropy in entropies]


def ratios(entropies: Iterable[float], **options: Any) -> list[float]:
    config, reference = FeedbackConfig(**{"hold_steps": 0} | options), Reference()
    found = []
    for entropy in entropies:
        reference.observe(entropy, config)
        found.append(reference.ratio)
    return found


def decaying(start: float = 2.0, end: float = 0.1, *, steps: int = 400, half_life: float = 50.0) -> list[float]:
    """Entropy as training lowers it: most of the fall is early (arXiv 2505.22617)."""
    return [end + (start - end) * 0.5 ** (step / half_life) for step in range(steps)]


def noisy(entropies: Iterable[float], *, share: float = 0.1, seed: int = 0) -> list[float]:
    source = random.Random(seed)
    return [entropy * math.exp(source.gauss(0, share)) for entropy in entropies]


def path(entropies: Iterable[float], **options: Any) -> list[tuple[str, int, int]]:
    """Return the level, N_min in samples and T_max in milliseconds from the start on, without repetitions."""
    config = trigger_config("entropy", **options)
    subject = Feedback(config.feedback, entropy_gain=1.0, total_steps=STEPS, min_samples=32)
    trigger = Trigger(config, group_size=8, groups_per_step=32)
    found = []
    for adjustment in (subject.adjustment, *observe(subject, entropies)):
        state = TriggerState(num_ready=0, num_accumulated=0, waiting_since=None, factor=adjustment.factor)
        limits = trigger.thresholds(state)
        level = {0.5: "high", 1.0: "normal", 2.0: "low"}[adjustment.factor]
        found.append((level, limits.min_groups * 8, round(limits.max_wait_s * 1000)))
    return [each for each, _ in itertools.groupby(found)]


HIGH, NORMAL, LOW = ("high", 16, 250), ("normal", 32, 500), ("low", 64, 1000)

# --- entropy ---------------------------------------------------------------------------------------------------------


def test_the_reference_is_the_entropy_of_the_first_steps() -> None:
    assert ratios([2.0, 3.0, 2.5, 1.25, 5.0], reference_steps=2) == pytest.approx([1.0, 1.2, 1.0, 0.5, 2.0])


def test_a_running_reference_follows_the_entropy() -> None:
    found = ratios([2.0, 3.0, 2.5, *[1.0] * 40], reference="running", reference_steps=4)
    assert found[:3] == [1.0, 1.5, 1.0]
    assert found[3] == pytest.approx(0.4)
    assert found[-1] == pytest.approx(1.0, abs=1e-4)


def test_the_reference_may_be_a_number() -> None:
    assert ratios([2.0, 0.5], reference=1.0) == [2.0, 0.5]


def test_single_steps_are_averaged() -> None:
    assert ratios([1.0, 1.0, 1.0, 5.0], reference=1.0, hold_steps=1)[:4] == pytest.approx([1.0, 1.0, 1.0, 2.0])


@pytest.mark.parametrize("nothing", [math.nan, math.inf, -math.inf, -0.1])
def test_what_is_no_entropy_changes_nothing(nothing: float) -> None:
    assert ratios([2.0, 1.0, nothing, 1.0], reference_steps=1) == [1.0, 0.5, 0.5, 0.5]


def test_a_policy_that_is_nearly_certain_has_no_volatile_entropy() -> None:
    assert ratios([0.0, 1e-9, 1e-5, 1e-12]) == [1.0] * 4


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


def test_a_decaying_entropy_goes_from_small_and_frequent_to_large_and_rare() -> None:
    assert path(decaying()) == [HIGH, NORMAL, LOW]
    assert path(noisy(decaying())) == [HIGH, NORMAL, LOW]


def test_a_run_stays_high_while_its_entropy_is_that_of_the_start() -> None:
    assert path([1.0] * 100) == [HIGH]
    assert path(noisy([1.0] * 400)) == [HIGH]


def test_a_collapse_goes_straight_to_low() -> None:
    assert path([2.0] * 20 + [0.001] * 20) in ([HIGH, LOW], [HIGH, NORMAL, LOW])


def test_entropy_that_rises_again_leads_back() -> None:
    assert path(decaying() + decaying()[::-1]) == [HIGH, NORMAL, LOW, NORMAL, HIGH]


def test_a_level_ends_only_beyond_the_band() -> None:
    entropies = {"reference": 1.0, "hold_steps": 0}
    assert path([1.0, 0.69, 0.76, 0.69, 0.76], **entropies) == [HIGH, NORMAL]
    assert path([1.0, 0.69, 0.78], **entropies) == [HIGH, NORMAL, HIGH]
    assert path([0.3, 0.38, 0.34], **entropies) == [HIGH, LOW]
    assert path([0.3, 0.39], **entropies) == [HIGH, LOW, NORMAL]


def test_thresholds_around_one_suit_a_running_reference() -> None:
    steady = {"reference": "running", "reference_steps": 1000, "hold_steps": 0}
    assert path([1.0] * 50, **steady) == [NORMAL]
    assert path([*[1.0] * 50, 1.3, 1.0, 0.8], **steady) == [NORMAL, HIGH, NORMAL, LOW]


def test_the_smooth_form_is_continuous() -> None:
    subject = feedback_for("entropy", form="smooth", hold_steps=0, reference=1.0)
    assert subject.adjustment.factor == 0.5
    factors = [found.factor for found in observe(subject, [1 - share / 100 for share in range(101)])]
    assert factors[0] == 0.5 and factors[-1] == 2.0 and factors == sorted(factors)
    assert max(after / before for before, after in pairwise(factors)) < 1.03


def test_a_step_without_tokens_has_no_entropy() -> None:
    subject = feedback_for("entropy", hold_steps=0)
    observe(subject, [1.0] * 5)
    found = subject.observe(learner(0.0, tokens=0.0))
    assert (found.factor, found.preference) == (0.5, 1.0)


@given(st.floats(1e-3, 20), st.integers(1, 100), st.sampled_from(["initial", "running"]))
def test_constant_entropy_never_leaves_the_first_level(entropy: float, reference_steps: int, reference: str) -> None:
    subject = feedback_for("entropy", reference=reference, reference_steps=reference_steps)
    for found in observe(subject, [entropy] * 60):
        assert found.factor == (0.5 if reference == "initial" else 1.0)
        assert found.preference == pytest.approx(1.0)


@pytest.mark.parametrize("reference", [0.0, -1.0, math.nan, "first"])
def test_a_reference_that_is_no_entropy_is_refused(reference: object) -> None:
    with pytest.raises(ValidationError, match="reference"):
        FeedbackConfig.model_validate({"reference": reference})


@pytest.mark.parametrize(
    "levels", [{"normal_below": 0.3}, {"low_below": 0.8}, {"normal_below": 2.0, "low_below": 1.0, "form": "smooth"}]
)
def test_levels_that_contradict_each_other_are_named(levels: dict[str, Any]) -> None:
    with pytest.raises(ValidationError, match="low_below"):
        FeedbackConfig(**levels)


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
    subject = feedback_for("none", reference=1.0, hold_steps=0)
    found = observe(subject, [1.0, 1.0, 2.0])[-1]
    assert found.factor == 1.0
    assert found.preference == pytest.approx(2.0)


def test_another_signals_state_gives_only_the_reference() -> None:
    before, after = feedback_for("entropy", hold_steps=0), feedback_for("time", hold_steps=0)
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


def test_a_change_of_the_thresholds_is_logged_with_its_reason() -> None:
    feedback = {"signal": "entropy", "reference": 1.0, "hold_steps": 0}
    trigger = {"use": "step", "min_samples": 128, "max_wait": "500ms", "feedback": feedback}
    config = Config.model_validate({"scheduler": {"trigger": trigger}, "rollout": {"slots": 8}})
    found = []

    def log(decider: str, reason: str, inputs: Any) -> None:
        if decider == "adaptation":
            found.append((reason, inputs["adapted"]))

    scheduler = Scheduler(config, now=lambda: 0.0, log_decision=log)
    for version, entropy in enumerate((1.0, 1.0, 0.5, 0.5, 0.1), start=1):
        scheduler.complete_step(LearnerState(policy_version=version, entropy=entropy, metrics={"tokens": 100.0}))
    (first, changed), (second, again) = found
    assert first.startswith("entropy is normal") and second.startswith("entropy is low")
    assert changed["min_samples"] == [64, 128] and changed["max_wait_s"] == [0.25, 0.5]
    assert again["min_samples"] == [128, 256] and again["max_wait_s"] == [0.5, 1.0]
