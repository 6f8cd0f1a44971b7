"""The vocabulary: every noun that crosses a boundary, once.

Frozen, slotted, keyword-only, importable without torch; what is made per episode is a msgspec struct, ten times cheaper
than a frozen dataclass. One word per idea:

* a *task* is one problem; a *group* is the G *episodes* of one task whose rewards are compared;
* an *episode* is one attempt in an environment, a *turn* is observation -> action;
* an *EpisodeLease* allows one episode to be played and ends in exactly one *trajectory*;
* a *SegmentGrant* allows one generate call of that episode; its tokens are a *segment*;
* *policy_version* is a monotone integer that is never reused;
* *staleness* of a token is (version being trained) - (version that generated it).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import pairwise
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

Purpose = Literal["train", "eval"]
"""What a task is for: to be trained on, or held out and only played."""

FinishReason = Literal["stop", "length", "abort"]
TrajectoryStatus = Literal["completed", "truncated", "aborted", "failed"]
StopReason = Literal["terminated", "truncated", "max_turns", "max_length"]
"""Why an episode went no further: its world ended; its environment cut it short; it had no turn left (`env.max_turns`);
an answer, or what it had to answer, was too long."""
Formulation = Literal["trajectory", "step"]
"""What becomes a training sample: an episode as a whole, or each of its turns with all that came before as its
prompt."""

UpdateMode = Literal["in_place", "retract", "drain"]
"""What becomes of running answers when new weights come: they go on over their keys and values, or have these computed
anew, or end first."""


NO_VERSION = -1
"""Stands for "no policy": unsampled positions (prompts, observations), servers before their first weights."""


class EpisodeState(StrEnum):
    """Where an episode is. Each is in exactly one state; the ledger holds the law (see `scheduler/ledger.py`)."""

    PENDING = "pending"
    """Admitted, not yet handed to a worker."""
    LEASED = "leased"
    """A worker holds its lease."""
    UNFINISHED = "unfinished"
    """Cut at the end of a segment, waiting for its next grant."""
    REWARDING = "rewarding"
    """Generated, its reward still being computed."""
    READY = "ready"
    """Rewarded; trained as soon as its group is whole and the trigger fires."""
    TRAINING = "training"
    """Handed to the trainer."""
    TRAINED = "trained"
    """Part of an optimizer step."""
    COLLECTED = "collected"
    """Kept in the pool for good, by a run that only plays."""
    FILTERED = "filtered"
    """Dropped by the group filter: nothing to learn from it."""
    DISCARDED_STALE = "discarded_stale"
    """Every token is older than `max_staleness`."""
    DISCARDED_SURPLUS = "discarded_surplus"
    """Finished after its group was already full."""
    FAILED = "failed"
    """Its environment failed beyond the retry budget, or a sibling's did."""
    CANCELLED = "cancelled"
    """Given up because the run stopped."""

    __hash__ = str.__hash__  # an Enum's own is a Python function, and the ledger counts by state


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One problem drawn from a task source."""

    task_id: str
    tag: str
    """Which environment plays it (`env` section of the configuration)."""
    index: int
    """Position among all tasks of its purpose; the same index always yields the same task."""
    purpose: Purpose = "train"
    payload: dict[str, Any] = field(default_factory=dict)
    """What the environment needs (question, answer, metadata); plain JSON values."""


class EpisodeId(NamedTuple):
    """`tag/group/episode/attempt`: unique over the whole life of a run."""

    tag: str
    group: int
    episode: int
    """Index of the member within its group, 0..G-1."""
    attempt: int

    def __str__(self) -> str:
        return f"{self.tag}/{self.group}/{self.episode}/{self.attempt}"


class GroupAttempt(NamedTuple):
    """One try at a group; a later one has a higher number."""

    group: int
    attempt: int


def stable_seed(*parts: object) -> int:
    """A 63-bit seed from any printable parts; equal on every machine and Python version."""
    digest = hashlib.blake2b("\x1f".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def nth_seed(seed: int, number: int) -> int:
    """The `number`-th of a family of 63-bit seeds that share no stream (a step of SplitMix64, Steele et al. 2014)."""
    mixed = (seed + (number + 1) * 0x9E3779B97F4A7C15) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & 0xFFFFFFFFFFFFFFFF
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & 0xFFFFFFFFFFFFFFFF
    return (mixed ^ (mixed >> 31)) >> 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Sampling:
    """How the actions of an episode are sampled. `temperature` 0 is greedy; `top_p` 1 and `top_k` 0 keep all tokens."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_new_tokens: int = 64
    """Per turn."""


class EpisodeLease(msgspec.Struct, frozen=True, kw_only=True):
    """Permission to play one episode. Ends in exactly one trajectory, whatever happens."""

    episode: EpisodeId
    env_seed: int
    """Shared by all members of the group and by retries: they meet the same world."""
    sampling_seed: int
    """Differs between members, and between attempts after a failure; who goes on for a lost worker has the same."""
    deadline_s: float
    """Seconds after which the lease is void and the episode counts as failed."""


class SegmentGrant(msgspec.Struct, frozen=True, kw_only=True):
    """Permission to generate up to `max_tokens` in one generate call of a leased episode."""

    episode: EpisodeId
    max_tokens: int


class VersionSpan(NamedTuple):
    """Tokens [start, end) of a segment were sampled by `policy_version`; stamped by the server."""

    policy_version: int
    start: int
    end: int


def add_spans(spans: list[VersionSpan], more: Sequence[VersionSpan], *, offset: int) -> None:
    """Extend `spans` by those of the tokens from `offset` on; neighbours of one version become one."""
    for version, start, end in more:
        if spans and spans[-1].policy_version == version:
            spans[-1] = VersionSpan(version, spans[-1].start, offset + end)
        else:
            spans.append(VersionSpan(version, offset + start, offset + end))


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """The tokens of one grant. `token_ids` and `logprobs` have the same length."""

    token_ids: list[int]
    logprobs: list[float]
    """Log-probability of each sampled token under the policy that sampled it, at the sampling temperature, in nats."""
    spans: list[VersionSpan]
    finish_reason: FinishReason
    top_logprobs: list[list[tuple[float, int]]] | None = None
    """Of each place the likeliest (log-probability, token), best first, where a client asked for them."""

    @classmethod
    def joined(cls, segments: Sequence[Segment], reason: FinishReason) -> Segment:
        """Consecutive segments of one answer as one."""
        spans: list[VersionSpan] = []
        length = 0
        for segment in segments:
            add_spans(spans, segment.spans, offset=length)
            length += len(segment.token_ids)
        return cls(
            token_ids=[token for segment in segments for token in segment.token_ids],
            logprobs=[logprob for segment in segments for logprob in segment.logprobs],
            spans=spans,
            finish_reason=reason,
        )

    def cut(self, length: int, reason: FinishReason) -> Segment:
        """Its first `length` tokens."""
        spans = [VersionSpan(version, start, min(end, length)) for version, start, end in self.spans if start < length]
        return Segment(
            token_ids=self.token_ids[:length], logprobs=self.logprobs[:length], spans=spans, finish_reason=reason
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Observation -> action. `observation_ids` are only the tokens this turn added to the context."""

    observation_ids: list[int]
    segments: list[Segment]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """What an episode left behind. A failed episode is a trajectory too: its `error` says why."""

    episode: EpisodeId
    task_id: str
    turns: list[Turn]
    reward: float
    status: TrajectoryStatus
    stop_reason: StopReason | None = None
    """None if it did not end in its environment."""
    error: str | None = None
    started_at: float = 0.0
    finished_at: float = 0.0
    """Seconds since the epoch."""
    env_seed: int = 0
    info: dict[str, Any] = field(default_factory=dict)
    """Of what the environment told beside its observations: what `dump.columns` names, the latest of each."""

    @property
    def num_tokens(self) -> int:
        """That the policy generated."""
        return sum(len(segment.token_ids) for turn in self.turns for segment in turn.segments)

    def summary(self, *, text: str | None = None) -> EpisodeSummary:
        """The part of it the controller needs."""
        segments = [segment for turn in self.turns for segment in turn.segments]
        versions = [span.policy_version for segment in segments for span in segment.spans]
        return EpisodeSummary(
            episode=self.episode,
            status=self.status,
            stop_reason=self.stop_reason,
            reward=self.reward,
            num_turns=len(self.turns),
            prompt_tokens=sum(len(turn.observation_ids) for turn in self.turns),
            response_tokens=self.num_tokens,
            version_min=min(versions, default=NO_VERSION),
            version_max=max(versions, default=NO_VERSION),
            seconds=self.finished_at - self.started_at,
            error=self.error,
            text=text,
            env_seed=self.env_seed,
            info=self.info,
        )

    @classmethod
    def unflatten(
        cls, sample: Sample, *, episode: EpisodeId, task_id: str, ended: bool, env_seed: int = 0
    ) -> Trajectory:
        """The inverse of `flatten`, for a trajectory that was saved; `stop_reason` and `info` are no part of it."""
        bounds = np.flatnonzero(np.diff(sample.loss_mask, prepend=0, append=0))  # start, end of each action
        turns, seen = [], 0
        for start, end in bounds.reshape(-1, 2).tolist():
            observation_ids = sample.token_ids[seen:start].tolist()
            turns.append(Turn(observation_ids=observation_ids, segments=[_segment(sample, start, end)]))
            seen = end
        if seen < len(sample.token_ids):
            turns.append(Turn(observation_ids=sample.token_ids[seen:].tolist(), segments=[]))
        status: TrajectoryStatus = "aborted" if not ended else "truncated" if sample.truncated else "completed"
        if status == "completed" and turns and turns[-1].segments:
            turns[-1].segments[-1] = replace(turns[-1].segments[-1], finish_reason="stop")
        return cls(
            episode=episode, task_id=task_id, turns=turns, reward=sample.reward, status=status, env_seed=env_seed
        )

    def formulate(self, formulation: Formulation) -> list[Sample]:
        """As training samples. All of an episode have its reward."""
        parts = [self] if formulation == "trajectory" else self._turn_by_turn()
        return [part.flatten() for part in parts]

    def _turn_by_turn(self) -> Iterator[Trajectory]:
        """Every turn as a trajectory of its own: all that came before is part of what it answers."""
        context: list[int] = []
        for turn in self.turns:
            context += turn.observation_ids
            yield replace(self, turns=[Turn(observation_ids=list(context), segments=turn.segments)])
            context += [token for segment in turn.segments for token in segment.token_ids]

    def flatten(self) -> Sample:
        """Token-level view for training: observations masked out, actions kept."""
        tokens: list[int] = []
        mask: list[int] = []
        logprobs: list[float] = []
        versions: list[int] = []
        for turn in self.turns:
            observed = len(turn.observation_ids)
            tokens += turn.observation_ids
            mask += [0] * observed
            logprobs += [0.0] * observed
            versions += [NO_VERSION] * observed
            for segment in turn.segments:
                tokens += segment.token_ids
                mask += [1] * len(segment.token_ids)
                logprobs += segment.logprobs
                for span in segment.spans:
                    versions += [span.policy_version] * (span.end - span.start)
        return Sample(
            group=self.episode.group,
            episode=self.episode.episode,
            reward=self.reward,
            truncated=self.status == "truncated",
            token_ids=np.asarray(tokens, dtype=np.int32),
            loss_mask=np.asarray(mask, dtype=np.uint8),
            logprobs=np.asarray(logprobs, dtype=np.float32),
            versions=np.asarray(versions, dtype=np.int32),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A trajectory, or a turn of one, as the trainer sees it. All arrays have length T = prompt + response tokens."""

    group: int
    episode: int
    reward: float
    truncated: bool
    token_ids: npt.NDArray[np.int32]  # [T]
    loss_mask: npt.NDArray[np.uint8]  # [T], 1 on sampled tokens
    logprobs: npt.NDArray[np.float32]  # [T], behaviour log-probabilities, 0 where the mask is 0
    versions: npt.NDArray[np.int32]  # [T], policy_version per sampled token, NO_VERSION where the mask is 0

    @classmethod
    def joined(cls, pieces: Sequence[Sample]) -> Sample:
        """A sample from its consecutive pieces; how it ended is what the last one says."""
        return replace(
            pieces[-1],
            token_ids=np.concatenate([piece.token_ids for piece in pieces]),
            loss_mask=np.concatenate([piece.loss_mask for piece in pieces]),
            logprobs=np.concatenate([piece.logprobs for piece in pieces]),
            versions=np.concatenate([piece.versions for piece in pieces]),
        )

    @classmethod
    def overlaid(cls, samples: Sequence[Sample]) -> Sample:
        """The whole of a trajectory, of which `formulate` made these: each is a prefix of the next."""
        whole = samples[-1]
        if len(samples) == 1:
            return whole
        mask, logprobs, versions = whole.loss_mask.copy(), whole.logprobs.copy(), whole.versions.copy()
        for sample in samples[:-1]:
            said = np.flatnonzero(sample.loss_mask)
            mask[said], logprobs[said], versions[said] = 1, sample.logprobs[said], sample.versions[said]
        return replace(whole, loss_mask=mask, logprobs=logprobs, versions=versions)


def _segment(sample: Sample, start: int, end: int) -> Segment:
    """Tokens [start, end) of a sample, their versions as spans."""
    versions = sample.versions[start:end]
    cuts = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist(), end - start]
    return Segment(
        token_ids=sample.token_ids[start:end].tolist(),
        logprobs=sample.logprobs[start:end].tolist(),
        spans=[VersionSpan(int(versions[a]), a, b) for a, b in pairwise(cuts)],
        finish_reason="length",
    )


class PayloadRef(msgspec.Struct, frozen=True, kw_only=True):
    """Where a group's tokens lie: one checksummed record in a worker-owned segment file of the pool."""

    file: str
    """Name inside the run's `pool/` folder."""
    offset: int
    length: int
    """Bytes."""
    crc32: int


class EpisodeSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What the controller needs to know of a finished episode; the tokens stay in the pool."""

    episode: EpisodeId
    status: TrajectoryStatus
    reward: float
    num_turns: int
    prompt_tokens: int
    """Observation tokens of all turns."""
    response_tokens: int
    version_min: int
    """Oldest and newest policy_version among the sampled tokens; NO_VERSION if there are none."""
    version_max: int
    seconds: float
    stop_reason: StopReason | None = None
    """None if it did not end in its environment."""
    error: str | None = None
    text: str | None = None
    """Decoded last action; only asked for where people read it (evaluation)."""
    env_seed: int = 0
    info: dict[str, Any] = {}
    """See `Trajectory.info`."""


class GroupRef(msgspec.Struct, frozen=True, kw_only=True):
    """A whole, rewarded group on its way to the trainer."""

    group: int
    task_id: str
    ref: PayloadRef
    episodes: tuple[int, ...]
    """Members with tokens young enough to train; the others only count in the group's mean reward."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WeightsHandle:
    """Names a published set of weights. Only this travels over HTTP, never the tensors."""

    policy_version: int
    path: str
    """A safetensors file in shared memory or on disk, complete before the handle exists."""
    num_bytes: int
    fingerprint: str
    """Checksum over names, shapes, dtypes and bytes; the server echoes what it loaded."""
    machine: str = ""
    """Boot id of the machine that `path` is on."""
    url: str = ""
    """Where other machines get that file; without one they see it too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Endpoint:
    """Where an agent's OpenAI client finds the policy: `OpenAI(base_url=..., api_key=...)`. Either part alone says
    which episode it is, so one of them may be shared."""

    base_url: str = field(repr=False)
    """With the key in it."""
    api_key: str = field(repr=False)
    model: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorNames:
    """Which tensors a transfer carries, in its order."""

    names: list[str]
    dtypes: list[str]
    """As torch spells them: `bfloat16`."""
    shapes: list[list[int]]


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupTensors(TensorNames):
    """Tensors that rank 0 of a group broadcasts while the receiver is told of them."""

    group_name: str
    flat: bool = False
    """All of them as one broadcast of their bytes, end to end; otherwise one broadcast each."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceTensors(TensorNames):
    """Tensors in another process's device memory, their bytes end to end in one allocation; CUDA's IPC fields."""

    device_uuid: str
    memory_handle: bytes
    num_bytes: int
    """Of the storage inside the allocation."""
    offset_bytes: int
    ref_counter_handle: bytes
    ref_counter_offset: int
    event_handle: bytes
    event_sync_required: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerState:
    """What the learner tells the rest of the system after each optimizer step."""

    policy_version: int
    """The version this step produced."""
    entropy: float
    """Mean policy entropy over the trained tokens, in nats per token, before the step."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Loss, gradient norm, clip fraction, ...; names are documented in `trainer/learner.py`."""
    alarms: list[str] = field(default_factory=list)
    """What is wrong since this step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BusySpan:
    """One bar of the timeline: `process` was doing `kind` from `start` to `end` (seconds since the epoch)."""

    process: str
    kind: Literal[
        "generate", "train", "step", "update_weights", "publish", "checkpoint", "evaluate", "warm_start", "restore"
    ]
    start: float
    end: float
    policy_version: int = NO_VERSION
