"""Count or timeout, in every use, and what feedback may make of the thresholds."""

import math
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config.scheduling import FeedbackConfig, TriggerConfig
from penstock.scheduler.trigger import Thresholds, Trigger, TriggerState


def trigger(use: str = "compute", *, group_size: int = 8, groups_per_step: int = 10, **settings: Any) -> Trigger:
    config = TriggerConfig(**{"use": use, "min_samples": 32, "max_wait": "0.5s"} | settings)
    return Trigger(config, group_size=group_size, groups_per_step=groups_per_step)


COMPUTE, STEP, BATCH = trigger("compute"), trigger("step"), trigger("batch")
ADAPTIVE = FeedbackConfig(
    signal="entropy", fewest_samples=5, most_samples=60, shortest_wait="200ms", longest_wait="2s", band=0.1
)


def state(*, ready: int = 0, accumulated: int = 0, since: float = 0.0, **factors: float) -> TriggerState:
    waiting_since = since if ready else None
    return TriggerState(num_ready=ready, num_accumulated=accumulated, waiting_since=waiting_since, **factors)


def scaled(factor: float) -> TriggerState:
    return state(factor=factor)


def test_samples_are_rounded_up_to_whole_groups() -> None:
    assert trigger(min_samples=17).thresholds(state()).min_groups == 3
    assert trigger(min_samples=16).thresholds(state()).min_groups == 2
    assert trigger(min_samples=1).thresholds(state()).min_groups == 1


def test_waits_until_the_count_or_the_clock() -> None:
    waiting = COMPUTE.decide(state(ready=3, since=1.0), now=1.2)
    assert waiting.num_groups == 0 and waiting.look_again_at == 1.5
    assert COMPUTE.decide(state(ready=4, since=1.0), now=1.2).num_groups == 4
    late = COMPUTE.decide(state(ready=1, since=1.0), now=1.5)
    assert late.num_groups == 1 and not late.step
    assert late.reason == "timeout: the learner has waited 0.500 s of 0.5 s, 1 groups ready, 4 wanted"


def test_a_learner_at_work_has_not_begun_to_wait() -> None:
    busy = TriggerState(num_ready=1, num_accumulated=0, waiting_since=None)
    assert COMPUTE.decide(busy, now=1e9).num_groups == 0


def test_a_relative_wait_is_a_share_of_a_whole_steps_time() -> None:
    subject = trigger(max_wait="0.25x")
    assert subject.thresholds(state()).max_wait_s == math.inf
    measured = msgspec.structs.replace(state(ready=1, since=10.0), whole_step_s=40.0)
    assert subject.thresholds(measured).max_wait_s == 10.0
    assert subject.decide(measured, now=19.0).look_again_at == 20.0
    assert subject.decide(measured, now=20.0).num_groups == 1


def test_n_min_that_is_not_typed_follows_the_learner() -> None:
    learned = trigger(min_samples=None)
    assert learned.thresholds(state()).min_groups == 8
    assert learned.thresholds(msgspec.structs.replace(state(), best_groups=3)).min_groups == 3
    assert learned.thresholds(msgspec.structs.replace(state(), best_groups=99)).min_groups == 10
    assert COMPUTE.thresholds(msgspec.structs.replace(state(), best_groups=3)).min_groups == 4


@pytest.mark.parametrize(("use", "fewest", "expected"), [("step", 6, 6), ("step", 60, 10), ("compute", 6, 3)])
def test_steps_whose_size_is_not_typed_do_not_outrun_generation(use: str, fewest: int, expected: int) -> None:
    config = TriggerConfig(use=use, feedback=FeedbackConfig(signal="entropy"))  # type: ignore[arg-type]
    subject = Trigger(config, group_size=8, groups_per_step=10, fewest_per_version=fewest)
    learned = msgspec.structs.replace(scaled(1.0), best_groups=3)
    assert subject.thresholds(learned).min_groups == expected


@pytest.mark.parametrize(
    ("num_ranks", "typed", "expected"), [(1, None, 1), (4, None, 2), (64, None, 32), (999, None, 40), (64, 16, 2)]
)
def test_no_rank_is_left_without_samples_unless_the_number_is_typed(
    num_ranks: int, typed: int | None, expected: int
) -> None:
    config = TriggerConfig(min_samples=typed)
    subject = Trigger(config, group_size=8, groups_per_step=40, num_ranks=num_ranks)
    assert subject.thresholds(msgspec.structs.replace(state(), best_groups=1)).min_groups == expected


def test_nothing_ready_never_fires() -> None:
    decision = COMPUTE.decide(state(ready=0), now=100.0)
    assert decision.num_groups == 0 and decision.look_again_at == math.inf


def test_compute_steps_exactly_at_the_batch() -> None:
    decision = COMPUTE.decide(state(ready=9, accumulated=8), now=0.0)
    assert decision.num_groups == 2 and decision.step


def test_step_steps_at_every_trigger() -> None:
    assert STEP.decide(state(ready=4), now=0.0).step
    assert STEP.decide(state(ready=1), now=0.6).step


def test_batch_waits_for_whole_steps_and_for_no_clock() -> None:
    waiting = BATCH.decide(state(ready=9), now=1e9)
    assert waiting.num_groups == 0 and waiting.look_again_at == math.inf
    assert waiting.reason == "9 of 10 groups ready"
    decision = BATCH.decide(state(ready=13), now=0.0)
    assert (decision.num_groups, decision.step) == (10, True)
    assert BATCH.thresholds(state()) == Thresholds(min_groups=10, max_wait_s=math.inf)


def test_feedback_moves_the_thresholds_within_bounds() -> None:
    adaptive = trigger(feedback=ADAPTIVE)
    assert adaptive.thresholds(scaled(0.5)) == Thresholds(min_groups=2, max_wait_s=0.25)
    assert adaptive.thresholds(scaled(0.01)) == Thresholds(min_groups=1, max_wait_s=0.2)
    assert adaptive.thresholds(scaled(100)) == Thresholds(min_groups=8, max_wait_s=2.0)  # 60 samples are 8 groups
    assert adaptive.decide(state(ready=2, factor=0.5), now=0.0).num_groups == 2
    assert adaptive.decide(state(ready=1, factor=2.0), now=0.5).look_again_at == 1.0


def test_without_feedback_thresholds_are_what_was_typed() -> None:
    fixed = trigger(max_wait="1ms", feedback=ADAPTIVE.model_copy(update={"signal": "none"}))
    assert fixed.thresholds(scaled(3.0)) == Thresholds(min_groups=4, max_wait_s=0.001)


def test_the_batch_bounds_n_min_whatever_most_samples_says() -> None:
    unbounded = trigger(feedback=FeedbackConfig(signal="entropy", most_samples=10_000))
    assert unbounded.thresholds(scaled(100)).min_groups == 10


@given(st.integers(1, 16), st.integers(1, 64), st.floats(1e-6, 1e6), st.floats(1e-3, 1e3), st.data())
def test_thresholds_stay_within_their_bounds(
    group_size: int, groups_per_step: int, factor: float, max_wait_s: float, data: st.DataObject
) -> None:
    batch = group_size * groups_per_step
    fewest = data.draw(st.integers(1, batch))
    most = data.draw(st.one_of(st.none(), st.integers(fewest, 2 * batch)))
    low, high = sorted(data.draw(st.tuples(st.floats(0.01, 10), st.floats(0.01, 10))))
    feedback = FeedbackConfig(
        signal="time", fewest_samples=fewest, most_samples=most, shortest_wait=f"{low}s", longest_wait=f"{high}s"
    )
    adaptive = trigger(
        group_size=group_size,
        groups_per_step=groups_per_step,
        min_samples=data.draw(st.integers(fewest, batch)),
        max_wait=f"{max_wait_s}s",
        feedback=feedback,
    )
    found = adaptive.thresholds(state(factor=factor))
    assert low <= found.max_wait_s <= high
    assert fewest <= found.min_groups * group_size < min(most or batch, batch) + group_size
    assert 1 <= found.min_groups <= groups_per_step


@pytest.mark.parametrize("subject", [COMPUTE, STEP, BATCH, trigger(feedback=ADAPTIVE)], ids=lambda it: it.use)
@given(st.integers(0, 50), st.integers(0, 9), st.floats(0, 10), st.floats(0, 10), st.floats(0.1, 10))
def test_a_decision_never_exceeds_what_is_ready_or_the_batch(
    subject: Trigger, ready: int, accumulated: int, since: float, later: float, factor: float
) -> None:
    if subject.use != "compute":
        accumulated = 0
    seen = state(ready=ready, accumulated=accumulated, since=since, factor=factor)
    decision = subject.decide(seen, now=since + later)
    assert 0 <= decision.num_groups <= min(ready, subject.groups_per_step - accumulated)
    assert decision.reason
    if decision.num_groups and subject.use != "step":
        assert decision.step == (accumulated + decision.num_groups == subject.groups_per_step)
    if not decision.num_groups:
        assert not decision.step and decision.look_again_at > since + later
