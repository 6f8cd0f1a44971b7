"""The trainer's supply: groups that are READY, TRAINING, or trained into weights that no server serves yet."""

from __future__ import annotations

import math
from collections.abc import Collection

from penstock.config import Config
from penstock.scheduler.active_group import ActiveGroup, Stage
from penstock.scheduler.active_groups import ActiveGroups
from penstock.scheduler.bias import LengthBias
from penstock.scheduler.feedback import Feedback
from penstock.scheduler.learner_pace import LearnerPace
from penstock.scheduler.running_mean import RunningMean
from penstock.scheduler.trigger import Thresholds, Trigger, TriggerDecision, TriggerState
from penstock.types import NO_VERSION, EpisodeState, EpisodeSummary, GroupRef, LearnerState
from penstock.version_history import VersionHistory

UPDATES = 20
"""Number of latest weight updates in the mean of their time."""


class Supply:
    """The groups for the trainer, the trigger that decides when to train, and its feedback from the learner."""

    def __init__(self, config: Config, groups: ActiveGroups) -> None:
        settings = config.scheduler
        self._groups = groups
        self.trained_version = 0
        """Version that the learner is training."""
        self._first_version = 0
        """First version that this learner trained under this controller. Older tokens aged at once, in a restart."""
        self.history = VersionHistory()
        """The versions that recoveries have restored."""
        self.bias = LengthBias(group_size=config.env.group_size, look_ahead=config.look_ahead)
        self._trigger = _trigger(config)
        counts_steps, groups_per_step = self._trigger.use == "step", config.trainer.groups_per_step
        self.learner = LearnerPace(groups_per_step=groups_per_step, counts_steps=counts_steps)
        self.feedback = Feedback(
            settings.trigger.feedback,
            entropy_gain=settings.dispatch.entropy_gain,
            total_steps=config.trainer.steps,
            min_samples=self._trigger.min_samples,
        )
        self.adjustment = self.feedback.adjustment
        """The settings that follow from the learner's report, until the next optimizer step."""
        self._max_staleness, self._group_size = settings.max_staleness, config.env.group_size
        self._unserved: dict[int, int] = {}
        """Number of groups trained into each version that no server serves yet."""
        self._update_s = RunningMean()

    def use(self, config: Config) -> None:
        """Trigger by the settings of `config` from now on. The bound on the staleness of trained samples stays."""
        self._trigger = _trigger(config)

    @property
    def num_ready(self) -> int:
        return self._groups.count(Stage.READY)

    @property
    def num_unserved(self) -> int:
        """Return the number of groups in training, or trained into weights that no server serves yet."""
        return self._groups.count(Stage.TRAINING) + sum(self._unserved.values())

    @property
    def groups_per_step(self) -> int:
        """Return the least number of groups in the next optimizer step."""
        return self.thresholds.min_groups if self._trigger.use == "step" else self._trigger.groups_per_step

    @property
    def thresholds(self) -> Thresholds:
        """Return the current N_min and T_max."""
        return self._trigger.thresholds(self._state)

    @property
    def _state(self) -> TriggerState:
        oldest, idle_since = self._groups.first(Stage.READY), self.learner.idle_since
        return TriggerState(
            num_ready=self.num_ready,
            num_accumulated=self._groups.count(Stage.TRAINING),
            waiting_since=None if oldest is None or idle_since is None else max(oldest.ready_at, idle_since),
            best_groups=self.learner.best_groups,
            whole_step_s=self.learner.whole_step_s,
            factor=self.adjustment.factor,
        )

    @property
    def remedy_for_stale_work(self) -> str:
        """Return the settings under which versions do not outrun the groups in flight."""
        if self._trigger.use != "step" or self._trigger.fewest_groups <= self.thresholds.min_groups:
            return "raise scheduler.max_staleness or trainer.groups_per_step, or lower scheduler.max_running"
        fewest = f"scheduler.trigger.min_samples to {self._trigger.fewest_groups * self._group_size} or more"
        return f"set {fewest} and scheduler.trigger.max_wait to 1x, or raise scheduler.max_staleness"

    def decide(self, *, now: float) -> TriggerDecision:
        """Return the decision of the trigger."""
        return self._trigger.decide(self._state, now=now)

    def add_ready(self, group: ActiveGroup, *, now: float) -> None:
        """Add a complete group."""
        group.ready_at = now
        self._groups.move(group, Stage.READY)

    def take_ready(self, num_groups: int, *, step: bool, now: float) -> tuple[GroupRef, ...]:
        """Move the `num_groups` oldest ready groups to TRAINING, and return them. `step`: an optimizer step follows."""
        chosen = self._groups.at(Stage.READY)[:num_groups]
        num_tokens = sum(each.prompt_tokens + each.response_tokens for group in chosen for each in group.summaries)
        self.learner.end_wait(now, num_groups=len(chosen), num_tokens=num_tokens, step=step)
        return tuple(self._start_training(group) for group in chosen)

    def _start_training(self, group: ActiveGroup) -> GroupRef:
        members = group.members(EpisodeState.READY)
        group.move_members(members, EpisodeState.TRAINING)
        self._groups.move(group, Stage.TRAINING)
        if group.ref is None:
            raise RuntimeError(f"group {group.number} is ready without a payload")
        return GroupRef(group=group.number, task_id=group.task.task_id, ref=group.ref, episodes=members)

    def complete_step(self, learner: LearnerState, *, now: float) -> list[ActiveGroup]:
        """Move all groups in training to TRAINED, and return them. Adapts the settings to the learner's report."""
        trained = self._groups.at(Stage.TRAINING)
        self.learner.complete_step(now, num_groups=len(trained))
        for group in trained:
            members = group.members(EpisodeState.TRAINING)
            self.bias.trained([group.summaries[member].response_tokens for member in members])
            group.move_members(members, EpisodeState.TRAINED)
        self.trained_version = learner.policy_version
        self._unserved[learner.policy_version] = len(trained)
        self.adjustment = self.feedback.observe(learner)
        return trained

    def discard_aged(self) -> list[tuple[ActiveGroup, int]]:
        """Discard ready members that became too old. Returns pairs (group, number of discarded members).

        It leaves out groups that will be replayed.
        """
        fresh = [group for group in self._groups.at(Stage.READY) if not self.is_stale_after_rewind(group)]
        return [(group, count) for group in fresh if (count := self.discard_stale(group))]

    def attach_learner(self, version: int, accumulated: Collection[int]) -> None:
        """Adapt to a learner that trains `version` and has accumulated the groups `accumulated`."""
        self.trained_version = self._first_version = version
        for group in [group for group in self._groups.at(Stage.READY) if group.number in accumulated]:
            self.discard_stale(group)
            if not group.has_ended:
                self._start_training(group)

    def rewind(self, trained_version: int, *, now: float) -> None:
        """Make all groups in training ready again, ahead of the ready groups, after the loss of the learner."""
        training, ready = self._groups.at(Stage.TRAINING), self._groups.at(Stage.READY)
        for group in training:
            group.move_members(group.members(EpisodeState.TRAINING), EpisodeState.READY)
            group.ready_at = now
        for group in (*training, *ready):
            self._groups.move(group, Stage.READY)
        self._unserved = {}
        self.trained_version = self._first_version = trained_version

    @property
    def update_s(self) -> float:
        """Return the mean time in which the servers took new weights, in seconds."""
        return self._update_s.value

    def mark_served(self, version: int, *, update_s: float | None = None) -> None:
        """Count all groups trained into `version`, or an earlier version, as served. The update took `update_s`."""
        if update_s is not None:
            self._update_s.add(update_s, steps=UPDATES)
        self._unserved = {unserved: num for unserved, num in self._unserved.items() if unserved > version}

    def is_stale_after_rewind(self, group: ActiveGroup) -> bool:
        """Return whether a complete group from before this learner has members too old to train.

        The scheduler replays such a group instead of discarding it, because the group did not age by waiting.
        """
        before = any(NO_VERSION < summary.version_max < self._first_version for summary in group.summaries)
        return before and not group.num_stale and bool(self._stale_members(group))

    def discard_stale(self, group: ActiveGroup) -> int:
        """Discard the ready members of `group` that are too old to train. Returns their number."""
        if not (too_old := self._stale_members(group)):
            return 0
        ready = group.members(EpisodeState.READY)
        stale = [member for member in too_old if member in ready]
        group.move_members(stale, EpisodeState.DISCARDED_STALE)
        group.num_stale += len(stale)
        return len(stale)

    def _stale_members(self, group: ActiveGroup) -> list[int]:
        """Return the members without trainable tokens: even their newest token is too old.

        This sweep and the learner's token mask guarantee the staleness bound: at most `max_staleness` optimizer steps
        lie between the weights that sampled a token and those that are trained with it.
        """
        return [number for number, each in enumerate(group.summaries) if self._staleness(each) > self._max_staleness]

    def _staleness(self, summary: EpisodeSummary) -> int:
        """Return the staleness of the freshest token; 0 without tokens."""
        if summary.version_max == NO_VERSION:
            return 0
        return self.history.least_steps(summary.version_min, summary.version_max, self.trained_version)


def _trigger(config: Config) -> Trigger:
    """Return the trigger that `config` describes."""
    settings = config.scheduler
    in_flight = math.ceil(config.max_running / config.env.num_members)
    return Trigger(
        settings.trigger.model_copy(update={"use": settings.trigger_use}),
        group_size=config.env.group_size,
        groups_per_step=config.trainer.groups_per_step,
        fewest_per_version=math.ceil(in_flight / max(settings.max_staleness, 1)),
        num_ranks=config.num_ranks,
    )
