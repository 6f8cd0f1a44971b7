"""When a search is due, and whether a change keeps its promise."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.config import Config
from penstock.config.tunable import NAMES, PATHS, movable, settings_of, with_settings
from penstock.ports.settings_search import Answer
from penstock.scheduler.learner_pace import Call
from penstock.scheduler.tuning import FEWEST_GROUPS, LEAST_TRUST, Change, Tuning
from penstock.types import EpisodeId, EpisodeSummary, LearnerState

FIRST, EVERY = 6, 40
TRIED = {"max_running": 32}


def config(**tuning: Any) -> Config:
    settings = {"mode": "auto", "first_steps": FIRST, "every_steps": EVERY, **tuning}
    return Config.model_validate({"scheduler": {"tuning": settings}})


def episode(number: int, *, tokens: int, seconds: float = 1.0, env_s: float = 0.0) -> EpisodeSummary:
    return EpisodeSummary(
        episode=EpisodeId("main", number, 0, 0),
        status="completed",
        response_tokens=tokens,
        prompt_tokens=10,
        seconds=seconds,
        env_s=env_s,
    )


class Run:
    """A run with step times that the test chooses."""

    def __init__(self, **tuning: Any) -> None:
        self.config = config(**tuning)
        self.tuning = Tuning(self.config)
        self.now, self.version = 0.0, 0
        self.changes: list[Change] = []
        for number in range(FEWEST_GROUPS):
            self.group(number)

    def group(self, number: int, *, tokens: int = 100, seconds: float = 1.0, env_s: float = 0.0) -> None:
        self.tuning.observe_group(str(number), [episode(number, tokens=tokens, seconds=seconds, env_s=env_s)])

    def steps(self, count: int, *, seconds: float = 1.0, ess: float = 1.0, tokens: int = 90) -> None:
        for _ in range(count):
            self.now += seconds
            self.version += 1
            learner = LearnerState(policy_version=self.version, entropy=1.0, metrics={"ess": ess})
            trained = [episode(number, tokens=tokens) for number in range(10)]
            if change := self.tuning.complete_step(learner, trained, now=self.now):
                self.changes.append(change)

    def answer(self, answer: Answer) -> Change | None:
        assert self.tuning.why_due
        self.tuning.question([Call(1, 100, True, 1.0)], update_s=0.1, knows_lengths=True)
        assert not self.tuning.why_due, "one search at a time"
        return self.tuning.take(answer)

    def try_out(self, *, promised: float, gain: float) -> Change:
        """Change a setting with this promise, and run until the trial has ended."""
        assert self.answer(Answer(changes=TRIED, gain=promised, reason="predicted"))
        while self.tuning.state.trial is not None:
            self.steps(1, seconds=1.0 / gain)
        return self.changes[-1]


def test_the_first_search_waits_for_measurements() -> None:
    run = Run()
    run.steps(FIRST)
    assert not run.tuning.why_due, "the first step has no beginning"
    run.steps(1)
    assert run.tuning.why_due == f"{FIRST} steps are measured"


def test_a_run_without_tuning_asks_nothing() -> None:
    run = Run(mode="off")
    run.steps(10 * EVERY)
    assert not run.tuning.why_due and not run.changes


def test_a_promise_that_comes_is_kept() -> None:
    run = Run()
    run.steps(FIRST + 1)
    verdict = run.try_out(promised=1.5, gain=1.5)
    assert not verdict.settings and verdict.reason.startswith("kept: 1.5 times the speed before")
    assert run.tuning.in_force["max_running"] == 32
    assert not run.tuning.state.rejected


@given(st.floats(1.06, 4.0), st.floats(0.2, 4.0))
def test_a_change_that_brings_less_than_half_its_promise_is_undone(promised: float, gain: float) -> None:
    run = Run()
    run.steps(FIRST + 1)
    before = run.tuning.in_force
    verdict = run.try_out(promised=promised, gain=gain)
    bar = 1 + (promised - 1) / 2
    if gain < bar * (1 - 1e-9):
        assert verdict.settings == {"max_running": before["max_running"]}
        assert run.tuning.in_force == before
        assert run.tuning.state.rejected == [TRIED] and run.tuning.state.trust["max_running"] < 1
    elif gain > bar * (1 + 1e-9):
        assert run.tuning.in_force == {**before, **TRIED}


def test_broken_promises_count_less_and_less_and_kept_ones_more() -> None:
    run = Run(every_steps=1)
    run.steps(FIRST + 1)
    seen = []
    for gain in (0.5, 0.5, 0.5, 0.5, 0.5, 3.0, 3.0):
        run.try_out(promised=2.0, gain=gain)
        seen.append(run.tuning.state.trust["max_running"])
        run.steps(FIRST + 1)
    assert seen[:4] == [0.5, 0.25, 0.125, LEAST_TRUST] and seen[4] < seen[5] < seen[6] <= 1


def test_noise_is_no_broken_promise() -> None:
    """The steps vary by a factor of 3: a tenth less than promised shows nothing."""
    run = Run()
    for number in range(FIRST + 1):
        run.steps(1, seconds=0.5 if number % 2 else 1.5)
    assert run.answer(Answer(changes=TRIED, gain=1.2, reason="predicted"))
    while run.tuning.state.trial is not None:
        run.steps(1, seconds=0.46 if run.version % 2 else 1.38)
    assert run.changes[-1].reason.startswith("kept")


def test_a_trial_ends_without_a_verdict_when_something_else_changes_the_speed() -> None:
    run = Run()
    run.steps(FIRST + 1)
    assert run.answer(Answer(changes=TRIED, gain=1.5, reason="predicted"))
    verdict = run.tuning.disturb("feedback has changed the thresholds")
    assert (
        verdict is not None and not verdict.settings and verdict.reason.startswith("kept without a verdict: feedback")
    )
    assert run.tuning.in_force["max_running"] == 32 and not run.tuning.state.trust
    run.steps(FIRST, seconds=9.0)
    assert not run.changes, "it is not judged later"
    assert run.tuning.why_due == "the last change was not judged"
    assert run.tuning.disturb("again") is None and not run.tuning.why_due, "the steps before do not count"


@pytest.mark.parametrize(("tokens", "is_judged"), [(60, False), (85, True), (95, True), (200, False)])
def test_a_trial_ends_without_a_verdict_when_episodes_become_longer_or_shorter(tokens: int, is_judged: bool) -> None:
    run = Run()
    run.steps(FIRST + 1)
    assert run.answer(Answer(changes=TRIED, gain=1.5, reason="predicted"))
    while run.tuning.state.trial is not None:
        run.steps(1, tokens=tokens)
    reason = run.changes[-1].reason
    assert run.tuning.in_force.items() >= TRIED.items() or is_judged
    if is_judged:
        assert reason.startswith("undone")
    else:
        assert reason == f"kept without a verdict: episodes went from 100 to {tokens + 10} tokens meanwhile"
        run.steps(FIRST + 1)
        assert run.tuning.why_due == "the last change was not judged"


def test_a_change_waits_for_steps_that_it_can_be_compared_with() -> None:
    """Feedback changes the thresholds while the search runs."""
    run = Run()
    run.steps(FIRST + 1)
    run.tuning.question([], update_s=0.0, knows_lengths=False)
    run.tuning.disturb("feedback has changed the thresholds")
    said = run.tuning.take(Answer(changes=TRIED, gain=1.5, reason="predicted"))
    assert said is not None and not said.settings and said.reason.startswith("not changed: too few steps")
    assert run.tuning.in_force == settings_of(run.config)
    run.steps(FIRST)
    assert run.tuning.why_due == "the last answer came without steps to compare with"


ACTIONS = st.sampled_from(["step", "empty step", "disturb", "search", "answer", "nothing", "postponed", "resume"])


@given(st.lists(ACTIONS, max_size=120))
def test_no_order_of_events_breaks_it(actions: list[str]) -> None:
    run = Run(every_steps=1)
    searching = False
    for action in actions:
        tuning = run.tuning
        if action == "step":
            run.steps(3)
        elif action == "empty step":
            run.now, run.version = run.now + 1.0, run.version + 1
            tuning.complete_step(LearnerState(policy_version=run.version, entropy=1.0), [], now=run.now)
        elif action == "disturb":
            tuning.disturb("feedback")
        elif action == "search" and not searching and tuning.why_due:
            tuning.question([], update_s=0.0, knows_lengths=False)
            searching = True
        elif action in ("answer", "nothing", "postponed") and searching:
            changes = TRIED if action == "answer" else {}
            tuning.take(Answer(changes=changes, gain=1.2, reason=action, was_postponed=action == "postponed"))
            searching = False
        elif action == "resume":
            run.tuning = Tuning(run.config)
            run.tuning.load_state_dict(tuning.state_dict())
            searching = False
            for number in range(FEWEST_GROUPS):
                run.group(number)
        assert set(run.tuning.in_force) == set(NAMES)


def test_nothing_is_said_once() -> None:
    run = Run(every_steps=1)
    run.steps(FIRST + 1)
    said = run.answer(Answer(reason="no setting is faster"))
    assert said is not None and not said.settings
    run.steps(FIRST)
    assert run.answer(Answer(reason="no setting is faster")) is None


def test_the_next_search_comes_after_every_steps_or_with_a_drift() -> None:
    run = Run()
    run.steps(FIRST + 1)
    run.answer(Answer(reason="nothing"))
    run.steps(EVERY - 1)
    assert not run.tuning.why_due
    for number in range(1000, 2000):
        run.group(number, tokens=200)
    assert run.tuning.why_due == "the workload drifts: from 100 to 200 tokens"
    run.answer(Answer(reason="nothing"))
    run.steps(EVERY)
    assert run.tuning.why_due == f"{EVERY} steps since the last search"


def test_an_environment_that_takes_a_hundredth_of_an_episode_is_no_drift() -> None:
    run = Run()

    def groups(env_s: float) -> None:
        for number in range(1000):
            run.group(number, seconds=10.0, env_s=env_s)

    groups(0.1)
    run.steps(FIRST + 1)
    run.answer(Answer(reason="nothing"))
    run.steps(FIRST)
    groups(0.3)
    assert not run.tuning.why_due
    groups(4.0)
    assert run.tuning.why_due == "the workload drifts: from 0.1 to 4 s in the environment"


def test_a_postponed_search_is_asked_again() -> None:
    run = Run()
    run.steps(FIRST + 1)
    assert run.answer(Answer(reason="", was_postponed=True)) is None
    assert not run.tuning.why_due
    run.steps(FIRST)
    assert run.tuning.why_due == "the last search was postponed"


def test_searches_that_are_cut_short_go_on_until_every_setting_was_tried() -> None:
    run = Run()
    names = list(run.tuning._movable)
    assert len(names) > 4

    def ask(left_out: list[str]) -> list[str]:
        run.steps(FIRST + 1)
        asked = run.tuning.question([], update_s=0.0, knows_lengths=False).movable
        run.tuning.take(Answer(reason="cut", left_out=left_out, was_cut=True))
        run.steps(FIRST)
        return list(asked)

    assert ask(names[2:]) == names
    assert run.tuning.why_due == f"the last search did not reach {', '.join(names[2:])}"
    assert ask([*names[:2], *names[4:]]) == [*names[2:], *names[:2]]
    assert ask(names[:4]) == [*names[4:], *names[:4]]
    assert not run.tuning.why_due


def test_samples_do_not_become_older_while_the_effective_sample_size_is_low() -> None:
    run = Run()
    run.steps(FIRST + 1, ess=0.3)
    assert not run.tuning.question([], update_s=0.0, knows_lengths=False).may_be_staler
    other = Run()
    other.steps(FIRST + 1, ess=0.9)
    assert other.tuning.question([], update_s=0.0, knows_lengths=False).may_be_staler


def test_a_resumed_run_has_the_settings_that_were_in_force() -> None:
    run = Run()
    run.steps(FIRST + 1)
    run.try_out(promised=1.5, gain=1.5)
    resumed = Tuning(run.config)
    resumed.load_state_dict(json.loads(json.dumps(run.tuning.state_dict())))
    assert resumed.in_force == run.tuning.in_force
    assert resumed.state.changed["max_running"].reason == "predicted"
    restricted = Tuning(config(may=["look_ahead"]))
    restricted.load_state_dict(run.tuning.state_dict())
    assert restricted.in_force == settings_of(config(may=["look_ahead"]))


def test_settings_are_read_and_replaced_by_short_names() -> None:
    plain = Config()
    assert set(settings_of(plain)) == set(PATHS) == set(NAMES)
    changed = with_settings(plain, {"dispatch": "sjf", "max_running": 24, "redundancy": 1, "max_wait": "1x"})
    assert (changed.scheduler.dispatch.policy, changed.max_running, changed.env.num_members) == ("sjf", 24, 9)
    assert settings_of(changed)["max_wait"] == "1x" and plain.scheduler.dispatch.policy == "fifo"


@pytest.mark.parametrize(
    ("scheduler", "fixed"),
    [
        ({"mode": "synchronous", "max_staleness": 0}, {"min_samples", "max_wait", "max_staleness"}),
        ({"trigger": {"use": "step"}}, {"min_samples", "max_wait"}),
        ({"segment_length": 64, "max_segment_count": 4}, {"segment_length"}),
        ({"trigger": {"feedback": {"signal": "noise_scale"}}}, {"min_samples"}),
        ({"max_staleness": 1}, {"max_staleness"}),
    ],
)
def test_what_cannot_move_is_refused_by_name(scheduler: dict[str, Any], fixed: set[str]) -> None:
    plain = Config.model_validate({"scheduler": scheduler})
    assert set(NAMES) - set(movable(plain)) == fixed
    for name in fixed:
        with pytest.raises(ValueError, match=rf"tuning\.may names {name}, which cannot change by itself: "):
            Config.model_validate({"scheduler": {**scheduler, "tuning": {"mode": "auto", "may": [name]}}})


def test_a_setting_that_nobody_can_move_is_refused() -> None:
    with pytest.raises(ValueError, match=r"tuning\.may"):
        Config.model_validate({"scheduler": {"tuning": {"may": ["groups_per_step"]}}})
    assert Config.model_validate({"scheduler": {"tuning": "auto"}}).scheduler.tuning.mode == "auto"
