"""Everything that travels on the control bus: small tagged structs, never a tensor.

The wire word of the design note (`NEW_TASK`, `DATA_GENERATED`, ...) is the struct's tag.
"""

from __future__ import annotations

from typing import Any

import msgspec

from penstock.deadline import Stall
from penstock.ports import SavedStates, TrainerState, Work
from penstock.types import (
    BusySpan,
    EpisodeId,
    EpisodeSummary,
    GroupAttempt,
    GroupRef,
    LearnerState,
    PayloadRef,
    SegmentGrant,
    WeightsHandle,
)


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """Base of all messages."""


class Ack(Message, frozen=True, kw_only=True, tag="ACK"):
    """Received and acted upon."""


class Refused(Message, frozen=True, kw_only=True, tag="REFUSED"):
    """The request was understood and cannot be met; `reason` is for people."""

    reason: str


class Hello(Message, frozen=True, kw_only=True, tag="HELLO"):
    """A process joins the run. Answered with `Welcome`."""

    role: str
    name: str
    nonce: str
    pid: int
    url: str = ""
    attached: bool = False
    """Nobody supervises it: it came by itself, and may go."""


class Goodbye(Message, frozen=True, kw_only=True, tag="GOODBYE"):
    """An attached worker leaves the run; what it played goes to others."""

    name: str


class Welcome(Message, frozen=True, kw_only=True, tag="WELCOME"):
    """The run as it is when a process joins."""

    server_urls: list[str]


class WhoAreYou(Message, frozen=True, kw_only=True, tag="WHO_ARE_YOU"):
    """The controller is a new one, and knows nobody: introduce yourself, and forget what the old one had given you."""


class ServersChanged(Message, frozen=True, kw_only=True, tag="SERVERS_CHANGED"):
    """Where the rollout servers are now."""

    server_urls: list[str]


class Heartbeat(Message, frozen=True, kw_only=True, tag="HEARTBEAT"):
    """Sent periodically without an answer. `progress` grows while the process does useful work; all else is what came
    since the last one, so that sums survive the death of either side."""

    name: str
    progress: int
    cpu_s: float
    """CPU seconds of the whole process."""
    busy_s: float = 0.0
    """Seconds of useful model compute."""
    counters: dict[str, float] = {}
    spans: list[BusySpan] = []


class TaskRequest(Message, frozen=True, kw_only=True, tag="TASK_REQUEST"):
    """An environment worker is ready for work: it can hold `capacity` episodes at once."""

    worker: str
    capacity: int


class NewTask(Message, frozen=True, kw_only=True, tag="NEW_TASK"):
    """A group to play."""

    work: Work


class Cancel(Message, frozen=True, kw_only=True, tag="CANCEL"):
    """Nobody waits for these any more. Broadcast, so it may overtake the `NewTask` it speaks of."""

    attempts: list[GroupAttempt]


class GrantRequest(Message, frozen=True, kw_only=True, tag="GRANT_REQUEST"):
    """A leased episode wants to generate again: its next turn, or the next segment of a cut answer."""

    worker: str
    episode: EpisodeId
    unfinished: bool
    """True if the last segment was cut: by its grant, or by a server that gave way."""
    num_tokens: int
    """Generated so far in the episode."""
    saved: PayloadRef | None = None
    """Where those lie that are new since the last one, if cut episodes are saved (see `ports.SavedEpisode`)."""


class EpisodesEnded(Message, frozen=True, kw_only=True, tag="EPISODES_ENDED"):
    """Members of a group ended while others have not; the tokens stay with the worker until the group is whole.

    A member whose saved record could not be read ended too: it failed."""

    worker: str
    group: int
    episodes: list[EpisodeSummary]
    saved: list[PayloadRef | None]
    """One each; where all its tokens lie, if a copy was saved."""


class Grant(Message, frozen=True, kw_only=True, tag="GRANT"):
    """The answer to a `GrantRequest`, sent when the scheduler decides so."""

    grant: SegmentGrant


class DataGenerated(Message, frozen=True, kw_only=True, tag="DATA_GENERATED"):
    """A group is played. Its tokens lie in the pool at `ref` (None if a member failed, or if it was an evaluation)."""

    worker: str
    group: int
    ref: PayloadRef | None
    episodes: list[EpisodeSummary]


class StallReport(Message, frozen=True, kw_only=True, tag="STALL"):
    """Somebody in the sending process waits, and has waited long."""

    stall: Stall


class AskState(Message, frozen=True, kw_only=True, tag="ASK_STATE"):
    """What does the trainer hold?"""


class HeldState(Message, frozen=True, kw_only=True, tag="HELD_STATE"):
    """This."""

    state: TrainerState


class AskSaved(Message, frozen=True, kw_only=True, tag="ASK_SAVED"):
    """Which checkpoints in `directory` are whole?"""

    directory: str


class FoundSaved(Message, frozen=True, kw_only=True, tag="FOUND_SAVED"):
    """These."""

    saved: SavedStates


class HoldsNothing(Message, frozen=True, kw_only=True, tag="HOLDS_NOTHING"):
    """A trainer that was not told yet where to begin cannot do what it was asked: the one that could has died."""


class Restore(Message, frozen=True, kw_only=True, tag="RESTORE"):
    """Go back to a checkpoint."""

    directory: str
    step: int
    policy_version: int


class Begin(Message, frozen=True, kw_only=True, tag="BEGIN"):
    """Begin with the weights a run starts with, after the warm start if there is to be one."""

    policy_version: int


class Begun(Message, frozen=True, kw_only=True, tag="BEGUN"):
    """What came of the warm start; empty if the configuration asks for none."""

    metrics: dict[str, float]


class Accumulate(Message, frozen=True, kw_only=True, tag="ACCUMULATE"):
    """Add the gradient of these groups."""

    groups: list[GroupRef]


class Accumulated(Message, frozen=True, kw_only=True, tag="ACCUMULATED"):
    """Gradients added; counts and sums."""

    metrics: dict[str, float]


class Step(Message, frozen=True, kw_only=True, tag="STEP"):
    """One optimizer step over everything accumulated."""


class LearnerStateUpdate(Message, frozen=True, kw_only=True, tag="LEARNER_STATE_UPDATE"):
    """The reply to `Step`: how the learner does."""

    state: LearnerState


class Publish(Message, frozen=True, kw_only=True, tag="PUBLISH"):
    """Write the current weights where servers can map them."""


class Published(Message, frozen=True, kw_only=True, tag="PUBLISHED"):
    """Where they are."""

    handle: WeightsHandle


class SaveCheckpoint(Message, frozen=True, kw_only=True, tag="SAVE_CHECKPOINT"):
    """Save weights, optimizer, RNG and `state` atomically under `directory`."""

    directory: str
    state: dict[str, Any]


AnyMessage = (
    Ack
    | Refused
    | Hello
    | Goodbye
    | Welcome
    | WhoAreYou
    | ServersChanged
    | Heartbeat
    | TaskRequest
    | NewTask
    | Cancel
    | GrantRequest
    | Grant
    | EpisodesEnded
    | DataGenerated
    | StallReport
    | AskState
    | HeldState
    | AskSaved
    | FoundSaved
    | Restore
    | Begin
    | Begun
    | HoldsNothing
    | Accumulate
    | Accumulated
    | Step
    | LearnerStateUpdate
    | Publish
    | Published
    | SaveCheckpoint
)
