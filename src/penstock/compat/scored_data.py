"""What Atropos environments push: read, checked field by field, and traced back to how the policy said it.

A sequence is tokens and a mask: -100 where the environment spoke, the token itself where the policy did. What the
policy said is looked up among its latest answers to exactly the tokens before it, so that log-probabilities and
versions are those of the sampling:

* a mask that goes on after the answer (a template's end of turn) is taken back there: nobody sampled that;
* one that ends before it (at a stop string, say) keeps that much of it;
* the last answer of a sequence, if it was tokenised anew from its text, gets its own tokens back; an earlier one is
  left out of the training, because what follows was said after the new tokens.

What cannot be found keeps the log-probabilities that came with it, or none, and counts as sampled by the oldest policy
it may come from.
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, NamedTuple

import msgspec
import numpy as np
from msgspec import Struct

from penstock.envs.scored import ScoredEpisode
from penstock.rollout.remembered import Remembered, Said
from penstock.types import Sampling, Segment, Turn, VersionSpan

UNTRAINED = -100


class ScoredData(Struct):
    """A group as it travels. What is not named here means nothing to us."""

    tokens: list[list[int]]
    masks: list[list[int]]
    scores: list[float]
    inference_logprobs: list[list[float]] | None = None
    advantages: list[list[float]] | None = None
    overrides: list[dict[str, Any]] | None = None
    images: Any = None
    distill_token_ids: list[Any] | None = None
    distill_logprobs: list[Any] | None = None
    env_id: int | None = None


UNSERVED = ("advantages", "images", "distill_token_ids", "distill_logprobs")
"""Fields that would change what is trained, and do not here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a group must keep to."""

    group_size: int
    max_context: int
    vocab_size: int
    sampling: Sampling
    """How the run samples what it trains."""


def parse(body: bytes) -> Any:
    """JSON as Python writes it, NaN and all: what is wrong with a number is better said with its name."""
    try:
        return json.loads(body)
    except ValueError as error:
        raise ValueError(f"the body is not JSON: {error}") from None


def read_group(document: object, limits: Limits) -> ScoredData:
    """A group that can be trained. Raises ValueError, which names the field."""
    try:
        data = msgspec.convert(document, ScoredData)
    except msgspec.ValidationError as error:
        raise ValueError(str(error).replace("$.", "")) from None
    _check_sizes(data, limits)
    for number, (tokens, mask, score) in enumerate(zip(data.tokens, data.masks, data.scores, strict=True)):
        _check_sequence(number, tokens, mask, limits)
        if not math.isfinite(score):
            raise ValueError(f"scores[{number}] is {score}, not a finite number")
    if logprobs := data.inference_logprobs:
        lengths = [len(tokens) for tokens in data.tokens]
        if [len(each) for each in logprobs] != lengths:
            raise ValueError("inference_logprobs do not have a value for every token")
    for name in UNSERVED:
        if getattr(data, name):
            raise ValueError(f"{name} are not served: advantages come from the scores of a group")
    for number, overrides in enumerate(data.overrides or ()):
        if any(overrides.values()):
            raise ValueError(f"overrides[{number}] are not served: {overrides}")
    return data


def _check_sizes(data: ScoredData, limits: Limits) -> None:
    for name in ("tokens", "masks", "scores"):
        size = len(getattr(data, name))
        if size != limits.group_size:
            raise ValueError(
                f"{name} holds {size} sequences, and env.group_size is {limits.group_size}: "
                f"give the environment --env.group_size {limits.group_size}"
            )


def _check_sequence(number: int, tokens: list[int], mask: list[int], limits: Limits) -> None:
    if len(mask) != len(tokens):
        raise ValueError(f"masks[{number}] has {len(mask)} values for the {len(tokens)} of tokens[{number}]")
    if len(tokens) > limits.max_context:
        raise ValueError(f"tokens[{number}] are {len(tokens)}, more than model.max_context {limits.max_context}")
    try:
        ids, masked = np.asarray(tokens, dtype=np.int64), np.asarray(mask, dtype=np.int64)
    except OverflowError:
        raise ValueError(f"tokens[{number}] or masks[{number}] hold a number that no token can be") from None
    for place in np.flatnonzero((ids < 0) | (ids >= limits.vocab_size))[:1].tolist():
        raise ValueError(
            f"tokens[{number}][{place}] is {tokens[place]}, and the model's tokens go up to {limits.vocab_size - 1}: "
            "the environment must use the model's own tokenizer"
        )
    for place in np.flatnonzero((masked != UNTRAINED) & (masked != ids))[:1].tolist():
        raise ValueError(
            f"masks[{number}][{place}] is {mask[place]}, neither {UNTRAINED} nor the token {tokens[place]}"
        )


class Traced(NamedTuple):
    """A group, traced back."""

    episodes: list[ScoredEpisode]
    num_unknown: int
    """Answers of which nobody remembers the sampling."""
    num_left_out: int
    """Answers that were tokenised anew, and that others follow."""


class _Sequence(NamedTuple):
    """One of a group."""

    number: int
    tokens: list[int]
    spoken: list[tuple[int, int]]
    """[start, end) of what the policy said."""
    score: float
    logprobs: list[float]


class Tracing:
    """Looks up what the policy said."""

    def __init__(self, remembered: Remembered, limits: Limits, *, decode: Callable[[Sequence[int]], str]) -> None:
        self._remembered, self._limits, self._decode = remembered, limits, decode

    def trace(self, data: ScoredData, *, oldest_version: int) -> Traced:
        """Raises ValueError for words that the policy said in another way than it is trained."""
        logprobs = data.inference_logprobs or [[math.nan] * len(tokens) for tokens in data.tokens]
        sequences = [
            _Sequence(number, tokens, list(_spoken(mask)), score, own)
            for number, (tokens, mask, score, own) in enumerate(
                zip(data.tokens, data.masks, data.scores, logprobs, strict=True)
            )
        ]
        counts: Counter[str] = Counter()
        episodes = [self._trace(sequence, oldest_version, counts) for sequence in sequences]
        return Traced(episodes, counts["unknown"], counts["left out"])

    def _trace(self, sequence: _Sequence, oldest: int, counts: Counter[str]) -> ScoredEpisode:
        turns: list[Turn] = []
        observed = 0
        for start, end in sequence.spoken:
            segments, place = self._recall(sequence, start, end)
            if not segments and place == end:
                counts["left out"] += 1
                continue
            if not segments:
                counts["unknown"] += 1
                segments, place = [_as_pushed(sequence, start, end, oldest)], end
            turns.append(Turn(observation_ids=sequence.tokens[observed:start], segments=segments))
            observed = place
        truncated = bool(turns) and turns[-1].segments[-1].finish_reason == "length"
        if observed < len(sequence.tokens):
            turns.append(Turn(observation_ids=sequence.tokens[observed:], segments=[]))
        return ScoredEpisode(turns=turns, reward=sequence.score, truncated=truncated)

    def _recall(self, sequence: _Sequence, start: int, end: int) -> tuple[list[Segment], int]:
        """What was said in [start, end), as one answer or several that follow each other, and up to where. Nothing up
        to the end is what is to be left out."""
        segments: list[Segment] = []
        while start < end:
            found = self._find(sequence, start, end)
            if found is None:
                break
            segment, num_tokens = found
            if segment is not None:
                segments.append(segment)
            start += num_tokens
        return segments, start

    def _find(self, sequence: _Sequence, start: int, end: int) -> tuple[Segment | None, int] | None:
        """The answer that begins at `start`, and for how many tokens of the sequence it stands."""
        answers = self._remembered.answers(sequence.tokens[:start])
        spoken = sequence.tokens[start:end]
        best = max(answers, key=lambda said: _in_common(said, spoken), default=None)
        if best is None:
            return None
        common, length = _in_common(best, spoken), len(best.token_ids)
        if common == min(length, len(spoken)):
            self._check_sampling(sequence, best)
            return (best.segment() if common == length else best.segment().cut(common, "stop")), common
        alike = next((said for said in answers if self._reads_alike(said, spoken)), None)
        if alike is None:
            return None
        self._check_sampling(sequence, alike)
        is_last = end == sequence.spoken[-1][1]
        return (alike.segment() if is_last else None), len(spoken)

    def _reads_alike(self, said: Said, spoken: list[int]) -> bool:
        return self._decode(said.token_ids.tolist()).strip() == self._decode(spoken).strip()

    def _check_sampling(self, sequence: _Sequence, said: Said) -> None:
        run = self._limits.sampling
        for name in ("temperature", "top_p", "top_k"):
            asked, trained = getattr(said, name), getattr(run, name)
            if asked != trained:
                raise ValueError(
                    f"tokens[{sequence.number}] were sampled at {name} {asked:g}, and the run trains at env.{name} "
                    f"{trained:g}: make them equal"
                )


def _spoken(mask: list[int]) -> Iterator[tuple[int, int]]:
    """[start, end) of what the policy said."""
    place = 0
    for is_spoken, values in groupby(mask, key=lambda value: value != UNTRAINED):
        length = len(list(values))
        if is_spoken:
            yield place, place + length
        place += length


def _in_common(said: Said, spoken: Sequence[int]) -> int:
    """Tokens at the beginning that are the same."""
    length = min(len(said.token_ids), len(spoken))
    differ = np.flatnonzero(said.token_ids[:length] != np.asarray(spoken[:length], dtype=np.int64))
    return int(differ[0]) if len(differ) else length


def _as_pushed(sequence: _Sequence, start: int, end: int, version: int) -> Segment:
    return Segment(
        token_ids=sequence.tokens[start:end],
        logprobs=sequence.logprobs[start:end],
        spans=[VersionSpan(version, 0, end - start)],
        finish_reason="stop",
    )
