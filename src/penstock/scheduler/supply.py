"""What the trainer is supplied with: whole groups that are ready, in training, or trained and not yet served."""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice

from penstock.config import Config
from penstock.scheduler.bias import LengthBias
from penstock.scheduler.feedback import Adjustment, feedback
from penstock.scheduler.live import LiveGroup
from penstock.scheduler.staleness import StalenessPolicy
from penstock.scheduler.trigger import Thresholds, Trigger, TriggerDecision, TriggerState
from penstock.types import NO_VERSION, EpisodeState, GroupRef, LearnerState


class Supply:
    """Groups between ready and served; asks the trigger, and listens to the learner on its behalf."""

    def __init__(self, config: Config) -> None:
        settings = config.scheduler
        self.trained_version = 0
        """Version the learner is training."""
        self._first_version = 0
        """That this learner trained under this controller. What was made before, and is too old by now, did not grow
        old: the count of versions jumped, or time went by while there was none to count."""
        self.bias = LengthBias(group_size=config.env.group_size, look_ahead=config.look_ahead)
        self._trigger = Trigger.from_config(
            settings.trigger.model_copy(update={"use": settings.trigger_use}),
            group_size=config.env.group_size,
            groups_per_step=config.trainer.groups_per_step,
        )
        self.feedback = feedback(
            settings.trigger,
            entropy_gain=settings.dispatch.entropy_gain,
            total_steps=config.trainer.steps,
            min_samples=self._trigger.min_samples,
        )
        self._adjustment = self.feedback.adjustment
        self._staleness = StalenessPolicy(max_staleness=settings.max_staleness)
        self._ready: dict[int, tuple[LiveGroup, float]] = {}
        """In the order they became so, with the time."""
        self._training: list[LiveGroup] = []
        self._unserved: dict[int, int] = {}
        """Versions that no server serves yet, with the number of groups trained into each."""

    @property
    def num_ready(self) -> int:
        return len(self._ready)

    @property
    def num_unserved(self) -> int:
        """Groups in training, or trained into weights that no server serves yet."""
        return len(self._training) + sum(self._unserved.values())

    @property
    def groups_per_step(self) -> int:
        """How many groups the next optimizer step takes at least."""
        return self.thresholds.min_groups if self._trigger.use == "step" else self._trigger.groups_per_step

    @property
    def thresholds(self) -> Thresholds:
        """N_min and T_max now in force."""
        return self._trigger.thresholds(self._state)

    @property
    def _state(self) -> TriggerState:
        return TriggerState(
            num_ready=len(self._ready),
            num_accumulated=len(self._training),
            waiting_since=next(iter(self._ready.values()))[1] if self._ready else None,
            samples_factor=self._adjustment.samples_factor,
            wait_factor=self._adjustment.wait_factor,
        )

    @property
    def preference(self) -> float:
        """How strongly short answers are preferred, by the learner's entropy."""
        return self._adjustment.preference

    def add(self, group: LiveGroup, *, now: float) -> int:
        """A whole group is ready; returns how many of its members are too old to train, and discarded."""
        self._ready[group.number] = group, now
        return self._discard_stale(group)

    def decide(self, *, now: float) -> TriggerDecision:
        """What to train now."""
        return self._trigger.decide(self._state, now=now)

    def take(self, num_groups: int) -> tuple[GroupRef, ...]:
        """The oldest ready groups; they are `training` now."""
        return tuple(self._take(number) for number in list(islice(self._ready, num_groups)))

    def _take(self, number: int) -> GroupRef:
        group, _ = self._ready.pop(number)
        members = group.ledger.members(number, EpisodeState.READY)
        group.ledger.move(number, members, EpisodeState.TRAINING)
        self._training.append(group)
        if group.ref is None:
            raise RuntimeError(f"group {number} is ready without a payload")
        return GroupRef(group=number, task_id=group.task.task_id, ref=group.ref, episodes=members)

    def learned(self, learner: LearnerState) -> tuple[list[LiveGroup], list[tuple[LiveGroup, int]], Adjustment]:
        """The learner made a new version from everything in training: (groups trained; groups of which members grew too
        old meanwhile, and how many; what its state changes)."""
        trained, self._training = self._training, []
        for group in trained:
            members = group.ledger.members(group.number, EpisodeState.TRAINING)
            self.bias.trained([group.summaries[member].response_tokens for member in members])
            group.ledger.move(group.number, members, EpisodeState.TRAINED)
        self.trained_version = learner.policy_version
        self._unserved[learner.policy_version] = len(trained)
        self._adjustment = self.feedback.observe(learner)
        ready = [group for group, _ in self._ready.values() if not self.has_outlived(group)]
        aged = [(group, count) for group in ready if (count := self._discard_stale(group))]
        return trained, aged, self._adjustment

    def learner_at(self, version: int, accumulated: Collection[int]) -> None:
        """A learner of which nothing was known trains `version`, and has these groups accumulated."""
        self.trained_version = self._first_version = version
        for number in [number for number in self._ready if number in accumulated]:
            self._discard_stale(self._ready[number][0])
            if number in self._ready:
                self._take(number)

    def rewind(self, trained_version: int, *, now: float) -> None:
        """The learner is another one: it holds nothing of what was in training."""
        for group in self._training:
            members = group.ledger.members(group.number, EpisodeState.TRAINING)
            group.ledger.move(group.number, members, EpisodeState.READY)
        self._ready = {group.number: (group, now) for group in self._training} | self._ready
        self._training = []
        self._unserved = {}
        self.trained_version = self._first_version = trained_version

    def put(self, group: LiveGroup, *, now: float) -> None:
        """A whole group that was ready before is so again, however old."""
        self._ready[group.number] = group, now

    def take_outlived(self) -> list[LiveGroup]:
        """Ready groups that `has_outlived`; they are not ready any more."""
        found = [group for group, _ in self._ready.values() if self.has_outlived(group)]
        for group in found:
            del self._ready[group.number]
        return found

    def has_outlived(self, group: LiveGroup) -> bool:
        """A whole group from before this learner, or this controller, has members too old to train now."""
        before = any(NO_VERSION < summary.version_max < self._first_version for summary in group.summaries)
        return before and not group.num_stale and bool(self._stale(group))

    def published(self, version: int) -> None:
        """All that was trained into `version`, and into those before, is served."""
        self._unserved = {unserved: num for unserved, num in self._unserved.items() if unserved > version}

    def clear(self) -> None:
        """Nothing of this will be trained."""
        self._ready.clear()
        self._training.clear()

    def _discard_stale(self, group: LiveGroup) -> int:
        too_old = self._stale(group)
        if not too_old:
            return 0
        ready = group.ledger.members(group.number, EpisodeState.READY)
        stale = [member for member in too_old if member in ready]
        group.ledger.move(group.number, stale, EpisodeState.DISCARDED_STALE)
        group.num_stale += len(stale)
        if group.number not in group.ledger:
            del self._ready[group.number]
        return len(stale)

    def _stale(self, group: LiveGroup) -> list[int]:
        return self._staleness.stale(group.summaries, trained_version=self.trained_version)
