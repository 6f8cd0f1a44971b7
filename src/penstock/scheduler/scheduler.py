"""The thin asynchronous shell around the pure deciders: owns the ledger, holds the groups in flight, wakes waiters.

Methods that wait re-evaluate their decider after every change and raise `Stalled` if nothing at all changes for
`stall_s`. Everything else is synchronous, so that one event is one consistent change of state.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from penstock.config import Config
from penstock.deadline import deadline
from penstock.ports import Work
from penstock.scheduler.dispatch import PendingGroup, dispatch_policy
from penstock.scheduler.filters import Drop, DropEqualRewards, GroupFilter, KeepAll
from penstock.scheduler.ledger import Ledger
from penstock.scheduler.staleness import AdmissionPolicy, StalenessPolicy
from penstock.scheduler.trigger import CountOrTimeoutTrigger, TriggerState
from penstock.types import (
    EVAL_TAG,
    NO_VERSION,
    EpisodeId,
    EpisodeLease,
    EpisodeState,
    EpisodeSummary,
    GroupRef,
    PayloadRef,
    Sampling,
    SegmentGrant,
    Task,
    stable_seed,
)


class NothingToLearn(RuntimeError):
    """Group after group was filtered; the message says what to change."""

    self_explanatory = True


class TooManyFailures(RuntimeError):
    """Group after group failed in its environment; the message quotes the last error."""

    self_explanatory = True


@dataclass(slots=True, kw_only=True)
class _Group:
    """A live group."""

    task: Task
    size: int
    attempt: int = 0
    worker: str | None = None
    generating: set[int] = field(default_factory=set)
    """Members that hold a segment grant."""
    summaries: Sequence[EpisodeSummary] = ()
    ref: PayloadRef | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Assignment:
    """The next thing to send to `worker`: a new group, or a grant for an episode that waits for one."""

    worker: str
    item: Work | SegmentGrant
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainBatch:
    """Groups to accumulate now; `step` says whether an optimizer step follows."""

    groups: tuple[GroupRef, ...]
    step: bool
    reason: str
    discarded: tuple[int, ...] = ()
    """Groups found too old meanwhile."""


Record = Callable[[str, str, Mapping[str, Any]], None]
"""Called as record(decider, reason, inputs) with every decision."""


class Scheduler:
    """Admission, dispatch, collection and trigger of one run."""

    max_failed_groups = 20
    """Groups in a row that may fail before the run does."""

    def __init__(self, config: Config, *, now: Callable[[], float], record: Record) -> None:
        self._config, self._now, self._record = config, now, record
        settings, group_size = config.scheduler, config.env.group_size
        self.ledger = Ledger()
        self.evaluations = Ledger()
        self.policy_version = NO_VERSION
        """Version the servers serve; NO_VERSION before the first weights."""
        self.trained_version = 0
        """Version the learner is training."""
        self._staleness = StalenessPolicy(max_staleness=settings.max_staleness)
        self._trigger = CountOrTimeoutTrigger.from_samples(
            use=settings.trigger.use,
            min_samples=settings.trigger.min_samples,
            max_wait_s=settings.trigger.max_wait_s,
            group_size=group_size,
            groups_per_step=config.trainer.groups_per_step,
        )
        smallest_step = self._trigger.min_groups if settings.trigger.use == "step" else config.trainer.groups_per_step
        self._admission = AdmissionPolicy(max_staleness=settings.max_staleness, groups_per_step=smallest_step)
        self._filter: GroupFilter = DropEqualRewards() if settings.filter_equal_rewards else KeepAll()
        self._dispatch = dispatch_policy(settings.dispatch)
        self._groups: dict[int, _Group] = {}
        self._next_group = 0
        self._waiting_grants: deque[tuple[EpisodeId, bool]] = deque()
        self._workers: dict[str, int] = {}
        """Free episode places per worker."""
        self._running = 0
        """Episodes that hold a segment grant."""
        self._ready: dict[int, float] = {}
        """Whole groups ready to train, in the order they became so, with the time."""
        self._training: list[int] = []
        self._num_unpublished = 0
        """Groups trained into weights that no server serves yet."""
        self._failed_in_a_row = self._filtered_in_a_row = 0
        self._results: dict[int, asyncio.Future[EpisodeSummary]] = {}
        self._hopeless: Exception | None = None
        """Why the run cannot go on; raised by whoever waits next."""
        self._changed = asyncio.Event()
        self._stall_s = config.env.episode_timeout_s * config.env.max_attempts + 600.0

    # --- admission -------------------------------------------------------------------------------------------------

    @property
    def num_in_flight(self) -> int:
        """Groups between admission and the moment the weights they trained are served."""
        return len(self.ledger.live_groups()) + self._num_unpublished

    async def admit(self, task: Task) -> int:
        """Wait for room in the staleness budget, then take `task` in; returns its group."""
        while True:
            decision = self._admission.decide(num_in_flight=self.num_in_flight)
            if decision.num_groups > 0:
                break
            await self._change("admission", "room in the staleness budget", "the trainer")
        self._record("admission", decision.reason, {"group": self._next_group, "task": task.task_id})
        return self._add(task, self._config.env.group_size, self.ledger)

    def _add(self, task: Task, size: int, ledger: Ledger) -> int:
        group, self._next_group = self._next_group, self._next_group + 1
        ledger.admit(group, size)
        self._groups[group] = _Group(task=task, size=size)
        self._dispatch.push(PendingGroup(group=group, task=task, size=size, admitted_at=self._now()))
        self._notify()
        return group

    # --- dispatch --------------------------------------------------------------------------------------------------

    def worker_joined(self, worker: str, capacity: int) -> None:
        """`worker` can hold `capacity` episodes."""
        self._workers[worker] = capacity
        self._notify()

    def request_grant(self, episode: EpisodeId, *, unfinished: bool) -> None:
        """A leased episode has used its grant and wants another one. Unknown (cancelled) episodes are ignored."""
        group = self._groups.get(episode.group)
        if group is None or group.attempt != episode.attempt:
            return
        self._stop_generating(group, {episode.episode})
        if unfinished:
            self._ledger(group).move(episode.group, [episode.episode], EpisodeState.UNFINISHED)
        self._waiting_grants.append((episode, unfinished))
        self._notify()

    async def next_assignment(self) -> Assignment:
        """Wait for something to run and for the slots to run it: waiting grants first, then new groups."""
        while True:
            if assignment := self._next_grant() or self._next_group_start():
                self._record("dispatch", assignment.reason, {"worker": assignment.worker})
                return assignment
            await self._change("dispatch", "a task and free slots", "admission or the rollout servers")

    def _next_grant(self) -> Assignment | None:
        while self._waiting_grants and self._running < self._config.max_running:
            episode, unfinished = self._waiting_grants.popleft()
            group = self._groups.get(episode.group)
            if group is None or group.worker is None or group.attempt != episode.attempt:
                continue
            if unfinished:
                self._ledger(group).move(episode.group, [episode.episode], EpisodeState.LEASED)
            self._start_generating(group, {episode.episode})
            reason = "the next segment of a cut answer" if unfinished else "the next turn of an open episode"
            return Assignment(worker=group.worker, item=self._grant(episode), reason=reason)
        return None

    def _next_group_start(self) -> Assignment | None:
        worker = max(self._workers, key=lambda name: self._workers[name], default=None)
        free = min(self._config.max_running - self._running, self._workers[worker] if worker else 0)
        if worker is None or not len(self._dispatch) or free < self._config.env.group_size:
            return None
        while decision := self._dispatch.pop(now=self._now()):
            if group := self._groups.get(decision.group.group):
                work = self._lease(decision.group.group, group, worker)
                return Assignment(worker=worker, item=work, reason=decision.reason)
        return None

    def _lease(self, number: int, group: _Group, worker: str) -> Work:
        members = range(group.size)
        self._ledger(group).move(number, members, EpisodeState.LEASED)
        group.worker = worker
        self._workers[worker] -= group.size
        self._start_generating(group, set(members))
        seed, tag, task = self._config.seed, group.task.tag, group.task
        env_seed = stable_seed(seed, tag, task.index)
        episodes = [EpisodeId(tag, number, member, group.attempt) for member in members]
        evaluating = tag == EVAL_TAG
        env = self._config.env
        return Work(
            task=task,
            leases=tuple(
                EpisodeLease(
                    episode=episode,
                    env_seed=env_seed,
                    sampling_seed=stable_seed(seed, tag, task.index, episode.episode, episode.attempt),
                    deadline_s=env.episode_timeout_s,
                )
                for episode in episodes
            ),
            grants=tuple(self._grant(episode) for episode in episodes),
            sampling=Sampling(
                temperature=env.eval_temperature if evaluating else env.temperature, max_new_tokens=env.max_new_tokens
            ),
            keep_text=evaluating,
        )

    def _grant(self, episode: EpisodeId) -> SegmentGrant:
        tokens = self._config.env.max_new_tokens
        return SegmentGrant(episode=episode, max_tokens=min(tokens, self._config.scheduler.segment_length or tokens))

    def task_of(self, number: int) -> Task | None:
        """The task of a live group; None once nobody waits for it."""
        group = self._groups.get(number)
        return group.task if group else None

    # --- collection ------------------------------------------------------------------------------------------------

    def finish(self, number: int, ref: PayloadRef | None, summaries: Sequence[EpisodeSummary]) -> EpisodeState | None:
        """A worker played the group. Returns what its episodes are now; None if nobody waits for it any more
        (cancelled, or an older attempt)."""
        group = self._groups.get(number)
        if group is None or not summaries or summaries[0].episode.attempt != group.attempt or group.worker is None:
            return None
        self._workers[group.worker] += group.size
        self._stop_generating(group, set(range(group.size)))
        group.worker = None
        errors = [summary.error for summary in summaries if summary.status == "failed"]
        if errors:
            state = self._fail(number, group, errors[0] or "no reason given", summaries)
        elif number in self._results:
            state = self._evaluated(number, summaries[0])
        else:
            state = self._rewarded(number, group, ref, summaries)
        self._notify()
        return state

    def _fail(self, number: int, group: _Group, error: str, summaries: Sequence[EpisodeSummary]) -> EpisodeState:
        ledger = self._ledger(group)
        group.attempt += 1
        if group.attempt < self._config.env.max_attempts:
            self._record("retry", error, {"group": number, "attempt": group.attempt})
            ledger.move(number, ledger.members(number), EpisodeState.PENDING)
            self._dispatch.push(PendingGroup(group=number, task=group.task, size=group.size, admitted_at=self._now()))
            return EpisodeState.PENDING
        self._record("retry", f"given up after {group.attempt} attempts: {error}", {"group": number})
        ledger.move(number, ledger.members(number), EpisodeState.FAILED)
        del self._groups[number]
        self._failed_in_a_row += 1
        if number in self._results:
            self._results.pop(number).set_result(summaries[0])
        if self._failed_in_a_row >= self.max_failed_groups:
            self._hopeless = TooManyFailures(
                f"{self._failed_in_a_row} groups in a row failed; the last error was: {error}"
            )
        return EpisodeState.FAILED

    def _evaluated(self, number: int, summary: EpisodeSummary) -> EpisodeState:
        self._failed_in_a_row = 0
        for state in (EpisodeState.READY, EpisodeState.TRAINING, EpisodeState.TRAINED):
            self.evaluations.move(number, [0], state)
        del self._groups[number]
        self._results.pop(number).set_result(summary)
        return EpisodeState.TRAINED

    def _rewarded(
        self, number: int, group: _Group, ref: PayloadRef | None, summaries: Sequence[EpisodeSummary]
    ) -> EpisodeState:
        self._failed_in_a_row = 0
        self.ledger.move(number, range(group.size), EpisodeState.READY)
        verdict = self._filter.decide(summaries)
        if isinstance(verdict, Drop):
            self._record("filter", verdict.reason, {"group": number})
            self.ledger.move(number, range(group.size), EpisodeState.FILTERED)
            del self._groups[number]
            self._count_filtered(verdict.reason)
            return EpisodeState.FILTERED
        self._filtered_in_a_row = 0
        group.ref, group.summaries = ref, summaries
        self._ready[number] = self._now()
        return EpisodeState.READY

    def _count_filtered(self, reason: str) -> None:
        self._filtered_in_a_row += 1
        if self._filtered_in_a_row >= self._config.scheduler.max_filtered_in_a_row:
            self._hopeless = NothingToLearn(
                f"{self._filtered_in_a_row} groups in a row were filtered, the last because {reason}: the task is too "
                "hard or too easy for this policy. Warm-start it longer or shorter, change the task, or set "
                "scheduler.filter_equal_rewards=false or a larger scheduler.max_filtered_in_a_row"
            )

    # --- training --------------------------------------------------------------------------------------------------

    async def next_batch(self) -> TrainBatch:
        """Wait until the trigger fires; the groups returned are `training`."""
        discarded: list[int] = []
        while True:
            discarded += self._sweep()
            state = TriggerState(
                num_ready=len(self._ready),
                num_accumulated=len(self._training),
                waiting_since=next(iter(self._ready.values()), None),
            )
            decision = self._trigger.decide(state, now=self._now())
            if decision.num_groups:
                break
            await self._change("the trainer", "ready groups", "the environment workers", until=decision.look_again_at)
        self._record("trigger", decision.reason, {"groups": decision.num_groups, "step": decision.step})
        groups = tuple(self._take(number) for number in list(self._ready)[: decision.num_groups])
        return TrainBatch(groups=groups, step=decision.step, reason=decision.reason, discarded=tuple(discarded))

    def _take(self, number: int) -> GroupRef:
        group = self._groups[number]
        del self._ready[number]
        members = self.ledger.members(number, EpisodeState.READY)
        self.ledger.move(number, members, EpisodeState.TRAINING)
        self._training.append(number)
        if group.ref is None:
            raise RuntimeError(f"group {number} is ready without a payload")
        return GroupRef(group=number, task_id=group.task.task_id, ref=group.ref, episodes=members)

    def _sweep(self) -> list[int]:
        """Discard what is too old to train; returns the groups of which nothing is left."""
        gone = []
        for number in list(self._ready):
            group = self._groups[number]
            stale = [
                member
                for member in self.ledger.members(number, EpisodeState.READY)
                if self._staleness.is_stale(group.summaries[member], trained_version=self.trained_version)
            ]
            if stale:
                self._record("staleness", f"{len(stale)} episodes too old to train", {"group": number})
                self.ledger.move(number, stale, EpisodeState.DISCARDED_STALE)
            if number not in self.ledger:
                del self._groups[number], self._ready[number]
                gone.append(number)
        return gone

    def stepped(self, version: int) -> tuple[int, ...]:
        """The learner made `version` from everything in training; returns those groups."""
        trained, self._training = tuple(self._training), []
        for number in trained:
            self.ledger.move(number, self.ledger.members(number, EpisodeState.TRAINING), EpisodeState.TRAINED)
            del self._groups[number]
        self.trained_version = version
        self._num_unpublished += len(trained)
        self.ledger.check()
        self._notify()
        return trained

    def published(self, version: int, num_groups: int) -> None:
        """Every server serves `version`: the `num_groups` it was trained on leave flight."""
        self.policy_version = version
        self._num_unpublished -= num_groups
        self._notify()

    # --- evaluation and the end ------------------------------------------------------------------------------------

    async def evaluate(self, tasks: Sequence[Task]) -> list[EpisodeSummary]:
        """Play each task once, outside the training ledger; results in the order of `tasks`, failed ones too."""
        loop = asyncio.get_running_loop()
        futures: list[asyncio.Future[EpisodeSummary]] = []
        for task in tasks:
            number = self._add(task, 1, self.evaluations)
            futures.append(self._results.setdefault(number, loop.create_future()))
        while left := sum(not future.done() for future in futures):
            await self._change("evaluation", f"{left} of {len(tasks)} episodes", "the environment workers")
        return [future.result() for future in futures]

    def cancel_all(self) -> tuple[int, ...]:
        """Give up everything that is still in flight; returns those groups."""
        groups = tuple(self._groups)
        for number in groups:
            group = self._groups.pop(number)
            ledger = self._ledger(group)
            members = [m for m in range(group.size) if ledger.state(number, m) not in _FINISHED]
            ledger.move(number, members, EpisodeState.CANCELLED)
            if group.worker is not None:
                self._workers[group.worker] += group.size
            self._stop_generating(group, set(range(group.size)))
        self._ready.clear()
        self._training.clear()
        self._results.clear()
        self._notify()
        return groups

    # --- shared ----------------------------------------------------------------------------------------------------

    def _ledger(self, group: _Group) -> Ledger:
        return self.evaluations if group.task.tag == EVAL_TAG else self.ledger

    def _start_generating(self, group: _Group, members: set[int]) -> None:
        self._running += len(members - group.generating)
        group.generating |= members

    def _stop_generating(self, group: _Group, members: set[int]) -> None:
        self._running -= len(members & group.generating)
        group.generating -= members

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    async def _change(self, waiter: str, resource: str, holder: str, *, until: float = float("inf")) -> None:
        """Until anything changes, or until the time `until`. Raises what makes the run hopeless."""
        if self._hopeless is not None:
            raise self._hopeless
        changed = self._changed
        remaining = until - self._now()
        if remaining < self._stall_s:
            try:
                await asyncio.wait_for(changed.wait(), max(remaining, 0))
            except TimeoutError:
                return
        else:
            async with deadline(self._stall_s, waiter=waiter, resource=resource, holder=holder):
                await changed.wait()


_FINISHED = frozenset({EpisodeState.DISCARDED_STALE})
"""Final states a member of a live group can be in."""
