"""Saving and restoring the scheduler's state, after the loss of the controller, of the trainer, or of both."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any

from penstock.config import Config
from penstock.ports.group_records import GroupRecord
from penstock.scheduler.active_group import ActiveGroup, Stage
from penstock.scheduler.active_groups import ActiveGroups
from penstock.scheduler.dispatcher import Dispatcher
from penstock.scheduler.filters import FilterChain
from penstock.scheduler.length_prediction import LengthPrediction
from penstock.scheduler.supply import Supply
from penstock.scheduler.tuning import Tuning
from penstock.types import EpisodeState, Task
from penstock.version_history import VersionHistory


class Restoring:
    """The scheduler's methods for `recovery.py` and for checkpoints."""

    def __init__(
        self,
        config: Config,
        groups: ActiveGroups,
        dispatcher: Dispatcher,
        supply: Supply,
        lengths: LengthPrediction,
        filters: FilterChain,
        tuning: Tuning,
        *,
        settings_restored: Callable[[], None],
        wake: Callable[[], None],
    ) -> None:
        """`settings_restored` puts the settings of `tuning` in force. `wake` wakes the loops that wait for groups to
        dispatch or to train."""
        self._tuning, self._settings_restored = tuning, settings_restored
        self._env, self._has_trainer = config.env, config.has_trainer
        self._groups, self._ledger, self._now, self._wake = groups, groups.ledger, groups.now, wake
        self._dispatcher, self._supply, self._lengths, self._filters = dispatcher, supply, lengths, filters
        self._replayed: list[tuple[int, Task]] = []

    def use(self, config: Config) -> None:
        """Admit groups with the redundancy of `config` from now on."""
        self._env = config.env

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a checkpoint must hold beside the pool's index, as plain values."""
        feedback, filters = self._supply.feedback.state_dict(), self._filters.state_dict()
        return {
            "next_group": self._groups.next_number,
            "feedback": feedback,
            "filters": filters,
            "tuning": self._tuning.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the feedback, the filters and the tuned settings from a saved state."""
        if tuning := state.get("tuning"):  # else the checkpoint is of an earlier release
            self._tuning.load_state_dict(tuning)
            self._settings_restored()
        self._supply.feedback.load_state_dict(state["feedback"])
        self._supply.adjustment = self._supply.feedback.adjustment
        self._lengths.arrange(self._dispatcher.policy, preference=self._supply.adjustment.preference)
        self._filters.load_state_dict(state["filters"])

    def restore_groups(self, records: Iterable[GroupRecord], task: Callable[[GroupRecord], Task]) -> None:
        """Restore ledger and queues of a new scheduler from the pool's records.

        Groups that had not completed start over.
        """
        for record in records:
            self._groups.next_number = max(self._groups.next_number, record.group + 1)
            if record.counts:
                self._ledger.add_counts(record.counts)
                self._groups.num_ended += 1
            else:
                self._restore_group(record, task(record), since=self._now())
        self._ledger.check()
        self._wake()

    def restore_counts(self, counts: Mapping[EpisodeState, int], *, next_group: int) -> None:
        """Restore a ledger from `counts` of episodes by final state, if the records of groups are gone."""
        self._ledger.add_counts(counts)
        self._groups.next_number = next_group

    def use_history(self, history: VersionHistory) -> None:
        """Compute the staleness of groups by `history` from now on."""
        self._supply.history = history

    def attach_learner(self, version: int, *, accumulated: Collection[int] = ()) -> None:
        """Adapt to a learner that trains `version` and has already accumulated the groups `accumulated` for it."""
        self._supply.attach_learner(version, accumulated)
        for group in self._groups.at(Stage.READY):
            if group.has_ended:
                self._groups.end_group(group, EpisodeState.DISCARDED_STALE)
        self.replay_stale_groups()
        self._wake()

    def rewind(self, version: int, lost: Iterable[GroupRecord], task: Callable[[GroupRecord], Task]) -> None:
        """Adapt to a learner that restarts from an earlier state, under the new number `version`.

        The groups that it trained since that state (`lost`) and the groups that it had accumulated are ready again. A
        lost group has waited as long as the next group admitted after it.
        """
        self._supply.rewind(version, now=self._now())
        for record in lost:
            self._ledger.remove_counts(record.counts)
            later = (group.admitted_at for group in self._groups if group.number > record.group)
            self._restore_group(record, task(record), since=min(later, default=self._now()))
        self.replay_stale_groups()
        self._ledger.check()
        self._wake()

    def admit_group(self, task: Task, *, number: int | None = None) -> ActiveGroup:
        """Admit a training group, under a new number or under its earlier `number`."""
        env = self._env
        return self._groups.admit_group(task, "train", env.group_size, redundancy=env.redundancy, number=number)

    def _restore_group(self, record: GroupRecord, task: Task, *, since: float) -> None:
        """Admit a group again. It has waited since then."""
        group = self.admit_group(task, number=record.group)
        group.admitted_at, group.attempt = since, record.attempt
        if record.ref is None:
            self._enqueue_again(group)
            return
        kept = range(len(record.episodes))
        for state in (EpisodeState.LEASED, EpisodeState.READY):
            group.move_members(kept, state)
        self._groups.discard_surplus(group, kept)
        group.ref, group.summaries = record.ref, record.episodes
        if self._has_trainer:
            self._supply.add_ready(group, now=self._now())
        else:
            self._groups.end_group(group, EpisodeState.COLLECTED)

    def replay_stale_groups(self) -> None:
        """Replay the ready groups that a rewind has made too old."""
        for group in self._groups.at(Stage.READY):
            if self._supply.is_stale_after_rewind(group):
                self.play_again(group)

    def play_again(self, group: ActiveGroup) -> None:
        """Queue a complete group for a new attempt, and drop its tokens."""
        group.move_members(range(group.size), EpisodeState.PENDING)
        group.ref, group.summaries = None, ()
        group.attempt += 1
        group.forget_progress()
        self._enqueue_again(group)
        self._replayed.append((group.number, group.task))

    def take_replayed(self) -> list[tuple[int, Task]]:
        """Return pairs (group, task) of the complete groups queued again since the last call."""
        replayed, self._replayed = self._replayed, []
        return replayed

    def _enqueue_again(self, group: ActiveGroup) -> None:
        (tokens,) = self._lengths.estimate([group.task])
        group.predicted_tokens = tokens or 0.0
        self._dispatcher.enqueue_group(group)
