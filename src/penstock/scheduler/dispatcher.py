"""The dispatcher decides what runs next.

The order is: grants, interrupted groups, evaluations, then new groups by dispatch policy and pacing. The code is
synchronous: each call of `next_assignment` makes one decision, and updates the ledger and the stages of groups. The
scheduler calls it when its inputs have changed.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

import msgspec

from penstock.config import Config
from penstock.ports.work import Work
from penstock.scheduler.active_group import ActiveGroup, Stage
from penstock.scheduler.active_groups import ActiveGroups
from penstock.scheduler.dispatch import DispatchPolicy
from penstock.scheduler.leases import Leases
from penstock.scheduler.pacing import PacingState, pace
from penstock.scheduler.supply import Supply
from penstock.scheduler.worker_capacity import WorkerCapacity
from penstock.types import EpisodeId, EpisodeState, GroupAttempt, SegmentGrant

EVALUATION_SHARE = 0.5
"""Share of `max_running` that evaluations may take while training groups wait to start."""


class Assignment(msgspec.Struct, frozen=True, kw_only=True):
    """An item to send to `worker`: members of a group, or a grant for a waiting episode."""

    worker: str
    item: Work | SegmentGrant
    reason: str


class Dispatcher:
    """Hands waiting groups to workers."""

    def __init__(self, config: Config, groups: ActiveGroups, supply: Supply) -> None:
        settings = config.scheduler
        self._groups, self._supply, self._now = groups, supply, groups.now
        self._alternates = settings.alternates
        self._groups_per_round = config.trainer.groups_per_step
        self._restarts = settings.alternates and settings.leftovers == "restart"
        self.policy = DispatchPolicy(settings.dispatch, look_ahead=config.look_ahead)
        self.capacity = WorkerCapacity(max_running=config.max_running)
        self._num_members = 0
        """Largest number of members that a group has had so far."""
        self.grant_requests: deque[EpisodeId] = deque()
        """Episodes that wait for their next grant, in the order of their requests."""
        self.use(config)

    def use(self, config: Config) -> None:
        """Decide by the settings of `config` from now on."""
        self._paced_by = config.scheduler if config.has_trainer else None
        self._leases = Leases(config)
        self._num_members = max(self._num_members, config.env.num_members)
        self._max_evaluating = max(1, int(EVALUATION_SHARE * config.max_running) // config.validation.samples)
        self.capacity.max_running = config.max_running
        self.policy.change(config.scheduler.dispatch, look_ahead=config.look_ahead)

    @property
    def num_playing(self) -> int:
        """Return the number of training groups that are PLAYING or INTERRUPTED."""
        return self._groups.num_started("train", "leftover")

    @property
    def num_waiting(self) -> int:
        """Return the number of training groups that can still start. Leftovers count in full rounds only."""
        leftovers = self._groups.count(Stage.LEFTOVER)
        return len(self.policy) + leftovers // self._groups_per_round * self._groups_per_round

    def oldest_wait_s(self) -> float:
        """Return the longest time, in seconds, that a group has waited to start or to restart."""
        now, queued = self._now(), [*self._groups.at(Stage.LEFTOVER), *self._groups.at(Stage.INTERRUPTED)]
        return max([self.policy.oldest_wait_s(now), *(now - group.admitted_at for group in queued)])

    def enqueue_group(self, group: ActiveGroup) -> None:
        """Let the dispatch policy decide when `group` starts."""
        self._groups.move(group, Stage.WAITING, kind="train")
        self.policy.push(group)

    def enqueue_rest(self, group: ActiveGroup, probe_tokens: int) -> None:
        """Queue the pending members of `group`, after its probe took `probe_tokens`."""
        if group.members(EpisodeState.PENDING):
            group.predicted_tokens = probe_tokens
            self.policy.push_rest(group, probe_tokens, now=self._now())

    def take_back(self, group: ActiveGroup, *, keep: Iterable[int] = ()) -> None:
        """End the current attempt of `group`. All members except `keep` become pending again."""
        self.capacity.release_slots(group)
        group.attempt += 1
        group.broken = frozenset()
        group.num_tokens = {m: tokens for m, tokens in group.num_tokens.items() if m in group.partial_rollouts}
        kept = {*keep, *group.members(EpisodeState.PENDING)}
        group.move_members([m for m in range(group.size) if m not in kept], EpisodeState.PENDING)

    def restart_leftovers(self) -> tuple[GroupAttempt, ...]:
        """Make the started groups leftovers, so that they start over in a later round. Returns their ended attempts.

        The scheduler calls this when a batch is complete. It does nothing unless `scheduler.leftovers` is `restart` in
        an alternating mode.
        """
        if not self._restarts:
            return ()
        started = [*self._groups.at(Stage.PLAYING), *self._groups.at(Stage.INTERRUPTED)]
        cut = sorted((group for group in started if group.kind != "evaluation"), key=lambda group: group.number)
        attempts = tuple(group.group_attempt for group in cut)
        for group in cut:
            group.forget_progress()
            self.take_back(group)
            self._groups.move(group, Stage.LEFTOVER, kind="leftover")
        return attempts

    def next_assignment(self) -> Assignment | None:
        """Return the next item that can run now; None if there is none."""
        gives_way = self._alternates and self._supply.num_unserved > 0
        if gives_way or self.capacity.free_grants <= 0:
            return None
        if granted := self._next_grant():
            return granted
        if self._groups.count(Stage.INTERRUPTED):
            return self._start_whole(Stage.INTERRUPTED, "runs again")
        may_evaluate = not self.num_waiting or self._groups.num_started("evaluation") < self._max_evaluating
        if self._groups.count(Stage.HELD_OUT) and may_evaluate:
            return self._start_whole(Stage.HELD_OUT, "evaluation")
        return self._next_start()

    def _next_grant(self) -> Assignment | None:
        while self.grant_requests:
            episode = self.grant_requests.popleft()
            group, member = self._groups.find_attempt(episode.group_attempt), episode.episode
            if group is None or group.worker is None:
                continue
            state = group.ledger.state(group.number, member)
            if state not in (EpisodeState.LEASED, EpisodeState.UNFINISHED):
                continue  # the episode ended without the grant
            was_cut = state is EpisodeState.UNFINISHED
            if was_cut:
                group.move_members([member], EpisodeState.LEASED)
            self.capacity.take_grants(group, [member])
            reason = "the next segment of a cut answer" if was_cut else "the next turn of an open episode"
            return Assignment(worker=group.worker, item=self._leases.grant(group, member), reason=reason)
        return None

    def _start_whole(self, stage: Stage, reason: str) -> Assignment | None:
        """Start the first group at `stage`; None if there is no capacity for all its members."""
        group = self._groups.first(stage)
        assert group is not None
        worker = self.capacity.find_worker(group.size)
        if worker is None or self.capacity.free_grants < group.size:
            return None
        return self._start(group, range(group.size), worker, reason)

    def _next_start(self) -> Assignment | None:
        pacing = pace(self._paced_by, self.pacing_state)
        if pacing.leftovers_only and pacing.num_groups:
            return self._start_whole(Stage.LEFTOVER, pacing.reason)
        worker = self.capacity.find_worker(self._num_members)
        may_start = pacing.num_groups > 0 and worker is not None
        free = self.capacity.free_grants
        while decision := self.policy.pop(now=self._now(), free=free, may_start=may_start):
            group = decision.group
            if self._groups.get(group.number) is not group:
                continue  # it has ended
            if decision.part != "rest":
                assert worker is not None
                members = range(group.size) if decision.part == "whole" else range(1)
                return self._start(group, members, worker, f"{decision.reason}; {pacing.reason}")
            if group.worker is not None and group.members(EpisodeState.PENDING):  # else its attempt has ended
                return self._lease(group, range(1, group.size), decision.reason)
        return None

    def _start(self, group: ActiveGroup, members: Sequence[int], worker: str, reason: str) -> Assignment:
        """Let `worker` play `group`, starting with `members`."""
        self.capacity.reserve_slots(group, worker)
        self._groups.move(group, Stage.PLAYING)
        return self._lease(group, members, reason)

    def _lease(self, group: ActiveGroup, members: Sequence[int], reason: str) -> Assignment:
        assert group.worker is not None
        pending = [member for member in group.members(EpisodeState.PENDING) if member in members]
        group.move_members(pending, EpisodeState.LEASED)
        self.capacity.take_grants(group, pending)
        work = self._leases.work(group, members, policy_version=self._supply.trained_version)
        return Assignment(worker=group.worker, item=work, reason=reason)

    @property
    def pacing_state(self) -> PacingState:
        """Return the counts of training groups that decide how many may start."""
        return PacingState(
            groups_per_step=self._supply.groups_per_step,
            num_playing=self.num_playing,
            num_ready=self._supply.num_ready,
            num_unserved=self._supply.num_unserved,
            num_leftovers=self._groups.count(Stage.LEFTOVER),
            playing_leftovers=self._groups.num_started("leftover") > 0,
        )
