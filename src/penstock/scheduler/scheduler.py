"""The thin asynchronous shell around the pure deciders: holds the live groups, and wakes who waits.

Four methods wait (`room`, `next_assignments`, `next_batch`, `evaluate`); each re-evaluates its decider when something
it depends on has changed. Everything else is synchronous, so that one event is one consistent change of state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.alarms import Alarms
from penstock.config import Config
from penstock.ports import EndedGroup, GroupRecord, TrainerLost, Work
from penstock.scheduler.dispatcher import Assignment, Demand, Dispatcher
from penstock.scheduler.evaluation import Evaluations, Played
from penstock.scheduler.filters import FilterChain, FilterFailed, FinishedGroup
from penstock.scheduler.foresight import Background, Foresight, Record
from penstock.scheduler.ledger import FINAL, Ledger
from penstock.scheduler.live import LiveGroup
from penstock.scheduler.patience import OutOfTasks, Patience, command_for
from penstock.scheduler.supply import Supply
from penstock.scheduler.wakeup import Progress
from penstock.types import (
    NO_VERSION,
    EpisodeId,
    EpisodeState,
    EpisodeSummary,
    GroupAttempt,
    GroupRef,
    LearnerState,
    PayloadRef,
    Task,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """Groups to accumulate now; `step` says whether an optimizer step follows."""

    groups: tuple[GroupRef, ...]
    step: bool
    reason: str
    restarted: tuple[GroupAttempt, ...] = ()
    """Attempts nobody waits for any more: their groups start over in a later round."""


MAX_STALE_SHARE = 0.1
"""Of what a step trains: more than this too old to train raises an alarm."""


def immediate(compute: Callable[[], object], use: Callable[[object], None]) -> None:
    """`Background` without a thread."""
    use(compute())


class Scheduler:
    """Admission, dispatch, collection and trigger of one run."""

    def __init__(
        self, config: Config, *, now: Callable[[], float], record: Record, background: Background = immediate
    ) -> None:
        self._config, self._now, self._record = config, now, record
        self._look_ahead = config.look_ahead
        settings = config.scheduler
        self.ledger = Ledger()
        self.policy_version = NO_VERSION
        """Version the servers serve; NO_VERSION before the first weights."""
        self._weights_lost = ""
        """Why nobody can have what was published last."""
        self._groups: dict[int, LiveGroup] = {}
        self._next_group = 0
        self._dispatcher = Dispatcher(config, self._groups, now=now)
        self._foresight = Foresight(config, self._groups, record=record, background=background)
        self._filters = FilterChain(settings.group_filter)
        self._supply = Supply(config)
        self._ended: list[EndedGroup] = []
        self._replayed: list[tuple[int, Task]] = []
        self._evaluations = Evaluations()
        self._patience = Patience(max_filtered=settings.max_filtered_in_a_row)
        self._out_of_tasks: str | None = None
        self._alarms = Alarms()
        stall_s = config.env.episode_timeout_s * config.env.max_attempts + 600.0
        self._progress = Progress(now=now, stall_s=stall_s)
        signal = self._progress.signal
        self._room = signal("admission", resource="room in the look-ahead", holder="dispatch")
        self._runnable = signal("dispatch", resource="a task, staleness budget and slots", holder="generation")
        self._trainable = signal("the trainer", resource="ready groups", holder="the environment workers")
        self._evaluated = signal("evaluation", resource="its episodes", holder="the environment workers")
        self._all_over = signal("the end", resource="the last groups", holder="the environment workers")
        self.num_ended = 0
        """Groups that came to their end, whatever it was."""

    @property
    def evaluations(self) -> Ledger:
        """The ledger of the evaluations."""
        return self._evaluations.ledger

    @property
    def trained_version(self) -> int:
        """Version the learner is training."""
        return self._supply.trained_version

    # --- admission -------------------------------------------------------------------------------------------------

    async def room(self) -> int:
        """Wait until an eighth of the look-ahead is free; returns for how many tasks. Several at once are cheaper, and
        so is predicting their lengths."""
        while True:
            self._room.clear()
            if room := self._num_room:
                return room
            await self._progress.wait(self._room)

    @property
    def _num_room(self) -> int:
        """Free places in the look-ahead; 0 while they are too few to bother."""
        free = self._look_ahead - len(self._dispatcher.policy)
        return free if free * 8 >= self._look_ahead else 0

    def admit(self, tasks: Sequence[Task]) -> list[tuple[int, Task]]:
        """Take `tasks` in, one group each; returns (group, task) pairs."""
        admitted = []
        for task, tokens in zip(tasks, self._foresight.estimate(tasks), strict=True):
            group = self._add(task, self._config.env.group_size, self.ledger, redundancy=self._config.env.redundancy)
            group.predicted_tokens = tokens or 0.0
            self._dispatcher.push(group)
            inputs = {"group": group.number, "task": task.task_id, "predicted_tokens": tokens}
            self._record("admission", f"{len(self._dispatcher.policy)} of {self._look_ahead} wait", inputs)
            self._supply.bias.admitted(group.number, tokens)
            admitted.append((group.number, task))
        self._progress.changed(self._runnable)
        return admitted

    def out_of_tasks(self, reason: str) -> None:
        """No more tasks will be admitted; an error only if the trainer needs more than are left."""
        self._out_of_tasks = reason
        self._progress.changed(self._trainable, self._all_over)

    async def all_ended(self) -> None:
        """Wait until no group is left to be played, and none will come."""
        while self._out_of_tasks is None or self._groups:
            self._all_over.clear()
            await self._progress.wait(self._all_over)

    def _add(
        self, task: Task, group_size: int, ledger: Ledger, *, redundancy: int = 0, number: int | None = None
    ) -> LiveGroup:
        number = self._next_group if number is None else number
        self._next_group = max(self._next_group, number + 1)
        size, now = group_size + redundancy, self._now()
        ledger.admit(number, size)
        group = LiveGroup(number=number, task=task, size=size, redundancy=redundancy, ledger=ledger, admitted_at=now)
        self._groups[number] = group
        return group

    # --- dispatch --------------------------------------------------------------------------------------------------

    def worker_joined(self, worker: str, capacity: int) -> None:
        """`worker` can hold `capacity` episodes."""
        self._dispatcher.places.join(worker, capacity)
        self._progress.changed(self._runnable)

    def worker_lost(self, worker: str) -> None:
        """What it played goes to others: saved episodes from where they were, the rest from the start."""
        self._dispatcher.places.lose(worker)
        for group in [group for group in self._groups.values() if group.worker == worker]:
            self._reissue(group, f"{worker} is lost")

    def tokens_lost(self, number: int, attempt: int, reason: str) -> None:
        """What a worker played at this attempt cannot be had, though the worker lives: as if it were lost."""
        if group := self._dispatcher.playing(number, attempt):
            self._reissue(group, reason)

    def _reissue(self, group: LiveGroup, reason: str) -> None:
        """Others play it: saved members from where they were, the rest from the start."""
        self._record("lost", reason, {"group": group.number, "saved": len(group.saved)})
        ended = {member for member, saved in group.saved.items() if saved.ended}
        self._dispatcher.take_back(group, keep=ended)
        self._dispatcher.push_again(group)
        self._progress.changed(self._runnable)

    async def next_assignments(self) -> list[Assignment]:
        """Wait for something to run and for the slots to run it. Everything that can run now: waiting grants first,
        then what must run again, then evaluations, then groups by the dispatch policy."""
        while True:
            self._runnable.clear()
            found = list(self._assign())
            if self._num_room:
                self._progress.changed(self._room)
            if found:
                return found
            await self._progress.wait(self._runnable)

    def _assign(self) -> Iterator[Assignment]:
        while assignment := self._dispatcher.next(self._demand):
            item = assignment.item
            what = (item.group, len(item.members)) if isinstance(item, Work) else (item.episode.group, 1)
            inputs = {
                "worker": assignment.worker,
                "group": what[0],
                "episodes": what[1],
                "free_grants": self._dispatcher.places.free_grants,
                "in_flight": self.num_in_flight,
                "unserved": self._supply.num_unserved,
            }
            self._record("dispatch", assignment.reason, inputs)
            yield assignment

    @property
    def _demand(self) -> Demand:
        return Demand(
            num_ready=self._supply.num_ready,
            num_unserved=self._supply.num_unserved,
            groups_per_step=self._supply.groups_per_step,
        )

    @property
    def num_in_flight(self) -> int:
        """Training groups between their start and the moment the weights they trained are served."""
        return self._dispatcher.num_playing + self._supply.num_ready + self._supply.num_unserved

    # --- collection ------------------------------------------------------------------------------------------------

    def task_of(self, number: int, attempt: int) -> Task | None:
        """The task of a group that is being played; None if nobody waits for this attempt at it."""
        group = self._dispatcher.playing(number, attempt)
        return group.task if group else None

    def request_grant(
        self, episode: EpisodeId, *, unfinished: bool, num_tokens: int, saved: PayloadRef | None = None
    ) -> None:
        """A leased episode has used its grant and wants another one. Unknown (cancelled) episodes are ignored."""
        group = self._dispatcher.playing(episode.group, episode.attempt)
        if group is None:
            return
        member = episode.episode
        self._dispatcher.places.stop(group, [member])
        group.num_tokens[member] = num_tokens
        group.keep(member, saved)
        if unfinished:
            group.ledger.move(group.number, [member], EpisodeState.UNFINISHED)
            inputs = {"group": group.number, "episode": member, "tokens": num_tokens, "saved": saved is not None}
            self._record("segment", f"cut after {num_tokens} tokens: goes on with its next grant", inputs)
        self._dispatcher.push_grant(episode)
        self._progress.changed(self._runnable)

    def generated(self, episodes: Sequence[EpisodeId], num_tokens: Sequence[int]) -> None:
        """Members of one attempt have said their last word: while their rewards are computed, others generate."""
        group = self._dispatcher.playing(episodes[0].group, episodes[0].attempt) if episodes else None
        if group is None:
            return
        leased = group.ledger.members(group.number, EpisodeState.LEASED)
        members = [episode.episode for episode in episodes if episode.episode in leased]
        self._dispatcher.places.stop(group, members)
        group.ledger.move(group.number, members, EpisodeState.REWARDING)
        if members:
            self._push_rest(group, num_tokens[0])
        self._progress.changed(self._runnable)

    def _push_rest(self, group: LiveGroup, probe_tokens: int) -> None:
        """The first member of a group has shown how long its answers are; whoever was held back may run."""
        if group.ledger.members(group.number, EpisodeState.PENDING):
            self._dispatcher.push_rest(group, probe_tokens)

    def ended(self, number: int, summaries: Sequence[EpisodeSummary], saved: Sequence[PayloadRef | None]) -> None:
        """Members that ended before their group was whole, a probe among them; their tokens stay with the worker."""
        group = self._dispatcher.playing(number, summaries[0].episode.attempt) if summaries else None
        if group is None:
            return
        members = [summary.episode.episode for summary in summaries]
        self._dispatcher.places.stop(group, members)
        failed = {summary.episode.episode: _error(summary) for summary in summaries if _has_failed(summary)}
        for member, ref, summary in zip(members, saved, summaries, strict=True):
            if member not in failed:
                group.keep(member, ref, summary)
        if not group.spares(failed):
            self._fail(group, next(iter(failed.values())))
        else:
            rewarded = group.ledger.members(number, EpisodeState.REWARDING)
            self._finish_members(group, set(members).difference(failed))
            group.broken.update(failed)
            for member, error in failed.items():
                self._record("surplus", f"the group does without: {error}", {"group": number, "episode": member})
            if not rewarded:  # else whoever was held back runs since its probe was generated
                self._push_rest(group, summaries[0].response_tokens)
        self._progress.changed(self._runnable)

    def finish(self, number: int, ref: PayloadRef | None, summaries: Sequence[EpisodeSummary]) -> EpisodeState | None:
        """A worker played the whole group. Returns what its episodes are now; None if nobody waits for it any more
        (cancelled, or an older attempt)."""
        group = self._dispatcher.playing(number, summaries[0].episode.attempt) if summaries else None
        if group is None:
            return None
        self._progress.changed(self._runnable)
        if failed := [summary for summary in summaries if _has_failed(summary)]:
            return self._fail(group, _error(failed[0]))
        self._dispatcher.places.release(group)
        members = [summary.episode.episode for summary in summaries]
        self._finish_members(group, members)
        self._shed(group, members)
        self._patience.played()
        self._alarms.update("failures", self._patience.failure_alarm())
        group.ref, group.summaries = ref, summaries
        return self._scored(group) if number in self._evaluations else self._rewarded(group)

    def _finish_members(self, group: LiveGroup, members: Iterable[int]) -> None:
        known = group.ledger.members(group.number, EpisodeState.READY)
        group.ledger.move(group.number, set(members).difference(known), EpisodeState.READY)

    def _shed(self, group: LiveGroup, kept: Sequence[int]) -> None:
        """It is whole with these members: nobody needs the others."""
        if len(kept) == group.size:
            return
        group.num_surplus += group.size - len(kept)
        group.ledger.shed(group.number, kept)
        group.size, group.redundancy = len(kept), 0
        self._record("surplus", f"{group.num_surplus} episodes more than needed", {"group": group.number})

    def _fail(self, group: LiveGroup, error: str) -> EpisodeState:
        """Try the group again, or give it up."""
        group.num_failures += 1
        group.forget()
        self._dispatcher.take_back(group)
        if group.num_failures < self._config.env.max_attempts:
            self._record("retry", error, {"group": group.number, "attempt": group.attempt})
            self._dispatcher.push_again(group)
            return EpisodeState.PENDING
        given_up = {"given_up": group.task.task_id} if group.ledger is self.ledger else {}
        reason = f"given up after {group.num_failures} attempts: {error}"
        self._record("retry", reason, {"group": group.number, **given_up})
        group.ledger.move(group.number, range(group.size), EpisodeState.FAILED)
        self._leave(group, EpisodeState.FAILED)
        if group.number in self._evaluations:
            self._evaluations.failed(group, error)
            self._tell_of_evaluation(group)
        self._give_up(self._patience.failed(error, command=command_for(self._config, group.task)))
        self._alarms.update("failures", self._patience.failure_alarm())
        self._notify_trainer()
        return EpisodeState.FAILED

    def _scored(self, group: LiveGroup) -> EpisodeState:
        """A held-out group is whole; whoever asked for it hears of it."""
        self._leave(group, EpisodeState.TRAINED)
        self._evaluations.played(group, group.summaries)
        self._tell_of_evaluation(group)
        return EpisodeState.TRAINED

    def _tell_of_evaluation(self, group: LiveGroup) -> None:
        ended, asked = self._evaluations.num_ended, self._evaluations.num_asked
        inputs = {"group": group.number, "held_out_ended": ended, "held_out": asked}
        self._record("evaluation", f"{ended} of {asked} held-out tasks have ended", inputs)
        self._progress.changed(self._evaluated)

    def _rewarded(self, group: LiveGroup) -> EpisodeState:
        """A training group is whole."""
        self._learn_lengths(group)
        try:
            dropped = self._filters.decide(FinishedGroup(task=group.task, episodes=group.summaries))
        except FilterFailed as failure:
            self._give_up(failure)
            self._dispatcher.stop_playing(group)
            self._play_anew(group)  # should the run go on one day with another filter
            return EpisodeState.PENDING
        if dropped is not None:
            self._record("filter", dropped.reason, {"group": group.number, "dropped_by": dropped.name})
            group.ledger.move(group.number, range(group.size), EpisodeState.FILTERED)
            self._leave(group, EpisodeState.FILTERED)
            hopeless = self._patience.filtered(dropped)
            if self._config.has_trainer:
                self._give_up(hopeless)
            self._alarms.update("filter", self._patience.alarm())
            self._notify_trainer()
            return EpisodeState.FILTERED
        self._record("filter", "kept", {"group": group.number})
        self._patience.kept()
        self._alarms.update("filter", None)
        if not self._config.has_trainer:
            return self._collected(group)
        self._dispatcher.stop_playing(group)
        if self._supply.has_outlived(group):
            self._play_anew(group)
            return EpisodeState.PENDING
        if num_stale := self._supply.add(group, now=self._now()):
            self._aged(group, num_stale)
        self._notify_trainer()
        return EpisodeState.READY if group.number in self._groups else EpisodeState.DISCARDED_STALE

    def _collected(self, group: LiveGroup) -> EpisodeState:
        """A whole group of a run that only plays: that was all."""
        group.ledger.move(group.number, range(group.size), EpisodeState.COLLECTED)
        self._leave(group, EpisodeState.COLLECTED)
        return EpisodeState.COLLECTED

    def _notify_trainer(self) -> None:
        """Wake it for work, for a deadline that has begun to run, or for want of tasks; not for every group."""
        if self._supply.num_ready <= 1 or self._out_of_tasks or self._supply.decide(now=self._now()).num_groups:
            self._progress.changed(self._trainable)

    def _aged(self, group: LiveGroup, num_stale: int) -> None:
        """Members of a ready group are too old to train."""
        self._record("staleness", f"{num_stale} episodes too old to train", {"group": group.number})
        if group.number not in group.ledger:
            self._leave(group, EpisodeState.DISCARDED_STALE)

    def _learn_lengths(self, group: LiveGroup) -> None:
        lengths = [summary.response_tokens for summary in group.summaries]
        self._supply.bias.played(group.number, lengths)
        if truncated := sum(summary.status == "truncated" for summary in group.summaries):
            self._record("segment", f"{truncated} answers reached their maximum", {"group": group.number})
        if self._foresight.played(group, lengths):
            self._arrange()

    def _arrange(self) -> None:
        self._foresight.arrange(self._dispatcher.policy, preference=self._supply.preference)

    # --- training --------------------------------------------------------------------------------------------------

    async def next_batch(self) -> TrainBatch:
        """Wait until the trigger fires; the groups returned are `training`. Raises `TrainerLost` (`check_weights`)."""
        while True:
            self._trainable.clear()
            self.check_weights()
            decision = self._supply.decide(now=self._now())
            if decision.fires:
                break
            self._check_supply()
            await self._progress.wait(self._trainable, until=decision.look_again_at)
        self._record("trigger", decision.reason, {"groups": decision.num_groups, "step": decision.step})
        groups = self._supply.take(decision.num_groups)
        restarted = self._dispatcher.restart_leftovers()
        if restarted:
            reason = f"{len(restarted)} unfinished groups start over in a later round"
            self._record("restart", reason, {"groups": [attempt.group for attempt in restarted]})
        return TrainBatch(
            groups=groups,
            step=decision.step,
            reason=decision.reason,
            restarted=restarted,
        )

    def take_ended(self) -> list[EndedGroup]:
        """Training groups that came to an end since the last call, whatever it was."""
        ended, self._ended = self._ended, []
        return ended

    def take_replayed(self) -> list[tuple[int, Task]]:
        """Groups that were ready, and are to be played anew since the last call: (group, task)."""
        replayed, self._replayed = self._replayed, []
        return replayed

    def _check_supply(self) -> None:
        """Raise if what the trainer waits for can never come."""
        if self._out_of_tasks is not None and not (self._dispatcher.num_waiting or self._dispatcher.num_playing):
            raise OutOfTasks(self._out_of_tasks)

    def learned(self, learner: LearnerState) -> None:
        """The learner made a new version from everything in training. What it tells of itself moves the trigger's
        thresholds and the preference for short answers."""
        trained, aged, adjustment = self._supply.learned(learner)
        for group in trained:
            self._leave(group, EpisodeState.TRAINED)
        for group, num_stale in aged:
            self._aged(group, num_stale)
        self._replay_outlived()
        self._record("feedback", adjustment.reason, adjustment.inputs)
        self._arrange()
        self._look_out(learner, num_aged=sum(count for _, count in aged))
        self.ledger.check()
        self._progress.changed(self._runnable, self._trainable)

    def published(self, version: int) -> None:
        """Every server serves `version`: the groups it was trained on leave flight."""
        self.policy_version, self._weights_lost = version, ""
        self._supply.published(version)
        self._progress.changed(self._runnable)

    def weights_lost(self, reason: str) -> None:
        """Nobody can have what the trainer published last, until something else is `published`."""
        self._weights_lost = reason
        self._progress.changed(self._trainable)

    def check_weights(self) -> None:
        """Raises `TrainerLost` if they are lost: what is played without them may be too old to train, for ever."""
        if self._weights_lost:
            raise TrainerLost(self._weights_lost)

    # --- what it shows and what survives ---------------------------------------------------------------------------

    def metrics(self) -> dict[str, float | None]:
        """Of the scheduler itself, for the line of a step."""
        thresholds = self._supply.thresholds
        return {
            "oldest_wait_s": self._dispatcher.oldest_wait_s(self._now()),
            "groups_pending": float(len(self._dispatcher.policy)),
            "groups_in_flight": float(self.num_in_flight),
            "trigger_min_samples": float(thresholds.min_groups * self._config.env.group_size),
            "trigger_max_wait_s": thresholds.max_wait_s,
            "sjf_preference": self._supply.preference,
            **self._supply.bias.report(),
            **self._foresight.metrics(),
        }

    def take_alarms(self) -> list[str]:
        """Alarms raised since the last call."""
        return self._alarms.take()

    def _look_out(self, learner: LearnerState, *, num_aged: int) -> None:
        wait_s, bound_s = self._dispatcher.oldest_wait_s(self._now()), self._config.scheduler.dispatch.max_wait_s
        starved = f"a group has waited {wait_s:.0f} s to start; scheduler.dispatch.max_wait_s is {bound_s:g}"
        self._alarms.update("starvation", starved if wait_s > bound_s else None)
        self._alarms.update("length bias", self._supply.bias.alarm())
        self._alarms.update("length prediction", None if self._foresight.trusted else self._foresight.reason)
        masked, trained = learner.metrics.get("tokens_masked_stale", 0.0), learner.metrics.get("tokens", 0.0)
        share = masked / max(masked + trained, 1.0)
        wasted = f"{share:.0%} of the tokens of this step and {num_aged} ready episodes were too old to train"
        remedy = "raise scheduler.trigger.max_wait_s and min_samples, or scheduler.max_staleness"
        too_much = share > MAX_STALE_SHARE or num_aged > MAX_STALE_SHARE * learner.metrics.get("samples", math.inf)
        self._alarms.update("stale work", f"{wasted}: {remedy}" if too_much else None)

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must know beside the pool's index; plain values."""
        return {
            "next_group": self._next_group,
            "feedback": self._supply.feedback.state_dict(),
            "filters": self._filters.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to a saved state."""
        self._supply.feedback.load_state_dict(state["feedback"])
        self._filters.load_state_dict(state["filters"])

    def take_up(self, records: Iterable[GroupRecord], task: Callable[[GroupRecord], Task]) -> None:
        """Go on where another controller was: ledger and queues of a new scheduler, from what the pool knows. Groups
        that were being played are played from their start."""
        for record in records:
            self._next_group = max(self._next_group, record.group + 1)
            if record.counts:
                self.ledger.remember(record.counts)
                self.num_ended += 1
            else:
                self._admit_again(record, task(record))
        self.ledger.check()
        self._progress.changed(self._runnable, self._trainable)

    def begin_from(self, counts: Mapping[EpisodeState, int], *, next_group: int) -> None:
        """Go on where only the sums are known: episodes by final state."""
        self.ledger.remember(counts)
        self._next_group = next_group

    def learner_at(self, version: int, *, accumulated: Collection[int] = ()) -> None:
        """A learner of which this scheduler knew nothing trains `version`, and has accumulated these groups for it."""
        self._supply.learner_at(version, accumulated)
        self._replay_outlived()

    def rewind(self, version: int, lost: Iterable[GroupRecord], task: Callable[[GroupRecord], Task]) -> None:
        """The learner goes on from an earlier state, now called `version`: what it had trained since (`lost`) and what
        it had accumulated is ready again."""
        self._supply.rewind(version, now=self._now())
        for record in lost:
            self.ledger.revive(record.counts)
            self._admit_again(record, task(record))
        self._replay_outlived()
        self.ledger.check()
        self._progress.changed(self._runnable, self._trainable)

    def _replay_outlived(self) -> None:
        for group in self._supply.take_outlived():
            self._play_anew(group)

    def _play_anew(self, group: LiveGroup) -> None:
        """It is whole, and too old to train, though it did not grow old (see `Supply.has_outlived`)."""
        group.ledger.move(group.number, range(group.size), EpisodeState.PENDING)
        group.ref, group.summaries = None, ()
        group.attempt += 1
        group.forget()
        self._push_again(group)
        self._replayed.append((group.number, group.task))
        self._progress.changed(self._runnable)

    def _admit_again(self, record: GroupRecord, task: Task) -> None:
        """It waits as long as the next group that was admitted after it."""
        since = min([g.admitted_at for g in self._groups.values() if g.number > record.group], default=self._now())
        env = self._config.env
        group = self._add(task, env.group_size, self.ledger, redundancy=env.redundancy, number=record.group)
        group.admitted_at, group.attempt = since, record.attempt
        if record.ref is None:
            self._push_again(group)
            return
        for state in (EpisodeState.LEASED, EpisodeState.READY):
            self.ledger.move(group.number, range(len(record.episodes)), state)
        self._shed(group, range(len(record.episodes)))
        group.ref, group.summaries = record.ref, record.episodes
        if self._config.has_trainer:
            self._supply.put(group, now=self._now())
        else:
            self._collected(group)

    def _push_again(self, group: LiveGroup) -> None:
        (tokens,) = self._foresight.estimate([group.task])
        group.predicted_tokens = tokens or 0.0
        self._dispatcher.push(group)

    def recall(self, played: Iterable[tuple[Task, Sequence[int]]]) -> None:
        """Learn lengths from groups that were played before: (task, response tokens of the members), in order."""
        self._foresight.recall(played)

    # --- evaluation and the end ------------------------------------------------------------------------------------

    async def evaluate(self, tasks: Sequence[Task], *, num_samples: int = 1) -> list[Played]:
        """Play each task so often, outside the training ledger, and beside training if there is any; results in the
        order of `tasks`, failed ones too."""
        groups = [self._add(task, num_samples, self.evaluations) for task in tasks]
        results = [self._evaluations.add(group) for group in groups]
        self._dispatcher.evaluations.extend(groups)
        self._progress.changed(self._runnable)
        for result in results:
            while not result.done():
                self._evaluated.clear()
                await self._progress.wait(self._evaluated)
        return [result.result() for result in results]

    def cancel_all(self) -> tuple[GroupAttempt, ...]:
        """Give up everything that is still live; returns what that was."""
        groups = list(self._groups.values())
        for group in groups:
            self._dispatcher.places.release(group)
            members = [m for m in range(group.size) if group.ledger.state(group.number, m) not in FINAL]
            group.ledger.move(group.number, members, EpisodeState.CANCELLED)
            self._leave(group, EpisodeState.CANCELLED)
        for waiting in (self._dispatcher, self._supply, self._evaluations):
            waiting.clear()
        self._progress.changed(self._room, self._runnable)
        return tuple(GroupAttempt(group.number, group.attempt) for group in groups)

    # --- shared ----------------------------------------------------------------------------------------------------

    def _leave(self, group: LiveGroup, state: EpisodeState) -> None:
        """The group is no longer live: its members are in `state`, but for those that grew too old before."""
        del self._groups[group.number]
        self._dispatcher.stop_playing(group)
        if group.ledger is self.ledger:
            stale, others = {EpisodeState.DISCARDED_STALE: group.num_stale}, {state: group.size - group.num_stale}
            surplus = {EpisodeState.DISCARDED_SURPLUS: group.num_surplus}
            counts = {each: count for each, count in (others | stale | surplus).items() if count}
            trained_in = self.trained_version if state is EpisodeState.TRAINED else None
            self._ended.append(EndedGroup(group=group.number, counts=counts, trained_in=trained_in))
            self.num_ended += 1
        if not self._groups:
            self._progress.changed(self._all_over)

    def _give_up(self, reason: Exception | None) -> None:
        if reason is not None:
            self._progress.give_up(reason)


def _has_failed(summary: EpisodeSummary) -> bool:
    return summary.status in ("failed", "aborted")


def _error(summary: EpisodeSummary) -> str:
    return summary.error or "no reason given"
