"""The vocabulary: the types that cross boundaries between parts. Tokens and trajectories are in `samples.py`.

Types are frozen, keyword-only and importable without torch. Types created per episode are msgspec structs, which are
ten times cheaper than frozen dataclasses. One word per idea:

* a *task* is one problem; a *group* is the G *episodes* of one task, and the learner compares their rewards;
* an *episode* is one attempt in an environment, a *turn* is observation -> action;
* an *EpisodeLease* allows one episode to be played and ends in exactly one *trajectory*;
* a *SegmentGrant* allows one generate call of that episode; its tokens are a *segment*;
* *policy_version* is a monotone integer that is never reused;
* *staleness* of a token is the number of optimizer steps between the version that generated it and the version being
  trained. It is their difference if no weights were restored meanwhile (`version_history.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Literal, NamedTuple

import msgspec

Purpose = Literal["train", "eval"]
"""Training tasks are trained on; evaluation tasks are held out and only played."""
FinishReason = Literal["stop", "length", "abort"]
TrajectoryStatus = Literal["completed", "truncated", "aborted", "failed"]
StopReason = Literal["terminated", "truncated", "max_turns", "max_length"]
"""Why an episode stopped.

Its environment terminated or truncated it, it used up `env.max_turns`, or an answer or a prompt was too long.
"""
Formulation = Literal["branches", "trajectory", "step"]
"""Form of a training sample: each branch of an episode, its last branch only, or one turn with everything before it as
the prompt. An episode without branches is one sample in both of the first two."""
UpdateMode = Literal["in_place", "retract", "drain"]
"""How running answers get new weights: they keep their keys and values, recompute them, or end before the update."""

MAX_VERSION = 2**31 - 1
"""Trajectories keep versions as 32-bit integers."""
MOST_METRICS, MAX_METRIC_NAME = 64, 64
"""Most metrics of an episode that an environment may give, and characters of their names."""
RECEIVE_S, SLOWEST_BYTES_PER_S = 300.0, 50e6
"""A server has so long for getting and verifying weights, or as long as they take at this rate."""
NO_VERSION = -1
"""Version of positions that no policy sampled (prompts, observations), and of servers without weights."""


class EpisodeState(StrEnum):
    """State of an episode. `scheduler/ledger.py` defines the legal transitions."""

    PENDING = "pending"
    """Admitted, not handed to a worker yet."""
    LEASED = "leased"
    """A worker holds its lease."""
    UNFINISHED = "unfinished"
    """Cut at the end of a segment, waiting for its next grant."""
    REWARDING = "rewarding"
    """Generated, its reward still being computed."""
    READY = "ready"
    """Rewarded. It is trained once its group is complete and the trigger fires."""
    TRAINING = "training"
    """Handed to the trainer."""
    TRAINED = "trained"
    """Part of an optimizer step."""
    COLLECTED = "collected"
    """Kept in the pool, by a run without a trainer."""
    FILTERED = "filtered"
    """Dropped with its group by a group filter."""
    DISCARDED_STALE = "discarded_stale"
    """Every token is older than `max_staleness`."""
    DISCARDED_SURPLUS = "discarded_surplus"
    """Its group was complete without it."""
    FAILED = "failed"
    """Its group failed more often than `env.max_attempts` allows."""
    CANCELLED = "cancelled"
    """The run stopped."""

    __hash__ = str.__hash__  # an Enum's own hash is a slow Python function, and the ledger counts by state


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One problem drawn from a task source."""

    task_id: str
    tag: str
    """Name of its environment's section in the configuration."""
    index: int
    """Position among all tasks of its purpose; the same index always yields the same task."""
    purpose: Purpose = "train"
    payload: dict[str, Any] = field(default_factory=dict)
    """Data for the environment (question, answer, metadata), as plain JSON values."""


class GroupAttempt(NamedTuple):
    """One attempt at a group; a later attempt has a higher number."""

    group: int
    attempt: int


class EpisodeId(NamedTuple):
    """`tag/group/episode/attempt`: unique over the whole life of a run."""

    tag: str
    group: int
    episode: int
    """Index of the member within its group, 0..G-1."""
    attempt: int

    def __str__(self) -> str:
        return f"{self.tag}/{self.group}/{self.episode}/{self.attempt}"

    @property
    def group_attempt(self) -> GroupAttempt:
        return GroupAttempt(self.group, self.attempt)


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the actions of an episode are sampled. `temperature` 0 is greedy; `top_p` 1 and `top_k` 0 keep all tokens."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 64
    """Most tokens per turn."""
    routed_from: int | None = None
    """Position from which on the experts that compute each token are recorded, if the policy has experts. None: none
    are."""


class EpisodeLease(msgspec.Struct, frozen=True, kw_only=True):
    """Permission to play one episode. It always ends in exactly one trajectory."""

    episode: EpisodeId
    env_seed: int
    """All members and all attempts of the group share it, so that they get the same environment."""
    sampling_seed: int
    """Differs between members, and changes after a failure. A replacement worker gets the same seed."""
    deadline_s: float
    """Seconds after which the lease is void and the episode counts as failed."""


class SegmentGrant(msgspec.Struct, frozen=True, kw_only=True):
    """Permission to generate up to `max_tokens` in one generate call of a leased episode."""

    episode: EpisodeId
    max_tokens: int


class PayloadRef(msgspec.Struct, frozen=True, kw_only=True):
    """Location of a group's tokens: one checksummed record in a worker's segment file of the pool."""

    file: str
    """Name inside the run's `pool/` folder."""
    offset: int
    length: int
    """In bytes."""
    checksum: int
    """XXH3, 64 bits."""


class EpisodeSummary(msgspec.Struct, frozen=True, kw_only=True):
    """Summary of a finished episode for the controller. The tokens stay in the pool."""

    episode: EpisodeId
    status: TrajectoryStatus
    reward: float = 0.0
    num_turns: int = 0
    prompt_tokens: int = 0
    """Observation tokens of all turns."""
    response_tokens: int = 0
    version_min: int = NO_VERSION
    """Oldest policy_version among the sampled tokens; NO_VERSION if there are none."""
    version_max: int = NO_VERSION
    """Newest policy_version among the sampled tokens."""
    seconds: float = 0.0
    env_s: float = 0.0
    """Seconds of `seconds` in which the environment or its tools worked."""
    reward_s: float = 0.0
    """Seconds of `seconds` in which a reward outside the environment was computed."""
    stop_reason: StopReason | None = None
    """None if the episode failed or was aborted."""
    error: str | None = None
    is_final: bool = False
    """Whether a failed episode would fail in the same way again."""
    text: str | None = None
    """Decoded last action, for evaluation samples."""
    env_seed: int = 0
    info: dict[str, Any] = {}
    """See `Trajectory.info`."""
    metrics: dict[str, float] = {}
    """See `Trajectory.metrics`."""

    def without_texts(self) -> EpisodeSummary:
        """Return only the numbers, for a memory that keeps many summaries."""
        return msgspec.structs.replace(self, info={}, text=None, error=None)


Summaries = Sequence[EpisodeSummary]
"""The summaries of a group's episodes, or of some of them."""


class GroupRef(msgspec.Struct, frozen=True, kw_only=True):
    """A complete, rewarded group for the trainer."""

    group: int
    task_id: str
    ref: PayloadRef
    episodes: tuple[int, ...]
    """Members with tokens fresh enough to train. Other members only count in the mean reward of the group."""


WeightsTransport = Literal["shared_memory", "collective", "device_memory", "file"]
"""How weights come to a server: it maps the file where the trainer wrote it, or where another server of its machine
received it; a broadcast to one or several machines; the memory of a device that it shares with the trainer; a file that
is read, by HTTP or from a shared folder."""

DirectWeights = Literal["nccl", "memory"]
"""How a foreign engine gets weights from the trainer's device: by broadcasts, or by copies on a device that both
share."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsHandle:
    """Name and location of published weights. Requests carry this handle, never the tensors."""

    policy_version: int
    path: str
    """A safetensors file in shared memory or on disk, complete before the handle exists."""
    num_bytes: int
    fingerprint: str
    """Checksum over names, shapes, dtypes and bytes. The server returns the checksum of the weights that it loaded."""
    machine: str = ""
    """Boot id of the machine with the file at `path`."""
    url: str = ""
    """Link with which other machines read this file; empty if they can open `path` too."""
    meeting: str = ""
    """HOST:PORT where other machines ask for a broadcast of this file; empty if there is none."""
    adapters: AdaptersForm | None = None
    """None if the file has all weights. Else it has low-rank adapters of some of them, float32, in peft's format."""

    @property
    def receive_limit_s(self) -> float:
        """How long a server may take to get and verify these weights, and those to which they are added."""
        base = self.adapters and self.adapters.base
        num_bytes = self.num_bytes + (base.num_bytes if base else 0)
        return max(RECEIVE_S, num_bytes / SLOWEST_BYTES_PER_S)


@dataclass(frozen=True, slots=True, kw_only=True)
class AdaptersForm:
    """What a server must know to add the adapters of a file to weights. The file's fingerprint covers it."""

    base: WeightsHandle | None
    """All weights, without adapters. Its version is the first one that was published with it. None if servers load them
    by themselves, from the directory of the model."""
    rank: int
    alpha: int
    """Adapters are scaled by alpha / rank."""
    targets: tuple[str, ...]
    """Names of the weights that have adapters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerState:
    """The learner's report after each optimizer step."""

    policy_version: int
    """Version that this step produced."""
    entropy: float
    """Mean policy entropy over the trained tokens, in nats per token, before the step."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Loss, gradient norm, clip fraction, ...; names are documented in `trainer/learner.py`."""
    alarms: list[str] = field(default_factory=list)
    """Alarms that this step raised."""
