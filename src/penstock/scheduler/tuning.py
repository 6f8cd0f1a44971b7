"""Self-tuning: when a search for better settings is due, and whether the change that it proposes keeps its promise.

Pure: `now` is passed in. The search itself runs elsewhere (`ports/settings_search.py`), on a model of the run.

    measuring ──► search ──► trial ──► kept
        ▲           │          │
        └── nothing ┴─ undone ─┘

A change is a promise of so much more speed. After the change, the work that began under the old settings drains; then
as many steps are measured as before the change. If the measured speed falls short of half the promised gain, by more
than the noise of the steps explains, the old settings return. The change is then not proposed again, and later promises
about its settings count less. If episodes have become much longer or shorter meanwhile, the speeds cannot be compared:
the change stays without a verdict. A workload that drifts makes rejected changes possible again.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any, NamedTuple

import msgspec

from penstock.config import Config
from penstock.config.tunable import movable, settings_of
from penstock.ports.settings_search import Answer, PlayedGroup, Question
from penstock.scheduler.learner_pace import Call
from penstock.scheduler.running_mean import RunningMean
from penstock.types import LearnerState, Summaries

WINDOW, FEWEST_GROUPS = 512, 16
"""Number of latest groups that a search sees, and the fewest that it needs."""
DRAIN_STEPS = 2
"""Steps beyond the staleness bound after which work of the old settings has drained."""
DISTRUST, TRUST_AGAIN, LEAST_TRUST = 0.5, 1.5, 0.1
"""Factors on the trust in a setting's predicted gains after a broken and after a kept promise; and its lower bound."""
FORGOTTEN_AFTER = 16
"""Number of latest rejected changes that are remembered."""
SMOOTHING = 10
"""Steps over which the effective sample size is averaged."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Settings to put in force now, by short name."""

    settings: dict[str, Any]
    reason: str
    inputs: dict[str, Any]


class Trial(msgspec.Struct, kw_only=True):
    """A change that is not judged yet."""

    before: dict[str, Any]
    """Earlier values of the changed settings."""
    promised: float
    """Predicted speed after the change, divided by the speed before."""
    speed_before: float
    noise_before: float
    """Standard error of the speed before, as a share of it."""
    length_before: float
    """Mean tokens of a trained episode before the change."""
    drains: int
    """Steps until the measurement begins."""


class InForce(msgspec.Struct, frozen=True, kw_only=True):
    """Since when a setting has its value, and why."""

    value: Any
    policy_version: int
    """Version that the learner trained when the value came into force."""
    reason: str


class State(msgspec.Struct, kw_only=True):
    """What a resumed run needs."""

    changed: dict[str, InForce] = {}
    """Settings that differ from the configuration, by short name."""
    trust: dict[str, float] = {}
    rejected: list[dict[str, Any]] = []
    trial: Trial | None = None
    policy_version: int = 0
    searches_cpu_s: float = 0.0
    """Processor time of all searches."""


class Profile(msgspec.Struct, frozen=True, kw_only=True):
    """The workload at a search, to notice that it drifts."""

    tokens: float
    env_s: float
    seconds: float
    """Mean time of an episode."""
    speed: float

    def differs(self, other: Profile, share: float) -> str:
        """Return what differs from `other` by more than `share`; empty if nothing does."""
        for name, mine, theirs in (
            ("tokens", self.tokens, other.tokens),
            ("tokens per second", self.speed, other.speed),
        ):
            if min(mine, theirs) > 0 and abs(math.log(theirs) - math.log(mine)) > math.log1p(share):
                return f"from {mine:.4g} to {theirs:.4g} {name}"
        if abs(other.env_s - self.env_s) > share * max(self.seconds, other.seconds):
            return f"from {self.env_s:.4g} to {other.env_s:.4g} s in the environment"
        return ""


class Step(NamedTuple):
    """What an optimizer step took, and what it trained."""

    seconds: float
    tokens: int
    episodes: int


class Tuning:
    """The decider. It hears of every completed group and of every optimizer step."""

    def __init__(self, config: Config) -> None:
        self._settings = config.scheduler.tuning
        self.is_on = self._settings.mode == "auto" and config.has_trainer
        self._configured = settings_of(config)
        self._movable = movable(config)
        self._groups: deque[PlayedGroup] = deque(maxlen=WINDOW)
        self._steps: deque[Step] = deque(maxlen=4 * self._settings.first_steps)
        """The latest steps since the settings changed."""
        self._last_step_at: float | None = None
        self._sample_efficiency = RunningMean()
        self._steps_since_search = 0
        self._searched: Profile | None = None
        self._is_searching = self._said_nothing = False
        self._untried: Sequence[str] = ()
        """Settings that the latest searches did not reach. The next search begins with them."""
        self._again = self._why = ""
        """Why to search again soon, empty if there is no reason; and why the latest search began."""
        self.state = State()

    @property
    def in_force(self) -> dict[str, Any]:
        """Return the values of all settings that may change."""
        return {**self._configured, **{name: each.value for name, each in self.state.changed.items()}}

    def observe_group(self, task_id: str, episodes: Summaries) -> None:
        """Take in a completed group."""
        if self.is_on:
            numbers = [episode.without_texts() for episode in episodes]
            self._groups.append(PlayedGroup(task_id=task_id, episodes=numbers))

    def complete_step(self, learner: LearnerState, trained: Summaries, *, now: float) -> Change | None:
        """Take in an optimizer step over the episodes `trained`. Return the verdict of a trial that ends with this
        step: the change is kept, or its earlier settings return."""
        if not self.is_on:
            return None
        self.state.policy_version = learner.policy_version
        self._steps_since_search += 1
        if "ess" in learner.metrics:
            self._sample_efficiency.add(learner.metrics["ess"], steps=SMOOTHING)
        before, self._last_step_at = self._last_step_at, now
        trial = self.state.trial
        if trial is not None and trial.drains:
            trial.drains -= 1
        elif before is not None:
            tokens = sum(each.prompt_tokens + each.response_tokens for each in trained)
            self._steps.append(Step(now - before, tokens, len(trained)))
        if trial is None or len(self._steps) < self._settings.first_steps:
            return None
        return self._judge(trial)

    def disturb(self, reason: str) -> Change | None:
        """Forget the steps measured so far, because something else has changed the speed. A change on trial stays: its
        effect cannot be told from that of the other one."""
        self._steps.clear()
        if self.state.trial is None:
            return None
        return self._keep_unjudged(reason)

    def _keep_unjudged(self, reason: str) -> Change:
        self.state.trial = None
        self._again = "the last change was not judged"
        return Change(settings={}, reason=f"kept without a verdict: {reason}", inputs={})

    def _judge(self, trial: Trial) -> Change | None:
        before, after = trial.length_before, _length(self._steps)
        if min(before, after) > 0 and abs(math.log(after / before)) > math.log1p(self._settings.drift):
            return self._keep_unjudged(f"episodes went from {before:.4g} to {after:.4g} tokens meanwhile")
        self.state.trial = None
        speed, noise = _speed(self._steps)
        gain, noise = speed / trial.speed_before, math.hypot(noise, trial.noise_before)
        names = list(trial.before)
        wanted = 1 + (trial.promised - 1) / 2 if trial.promised > 1 else 1 - self._settings.min_gain
        inputs = {"promised": trial.promised, "measured": gain, "noise": noise}
        if gain * (1 + noise) >= wanted:
            for name in names:
                self.state.trust[name] = min(self.state.trust.get(name, 1.0) * TRUST_AGAIN, 1.0)
            self._again = "settings have changed"
            kept = f"kept: {gain:.3g} times the speed before, {trial.promised:.3g} predicted"
            return Change(settings={}, reason=kept, inputs=inputs)
        tried = {name: self.in_force[name] for name in names}
        self.state.rejected = [*self.state.rejected, tried][-FORGOTTEN_AFTER:]
        for name in names:
            self.state.trust[name] = max(self.state.trust.get(name, 1.0) * DISTRUST, LEAST_TRUST)
        reason = f"undone: {gain:.3g} times the speed before, {trial.promised:.3g} predicted"
        return self._change(trial.before, reason, inputs)

    @property
    def why_due(self) -> str:
        """Return why a search is due; empty if none is."""
        first = self._settings.first_steps
        if not self.is_on or self._is_searching or self.state.trial is not None or not self._movable:
            return ""
        if len(self._steps) < first or len(self._groups) < FEWEST_GROUPS:
            return ""
        if self._searched is None:
            return f"{len(self._steps)} steps are measured"
        if self._steps_since_search < first:
            return ""
        if self._again:
            return self._again
        if changed := self._searched.differs(self._profile(), self._settings.drift):
            return f"the workload drifts: {changed}"
        if self._steps_since_search >= self._settings.every_steps:
            return f"{self._steps_since_search} steps since the last search"
        return ""

    def question(self, calls: Sequence[Call], *, update_s: float, knows_lengths: bool) -> Question:
        """Begin a search."""
        self._why = self.why_due
        profile = self._profile()
        if self._searched is not None and self._searched.differs(profile, self._settings.drift):
            self.state.rejected = []
        self._is_searching, self._searched, self._steps_since_search, self._again = True, profile, 0, ""
        efficiency, least = self._sample_efficiency, self._settings.min_sample_efficiency
        return Question(
            settings=self.in_force,
            movable=sorted(self._movable, key=lambda name: name not in self._untried),
            groups=list(self._groups),
            calls=list(calls),
            update_s=update_s,
            trust=self.state.trust,
            rejected=self.state.rejected,
            knows_lengths=knows_lengths,
            may_be_staler=not efficiency.count or efficiency.value >= least,
            min_gain=self._settings.min_gain,
        )

    def take(self, answer: Answer) -> Change | None:
        """End a search. Return the change to make now; None if there is none and it was said before."""
        self._is_searching = False
        self.state.searches_cpu_s += answer.cpu_s
        inputs: dict[str, Any] = {"searched": self._why, **answer.predicted}
        inputs |= {"simulated": answer.num_simulated, "cpu_s": answer.cpu_s}
        if answer.was_postponed:
            self._again = "the last search was postponed"
            return None
        self._untried = [name for name in self._untried or self._movable if name in answer.left_out]
        if self._untried:
            self._again = f"the last search did not reach {', '.join(self._untried)}"
        if not answer.changes:
            if self._said_nothing:
                return None
            self._said_nothing = True
            return Change(settings={}, reason=answer.reason, inputs=inputs)
        self._said_nothing = False
        speed, noise = _speed(self._steps)
        if len(self._steps) < self._settings.first_steps or not speed:
            self._again = "the last answer came without steps to compare with"
            reason = f"not changed: too few steps were measured under the same conditions ({answer.reason})"
            return Change(settings={}, reason=reason, inputs=inputs)
        self.state.trial = Trial(
            before={name: self.in_force[name] for name in answer.changes},
            promised=answer.gain,
            speed_before=speed,
            noise_before=noise,
            length_before=_length(self._steps),
            drains=self._configured["max_staleness"] + DRAIN_STEPS,
        )
        return self._change(answer.changes, answer.reason, inputs)

    def _change(self, settings: dict[str, Any], reason: str, inputs: dict[str, Any]) -> Change:
        before = self.in_force
        now = {
            name: InForce(value=value, policy_version=self.state.policy_version, reason=reason)
            for name, value in settings.items()
        }
        self.state.changed = self.state.changed | now
        self._steps.clear()
        changes = {name: [before[name], value] for name, value in settings.items()}
        return Change(settings=settings, reason=reason, inputs=inputs | {"changes": changes})

    def _profile(self) -> Profile:
        episodes = [episode for group in self._groups for episode in group.episodes]
        speed, _ = _speed(self._steps)
        return Profile(
            tokens=fmean(episode.response_tokens for episode in episodes),
            env_s=fmean(episode.env_s for episode in episodes),
            seconds=fmean(episode.seconds for episode in episodes),
            speed=speed,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state as plain JSON values."""
        found: dict[str, Any] = msgspec.to_builtins(self.state)
        return found

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a saved state. A trial that was going on counts as kept: its measurements are gone."""
        self.state = msgspec.convert(state, State)
        self.state.trial = None
        may = set(self._movable) if self.is_on else set()
        self.state.changed = {name: each for name, each in self.state.changed.items() if name in may}


def _speed(steps: Collection[Step]) -> tuple[float, float]:
    """Return trained tokens per second over these steps, and its standard error as a share."""
    seconds, tokens = sum(each.seconds for each in steps), sum(each.tokens for each in steps)
    if len(steps) < 2 or seconds <= 0 or tokens <= 0:
        return 0.0, math.inf
    speed = tokens / seconds
    # of a ratio of sums: the spread of what each step has beyond its share
    residuals = [each.tokens - speed * each.seconds for each in steps]
    return speed, stdev(residuals) * math.sqrt(len(steps)) / tokens


def _length(steps: Collection[Step]) -> float:
    """Return the mean tokens of a trained episode over these steps."""
    return sum(each.tokens for each in steps) / max(sum(each.episodes for each in steps), 1)
