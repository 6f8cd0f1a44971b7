"""Who gets what next: grants, groups that must run again, evaluations, and new groups by policy and pace.

Synchronous: one call, one decision, carried out in the ledger. The scheduler's shell calls it when something changed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence

import msgspec

from penstock.config import Config
from penstock.ports import Work
from penstock.scheduler.dispatch import DispatchDecision, PendingGroup, dispatch_policy
from penstock.scheduler.leases import Leases
from penstock.scheduler.live import LiveGroup
from penstock.scheduler.pacing import PacingState, pacing
from penstock.scheduler.places import Places
from penstock.types import EpisodeId, EpisodeState, GroupAttempt, SegmentGrant

EVALUATION_SHARE = 0.5
"""Of what may generate at once, while training groups wait to start."""


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """The next thing to send to `worker`: members of a group, or a grant for an episode that waits for one."""

    worker: str
    item: Work | SegmentGrant
    reason: str


class Demand(msgspec.Struct, frozen=True, kw_only=True):
    """What the learner's side lets run."""

    num_ready: int
    num_unserved: int
    """Groups in training, or trained into weights that no server serves yet."""
    groups_per_step: int


class Dispatcher:
    """Every group that is to be played or being played."""

    def __init__(self, config: Config, groups: dict[int, LiveGroup], *, now: Callable[[], float]) -> None:
        settings = config.scheduler
        self._groups, self._now = groups, now
        self._num_members, self._alternates = config.env.num_members, settings.alternates
        self._round = config.trainer.groups_per_step
        self._restarts = settings.alternates and settings.leftovers == "restart"
        self.policy = dispatch_policy(settings.dispatch, look_ahead=config.look_ahead)
        self.places = Places(max_running=config.max_running)
        self.evaluations: deque[LiveGroup] = deque()
        """Evaluation groups nobody plays yet."""
        self._pacing = pacing(config)
        self._leases = Leases(config)
        self._grants: deque[EpisodeId] = deque()
        """Episodes that wait for their next grant."""
        self._again: deque[LiveGroup] = deque()
        """Started groups that must be handed to a worker once more."""
        self._leftovers: deque[LiveGroup] = deque()
        """Groups that wait for a round of leftovers."""
        self._playing: set[int] = set()
        """Training groups started and not yet ready, filtered, failed or left over."""
        self._playing_leftovers: set[int] = set()
        self._evaluating: set[int] = set()
        """Evaluation groups being played."""
        self._max_evaluating = max(1, int(EVALUATION_SHARE * config.max_running) // config.validation.samples)

    @property
    def num_playing(self) -> int:
        """Training groups being played, those to be handed out again included."""
        return len(self._playing)

    @property
    def num_waiting(self) -> int:
        """Training groups that can still be started; leftovers only if they are enough for a round."""
        return len(self.policy) + len(self._leftovers) // self._round * self._round

    def push(self, group: LiveGroup) -> None:
        """An admitted group."""
        self.policy.push(_pending(group, since=group.admitted_at))

    def push_rest(self, group: LiveGroup, probe_tokens: int) -> None:
        """The probe of `group` ended; the rest of it may run."""
        group.predicted_tokens = probe_tokens
        self.policy.push_rest(_pending(group, since=self._now()), probe_tokens)

    def push_grant(self, episode: EpisodeId) -> None:
        """A played episode wants to generate again."""
        self._grants.append(episode)

    def push_again(self, group: LiveGroup) -> None:
        """A started group that lost its worker or failed."""
        self._again.append(group)

    def oldest_wait_s(self, now: float) -> float:
        """How long the oldest group that is to be started, or started again, has waited since its admission."""
        queued = [*self._leftovers, *self._again]
        return max([self.policy.oldest_wait_s(now), *(now - group.admitted_at for group in queued)])

    def playing(self, number: int, attempt: int) -> LiveGroup | None:
        """The group that a worker's message about `attempt` speaks of; None if nobody waits for that."""
        group = self._groups.get(number)
        return group if group is not None and group.worker is not None and group.attempt == attempt else None

    def stop_playing(self, group: LiveGroup) -> None:
        """The group is whole, or given up."""
        self._playing.discard(group.number)
        self._playing_leftovers.discard(group.number)
        self._evaluating.discard(group.number)

    def take_back(self, group: LiveGroup, *, keep: Iterable[int] = ()) -> None:
        """All members but those to keep are pending again, under a new attempt."""
        self.places.release(group)
        group.attempt += 1
        group.broken.clear()
        group.num_tokens = {member: group.num_tokens[member] for member in group.saved if member in group.num_tokens}
        kept = {*keep, *group.ledger.members(group.number, EpisodeState.PENDING)}
        group.ledger.move(group.number, [m for m in range(group.size) if m not in kept], EpisodeState.PENDING)

    def restart_leftovers(self) -> tuple[GroupAttempt, ...]:
        """With leftovers `restart`, what still plays when a batch is whole starts over in a later round. Returns the
        attempts that end here."""
        if not self._restarts:
            return ()
        playing = [self._groups[number] for number in sorted(self._playing)]
        attempts = tuple(GroupAttempt(group.number, group.attempt) for group in playing)
        self._again = deque(group for group in self._again if group.number not in self._playing)
        for group in playing:
            group.forget()
            self.take_back(group)
            self.stop_playing(group)
        self._leftovers.extend(playing)
        return attempts

    def clear(self) -> None:
        """Nobody waits for anything any more."""
        for queue in (self.evaluations, self._grants, self._again, self._leftovers):
            queue.clear()

    def next(self, demand: Demand) -> Assignment | None:
        """What runs now; None if nothing can."""
        gives_way = self._alternates and demand.num_unserved > 0
        if gives_way or self.places.free_grants <= 0:
            return None
        if granted := self._next_grant():
            return granted
        if self._again:
            return self._next_of(self._again, "runs again")
        if self.evaluations and self._may_evaluate:
            return self._next_evaluation()
        return self._next_start(demand)

    @property
    def _may_evaluate(self) -> bool:
        """Beside training, held-out tasks take no more than their share."""
        return not self.num_waiting or len(self._evaluating) < self._max_evaluating

    def _next_evaluation(self) -> Assignment | None:
        number = self.evaluations[0].number
        if assignment := self._next_of(self.evaluations, "evaluation"):
            self._evaluating.add(number)
        return assignment

    def _next_grant(self) -> Assignment | None:
        while self._grants:
            episode = self._grants.popleft()
            group, member = self.playing(episode.group, episode.attempt), episode.episode
            if group is None or group.worker is None:
                continue
            state = group.ledger.state(group.number, member)
            if state not in (EpisodeState.LEASED, EpisodeState.UNFINISHED):
                continue  # ended without it
            cut = state is EpisodeState.UNFINISHED
            if cut:
                group.ledger.move(group.number, [member], EpisodeState.LEASED)
            self.places.generate(group, [member])
            reason = "the next segment of a cut answer" if cut else "the next turn of an open episode"
            return Assignment(worker=group.worker, item=self._leases.grant(group, member), reason=reason)
        return None

    def _next_of(self, queue: deque[LiveGroup], reason: str) -> Assignment | None:
        """The group at the head of `queue`, as soon as there is a place for it."""
        size = queue[0].size
        worker = self.places.roomiest(size)
        if worker is None or self.places.free_grants < size:
            return None
        return self._hand_out(queue.popleft(), range(size), worker, reason)

    def _next_start(self, demand: Demand) -> Assignment | None:
        pace = self._pacing.decide(self._pacing_state(demand), groups_per_step=demand.groups_per_step)
        if pace.leftovers_only and pace.num_groups:
            return self._next_leftover(pace.reason)
        worker = self.places.roomiest(self._num_members)
        may_start = pace.num_groups > 0 and worker is not None
        free = self.places.free_grants
        while decision := self.policy.pop(now=self._now(), free=free, may_start=may_start):
            if self._can_start(decision):
                return self._start(decision, worker, pace.reason)
        return None

    def _next_leftover(self, pacing: str) -> Assignment | None:
        number = self._leftovers[0].number
        if assignment := self._next_of(self._leftovers, pacing):
            self._playing.add(number)
            self._playing_leftovers.add(number)
        return assignment

    def _can_start(self, decision: DispatchDecision) -> bool:
        """False for a group given up meanwhile, and for the rest of one that was taken back."""
        group = self._groups.get(decision.group.group)
        if group is None or decision.part != "rest":
            return group is not None
        return group.worker is not None and bool(group.ledger.members(group.number, EpisodeState.PENDING))

    def _start(self, decision: DispatchDecision, worker: str | None, pacing: str) -> Assignment:
        group = self._groups[decision.group.group]
        if decision.part == "rest":
            return self._give(group, range(1, group.size), decision.reason)
        assert worker is not None
        self._playing.add(group.number)
        members = range(group.size) if decision.part == "whole" else range(1)
        return self._hand_out(group, members, worker, f"{decision.reason}; {pacing}")

    def _hand_out(self, group: LiveGroup, members: Sequence[int], worker: str, reason: str) -> Assignment:
        """Let `worker` play the group, `members` first."""
        self.places.reserve(group, worker)
        return self._give(group, members, reason)

    def _give(self, group: LiveGroup, members: Sequence[int], reason: str) -> Assignment:
        assert group.worker is not None
        pending = [m for m in group.ledger.members(group.number, EpisodeState.PENDING) if m in members]
        group.ledger.move(group.number, pending, EpisodeState.LEASED)
        self.places.generate(group, pending)
        return Assignment(worker=group.worker, item=self._leases.work(group, members), reason=reason)

    def _pacing_state(self, demand: Demand) -> PacingState:
        return PacingState(
            num_in_flight=len(self._playing) + demand.num_ready + demand.num_unserved,
            num_playing=len(self._playing),
            num_ready=demand.num_ready,
            num_unserved=demand.num_unserved,
            num_leftovers=len(self._leftovers),
            playing_leftovers=bool(self._playing_leftovers),
        )


def _pending(group: LiveGroup, *, since: float) -> PendingGroup:
    return PendingGroup(
        group=group.number,
        task=group.task,
        size=group.size,
        admitted_at=since,
        predicted_tokens=group.predicted_tokens,
    )
