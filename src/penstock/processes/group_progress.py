"""A group that this worker runs. It keeps ended members until the group is whole; then they become one record."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

import msgspec

from penstock.ports.work import Work
from penstock.samples import Sample, Trajectory
from penstock.sendable import sendable
from penstock.types import EpisodeSummary, Formulation

MAX_TEXT = 8_000
"""Most characters of an answer that its summary shows. The summaries of a group travel in one message."""


@dataclass(slots=True, kw_only=True, eq=False)
class GroupProgress:
    """One attempt at a group, with its spare members. As many members may fail as are spare."""

    work: Work
    """The first work of this attempt."""
    saves_cut: bool
    """Whether members are saved when their answers are cut."""
    counts_tokens: bool = True
    """Whether the policy has tokens. Otherwise the counts in summaries are 0."""
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    """Tasks that run the members."""
    unreported: list[int] = field(default_factory=list)
    """Members that ended since the last report."""
    num_saved: dict[int, int] = field(default_factory=dict)
    """Number of segments of each cut member that are saved in the pool."""
    _ended: dict[int, tuple[Trajectory, str]] = field(default_factory=dict)

    @property
    def number(self) -> int:
        return self.work.group

    @property
    def attempt(self) -> int:
        return self.work.attempt

    @property
    def whole(self) -> bool:
        """Return whether enough members have ended without failure, or all members have ended."""
        return len(self._well) >= self.work.group_size or self.over

    @property
    def over(self) -> bool:
        """Return whether all members have ended."""
        return len(self._ended) == self.work.group_size + self.work.redundancy

    @property
    def failed(self) -> bool:
        """Return whether more members failed than there are spare ones."""
        return len(self._ended) - len(self._well) > self.work.redundancy

    @property
    def members(self) -> list[int]:
        """Return the members of the finished group, sorted: the first that ended without failure. Return all ended
        members of a failed group."""
        return sorted(self._ended if self.failed else self._well[: self.work.group_size])

    @property
    def surplus(self) -> list[int]:
        """Return the ended members that the finished group does not include."""
        return sorted(self._ended.keys() - set(self.members))

    @property
    def _well(self) -> list[int]:
        return [member for member, (played, _) in self._ended.items() if played.status not in ("failed", "aborted")]

    def keep(self, trajectory: Trajectory, text: str) -> None:
        """Keep the trajectory and text of an ended member."""
        self._ended[trajectory.episode.episode] = trajectory, text

    def formulated(self, formulation: Formulation) -> list[Sample]:
        """Return the training samples of all members."""
        ended = [self._ended[member][0] for member in self.members]
        return [sample for trajectory in ended for sample in trajectory.formulate(formulation)]

    def branches(self, member: int) -> list[Sample]:
        """Return the whole trajectory of a member, as one sample for each branch; empty if the member failed."""
        return self._ended[member][0].formulate("branches") if member in self._well else []

    def num_tokens(self, members: list[int]) -> int:
        """Return the number of tokens that the policy generated for these members."""
        return sum(self._ended[member][0].num_tokens for member in members) if self.counts_tokens else 0

    def summaries(self, members: list[int]) -> list[EpisodeSummary]:
        """Return the summaries of members. Only that of the first one has a text, which samples show."""
        shown = self.work.keep_text
        texts = {number: sendable(self._ended[number][1], MAX_TEXT) for number in members[:1] if shown}
        found = [self._ended[number][0].summary(text=texts.get(number)) for number in members]
        if self.counts_tokens:
            return found
        return [msgspec.structs.replace(each, prompt_tokens=0, response_tokens=0) for each in found]

    def stop(self) -> None:
        """Stop all tasks of the group."""
        for task in self.tasks:
            task.cancel()
