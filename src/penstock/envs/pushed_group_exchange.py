"""Matches leases with groups that external programs played and scored. Both sides are served in order of arrival.

A program that offers a group waits until a lease takes it. This wait is the only pacing: the program plays no further
group meanwhile. A group that is too stale to train when it reaches the front is rejected at once, so that it does not
delay newer groups.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial

from penstock.deadline import warn_if_stalled
from penstock.envs.dialogue import EpisodeFailure
from penstock.envs.manager import Ended
from penstock.ports.work import Work
from penstock.samples import Trajectory, Turn
from penstock.types import NO_VERSION, TrajectoryStatus

RECENT_S = 60.0
"""Seconds after a group that can be trained in which refused groups fail no lease."""
STALL_WARNING_S = 60.0
"""Seconds that a lease waits for a group before the wait is reported."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredEpisode:
    """One member of a pushed group."""

    turns: list[Turn]
    reward: float
    status: TrajectoryStatus


@dataclass(slots=True, kw_only=True, eq=False)
class Offer:
    """A group offered for training."""

    episodes: list[ScoredEpisode]
    source: str
    """Name of the program that pushed the group."""
    outcome: asyncio.Future[str | None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """None when a lease has taken the group; the reason when the group is rejected, because it is too stale."""


class Exchange:
    """A `WorkPlayer` that waits for groups from external programs instead of playing."""

    def __init__(self, *, max_staleness: int, newest: Callable[[], int], holder: Callable[[], str]) -> None:
        """`newest`: returns the served policy_version. `holder`: returns the programs that should push the next group,
        for stall reports."""
        self._max_staleness, self._newest, self._holder = max_staleness, newest, holder
        self._leases: deque[asyncio.Future[Offer]] = deque()
        self._offers: deque[Offer] = deque()
        self._last_offer_at = -math.inf
        self.has_begun = False
        """Whether a lease has ever arrived, so that training has begun."""
        self.published = NO_VERSION
        """Newest policy_version in the work so far."""
        self.counts: Counter[str] = Counter()
        """Number of groups by outcome: `offered`, `refused`, `taken`, `stale`, and counts that the caller adds."""

    @property
    def num_offers(self) -> int:
        """Number of groups that wait for a lease."""
        return len(self._offers)

    def num_offers_of(self, source: str) -> int:
        return sum(offer.source == source for offer in self._offers)

    def offer(self, offer: Offer) -> None:
        """Add a group to the queue. `offer.outcome` says how it leaves the queue."""
        self.counts["offered"] += 1
        self._last_offer_at = time.monotonic()
        self._offers.append(offer)
        self._match()

    def refuse(self, reason: str, *, is_only: bool) -> None:
        """Count a pushed group that cannot be trained.

        The episodes of the first waiting lease fail with `reason`, because nothing else would tell what is wrong. But
        they wait on if its environment is not the only one, or if a group that can be trained has come recently.
        """
        self.counts["refused"] += 1
        if not is_only or time.monotonic() - self._last_offer_at < RECENT_S:
            return
        self._leases = deque(lease for lease in self._leases if not lease.done())
        if self._leases:
            self._leases.popleft().set_exception(EpisodeFailure(reason))

    async def play(self, work: Work, ended: Ended, *, begun: Mapping[int, Trajectory] | None = None) -> None:
        """Wait for the next group and end all members of `work` with its episodes. `begun` must be empty, because
        external programs never leave partial episodes."""
        assert not begun, "external programs push whole episodes only"
        started_at = time.time()
        lease: asyncio.Future[Offer] = asyncio.get_running_loop().create_future()
        self._leases.append(lease)
        self.has_begun = True
        self.published = max(self.published, work.policy_version)
        self._match()
        trajectory = partial(Trajectory, task_id=work.task.task_id, started_at=started_at)
        try:
            waiter = f"group {work.group}"
            with warn_if_stalled(STALL_WARNING_S, waiter=waiter, resource="a pushed group", holder=self._holder):
                offer = await lease
        except EpisodeFailure as error:
            for episode in work.episodes:
                failed = trajectory(episode=episode, turns=[], reward=0.0, status="failed", error=str(error))
                ended(replace(failed, finished_at=time.time()), "")
            return
        except asyncio.CancelledError:
            self._give_back(lease)
            raise
        self.counts["taken"] += 1
        for episode, scored in zip(work.episodes, offer.episodes, strict=True):
            completed = trajectory(episode=episode, turns=scored.turns, reward=scored.reward, status=scored.status)
            ended(replace(completed, finished_at=time.time()), "")
        if not offer.outcome.done():
            offer.outcome.set_result(None)

    def _give_back(self, lease: asyncio.Future[Offer]) -> None:
        """Return the group of a cancelled lease, if it has one, to the front of the queue."""
        if lease.done() and not lease.cancelled() and lease.exception() is None:
            self._offers.appendleft(lease.result())
            self._match()

    def _match(self) -> None:
        while self._offers and self._leases:
            if self._leases[0].done():
                self._leases.popleft()
            elif reason := self._rejection(self._offers[0]):
                self.counts["stale"] += 1
                offer = self._offers.popleft()
                if not offer.outcome.done():
                    offer.outcome.set_result(reason)
            else:
                self._leases.popleft().set_result(self._offers.popleft())

    def _rejection(self, offer: Offer) -> str | None:
        """Return the reason why a group is too stale to train; None if it can be trained."""
        segments = [segment for each in offer.episodes for turn in each.turns for segment in turn.segments]
        newest = max((span.policy_version for each in segments for span in each.spans), default=NO_VERSION)
        served = self._newest()
        if newest == NO_VERSION or served - newest <= self._max_staleness:
            return None
        return (
            f"its youngest token is of policy_version {newest}, {served} is served, and scheduler.max_staleness is "
            f"{self._max_staleness}"
        )
