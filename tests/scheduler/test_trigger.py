"""Count or timeout, in both uses."""

import math

from hypothesis import given
from hypothesis import strategies as st

from penstock.scheduler.staleness import AdmissionPolicy
from penstock.scheduler.trigger import CountOrTimeoutTrigger, TriggerState

COMPUTE = CountOrTimeoutTrigger(use="compute", min_groups=4, max_wait_s=0.5, groups_per_step=10)
STEP = CountOrTimeoutTrigger(use="step", min_groups=4, max_wait_s=0.5, groups_per_step=10)


def state(*, ready: int, accumulated: int = 0, since: float = 0.0) -> TriggerState:
    return TriggerState(num_ready=ready, num_accumulated=accumulated, waiting_since=since if ready else None)


def test_samples_are_rounded_up_to_whole_groups() -> None:
    trigger = CountOrTimeoutTrigger.from_samples(
        use="compute", min_samples=17, max_wait_s=1.0, group_size=8, groups_per_step=32
    )
    assert trigger.min_groups == 3


def test_waits_until_the_count_or_the_clock() -> None:
    waiting = COMPUTE.decide(state(ready=3, since=1.0), now=1.2)
    assert waiting.num_groups == 0 and waiting.look_again_at == 1.5
    assert COMPUTE.decide(state(ready=4, since=1.0), now=1.2).num_groups == 4
    late = COMPUTE.decide(state(ready=1, since=1.0), now=1.5)
    assert late.num_groups == 1 and not late.step and "timeout" in late.reason


def test_nothing_ready_never_fires() -> None:
    decision = COMPUTE.decide(state(ready=0), now=100.0)
    assert decision.num_groups == 0 and decision.look_again_at == math.inf


def test_compute_steps_exactly_at_the_batch() -> None:
    decision = COMPUTE.decide(state(ready=9, accumulated=8), now=0.0)
    assert decision.num_groups == 2 and decision.step


def test_step_steps_at_every_trigger() -> None:
    assert STEP.decide(state(ready=4), now=0.0).step
    assert STEP.decide(state(ready=1), now=0.6).step


@given(
    st.sampled_from([COMPUTE, STEP]),
    st.integers(0, 50),
    st.integers(0, 9),
    st.floats(0, 10),
    st.floats(0, 10),
)
def test_a_decision_never_exceeds_what_is_ready_or_the_batch(
    trigger: CountOrTimeoutTrigger, ready: int, accumulated: int, since: float, later: float
) -> None:
    if trigger.use == "step":
        accumulated = 0
    decision = trigger.decide(state(ready=ready, accumulated=accumulated, since=since), now=since + later)
    assert 0 <= decision.num_groups <= min(ready, trigger.groups_per_step - accumulated)
    assert decision.reason
    if decision.num_groups and trigger.use == "compute":
        assert decision.step == (accumulated + decision.num_groups == trigger.groups_per_step)
    if not decision.num_groups:
        assert not decision.step and decision.look_again_at > since + later


@given(st.integers(0, 5), st.integers(1, 64), st.integers(0, 1000))
def test_admission_never_overfills_the_budget(max_staleness: int, groups_per_step: int, in_flight: int) -> None:
    policy = AdmissionPolicy(max_staleness=max_staleness, groups_per_step=groups_per_step)
    admitted = policy.decide(num_in_flight=in_flight).num_groups
    assert admitted >= 0
    assert in_flight + admitted <= max(in_flight, (max_staleness + 1) * groups_per_step)
