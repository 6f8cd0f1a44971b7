"""A worker's side of the pool: records of whole groups, and of episodes whose group is not whole yet.

Saved episodes survive their worker. A cut answer of a single-turn episode goes on from its tokens on any server; what
happened in a multi-turn environment cannot be repeated, so there only members that ended are worth saving.
Every token of a cut answer is saved once, however often it is cut; an answer that ended is saved whole.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import msgspec

from penstock.config import Config
from penstock.ports import PayloadsLost, SavedEpisode, Work
from penstock.processes.playing import PlayedGroup
from penstock.processes.pool import WorkerPool
from penstock.store.payload import PayloadError
from penstock.types import PayloadRef, Sample, Task, Trajectory, Turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Recalled:
    """What is left to play of some work, and what others had played of it."""

    work: Work
    begun: dict[int, Trajectory]
    """Members of `work` that go on from here."""
    ended: dict[int, Trajectory]
    """Members that are no longer part of `work`."""

    @property
    def failed(self) -> list[int]:
        """Members that ended, and whose tokens are lost."""
        return [member for member, trajectory in self.ended.items() if trajectory.status == "failed"]


class SavedEpisodes:
    """Appends to this worker's own pool files, reads everybody's."""

    def __init__(self, config: Config, pool: WorkerPool) -> None:
        self._pool = pool
        settings = config.scheduler
        colocated_leftovers = settings.mode == "colocated" and settings.over_sampling > 1
        self._saves_ended = settings.segment_length is not None or colocated_leftovers
        """Groups stay open for long: their members are worth saving."""
        self._environments = config.environments

    def append(self, samples: Sequence[Sample]) -> PayloadRef:
        """The record of a whole group."""
        return self._pool.writer.append(samples)

    def save_cut(self, group: PlayedGroup, so_far: Trajectory) -> PayloadRef | None:
        """What is new of a member whose answer was cut; None if nothing is."""
        member, num_segments = so_far.episode.episode, len(so_far.turns[-1].segments)
        num_saved = group.num_saved.get(member, 0)
        if not group.saves_cut or num_segments == num_saved:
            return None
        ref = self._pool.writer.append([piece(so_far, start=num_saved)])
        group.num_saved[member] = num_segments
        return ref

    def saves_cut(self, task: Task) -> bool:
        """Whether episodes of `task` are saved when their answers are cut."""
        return self._saves_ended and self._environments.of_task(task).max_turns == 1

    def save_ended(self, group: PlayedGroup, members: list[int]) -> list[PayloadRef | None]:
        """Members that ended well before their group was whole; a group that failed starts from nothing."""
        if group.failed or not self._saves_ended:
            return [None] * len(members)
        samples = [group.sample(member) for member in members]
        return [None if sample is None else self._pool.writer.append([sample]) for sample in samples]

    def reported(self, refs: Iterable[PayloadRef | None]) -> None:
        """The controller was told of these records, and has them if it wants them."""
        for ref in refs:
            if ref is not None:
                self._pool.writer.release(ref)

    async def fetch(self, work: Work, *, host: str) -> None:
        """What was saved of `work`, from the `host` of the controller. What cannot be had is missing when it is
        recalled."""
        for saved in work.saved:
            with suppress(PayloadsLost):
                await self._pool.payloads.fetch(saved.refs, host=host)

    def recall(self, work: Work) -> Recalled:
        """Read what was saved of `work`.

        An unreadable cut episode is played from its start. One that ended counts as such with the scheduler, so if it
        is unreadable it has failed, and its group with it.
        """
        begun: dict[int, Trajectory] = {}
        ended: dict[int, Trajectory] = {}
        for saved in work.saved:
            episode, task_id = saved.episode, work.task.task_id
            try:
                sample = self._read(saved.refs)
            except PayloadError as error:
                print(f"warning: {_starts_over(saved)}: {error}", file=sys.stderr, flush=True)
                if saved.ended:
                    ended[episode.episode] = _lost(saved, task_id, error)
            else:
                trajectory = Trajectory.unflatten(
                    sample, episode=episode, task_id=task_id, ended=saved.ended, env_seed=work.env_seed
                )
                trajectory = replace(trajectory, stop_reason=saved.stop_reason, info=saved.info)
                (ended if saved.ended else begun)[episode.episode] = trajectory
        self._pool.payloads.drop(ref for saved in work.saved for ref in saved.refs)
        return Recalled(work=_without(work, ended), begun=begun, ended=ended)

    def _read(self, refs: Sequence[PayloadRef]) -> Sample:
        """The pieces from the last one on that begins the episode."""
        pieces: list[Sample] = []
        for ref in reversed(refs):
            (sample,) = self._pool.payloads.read(ref)
            pieces.append(sample)
            if not sample.loss_mask[0]:
                return Sample.joined(pieces[::-1])
        raise PayloadError("its first piece is missing")

    def close(self) -> None:
        self._pool.writer.close()
        self._pool.payloads.close()


def piece(so_far: Trajectory, *, start: int) -> Sample:
    """A single-turn trajectory from segment `start` on; the first piece has the observation."""
    (turn,) = so_far.turns
    observation_ids = [] if start else turn.observation_ids
    return replace(so_far, turns=[Turn(observation_ids=observation_ids, segments=turn.segments[start:])]).flatten()


def _starts_over(saved: SavedEpisode) -> str:
    return f"{'the group of ' if saved.ended else ''}{saved.episode} starts over"


def _lost(saved: SavedEpisode, task_id: str, error: PayloadError) -> Trajectory:
    """An episode that ended, and whose tokens are lost."""
    return Trajectory(
        episode=saved.episode,
        task_id=task_id,
        turns=[],
        reward=0.0,
        status="failed",
        error=f"{_starts_over(saved)}: {type(error).__name__}: {error}",
    )


def _without(work: Work, members: dict[int, Trajectory]) -> Work:
    """`work` less `members`."""
    if not members:
        return work
    left = [pair for pair in zip(work.members, work.max_tokens, strict=True) if pair[0] not in members]
    return msgspec.structs.replace(
        work, members=tuple(member for member, _ in left), max_tokens=tuple(tokens for _, tokens in left)
    )
