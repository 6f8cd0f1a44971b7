"""The restart policy alone, on invented times."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config import SupervisorConfig
from penstock.supervisor.failure import Exit, ExitKind
from penstock.supervisor.restart import Action, Decision, RestartPolicy

jitters = st.floats(0, 1, exclude_max=True)


def decide(
    policy: RestartPolicy,
    *,
    now: float = 0.0,
    kind: ExitKind = ExitKind.CRASHED,
    was_ready: bool = True,
    completed: bool = False,
    num_saved: int | None = None,
) -> Decision:
    loss = Exit(time=0.0, returncode=1, kind=kind, reason="exit code 1")
    return policy.decide("env-0", loss, was_ready=was_ready, completed=completed, now=now, num_saved=num_saved)


@given(
    st.integers(0, 5), st.lists(st.floats(0, 400), max_size=60).map(sorted), st.sampled_from(list(ExitKind)), jitters
)
def test_no_window_sees_more_restarts_than_the_budget(
    max_restarts: int, times: list[float], kind: ExitKind, jitter: float
) -> None:
    settings = SupervisorConfig(max_restarts=max_restarts, restart_window_s=100.0)
    policy = RestartPolicy(settings, jitter=lambda: jitter)
    restarts = []
    for now in times:
        decision = decide(policy, now=now, kind=kind)
        assert decision.reason
        if decision.action is Action.RESTART:
            restarts.append(now)
    for start in restarts:
        assert sum(start <= time < start + settings.restart_window_s for time in restarts) <= max_restarts


@given(st.lists(jitters, min_size=8, max_size=8))
def test_pauses_grow_up_to_a_bound(chances: list[float]) -> None:
    settings = SupervisorConfig(max_restarts=8, backoff_s=1.0, max_backoff_s=30.0)
    policy = RestartPolicy(settings, jitter=iter(chances).__next__)
    pauses = [decide(policy, now=float(now)).after_s for now in range(8)]
    growing = [pause for pause in pauses if pause < settings.max_backoff_s]
    assert all(before < after for before, after in pairwise(growing))
    assert len(growing) == 5
    assert max(pauses) == settings.max_backoff_s


def test_what_was_long_ago_is_forgiven() -> None:
    policy = RestartPolicy(SupervisorConfig(max_restarts=1, restart_window_s=10.0, backoff_s=1.0), jitter=lambda: 0.0)
    assert decide(policy, now=0.0).after_s == 1.0
    assert decide(policy, now=9.0).action is Action.FAIL
    assert decide(policy, now=10.0) == Decision(
        action=Action.RESTART, after_s=1.0, reason="env-0 has used 0 of 1 restarts within 10 s: it restarts in 1.00 s"
    )


def test_budgets_are_each_process_s_own() -> None:
    policy = RestartPolicy(SupervisorConfig(max_restarts=1))
    loss = Exit(time=0.0, returncode=0, kind=ExitKind.OK, reason="exit code 0")
    for name in ("env-0", "env-1"):
        assert policy.decide(name, loss, was_ready=True, completed=False, now=0.0).action is Action.RESTART
    assert policy.decide("env-0", loss, was_ready=True, completed=False, now=0.0).action is Action.FAIL


@given(st.sampled_from(list(ExitKind)))
def test_what_was_never_ready_is_restarted_only_if_its_machine_is_gone(kind: ExitKind) -> None:
    decision = decide(RestartPolicy(SupervisorConfig()), kind=kind, was_ready=False)
    assert (decision.action is Action.RESTART) == (kind is ExitKind.LOST), decision


@pytest.mark.parametrize("kind", [ExitKind.CONFIG_ERROR, ExitKind.GAVE_UP])
def test_what_no_restart_mends_is_never_retried(kind: ExitKind) -> None:
    assert decide(RestartPolicy(SupervisorConfig()), kind=kind).action is Action.FAIL


def test_whoever_goes_back_and_saves_nothing_new_is_given_up_however_slowly_it_fails() -> None:
    policy = RestartPolicy(SupervisorConfig(max_restarts=2, restart_window_s=10.0))
    assert decide(policy, now=0.0, num_saved=1).action is Action.RESTART
    assert decide(policy, now=100.0, num_saved=1).action is Action.RESTART
    last = decide(policy, now=200.0, num_saved=1)
    assert last.action is Action.FAIL
    assert last.reason == "env-0 has used 2 of 2 restarts within 10 s or since it last saved"
    assert decide(policy, now=300.0, num_saved=2).action is Action.RESTART, "it got on"


@given(st.sampled_from(list(ExitKind)), st.booleans())
def test_nobody_is_needed_once_the_work_is_done(kind: ExitKind, was_ready: bool) -> None:
    policy = RestartPolicy(SupervisorConfig(max_restarts=0))
    assert decide(policy, kind=kind, was_ready=was_ready, completed=True).action is Action.IGNORE


class Together:
    """Two processes of one set; times are seconds of a clock that begins at 0."""

    def __init__(self, max_restarts: int = 2) -> None:
        settings = SupervisorConfig(max_restarts=max_restarts, backoff_s=1.0)
        self._policy = RestartPolicy(settings, jitter=lambda: 0.0)

    def ends(
        self, name: str, now: float, *, started: float, kind: ExitKind = ExitKind.CRASHED, was_ready: bool = True
    ) -> Decision:
        loss = Exit(time=0.0, returncode=1, kind=kind, reason="exit code 1")
        return self._policy.decide(
            name, loss, was_ready=was_ready, completed=False, now=now, restart_set="learner", started=started
        )


def test_a_restart_set_goes_down_with_its_first_and_comes_back_as_one() -> None:
    both = Together()
    first, second = both.ends("rank-1", 10.0, started=0.0), both.ends("trainer-0", 10.25, started=0.0)
    assert (first.action, first.after_s, first.ends_set) == (Action.RESTART, 1.0, True)
    assert (second.action, second.after_s, second.ends_set) == (Action.RESTART, 0.75, False)
    assert second.reason == "trainer-0 is restarted together with rank-1"
    assert both.ends("trainer-0", 20.0, started=0.0).after_s == 0.0, "it was hard to end: the others wait for it"
    again = both.ends("trainer-0", 30.0, started=11.0)
    assert again.ends_set and again.after_s == 2.0


def test_a_restart_set_that_loses_a_machine_while_it_starts_comes_back_as_one() -> None:
    both = Together()
    first = both.ends("rank-1", 10.0, started=0.0, kind=ExitKind.LOST, was_ready=False)
    second = both.ends("trainer-0", 10.25, started=0.0, kind=ExitKind.KILLED_BY_SUPERVISOR, was_ready=False)
    assert (first.action, first.ends_set) == (Action.RESTART, True)
    assert second.reason == "trainer-0 is restarted together with rank-1"


def test_a_restart_set_has_one_budget() -> None:
    both = Together(max_restarts=1)
    assert both.ends("rank-1", 10.0, started=0.0).action is Action.RESTART
    last = both.ends("trainer-0", 20.0, started=12.0)
    assert last.action is Action.FAIL and last.reason.startswith("learner has used 1 of 1 restarts")


def test_what_cannot_be_started_again_is_no_part_of_an_earlier_fall() -> None:
    both = Together(max_restarts=2)
    assert both.ends("rank-1", 10.0, started=0.0).action is Action.RESTART
    assert both.ends("rank-1", 12.0, started=11.0).action is Action.RESTART
    assert both.ends("rank-1", 15.0, started=14.0).action is Action.FAIL
