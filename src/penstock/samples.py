"""Tokens of episodes: segments and turns make up a trajectory, and trajectories become training samples."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt

from penstock.types import (
    NO_VERSION,
    EpisodeId,
    EpisodeSummary,
    FinishReason,
    Formulation,
    StopReason,
    TrajectoryStatus,
)


class VersionSpan(NamedTuple):
    """The policy with `policy_version` sampled the tokens [start, end) of a segment. The server records spans."""

    policy_version: int
    start: int
    end: int


def add_spans(spans: list[VersionSpan], more: Sequence[VersionSpan], *, offset: int) -> None:
    """Append the spans `more`, shifted by `offset`, to `spans`. Adjacent spans of one version become one span."""
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
    """Most likely (log-probability, token) pairs at each position, best first; None unless a client asked for them."""

    @classmethod
    def joined(cls, segments: Sequence[Segment], reason: FinishReason) -> Segment:
        """Return the consecutive `segments` of one answer as one segment."""
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
        """Return the first `length` tokens as a segment that ended for `reason`."""
        spans = [VersionSpan(version, start, min(end, length)) for version, start, end in self.spans if start < length]
        return Segment(
            token_ids=self.token_ids[:length], logprobs=self.logprobs[:length], spans=spans, finish_reason=reason
        )


ROOT = -1
"""Parent of a turn that begins a new context."""


def parent_of(turns: Sequence[Turn], index: int) -> int:
    """Return the index of the turn that a turn continues, `ROOT` if it continues none."""
    parent = turns[index].parent
    return index - 1 if parent is None else parent


def path_to(turns: Sequence[Turn], last: int) -> list[int]:
    """Return the indexes of the turns from the beginning of a context to the turn `last`; none for `ROOT`."""
    found: list[int] = []
    while last != ROOT:
        found.append(last)
        last = parent_of(turns, last)
    return found[::-1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Observation -> action. `observation_ids` are only the tokens that this turn added to the context."""

    observation_ids: list[int]
    segments: list[Segment]
    parent: int | None = None
    """Index of the turn whose context this turn continues, `ROOT` if it begins a new context. None: the turn before
    it."""

    @property
    def token_ids(self) -> list[int]:
        """Return the tokens of the action."""
        return [token for segment in self.segments for token in segment.token_ids]


def place_of(
    token_ids: Sequence[int], turns: Sequence[Turn], continued: Mapping[int, Sequence[int]]
) -> tuple[int, int]:
    """Return the turn with the longest context that these tokens begin with, and the length of this context.
    `continued`: the turns that continue a turn, by its index."""
    found, open_ends = (ROOT, 0), [(ROOT, 0)]
    while open_ends:
        index, known = open_ends.pop()
        found = max(found, (index, known), key=lambda each: each[1])
        for child in continued.get(index, ()):
            action = turns[child].token_ids
            context = turns[child].observation_ids + action
            if action and list(token_ids[known : known + len(context)]) == context:
                open_ends.append((child, known + len(context)))
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Trajectory:
    """The result of an episode. A failed episode has a trajectory too; its `error` says why it failed.

    The turns form a tree, because an agent may branch off or rewrite its history: then several turns continue the same
    turn. A *branch* is a path from a first turn to a turn that no other turn continues.
    """

    episode: EpisodeId
    task_id: str
    turns: list[Turn]
    reward: float
    status: TrajectoryStatus
    stop_reason: StopReason | None = None
    """None if the episode failed or was aborted."""
    error: str | None = None
    is_final: bool = False
    """Whether a failed episode would fail in the same way again."""
    started_at: float = 0.0
    """Seconds since the epoch."""
    finished_at: float = 0.0
    """Seconds since the epoch."""
    env_s: float = 0.0
    """Seconds in which the environment or its tools worked."""
    reward_s: float = 0.0
    """Seconds in which a reward outside the environment was computed."""
    env_seed: int = 0
    temperature: float = 1.0
    """At which the actions were sampled."""
    info: dict[str, Any] = field(default_factory=dict)
    """Latest value of each key in the environment's info that `dump.columns` names, or of all keys if a filter of the
    user may look at them."""
    metrics: dict[str, float] = field(default_factory=dict)
    """The environment's own metrics of the episode, by name."""

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens that the policy generated."""
        return sum(len(segment.token_ids) for turn in self.turns for segment in turn.segments)

    def branches(self) -> list[list[int]]:
        """Return the indexes of the turns of each branch. The last branch ends with the last turn."""
        inner = {parent_of(self.turns, index) for index in range(len(self.turns))}
        return [path_to(self.turns, last) for last in range(len(self.turns)) if last not in inner]

    def summary(self, *, text: str | None = None) -> EpisodeSummary:
        """Return the summary that the controller needs."""
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
            seconds=max(self.finished_at - self.started_at, 0.0),
            env_s=self.env_s,
            reward_s=self.reward_s,
            error=self.error,
            is_final=self.is_final,
            text=text,
            env_seed=self.env_seed,
            info=self.info,
            metrics=self.metrics,
        )

    @classmethod
    def unflatten(
        cls, samples: Sequence[Sample], *, episode: EpisodeId, task_id: str, ended: bool, env_seed: int = 0
    ) -> Self:
        """Return the trajectory of saved samples: the inverse of `formulate` by branches, without `stop_reason`,
        `info` and `metrics`."""
        sample, turns, continued = samples[-1], list[Turn](), dict[int, list[int]]()
        for each in samples:
            own = np.flatnonzero(each.loss_mask)
            before = each.token_ids[: own[0]].tolist() if len(own) else each.token_ids.tolist()
            parent, known = place_of(before, turns, continued) if turns else (None, 0)
            for turn in _turns(each, parent, start=known):
                turns.append(turn)
                continued.setdefault(parent_of(turns, len(turns) - 1), []).append(len(turns) - 1)
        status: TrajectoryStatus = "aborted" if not ended else "truncated" if sample.truncated else "completed"
        if status == "completed" and turns and turns[-1].segments:
            turns[-1].segments[-1] = replace(turns[-1].segments[-1], finish_reason="stop")
        return cls(
            episode=episode,
            task_id=task_id,
            turns=turns,
            reward=sample.reward,
            status=status,
            env_seed=env_seed,
            temperature=sample.temperature,
        )

    def formulate(self, formulation: Formulation) -> list[Sample]:
        """Return the training samples of the episode. Each of them has the reward of the episode."""
        if not self.turns:
            return [self._sample([], ())]  # so that its member has one
        match formulation:
            case "trajectory":
                return [self.flatten()]
            case "step":
                return [self._sample(path_to(self.turns, last), {last}) for last in range(len(self.turns))]
            case "branches":
                branches, done, found = self.branches(), set[int](), []
                for branch in branches:
                    found.append(self._sample(branch, set(branch) - done))
                    done |= set(branch)
                return found

    def flatten(self) -> Sample:
        """Return the last branch for training. The loss mask is 0 on observations and 1 on actions."""
        last = path_to(self.turns, len(self.turns) - 1)
        return self._sample(last, last)

    def _sample(self, path: Sequence[int], trained: Collection[int]) -> Sample:
        """Return the token arrays of the turns `path`. Actions of other turns than `trained` count as observations."""
        tokens: list[int] = []
        mask: list[int] = []
        logprobs: list[float] = []
        versions: list[int] = []
        for index in path:
            turn = self.turns[index]
            observed = turn.observation_ids if index in trained else turn.observation_ids + turn.token_ids
            tokens += observed
            mask += [0] * len(observed)
            logprobs += [0.0] * len(observed)
            versions += [NO_VERSION] * len(observed)
            for segment in turn.segments if index in trained else ():
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
            temperature=self.temperature,
            token_ids=np.asarray(tokens, dtype=np.int32),
            loss_mask=np.asarray(mask, dtype=np.uint8),
            logprobs=np.asarray(logprobs, dtype=np.float32),
            versions=np.asarray(versions, dtype=np.int32),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A branch of a trajectory or one of its turns, for the trainer. All arrays have length T = prompt + response."""

    group: int
    episode: int
    reward: float
    truncated: bool
    temperature: float = 1.0
    """At which the tokens were sampled."""
    token_ids: npt.NDArray[np.int32]  # [T]
    loss_mask: npt.NDArray[np.uint8]  # [T], 1 on sampled tokens
    logprobs: npt.NDArray[np.float32]  # [T], behaviour log-probabilities, 0 where the mask is 0
    versions: npt.NDArray[np.int32]  # [T], policy_version per sampled token, NO_VERSION where the mask is 0

    @classmethod
    def joined(cls, pieces: Sequence[Sample]) -> Sample:
        """Return a sample from its consecutive pieces. Reward and end come from the last piece."""
        names = ("token_ids", "loss_mask", "logprobs", "versions")
        arrays: dict[str, Any] = {name: np.concatenate([getattr(each, name) for each in pieces]) for name in names}
        return replace(pieces[-1], **arrays)

    @classmethod
    def overlaid(cls, samples: Sequence[Sample]) -> Sample:
        """Return the last branch of an episode with all its actions, from the samples that train them."""
        whole = samples[-1]
        if len(samples) == 1:
            return whole
        mask, logprobs, versions = whole.loss_mask.copy(), whole.logprobs.copy(), whole.versions.copy()
        for sample in samples[:-1]:
            shared = min(len(sample.token_ids), len(whole.token_ids))
            differs = np.flatnonzero(sample.token_ids[:shared] != whole.token_ids[:shared])
            sampled = np.flatnonzero(sample.loss_mask[: differs[0] if len(differs) else shared])
            sampled = sampled[mask[sampled] == 0]
            mask[sampled], logprobs[sampled], versions[sampled] = 1, sample.logprobs[sampled], sample.versions[sampled]
        return replace(whole, loss_mask=mask, logprobs=logprobs, versions=versions)


def _turns(sample: Sample, parent: int | None, *, start: int) -> Iterator[Turn]:
    """Yield the turns of a sample from this position on. The first one has this parent."""
    bounds = np.flatnonzero(np.diff(sample.loss_mask, prepend=0, append=0))  # [start, end) of each action
    seen = start
    for begin, end in bounds.reshape(-1, 2).tolist():
        observation_ids = sample.token_ids[seen:begin].tolist()
        yield Turn(observation_ids=observation_ids, segments=[_segment(sample, begin, end)], parent=parent)
        seen, parent = end, None
    if seen < len(sample.token_ids):
        yield Turn(observation_ids=sample.token_ids[seen:].tolist(), segments=[], parent=parent)


def _segment(sample: Sample, start: int, end: int) -> Segment:
    """Return the tokens [start, end) of a sample as a segment, with their versions as spans."""
    versions = sample.versions[start:end]
    cuts = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist(), end - start]
    return Segment(
        token_ids=sample.token_ids[start:end].tolist(),
        logprobs=sample.logprobs[start:end].tolist(),
        spans=[VersionSpan(int(versions[a]), a, b) for a, b in pairwise(cuts)],
        finish_reason="length",
    )
