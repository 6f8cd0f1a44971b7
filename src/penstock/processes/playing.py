"""A group of which this worker plays members: who has ended is kept until all have, then they go into one record."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Protocol

from penstock.envs.manager import Ended
from penstock.ports import Work
from penstock.types import EpisodeSummary, Sample, Trajectory


class Player(Protocol):
    """Who plays: the EnvManager, or somebody who waits for others that do."""

    async def play(self, work: Work, ended: Ended, *, begun: Mapping[int, Trajectory] | None = None) -> None:
        """Play every lease; `ended` hears of each episode as soon as it ends. Members in `begun` go on from there."""
        ...


@dataclass(slots=True, kw_only=True, eq=False)
class PlayedGroup:
    """One attempt at a group."""

    number: int
    attempt: int
    size: int
    keep_text: bool
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    """What plays its members."""
    unreported: list[int] = field(default_factory=list)
    """Members that ended since the last report."""
    num_saved: dict[int, int] = field(default_factory=dict)
    """Segments of cut members that lie in the pool."""
    _ended: dict[int, tuple[Trajectory, str]] = field(default_factory=dict)

    @property
    def whole(self) -> bool:
        """All members have ended."""
        return len(self._ended) == self.size

    @property
    def failed(self) -> bool:
        return any(trajectory.status == "failed" for trajectory, _ in self._ended.values())

    @property
    def members(self) -> list[int]:
        """Those that have ended, in their order."""
        return sorted(self._ended)

    def keep(self, trajectory: Trajectory, text: str) -> None:
        """A member ended."""
        self._ended[trajectory.episode.episode] = trajectory, text

    def samples(self, members: list[int]) -> list[Sample]:
        return [self._ended[member][0].flatten() for member in members]

    def summaries(self, members: list[int]) -> list[EpisodeSummary]:
        ended = [self._ended[member] for member in members]
        return [trajectory.summary(text=text if self.keep_text else None) for trajectory, text in ended]

    def stop(self) -> None:
        """Play no more of it."""
        for task in self.tasks:
            task.cancel()
