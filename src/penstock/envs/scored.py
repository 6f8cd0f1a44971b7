"""Groups that other programs played and scored, in exchange for leases: first come, first served on both sides.

Whoever brings a group waits until a lease takes it, which is all the pacing there is: a program that waits plays no
other one meanwhile. A group that nobody may train any more when its turn comes is turned away at once, so that it does
not hold up younger ones.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from penstock.deadline import patient
from penstock.envs.calls import EpisodeFailure
from penstock.envs.manager import Ended
from penstock.ports import Work
from penstock.types import NO_VERSION, EpisodeId, Trajectory, Turn

PATIENCE_S = 60.0
"""For a lease to wait for a group, before that is worth a report."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ScoredEpisode:
    """One member."""

    turns: list[Turn]
    reward: float
    truncated: bool

    @property
    def newest_version(self) -> int:
        """Of its tokens; NO_VERSION if none is known."""
        segments = (segment for turn in self.turns for segment in turn.segments)
        return max((span.policy_version for each in segments for span in each.spans), default=NO_VERSION)


class TurnedAway(Exception):
    """A group that will not be trained; says why."""


@dataclass(slots=True, kw_only=True, eq=False)
class Offer:
    """A group whose turn has not come."""

    episodes: list[ScoredEpisode]
    source: str
    """Who brought it."""
    taken: asyncio.Future[None] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    """Ends when a lease has taken it, or with `TurnedAway`."""


class Exchange:
    """Plays work, for the worker, by waiting for somebody who has."""

    def __init__(self, *, max_staleness: int, newest: Callable[[], int], holder: Callable[[], str]) -> None:
        """`newest`: the policy_version that is served. `holder`: who should bring the next group, for reports."""
        self._max_staleness, self._newest, self._holder = max_staleness, newest, holder
        self._leases: deque[asyncio.Future[Offer]] = deque()
        self._offers: deque[Offer] = deque()
        self.has_begun = False
        """There is a lease, or was: the run trains."""
        self.counts: Counter[str] = Counter()
        """Groups by what became of them here."""

    @property
    def num_offers(self) -> int:
        """Groups that wait for a lease."""
        return len(self._offers)

    def num_offers_of(self, source: str) -> int:
        return sum(offer.source == source for offer in self._offers)

    def offer(self, offer: Offer) -> None:
        """Wait in line."""
        self.counts["offered"] += 1
        self._offers.append(offer)
        self._match()

    def refuse(self, reason: str) -> None:
        """Somebody brought what cannot be trained: that is the failure of an episode, if one waits."""
        self.counts["refused"] += 1
        self._leases = deque(lease for lease in self._leases if not lease.done())
        if self._leases:
            self._leases.popleft().set_exception(EpisodeFailure(reason))

    async def play(self, work: Work, ended: Ended, *, begun: Mapping[int, Trajectory] | None = None) -> None:
        """Ends all members of `work` with those of the next group. Nothing that was begun here can go on elsewhere."""
        assert not begun, "what other programs play is never cut"
        started_at = time.time()
        lease: asyncio.Future[Offer] = asyncio.get_running_loop().create_future()
        self._leases.append(lease)
        self.has_begun = True
        self._match()
        try:
            with patient(
                PATIENCE_S, waiter=f"group {work.group}", resource="a group from outside", holder=self._holder
            ):
                offer = await lease
        except EpisodeFailure as error:
            for episode in work.episodes:
                ended(_failed(episode, work.task.task_id, str(error)), "")
            return
        except asyncio.CancelledError:
            self._give_back(lease)
            raise
        self.counts["taken"] += 1
        for episode, scored in zip(work.episodes, offer.episodes, strict=True):
            ended(_trajectory(episode, work.task.task_id, scored, started_at), "")
        if not offer.taken.done():
            offer.taken.set_result(None)

    def _give_back(self, lease: asyncio.Future[Offer]) -> None:
        """Nobody waits for this lease any more; what it was given is first in line again."""
        if lease.done() and not lease.cancelled() and lease.exception() is None:
            self._offers.appendleft(lease.result())
            self._match()

    def _match(self) -> None:
        while self._offers and self._leases:
            if self._leases[0].done():
                self._leases.popleft()
            elif (why := self._too_old(self._offers[0])) is not None:
                self.counts["stale"] += 1
                offer = self._offers.popleft()
                if not offer.taken.done():
                    offer.taken.set_exception(TurnedAway(why))
                    offer.taken.exception()  # nobody may be waiting any more
            else:
                self._leases.popleft().set_result(self._offers.popleft())

    def _too_old(self, offer: Offer) -> str | None:
        versions = [episode.newest_version for episode in offer.episodes]
        newest, served = max(versions), self._newest()
        if newest == NO_VERSION or served - newest <= self._max_staleness:
            return None
        return (
            f"its youngest token is of policy_version {newest}, {served} is served, and scheduler.max_staleness is "
            f"{self._max_staleness}"
        )


def _trajectory(episode: EpisodeId, task_id: str, scored: ScoredEpisode, started_at: float) -> Trajectory:
    return Trajectory(
        episode=episode,
        task_id=task_id,
        turns=scored.turns,
        reward=scored.reward,
        status="truncated" if scored.truncated else "completed",
        started_at=started_at,
        finished_at=time.time(),
    )


def _failed(episode: EpisodeId, task_id: str, error: str) -> Trajectory:
    return Trajectory(episode=episode, task_id=task_id, turns=[], reward=0.0, status="failed", error=error)
