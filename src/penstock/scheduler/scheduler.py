"""The scheduler: the asynchronous shell around the pure deciders. It holds the active groups and wakes the loops.

Four methods wait: `wait_for_room`, `next_assignments`, `next_batch` and `wait_until_ended`. Each calls its decider
again when an input of the decision has changed. All other methods are synchronous, so that each event changes the state
in one consistent step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from penstock.alarms import Alarms
from penstock.config import Config
from penstock.config.tunable import PATHS, with_settings
from penstock.ports.settings_search import Answer, Question
from penstock.ports.training import TrainerLost
from penstock.ports.work import Work
from penstock.scheduler.active_group import ActiveGroup, Stage
from penstock.scheduler.active_groups import ActiveGroups, DecisionLogger
from penstock.scheduler.dispatcher import Assignment, Dispatcher
from penstock.scheduler.early_stop import EarlyStop
from penstock.scheduler.evaluations import Evaluations
from penstock.scheduler.failure_budget import FailureBudget, OutOfTasks, command_for
from penstock.scheduler.filters import ZERO_VARIANCE, FilterChain, FilterFailed, FinishedGroup
from penstock.scheduler.health import Health
from penstock.scheduler.length_prediction import Background, LengthPrediction, run_now
from penstock.scheduler.members import MemberReports, errors_of, is_final
from penstock.scheduler.restoring import Restoring
from penstock.scheduler.supply import Supply
from penstock.scheduler.trigger import Thresholds
from penstock.scheduler.tuning import Change, Tuning
from penstock.scheduler.wakeup import Clock, Progress
from penstock.types import (
    NO_VERSION,
    EpisodeState,
    EpisodeSummary,
    GroupAttempt,
    GroupRef,
    LearnerState,
    PayloadRef,
    Summaries,
    Task,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """Groups to accumulate now. If `step` is True, an optimizer step follows."""

    groups: tuple[GroupRef, ...]
    step: bool
    restarted: tuple[GroupAttempt, ...] = ()
    """Attempts to cancel: their groups start over in a later round."""
    early_stop: str = ""
    """Why training ends now, without these groups; empty if it goes on."""


class Scheduler:
    """Admission, dispatch, collection and trigger of one run."""

    def __init__(
        self, config: Config, *, now: Clock, log_decision: DecisionLogger, background: Background = run_now
    ) -> None:
        self._config, self._now, self._log_decision = config, now, log_decision
        self._configured = config
        """The configuration of the run. Tuning changes settings of `_config`."""
        self._look_ahead = config.look_ahead
        self.policy_version = NO_VERSION
        """Version that the servers serve; NO_VERSION before the first weights."""
        self._weights_lost = ""
        """Why no server can get the latest published weights; empty if servers can."""
        self._out_of_tasks: str | None = None
        """Why no more tasks will come; None while tasks may come."""
        stall_s = config.env.episode_timeout_s * config.env.max_attempts + 600.0
        self._progress = Progress(now=now, stall_s=stall_s)
        signal = self._progress.signal
        self._room = signal("admission", resource="room in the look-ahead", holder="dispatch")
        self._runnable = signal("dispatch", resource="a task, staleness budget and slots", holder="generation")
        self._trainable = signal("the trainer", resource="ready groups", holder="the environment workers")
        self._stepped = signal("tuning", resource="an optimizer step", holder="the trainer")
        self._all_over = signal("the end", resource="the last groups", holder="the environment workers")

        self.groups = ActiveGroups(now=now, log_decision=log_decision)
        self.ledger = self.groups.ledger
        self.evaluations = Evaluations(self.groups, progress=self._progress, runnable=self._runnable)
        self.lengths = LengthPrediction(config, log_decision=log_decision, background=background)
        self.alarms = Alarms()
        self._supply = Supply(config, self.groups)
        self._dispatcher = Dispatcher(config, self.groups, self._supply)
        self._filters = FilterChain(config.scheduler.group_filter)
        self._early_stop = EarlyStop(config.scheduler.early_stop if config.has_trainer else None)
        self.tuning = Tuning(config)
        self.health = Health(config, self._dispatcher, self._supply, self.lengths, self.tuning, self.alarms)
        self._failure_budget = FailureBudget(max_filtered=config.scheduler.max_filtered_in_a_row, alarms=self.alarms)
        wake = partial(self._progress.changed, self._runnable)
        self.members = MemberReports(self.groups, self._dispatcher, self._fail, wake)
        self.restoring = Restoring(
            config,
            self.groups,
            self._dispatcher,
            self._supply,
            self.lengths,
            self._filters,
            self.tuning,
            settings_restored=self._use_tuned,
            wake=partial(self._progress.changed, self._runnable, self._trainable),
        )

    @property
    def trained_version(self) -> int:
        """Return the version that the learner is training."""
        return self._supply.trained_version

    @property
    def num_in_flight(self) -> int:
        """Return the number of training groups in flight: started, and not yet trained into weights that are served."""
        return self._dispatcher.pacing_state.num_in_flight

    # --- admission -------------------------------------------------------------------------------------------------

    async def wait_for_room(self) -> int:
        """Wait until an eighth of the look-ahead is free. Returns the number of tasks for which there is room.

        Admission and length prediction are cheaper for several tasks at once.
        """
        while True:
            self._room.clear()
            if room := self._num_room:
                return room
            await self._progress.wait(self._room)

    @property
    def _num_room(self) -> int:
        free = self._look_ahead - len(self._dispatcher.policy)
        return free if free * 8 >= self._look_ahead else 0

    def admit_tasks(self, tasks: Sequence[Task]) -> list[tuple[int, Task]]:
        """Admit one group per task. Returns pairs (group, task)."""
        admitted = []
        for task, tokens in zip(tasks, self.lengths.estimate(tasks), strict=True):
            group = self.restoring.admit_group(task)
            group.predicted_tokens = tokens or 0.0
            self._dispatcher.enqueue_group(group)
            inputs = {"group": group.number, "task": task.task_id, "predicted_tokens": tokens}
            self._log_decision("admission", f"{len(self._dispatcher.policy)} of {self._look_ahead} wait", inputs)
            self._supply.bias.admitted(group.number, tokens)
            admitted.append((group.number, task))
        self._progress.changed(self._runnable)
        return admitted

    def end_of_tasks(self, reason: str) -> None:
        """Record that no more tasks will come. The run fails with `reason` if the trainer needs more groups."""
        self._out_of_tasks = reason
        self._progress.changed(self._trainable, self._all_over)

    async def wait_until_ended(self) -> None:
        """Wait until every group has ended and no more tasks will come."""
        while self._out_of_tasks is None or len(self.groups):
            self._all_over.clear()
            await self._progress.wait(self._all_over)

    # --- dispatch --------------------------------------------------------------------------------------------------

    def add_worker(self, worker: str, capacity: int) -> None:
        """Let `worker` play up to `capacity` episodes."""
        self._dispatcher.capacity.add_worker(worker, capacity)
        self._progress.changed(self._runnable)

    def remove_worker(self, worker: str) -> None:
        """Reissue the groups of a lost worker."""
        self._dispatcher.capacity.remove_worker(worker)
        for group in self.groups:
            if group.worker == worker:
                self.reissue_group(group.group_attempt, f"{worker} is lost")

    def reissue_group(self, attempt: GroupAttempt, reason: str) -> None:
        """Let another worker continue a group that lost its worker or its tokens, from its partial rollouts."""
        if (group := self.groups.find_attempt(attempt)) is None:
            return
        self._log_decision("lost", reason, {"group": group.number, "saved": len(group.partial_rollouts)})
        ended = {member for member, partial in group.partial_rollouts.items() if partial.ended}
        self._dispatcher.take_back(group, keep=ended)
        self.groups.move(group, Stage.INTERRUPTED)
        self._progress.changed(self._runnable)

    async def next_assignments(self) -> list[Assignment]:
        """Wait until an assignment can run. Returns all assignments that can run now, in the dispatcher's order."""
        while True:
            self._runnable.clear()
            found = []
            while assignment := self._dispatcher.next_assignment():
                self._log_assignment(assignment)
                found.append(assignment)
            if self._num_room:
                self._progress.changed(self._room)
            if found:
                return found
            await self._progress.wait(self._runnable)

    def _log_assignment(self, assignment: Assignment) -> None:
        item = assignment.item
        inputs = {
            "worker": assignment.worker,
            "group": item.group if isinstance(item, Work) else item.episode.group,
            "episodes": len(item.members) if isinstance(item, Work) else 1,
            "free_grants": self._dispatcher.capacity.free_grants,
            "in_flight": self.num_in_flight,
            "unserved": self._supply.num_unserved,
        }
        self._log_decision("dispatch", assignment.reason, inputs)

    # --- completed groups ------------------------------------------------------------------------------------------

    def task_of(self, attempt: GroupAttempt) -> Task | None:
        """Return the task of a group that a worker plays; None for an earlier or a cancelled attempt."""
        group = self.groups.find_attempt(attempt)
        return None if group is None else group.task

    def finish_group(self, attempt: GroupAttempt, ref: PayloadRef | None, summaries: Summaries) -> EpisodeState | None:
        """Record a group that a worker has completed. Returns the new state of its episodes; None for an earlier or a
        cancelled attempt."""
        if (group := self.groups.find_attempt(attempt)) is None:
            return None
        self._progress.changed(self._runnable)
        if errors := errors_of(summaries):
            return self._fail(group, next(iter(errors.values())), is_final(summaries))
        self._dispatcher.capacity.release_slots(group)
        members = [summary.episode.episode for summary in summaries]
        group.mark_ready(members)
        self.groups.discard_surplus(group, members)
        self._failure_budget.complete_group()
        group.ref, group.summaries = ref, summaries
        if group.kind != "evaluation":
            return self._finish_training_group(group)
        self.evaluations.finish_group(group)
        self._end_group(group, EpisodeState.TRAINED)
        return EpisodeState.TRAINED

    def _fail(self, group: ActiveGroup, error: str, would_fail_again: bool) -> EpisodeState:
        """Queue the group for another attempt, or end it as FAILED: after `env.max_attempts` failures, or if another
        attempt would fail in the same way."""
        group.num_failures += 1
        group.forget_progress()
        self._dispatcher.take_back(group)
        if group.num_failures < self._config.env.max_attempts and not would_fail_again:
            self._log_decision("retry", error, {"group": group.number, "attempt": group.attempt})
            self.groups.move(group, Stage.INTERRUPTED)
            return EpisodeState.PENDING
        is_evaluation = group.kind == "evaluation"
        inputs = {"group": group.number} | ({} if is_evaluation else {"given_up": group.task.task_id})
        attempts = f"{group.num_failures} attempt{'' if group.num_failures == 1 else 's'}"
        self._log_decision("retry", f"given up after {attempts}: {error}", inputs)
        self._end_group(group, EpisodeState.FAILED)
        if is_evaluation:
            self.evaluations.fail_group(group, error)
        self._progress.give_up(self._failure_budget.fail_group(error, command=command_for(self._config, group.task)))
        self._notify_trainer()
        return EpisodeState.FAILED

    def _finish_training_group(self, group: ActiveGroup) -> EpisodeState:
        """Filter a complete group, and make it ready for the trainer."""
        self._learn_group(group)
        try:
            dropped = self._filters.decide(FinishedGroup(task=group.task, episodes=group.summaries))
        except FilterFailed as failure:
            self._progress.give_up(failure)
            self.restoring.play_again(group)  # a resumed run may have another filter
            return EpisodeState.PENDING
        self._early_stop.observe_group(dropped)
        self.alarms.update("filtered groups", self._early_stop.alarm())
        if dropped is not None:
            self._log_decision("filter", dropped.reason, {"group": group.number, "dropped_by": dropped.name})
            if dropped.name == ZERO_VARIANCE:
                self._supply.bias.equal_rewards(group.number)
            self._end_group(group, EpisodeState.FILTERED)
            self._end_if_hopeless(self._failure_budget.filter_group(dropped))
            self._notify_trainer()
            return EpisodeState.FILTERED
        self._log_decision("filter", "kept", {"group": group.number})
        self._failure_budget.keep_group()
        if not self._config.has_trainer:
            self._end_group(group, EpisodeState.COLLECTED)
            return EpisodeState.COLLECTED
        if self._supply.is_stale_after_rewind(group):
            self.restoring.play_again(group)
            return EpisodeState.PENDING
        self._supply.add_ready(group, now=self._now())
        self._report_stale(group, self._supply.discard_stale(group))
        self._notify_trainer()
        return EpisodeState.DISCARDED_STALE if group.has_ended else EpisodeState.READY

    def _end_if_hopeless(self, error: Exception | None) -> None:
        """End a run in which too many groups in a row were filtered: early if it has trained, else with `error`."""
        if error is None or not self._config.has_trainer:
            return
        if self._config.scheduler.early_stop is not None and self.ledger.count(EpisodeState.TRAINED):
            self._early_stop.end(str(error))
        else:
            self._progress.give_up(error)

    def _learn_group(self, group: ActiveGroup) -> None:
        lengths = [summary.response_tokens for summary in group.summaries]
        self.tuning.observe_group(group.task.task_id, group.summaries)
        self._supply.bias.played(group.number, lengths)
        if truncated := sum(summary.status == "truncated" for summary in group.summaries):
            self._log_decision("segment", f"{truncated} answers reached their maximum", {"group": group.number})
        if self.lengths.learn_group(group, lengths):
            self._arrange()

    def _arrange(self) -> None:
        self.lengths.arrange(self._dispatcher.policy, preference=self._supply.adjustment.preference)

    def _report_stale(self, group: ActiveGroup, num_stale: int) -> None:
        """Log members that became too old to train. End the group if no younger members remain."""
        if num_stale:
            self._log_decision("staleness", f"{num_stale} episodes too old to train", {"group": group.number})
            if group.has_ended:
                self._end_group(group, EpisodeState.DISCARDED_STALE)

    # --- training --------------------------------------------------------------------------------------------------

    async def next_batch(self) -> TrainBatch:
        """Wait until the trigger fires, and move the groups to TRAINING.

        Raises `TrainerLost` if the published weights are lost, and `OutOfTasks` if no more groups can become ready.
        """
        self._supply.learner.begin_wait(self._now())
        while True:
            self._trainable.clear()
            self.check_weights()
            if reason := self._early_stop.reason():
                self._log_decision("early stop", reason, {})
                return TrainBatch(groups=(), step=False, early_stop=reason)
            decision = self._supply.decide(now=self._now())
            if decision.num_groups or decision.step:
                break
            if self._out_of_tasks is not None and not (self._dispatcher.num_waiting or self._dispatcher.num_playing):
                raise OutOfTasks(self._out_of_tasks)
            await self._progress.wait(self._trainable, until=decision.look_again_at)
        self._log_decision("trigger", decision.reason, {"groups": decision.num_groups, "step": decision.step})
        groups = self._supply.take_ready(decision.num_groups, step=decision.step, now=self._now())
        restarted = self._dispatcher.restart_leftovers()
        if restarted:
            reason = f"{len(restarted)} unfinished groups start over in a later round"
            self._log_decision("restart", reason, {"groups": [attempt.group for attempt in restarted]})
        return TrainBatch(groups=groups, step=decision.step, restarted=restarted)

    def _notify_trainer(self) -> None:
        """Wake the trainer only if needed: it has work, its timeout starts, training is over, or tasks are used up."""
        is_over = self._out_of_tasks or self._early_stop.reason()
        if self._supply.num_ready <= 1 or is_over or self._supply.decide(now=self._now()).num_groups:
            self._progress.changed(self._trainable)

    def complete_step(self, learner: LearnerState) -> None:
        """Record an optimizer step over all groups in training, and adapt the trigger to the learner's report."""
        factor, before = self._supply.adjustment.factor, self._supply.thresholds
        trained: list[EpisodeSummary] = []
        for group in self._supply.complete_step(learner, now=self._now()):
            trained += group.summaries
            self._end_group(group, EpisodeState.TRAINED)
        aged = self._supply.discard_aged()
        for group, num_stale in aged:
            self._report_stale(group, num_stale)
        self.restoring.replay_stale_groups()
        self._early_stop.observe_step(learner)
        self._log_decision("feedback", self._supply.adjustment.reason, self._supply.adjustment.inputs)
        if self._supply.adjustment.factor != factor:
            self._log_adaptation(learner.policy_version, before)
            self._change_settings(self.tuning.disturb("feedback has changed the thresholds of the trigger"))
        self._change_settings(self.tuning.complete_step(learner, trained, now=self._now()))
        self._arrange()
        self.health.check_step(learner, num_aged=sum(count for _, count in aged))
        self.ledger.check()
        self._progress.changed(self._runnable, self._trainable, self._stepped)

    def _log_adaptation(self, version: int, before: Thresholds) -> None:
        """Log that the thresholds changed with the step that produced `version`."""
        after, size = self._supply.thresholds, self._config.env.group_size
        changes = {
            "min_samples": (before.min_groups * size, after.min_groups * size),
            "max_wait_s": (before.max_wait_s, after.max_wait_s),
        }
        changed = {name: list(pair) for name, pair in changes.items() if pair[0] != pair[1]}
        if changed:
            inputs = {"policy_version": version, "adapted": changed}
            self._log_decision("adaptation", self._supply.adjustment.reason, inputs)

    # --- tuning ----------------------------------------------------------------------------------------------------

    async def next_question(self) -> Question:
        """Wait until a search for better settings is due, and begin it."""
        while not self.tuning.why_due:
            self._stepped.clear()
            await self._progress.wait(self._stepped)
        learner, lengths = self._supply.learner, self.lengths
        knows_lengths = lengths.trusted and lengths.trust.tau is not None
        return self.tuning.question(learner.calls, update_s=self._supply.update_s, knows_lengths=knows_lengths)

    def take_answer(self, answer: Answer) -> None:
        """End a search, and put the settings in force that it found."""
        self._change_settings(self.tuning.take(answer))

    def _change_settings(self, change: Change | None) -> None:
        """Put settings in force, and log why. None changes nothing."""
        if change is None:
            return
        inputs = {name: value for name, value in change.inputs.items() if name != "changes"}
        if change.settings:
            changes = {PATHS[name]: pair for name, pair in change.inputs["changes"].items()}
            inputs |= {"policy_version": self.trained_version, "adapted": changes}
            self._use_tuned()
        self._log_decision("tuning", change.reason, inputs)

    def _use_tuned(self) -> None:
        """Decide by the settings of the configuration and the changes of tuning."""
        changed = {name: each.value for name, each in self.tuning.state.changed.items()}
        self._config = with_settings(self._configured, changed)
        self._look_ahead = self._config.look_ahead
        self._supply.bias.look_ahead = self._config.look_ahead
        for part in (self._supply, self._dispatcher, self.restoring):
            part.use(self._config)
        self._arrange()
        self._progress.changed(self._room, self._runnable, self._trainable)

    def mark_served(self, version: int, *, update_s: float | None = None) -> None:
        """Record that every server serves `version`. The groups trained into it are no longer in flight. The update
        took `update_s`; None if it was not measured."""
        self.policy_version, self._weights_lost = version, ""
        self._supply.mark_served(version, update_s=update_s)
        self._progress.changed(self._runnable)

    def mark_weights_lost(self, reason: str) -> None:
        """Record that no server can get the latest published weights. `mark_served` ends this state."""
        self._weights_lost = reason
        self._progress.changed(self._trainable)

    def check_weights(self) -> None:
        """Raise `TrainerLost` if the published weights are lost. Without them, all new groups would become stale."""
        if self._weights_lost:
            raise TrainerLost(self._weights_lost)

    # --- the end ---------------------------------------------------------------------------------------------------

    def cancel_all(self) -> tuple[GroupAttempt, ...]:
        """End every active group as CANCELLED. Returns their attempts."""
        groups = list(self.groups)
        for group in groups:
            self._dispatcher.capacity.release_slots(group)
            self._end_group(group, EpisodeState.CANCELLED)
        self.evaluations.clear()
        self._progress.changed(self._room, self._runnable)
        return tuple(group.group_attempt for group in groups)

    def _end_group(self, group: ActiveGroup, state: EpisodeState) -> None:
        """Remove a group from the active groups. Members that have not ended yet end in `state`."""
        self.groups.end_group(group, state, trained_in=self.trained_version if state is EpisodeState.TRAINED else None)
        if not len(self.groups):
            self._progress.changed(self._all_over)
