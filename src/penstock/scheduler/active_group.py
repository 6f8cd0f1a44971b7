"""An active group: the scheduler admitted it, and it has not ended. It is at exactly one stage.

    WAITING ──► PLAYING ──► READY ──► TRAINING ──► (trained)
       ▲         │  ▲  ▲      │          │
       │         ▼  │  │      │          │ the trainer was lost
       │ INTERRUPTED   LEFTOVER          ▼
       └──── tokens too old after a rewind ◄── READY

A group ends as trained, collected, filtered, discarded, failed or cancelled. An evaluation group starts at HELD_OUT
instead of WAITING, and ends when its last member ends.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping
from enum import Enum, auto
from types import MappingProxyType
from typing import Any, Literal

import msgspec

from penstock.ports.work import PartialRollout
from penstock.scheduler.ledger import Ledger
from penstock.types import EpisodeId, EpisodeState, EpisodeSummary, GroupAttempt, PayloadRef, Summaries, Task

Kind = Literal["train", "leftover", "evaluation"]
"""A `leftover` is a training group that did not complete in its round. It starts over in a later round."""


class Stage(Enum):
    """The stage of an active group."""

    WAITING = auto()
    """The dispatch policy decides when it starts."""
    HELD_OUT = auto()
    """An evaluation group that has not started."""
    PLAYING = auto()
    """A worker plays it."""
    INTERRUPTED = auto()
    """It started, then failed or lost its worker. The next free worker plays it."""
    LEFTOVER = auto()
    """It waits for a round of leftovers."""
    READY = auto()
    """All members have rewards. The trigger decides when the trainer gets the group."""
    TRAINING = auto()
    """The trainer has it."""

    __hash__ = object.__hash__  # an Enum's own hash is a slow Python function, and each move of a group looks up stages


NO_MEMBERS: Mapping[int, Any] = MappingProxyType({})


class ActiveGroup(msgspec.Struct, kw_only=True, eq=False, gc=False):
    """Everything that the scheduler knows about one group.

    The garbage collector does not scan groups, so that 100,000 waiting groups do not slow down the scheduler. This is
    safe because nothing that a group refers to refers back to it. Collections of members are replaced when they change;
    groups without members in them share the empty ones.
    """

    number: int
    task: Task
    kind: Kind = "train"
    stage: Stage = Stage.WAITING
    """Only `ActiveGroups.move` changes it."""
    size: int
    """Number of members. Redundant members count until the group is complete."""
    redundancy: int = 0
    ledger: Ledger
    admitted_at: float
    ready_at: float = 0.0
    predicted_tokens: float = 0.0
    attempt: int = 0
    """Number of the current attempt. It grows with every restart, and identifies messages about earlier attempts."""
    num_failures: int = 0
    num_stale: int = 0
    """Number of members discarded because they were too old to train."""
    num_surplus: int = 0
    """Number of members discarded because the group was complete without them."""
    broken: frozenset[int] = frozenset()
    """Failed members that the group does not need."""
    worker: str | None = None
    """The environment worker that plays the group."""
    generating: frozenset[int] = frozenset()
    """Members that hold a segment grant, so that they may generate."""
    num_tokens: Mapping[int, int] = NO_MEMBERS
    """Tokens generated so far, by member. Only members that asked for another grant are in it."""
    partial_rollouts: Mapping[int, PartialRollout] = NO_MEMBERS
    """Tokens saved in the pool, by member, so that another worker can continue the member."""
    summaries: Summaries = ()
    """Summaries of all members, once the group is complete."""
    ref: PayloadRef | None = None
    result: asyncio.Future[Summaries] | None = None
    """Delivers the summaries of an evaluation group."""

    @property
    def group_attempt(self) -> GroupAttempt:
        return GroupAttempt(self.number, self.attempt)

    def episode_id(self, member: int) -> EpisodeId:
        """Return the identifier of `member` in the current attempt."""
        return EpisodeId(self.task.tag, self.number, member, self.attempt)

    def members(self, *states: EpisodeState) -> tuple[int, ...]:
        """Return the members that are in one of `states`."""
        return self.ledger.members(self.number, *states)

    def move_members(self, members: Iterable[int], to: EpisodeState) -> None:
        """Move `members` to another state in the ledger."""
        self.ledger.move(self.number, members, to)

    def mark_ready(self, members: Iterable[int]) -> None:
        """Move `members` to READY. Some of them may be READY already."""
        self.move_members(set(members).difference(self.members(EpisodeState.READY)), EpisodeState.READY)

    @property
    def has_ended(self) -> bool:
        """Return whether every member is in a final state."""
        return self.number not in self.ledger

    def keep_tokens(self, member: int, ref: PayloadRef | None, summary: EpisodeSummary | None = None) -> None:
        """Remember where the tokens of `member` are.

        `ref` is one more piece. If the member ended, `summary` is given, and `ref` holds all its tokens.
        """
        if ref is None:
            return
        episode, reason, info = self.episode_id(member), None, {}
        refs: tuple[PayloadRef, ...] = (ref,)
        if summary is not None:
            reason, info = summary.stop_reason, summary.info
        elif member in self.partial_rollouts:
            refs = (*self.partial_rollouts[member].refs, ref)
        partial = PartialRollout(episode=episode, refs=refs, ended=summary is not None, stop_reason=reason, info=info)
        self.partial_rollouts = {**self.partial_rollouts, member: partial}

    def can_spare(self, failed: Iterable[int]) -> bool:
        """Return whether enough members remain if `failed` fail too."""
        return len(self.broken.union(failed)) <= self.redundancy

    def forget_progress(self) -> None:
        """Forget partial rollouts, so that the next attempt starts from the beginning."""
        self.partial_rollouts, self.num_tokens, self.broken = NO_MEMBERS, NO_MEMBERS, frozenset()
