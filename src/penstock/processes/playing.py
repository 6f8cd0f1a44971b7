"""A group of which this worker plays members: who has ended is kept until all have, then they go into one record."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from penstock.types import EpisodeSummary, Formulation, Sample, Trajectory


@dataclass(slots=True, kw_only=True, eq=False)
class PlayedGroup:
    """One attempt at a group."""

    number: int
    attempt: int
    size: int
    """Members that make the group."""
    redundancy: int
    """Further ones, of which each may fail."""
    keep_text: bool
    saves_cut: bool
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    """What plays its members."""
    unreported: list[int] = field(default_factory=list)
    """Members that ended since the last report."""
    num_saved: dict[int, int] = field(default_factory=dict)
    """Segments of cut members that lie in the pool."""
    _ended: dict[int, tuple[Trajectory, str]] = field(default_factory=dict)

    @property
    def whole(self) -> bool:
        """As many members as make the group have ended well, or all have ended somehow."""
        return len(self._well) >= self.size or self.over

    @property
    def over(self) -> bool:
        """Nobody plays any more."""
        return len(self._ended) == self.size + self.redundancy

    @property
    def failed(self) -> bool:
        """Too many members did."""
        return len(self._ended) - len(self._well) > self.redundancy

    @property
    def members(self) -> list[int]:
        """The first ones that ended well, as many as make the group, in their order; of a failed group all that
        ended."""
        return sorted(self._ended if self.failed else self._well[: self.size])

    @property
    def surplus(self) -> list[int]:
        """Those that ended, and that the group does without."""
        return sorted(self._ended.keys() - set(self.members))

    @property
    def _well(self) -> list[int]:
        return [member for member, (played, _) in self._ended.items() if played.status not in ("failed", "aborted")]

    def keep(self, trajectory: Trajectory, text: str) -> None:
        """A member ended."""
        self._ended[trajectory.episode.episode] = trajectory, text

    def formulated(self, formulation: Formulation) -> list[Sample]:
        """All members, as they are trained."""
        ended = [self._ended[member][0] for member in self.members]
        return [sample for trajectory in ended for sample in trajectory.formulate(formulation)]

    def sample(self, member: int) -> Sample | None:
        """Whole; None of one that failed."""
        return self._ended[member][0].flatten() if member in self._well else None

    def num_tokens(self, members: list[int]) -> int:
        """That the policy generated."""
        return sum(self._ended[member][0].num_tokens for member in members)

    def summaries(self, members: list[int]) -> list[EpisodeSummary]:
        ended = [self._ended[member] for member in members]
        return [trajectory.summary(text=text if self.keep_text else None) for trajectory, text in ended]

    def stop(self) -> None:
        """Play no more of it."""
        for task in self.tasks:
            task.cancel()
