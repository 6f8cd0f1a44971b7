"""A worker's side of the pool: records of whole groups, and of episodes whose group is not whole yet.

Saved episodes survive their worker. A cut answer of a single-turn episode goes on from its tokens on any server; what
happened in a multi-turn environment cannot be repeated, so there only members that ended are worth saving.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from penstock.config import Config
from penstock.ports import SavedEpisode, Work
from penstock.processes.playing import PlayedGroup
from penstock.store.payload import PayloadError, PayloadReader, PayloadWriter
from penstock.types import PayloadRef, Sample, Trajectory


@dataclass(frozen=True, slots=True, kw_only=True)
class Recalled:
    """What is left to play of some work, and what others had played of it."""

    work: Work
    begun: dict[int, Trajectory]
    """Members of `work` that go on from here."""
    ended: dict[int, Trajectory]
    """Members that are no longer part of `work`."""


class SavedEpisodes:
    """Appends to this worker's own pool files, reads everybody's."""

    def __init__(self, config: Config, pool: Path, worker: str) -> None:
        self._writer, self._reader = PayloadWriter(pool, worker), PayloadReader(pool)
        settings = config.scheduler
        colocated_leftovers = settings.mode == "colocated" and settings.over_sampling > 1
        self._saves_ended = settings.segment_length is not None or colocated_leftovers
        """Groups stay open for long: their members are worth saving."""
        self._saves_cut = self._saves_ended and config.env.max_turns == 1

    def append(self, samples: Sequence[Sample]) -> PayloadRef:
        """The record of a whole group."""
        return self._writer.append(samples)

    def save_cut(self, so_far: Trajectory) -> PayloadRef | None:
        """An episode whose answer was cut."""
        return self._writer.append([so_far.flatten()]) if self._saves_cut else None

    def save_ended(self, group: PlayedGroup, members: list[int]) -> list[PayloadRef | None]:
        """Members that ended before their group was whole; a group that failed starts from nothing."""
        if group.failed or not self._saves_ended:
            return [None] * len(members)
        return [self._writer.append([sample]) for sample in group.samples(members)]

    def recall(self, work: Work) -> Recalled:
        """Read what was saved of `work`. An episode whose record is unreadable is played from its start."""
        begun: dict[int, Trajectory] = {}
        ended: dict[int, Trajectory] = {}
        for saved in work.saved:
            if trajectory := self._read(saved, work.task.task_id):
                (ended if saved.ended else begun)[saved.episode.episode] = trajectory
        return Recalled(work=_without(work, ended), begun=begun, ended=ended)

    def _read(self, saved: SavedEpisode, task_id: str) -> Trajectory | None:
        try:
            (sample,) = self._reader.read(saved.ref)
        except PayloadError as error:
            print(f"warning: {saved.episode} starts over: {error}", file=sys.stderr, flush=True)
            return None
        return Trajectory.unflatten(sample, episode=saved.episode, task_id=task_id, ended=saved.ended)

    def close(self) -> None:
        self._writer.close()


def _without(work: Work, members: dict[int, Trajectory]) -> Work:
    """`work` less `members`."""
    if not members:
        return work
    left = [pair for pair in zip(work.members, work.max_tokens, strict=True) if pair[0] not in members]
    return msgspec.structs.replace(
        work, members=tuple(member for member, _ in left), max_tokens=tuple(tokens for _, tokens in left)
    )
