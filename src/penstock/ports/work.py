"""Work for environment workers: members of a group to play, with their leases and first grants."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import msgspec

from penstock.seeding import nth_seed
from penstock.types import (
    NO_VERSION,
    EpisodeId,
    EpisodeLease,
    GroupAttempt,
    PayloadRef,
    Sampling,
    SegmentGrant,
    StopReason,
    Task,
)


class PartialRollout(msgspec.Struct, frozen=True, kw_only=True):
    """Location in the pool of an episode's tokens so far, while its group is not complete.

    Workers save partial rollouts only where groups stay incomplete for long: with `scheduler.segment_length` set, or in
    mode colocated with over-sampling. They then save every ended member, and cut members of single-turn environments.
    """

    episode: EpisodeId
    refs: tuple[PayloadRef, ...]
    """An ended episode has one record. A cut episode has one record of new tokens per cut, in order. A record that
    begins with an observation restarts the episode, and replaces the records before it."""
    ended: bool
    stop_reason: StopReason | None = None
    info: dict[str, Any] = {}
    """The `Trajectory.info` of an ended episode."""


class Work(msgspec.Struct, frozen=True, kw_only=True):
    """Members of a group for an environment worker, each with a lease and a first grant.

    The worker reports the group once `group_size` members have ended. The members may come as one `Work`, or as two (a
    probe, then the rest). The worker reports members that end earlier when they end, and keeps their tokens. It also
    saves these tokens in the pool for other workers, under the conditions in `PartialRollout`.
    """

    task: Task
    group: int
    attempt: int
    group_size: int
    """Number of members that complete the group."""
    redundancy: int = 0
    """Number of further members. That many members may fail. Members still playing when the group is complete are
    cancelled."""
    members: tuple[int, ...]
    max_tokens: tuple[int, ...]
    """Size of each member's first grant."""
    env_seed: int
    """All members and attempts share it, so that they get the same environment."""
    sampling_seed: int
    """Seed of this attempt. The seed of each member follows from it."""
    deadline_s: float
    """Seconds after which a lease is void and its episode counts as failed."""
    sampling: Sampling
    saved: tuple[PartialRollout, ...] = ()
    """Partial rollouts of members that another worker began or ended. These members continue instead of starting
    over."""
    policy_version: int = NO_VERSION
    """Newest version of the learner when this work was made. Servers may have this version, and no newer one."""
    keep_text: bool = False
    """Whether summaries include the decoded last action (for evaluation samples)."""

    @property
    def episodes(self) -> list[EpisodeId]:
        """Return the episode identifiers of the members."""
        return [EpisodeId(self.task.tag, self.group, member, self.attempt) for member in self.members]

    @property
    def leases(self) -> list[EpisodeLease]:
        """Return one lease per member."""
        return [
            EpisodeLease(
                episode=episode,
                env_seed=self.env_seed,
                sampling_seed=nth_seed(self.sampling_seed, episode.episode),
                deadline_s=self.deadline_s,
            )
            for episode in self.episodes
        ]

    @property
    def grants(self) -> list[SegmentGrant]:
        """Return the first grant of each member."""
        pairs = zip(self.episodes, self.max_tokens, strict=True)
        return [SegmentGrant(episode=episode, max_tokens=max_tokens) for episode, max_tokens in pairs]


class Workers(Protocol):
    """The environment workers, seen from the loop. Results come back through the scheduler's methods.

    No method waits. So a worker that is slow to acknowledge delays no other worker. A worker that never acknowledges
    ends the run.
    """

    def start(self, worker: str, work: Work) -> None:
        """Send `work` to `worker`."""

    def grant(self, worker: str, grant: SegmentGrant) -> None:
        """Let a waiting episode generate again."""

    def cancel(self, attempts: Sequence[GroupAttempt]) -> None:
        """Stop playing these attempts."""
