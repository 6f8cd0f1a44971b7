"""Tokens of episodes: segments and turns make up a trajectory, and trajectories become training samples."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, Self

import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from penstock.routed_experts import Record, assembled, joined, unknown
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
    experts: Record | None = field(default=None, compare=False)
    """Experts of the latest tokens before the segment's last one, [n, width]: those of its own tokens and, as far as
    they were asked for, of the context before it. None: not recorded."""

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
            experts=joined([len(segment.token_ids) for segment in segments], [each.experts for each in segments]),
        )

    def cut(self, length: int, reason: FinishReason) -> Segment:
        """Return the first `length` tokens as a segment that ended for `reason`."""
        spans = [VersionSpan(version, start, min(end, length)) for version, start, end in self.spans if start < length]
        kept = 0 if self.experts is None else len(self.experts) - max(len(self.token_ids) - length, 0)
        return Segment(
            token_ids=self.token_ids[:length],
            logprobs=self.logprobs[:length],
            spans=spans,
            finish_reason=reason,
            experts=self.experts[:kept] if self.experts is not None and kept > 0 else None,
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


class CalledTool(NamedTuple):
    """A tool call of an answer."""

    name: str
    call_id: str = ""
    """Empty in environments with `step`: calls have no ids there."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolUse:
    """The execution of all tool calls of an answer. Times are in seconds since the epoch."""

    calls: Sequence[CalledTool]
    started_at: float
    finished_at: float | None = None
    """None if an agent executes the calls itself: the results come with its next request."""
    error: str | None = None
    """Type of the exception that ended the execution; None if there was none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """Observation -> action. `observation_ids` are only the tokens that this turn added to the context."""

    observation_ids: list[int]
    segments: list[Segment]
    parent: int | None = None
    """Index of the turn whose context this turn continues, `ROOT` if it begins a new context. None: the turn before
    it."""
    reward: float = 0.0
    """What the environment gave for the action. What an episode has earned beyond the rewards of its turns counts at
    its last action."""
    state: int | None = None
    """Hash of the environment's state, if it names one; None: of the observation."""
    trained: list[bool] | None = None
    """Whether each token of the action is trained; None: all are."""
    started_at: float = field(default=0.0, compare=False)
    """Time at which the answer was asked for, in seconds since the epoch. 0 if the worker did not see it: an external
    program has pushed the turn, or it was read from the pool."""
    answered_at: float = field(default=0.0, compare=False)
    """Time at which the answer was complete, in seconds since the epoch. 0 if it never was."""
    generating_s: float = field(default=0.0, compare=False)
    """Seconds between the two in which a server worked on the answer. In the others it waited for a grant."""
    tools: ToolUse | None = field(default=None, compare=False)
    """None if the action calls no tool."""

    @property
    def token_ids(self) -> list[int]:
        """Return the tokens of the action."""
        return [token for segment in self.segments for token in segment.token_ids]

    @property
    def state_hash(self) -> int:
        """Return a number that is equal for turns in equal states."""
        if self.state is not None:
            return self.state
        return xxh3_64_intdigest(np.asarray(self.observation_ids, dtype=np.int32).tobytes())


def num_routed(turns: Sequence[Turn]) -> int:
    """Return the number of leading tokens of a context with recorded experts. `turns`: those of the context."""
    known = length = 0
    for turn in turns:
        length += len(turn.observation_ids)
        for segment in turn.segments:
            length += len(segment.token_ids)
            if segment.experts is not None and length - 1 - len(segment.experts) <= known:
                known = length - 1
    return known


class Credit(NamedTuple):
    """The reward of one conversation of an agent, in place of that of its episode."""

    reward: float
    role: str = ""
    """The learner compares it with the conversations of the same role, in all episodes of the group."""


def place_of(
    token_ids: Sequence[int], turns: Sequence[Turn] | Mapping[int, Turn], continued: Mapping[int, Sequence[int]]
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
    turn. A *branch* is a path from a first turn to a turn that no other turn continues. A *conversation* is all turns
    with the same first turn.
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
    credits: Sequence[Credit] = ()
    """One for each conversation, in the order in which they began; none if all have the reward of the episode."""

    @property
    def num_tokens(self) -> int:
        """Return the number of tokens that the policy generated."""
        return sum(len(segment.token_ids) for turn in self.turns for segment in turn.segments)

    def branches(self) -> list[list[int]]:
        """Return the indexes of the turns of each branch. The last branch ends with the last turn."""
        inner = {parent_of(self.turns, index) for index in range(len(self.turns))}
        return [path_to(self.turns, last) for last in range(len(self.turns)) if last not in inner]

    def conversations(self) -> list[list[int]]:
        """Return the indexes of the turns of each conversation, in the order in which they began."""
        found: dict[int, list[int]] = {}
        first: list[int] = []
        for index in range(len(self.turns)):
            parent = parent_of(self.turns, index)
            first.append(index if parent == ROOT else first[parent])
            found.setdefault(first[index], []).append(index)
        return list(found.values())

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
        sample, turns, continued = samples[-1], dict[int, Turn](), dict[int, list[int]]()
        numbers = {turn: number for number, turn in enumerate(sorted(each.turn for s in samples for each in s.turns))}
        latest: dict[int, TrainedTurn] = {}
        """The latest turn of each sample that was added."""
        for place, which in sorted((place, which) for which, each in enumerate(samples) for place in each.turns):
            each, number = samples[which], numbers[place.turn]
            if which in latest:
                parent, seen = numbers[latest[which].turn], latest[which].end
            else:
                parent, seen = place_of(each.token_ids[: place.start].tolist(), turns, continued)
            turns[number] = _turn(each, place, observed_from=seen, parent=None if parent == number - 1 else parent)
            continued.setdefault(parent, []).append(number)
            latest[which] = place
        status: TrajectoryStatus = "aborted" if not ended else "truncated" if sample.truncated else "completed"
        if status == "completed" and turns and (segments := turns[max(turns)].segments):
            segments[-1] = replace(segments[-1], finish_reason="stop")
        credits = {each.conversation: each.credit for each in samples if each.credit is not None}
        return cls(
            episode=episode,
            task_id=task_id,
            turns=[turns[index] for index in sorted(turns)],
            reward=sample.reward,
            status=status,
            env_seed=env_seed,
            temperature=sample.temperature,
            credits=[credits[number] for number in sorted(credits)],
        )

    def formulate(self, formulation: Formulation) -> list[Sample]:
        """Return the training samples of the episode. Each of them has the reward of the episode, and the credit of its
        conversation."""
        if not self.turns:
            return [self._sample([], (), {})]  # so that its member has one
        rewards = self._rewards_of_turns()
        match formulation:
            case "trajectory":
                last = path_to(self.turns, len(self.turns) - 1)
                return [self._sample(last, last, rewards)]
            case "step":
                return [self._sample(path_to(self.turns, last), {last}, rewards) for last in range(len(self.turns))]
            case "branches":
                branches, done, found = self.branches(), set[int](), []
                for branch in branches:
                    found.append(self._sample(branch, set(branch) - done, rewards))
                    done |= set(branch)
                return found

    def flatten(self) -> Sample:
        """Return the last branch for training. The loss mask is 0 on observations and 1 on actions."""
        (sample,) = self.formulate("trajectory")
        return sample

    def _rewards_of_turns(self) -> dict[int, float]:
        """Return the reward of each turn. Those of a conversation, or of the whole episode, add up to its reward."""
        rewards = {index: turn.reward for index, turn in enumerate(self.turns)}
        parts = zip(self.conversations(), self.credits, strict=True) if self.credits else [(list(rewards), self)]
        for indexes, credited in parts:
            acting = [index for index in indexes if self.turns[index].segments] or indexes
            rewards[acting[-1]] += credited.reward - sum(rewards[index] for index in indexes)
        return rewards

    def _sample(self, path: Sequence[int], trained: Collection[int], rewards: Mapping[int, float]) -> Sample:
        """Return the token arrays of the turns `path`. Actions of other turns than `trained` count as observations."""
        tokens: list[int] = []
        mask: list[int] = []
        logprobs: list[float] = []
        versions: list[int] = []
        turns: list[TrainedTurn] = []
        for index in path:
            turn = self.turns[index]
            observed = turn.observation_ids if index in trained else turn.observation_ids + turn.token_ids
            tokens += observed
            mask += [0] * len(observed)
            logprobs += [0.0] * len(observed)
            versions += [NO_VERSION] * len(observed)
            if index not in trained:
                continue
            start = len(tokens)
            for segment in turn.segments:
                tokens += segment.token_ids
                mask += [1] * len(segment.token_ids)
                logprobs += segment.logprobs
                for span in segment.spans:
                    versions += [span.policy_version] * (span.end - span.start)
            ends = accumulate(len(segment.token_ids) for segment in turn.segments)
            cuts = _inside(ends, len(tokens) - start)
            turns.append(TrainedTurn(index, start, len(tokens), rewards[index], turn.state_hash, cuts))
            for place in () if turn.trained is None else np.flatnonzero(~np.asarray(turn.trained, dtype=np.bool_)):
                mask[start + place], logprobs[start + place], versions[start + place] = 0, 0.0, NO_VERSION
        conversation = self._conversation_of(path[0]) if path else 0
        return Sample(
            group=self.episode.group,
            episode=self.episode.episode,
            reward=self.reward,
            truncated=self.status == "truncated",
            temperature=self.temperature,
            conversation=conversation,
            credit=self.credits[conversation] if self.credits else None,
            turns=turns,
            token_ids=np.asarray(tokens, dtype=np.int32),
            loss_mask=np.asarray(mask, dtype=np.uint8),
            logprobs=np.asarray(logprobs, dtype=np.float32),
            versions=np.asarray(versions, dtype=np.int32),
            experts=self._experts(path),
        )

    def _experts(self, path: Sequence[int]) -> Record | None:
        """Return the experts of the tokens of the turns `path`."""
        pieces, length = list[tuple[int, Record]](), 0
        for turn in (self.turns[index] for index in path):
            length += len(turn.observation_ids)
            for segment in turn.segments:
                length += len(segment.token_ids)
                if segment.experts is not None:
                    pieces.append((length - 1, segment.experts))
        return assembled(length, pieces)

    def _conversation_of(self, first: int) -> int:
        return sum(parent_of(self.turns, index) == ROOT for index in range(first))


class TrainedTurn(NamedTuple):
    """One turn of a sample. The learner trains its action."""

    turn: int
    """Its index in the episode, in the order in which the turns were played."""
    start: int
    end: int
    """Its action is the tokens [start, end) of the sample."""
    reward: float
    """The rewards of all turns add up to the reward of the episode, or of their conversation if it has a credit."""
    state: int
    """Hash of the state in which the policy acted."""
    cuts: tuple[int, ...] = ()
    """Places in the action where one segment ends and the next begins."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """A branch of a trajectory or one of its turns, for the trainer. All arrays have length T = prompt + response."""

    group: int
    episode: int
    reward: float
    truncated: bool
    temperature: float = 1.0
    """At which the tokens were sampled."""
    conversation: int = 0
    """Number of its conversation in the episode."""
    credit: Credit | None = None
    """The conversation's own reward; None if all conversations share the reward of the episode."""
    turns: Sequence[TrainedTurn] = ()
    """The turns that are trained, in order."""
    token_ids: npt.NDArray[np.int32]  # [T]
    loss_mask: npt.NDArray[np.uint8]  # [T], 1 on sampled tokens
    logprobs: npt.NDArray[np.float32]  # [T], behaviour log-probabilities, 0 where the mask is 0
    versions: npt.NDArray[np.int32]  # [T], policy_version per sampled token, NO_VERSION where the mask is 0
    experts: Record | None = None  # [T, width], of each token; None if they are not recorded

    def is_continued_by(self, other: Sample) -> bool:
        """Return whether `other` begins with all tokens of this sample."""
        length = len(self.token_ids)
        return length <= len(other.token_ids) and bool((other.token_ids[:length] == self.token_ids).all())

    @classmethod
    def joined(cls, pieces: Sequence[Sample]) -> Sample:
        """Return the sample of a single turn from its consecutive pieces. Reward and end come from the last piece."""
        names = ("token_ids", "loss_mask", "logprobs", "versions")
        arrays: dict[str, Any] = {name: np.concatenate([getattr(each, name) for each in pieces]) for name in names}
        end, reward = len(arrays["token_ids"]), pieces[-1].reward
        ends = np.cumsum([len(each.token_ids) for each in pieces]).tolist()
        cuts = list(_ends_of_segments(pieces, ends))
        turns = [
            turn._replace(end=end, reward=reward, cuts=_inside([cut - turn.start for cut in cuts], end - turn.start))
            for turn in pieces[0].turns
        ]
        experts = [(last, each.experts) for last, each in zip(ends, pieces, strict=True) if each.experts is not None]
        return replace(pieces[-1], turns=turns, experts=assembled(end, experts), **arrays)

    @classmethod
    def overlaid(cls, samples: Sequence[Sample]) -> Sample:
        """Return the last branch of an episode with all its actions, from the samples that train them. `turns` are
        those of the last sample."""
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


def _inside(cuts: Iterable[int], length: int) -> tuple[int, ...]:
    """Return the places that lie inside of an action, in order and each once."""
    return tuple(sorted({cut for cut in cuts if 0 < cut < length}))


def _ends_of_segments(pieces: Sequence[Sample], ends: Sequence[int]) -> Iterator[int]:
    """Yield where the segments of a turn end, from its consecutive pieces. `ends`: where the pieces end."""
    yield from ends
    for piece, offset in zip(pieces, (0, *ends), strict=False):
        yield from (offset + turn.start + cut for turn in piece.turns for cut in turn.cuts)


def _turn(sample: Sample, place: TrainedTurn, *, observed_from: int, parent: int | None) -> Turn:
    """Return a trained turn of a sample. Its observation begins at `observed_from`."""
    trained = sample.loss_mask[place.start : place.end] != 0
    cuts = [0, *_inside(place.cuts, place.end - place.start), place.end - place.start]
    return Turn(
        observation_ids=sample.token_ids[observed_from : place.start].tolist(),
        segments=[
            _segment(sample, place.start + a, place.start + b, observed_from if a == 0 else place.start + a)
            for a, b in pairwise(cuts)
            if b > a
        ],
        parent=parent,
        reward=place.reward,
        state=place.state,
        trained=None if trained.all() else trained.tolist(),
    )


def _segment(sample: Sample, start: int, end: int, observed_from: int) -> Segment:
    """Return the tokens [start, end) of a sample as a segment, with their versions as spans, and with the experts from
    the token before `observed_from` on."""
    versions = sample.versions[start:end]
    experts = None if sample.experts is None else sample.experts[max(observed_from - 1, 0) : end - 1]
    cuts = [0, *(np.flatnonzero(np.diff(versions)) + 1).tolist(), end - start]
    return Segment(
        token_ids=sample.token_ids[start:end].tolist(),
        logprobs=sample.logprobs[start:end].tolist(),
        spans=[VersionSpan(int(versions[a]), a, b) for a, b in pairwise(cuts)],
        finish_reason="length",
        experts=None if experts is None or (experts == unknown(experts.dtype)).all() else experts,
    )
