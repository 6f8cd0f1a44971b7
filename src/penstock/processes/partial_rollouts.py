"""A worker's access to the pool: records of whole groups, and of episodes in groups that are not whole yet.

Saved episodes survive their worker. Any server can continue a cut answer of a single-turn episode from its tokens. The
events in a multi-turn environment cannot be repeated, so there only ended members are saved. Each token of a cut answer
is saved once, however often the answer is cut. An answer that ended is saved whole.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import msgspec

from penstock.config import Config
from penstock.config.tunable import movable
from penstock.ports.work import Work
from penstock.processes.group_progress import GroupProgress
from penstock.processes.pool_access import WorkerPool
from penstock.samples import Sample, Trajectory, Turn
from penstock.store.payload_files import PayloadError
from penstock.store.remote_payloads import PayloadsLost
from penstock.types import PayloadRef, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Recalled:
    """The remaining part of some work, and the saved episodes from before."""

    work: Work
    begun: dict[int, Trajectory]
    """Trajectories so far of members of `work` that continue."""
    ended: dict[int, Trajectory]
    """Trajectories of members that ended, and that are no longer part of `work`."""

    @property
    def failed(self) -> list[int]:
        """Return the members that ended but lost their tokens."""
        return [member for member, trajectory in self.ended.items() if trajectory.status == "failed"]


class PartialRollouts:
    """Appends records to this worker's own pool files, and reads the records of all workers."""

    def __init__(self, config: Config, pool: WorkerPool) -> None:
        self._pool = pool
        settings = config.scheduler
        colocated_leftovers = settings.mode == "colocated" and settings.over_sampling > 1
        tuned = movable(config) if settings.tuning.mode == "auto" else ()
        self._saves_ended = settings.segment_length is not None or "segment_length" in tuned or colocated_leftovers
        """Whether ended members are saved: these settings keep groups open for long."""
        self._environments = config.environments

    def save_cut(self, group: GroupProgress, so_far: Trajectory) -> PayloadRef | None:
        """Save the new segments of a member that was cut. Return None if there are none, or if cut members are not
        saved."""
        if so_far.turns[-1].parent is not None:
            return None  # it is a turn of an agent, which cannot continue in another process
        member, num_segments = so_far.episode.episode, len(so_far.turns[-1].segments)
        num_saved = group.num_saved.get(member, 0)
        if not group.saves_cut or num_segments == num_saved:
            return None
        ref = self._pool.writer.append([piece(so_far, start=num_saved)])
        group.num_saved[member] = num_segments
        return ref

    def saves_cut(self, task: Task) -> bool:
        """Return whether episodes of `task` are saved when their answers are cut."""
        return self._saves_ended and self._environments.of_task(task).max_turns == 1

    def save_ended(self, group: GroupProgress, members: list[int]) -> list[PayloadRef | None]:
        """Save the members that ended without failure before their group was whole. The result has None for the other
        members.

        Nothing of a failed group is saved, because the group starts again from nothing.
        """
        if group.failed or not self._saves_ended:
            return [None] * len(members)
        saved = [group.branches(member) for member in members]
        return [self._pool.writer.append(samples) if samples else None for samples in saved]

    def reported(self, refs: Iterable[PayloadRef | None]) -> None:
        """Release these records: the controller was told of them, and has fetched those that it wants."""
        for ref in refs:
            if ref is not None:
                self._pool.writer.release(ref)

    async def fetch(self, work: Work, *, host: str) -> None:
        """Fetch the saved episodes of `work` from the controller's `host`. Records that cannot be fetched are missing
        in `recall`."""
        for saved in work.saved:
            with suppress(PayloadsLost):
                await self._pool.payloads.fetch(saved.refs, host=host)

    def recall(self, work: Work) -> Recalled:
        """Read the saved episodes of `work`.

        An unreadable cut episode starts again. The scheduler already counts an ended episode as ended. So an unreadable
        ended episode has failed, and its group fails with it.
        """
        begun: dict[int, Trajectory] = {}
        ended: dict[int, Trajectory] = {}
        for saved in work.saved:
            episode, task_id = saved.episode, work.task.task_id
            try:
                samples = self._read(saved.refs)
            except PayloadError as error:
                message = f"{'the group of ' if saved.ended else ''}{episode} starts over: {error}"
                print(f"warning: {message}", file=sys.stderr, flush=True)
                if saved.ended:  # a failed trajectory without tokens
                    ended[episode.episode] = Trajectory(
                        episode=episode, task_id=task_id, turns=[], reward=0.0, status="failed", error=message
                    )
            else:
                trajectory = Trajectory.unflatten(
                    samples, episode=episode, task_id=task_id, ended=saved.ended, env_seed=work.env_seed
                )
                trajectory = replace(trajectory, stop_reason=saved.stop_reason, info=saved.info)
                (ended if saved.ended else begun)[episode.episode] = trajectory
        self._pool.payloads.drop(ref for saved in work.saved for ref in saved.refs)
        return Recalled(work=_without(work, ended), begun=begun, ended=ended)

    def _read(self, refs: Sequence[PayloadRef]) -> list[Sample]:
        """Return the branches of an episode that ended. For a cut episode, return one sample, joined from the pieces
        since the last one that begins the episode. Raises `PayloadError`."""
        pieces: list[Sample] = []
        for ref in reversed(refs):
            samples = self._pool.payloads.read(ref)
            if any(sample.loss_mask.any() and not sample.turns for sample in samples):
                raise PayloadError("an older version of penstock has saved it")
            if len(samples) > 1:
                return list(samples)
            if not samples or not len(samples[0].loss_mask):
                raise PayloadError("a piece of it is empty")
            pieces += samples
            if not samples[0].loss_mask[0]:
                return [Sample.joined(pieces[::-1])]
        raise PayloadError("its first piece is missing")


def piece(so_far: Trajectory, *, start: int) -> Sample:
    """Return a single-turn trajectory from segment `start` on, as a sample. Only the first piece has the
    observation."""
    (turn,) = so_far.turns
    observation_ids = [] if start else turn.observation_ids
    return replace(so_far, turns=[Turn(observation_ids=observation_ids, segments=turn.segments[start:])]).flatten()


def _without(work: Work, members: dict[int, Trajectory]) -> Work:
    """Return `work` without `members`."""
    left = [pair for pair in zip(work.members, work.max_tokens, strict=True) if pair[0] not in members]
    return msgspec.structs.replace(
        work, members=tuple(member for member, _ in left), max_tokens=tuple(tokens for _, tokens in left)
    )
