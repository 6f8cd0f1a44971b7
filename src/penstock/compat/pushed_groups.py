"""Groups pushed by Atropos environments: read, checked field by field, and matched with the policy's recorded answers.

A sequence has tokens and a mask. The mask is -100 for tokens of the environment, and the token itself for tokens of the
policy. A span of the policy is looked up among the latest answers to exactly the tokens before it, so that the
log-probabilities and versions are those of the sampling:

* If the mask continues after the answer (as over a template's end of turn), the further tokens are not trained as part
  of the answer, because the policy did not sample them.
* If the mask ends before the answer does (for example at a stop string), only that part of the answer is used.
* If the last answer of a sequence was tokenised again from its text, it gets its original tokens back. An earlier such
  answer is left out of the training, because the turns after it follow the new tokens.

An answer without a record keeps the log-probabilities that came with it, if any. It counts as sampled by the oldest
policy_version that it may come from.
"""

from __future__ import annotations

import json
import math
import reprlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import msgspec
import numpy as np
from msgspec import Struct

from penstock.config import Config
from penstock.envs.pushed_group_exchange import ScoredEpisode
from penstock.envs.rewards.reward import check_number
from penstock.model.chat import ChatTokenizer
from penstock.rollout.generation_cache import CachedAnswer, GenerationCache, Prefixes
from penstock.samples import Segment, Turn, VersionSpan

UNTRAINED = -100
UNSERVED = ("advantages", "images", "distill_token_ids", "distill_logprobs")
"""Fields that would change the training. They are refused, because the run does not support them."""


class PushedGroup(Struct):
    """A group as an environment pushes it. Other fields are ignored."""

    tokens: list[list[int]]
    masks: list[list[int]]
    scores: list[float]
    inference_logprobs: list[list[float]] | None = None
    overrides: list[dict[str, Any]] | None = None


def parse(body: bytes) -> Any:
    """Decode JSON in Python's dialect, including NaN: later checks can then name the field with the bad number. Raises
    ValueError."""
    try:
        return json.loads(body)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"the body is not JSON: {error}") from None


def read_group(document: Any, config: Config, *, vocab_size: int) -> PushedGroup:
    """Return a group that can be trained in the run of `config`. Raises ValueError, which names the bad field."""
    try:
        data = msgspec.convert(document, PushedGroup)
    except msgspec.ValidationError as error:
        raise ValueError(str(error).replace("$.", "")) from None
    for name in ("tokens", "masks", "scores"):
        if (size := len(getattr(data, name))) != config.env.group_size:
            raise ValueError(
                f"{name} holds {size} sequences, and env.group_size is {config.env.group_size}: "
                f"give the environment --env.group_size {config.env.group_size}"
            )
    for number, (tokens, mask, score) in enumerate(zip(data.tokens, data.masks, data.scores, strict=True)):
        _check_sequence(number, tokens, mask, config.model.max_context, vocab_size)
        check_number(f"scores[{number}]", score)
    if all(each == UNTRAINED for mask in data.masks for each in mask):
        raise ValueError(f"masks hold no token to train: all are {UNTRAINED}")
    if data.inference_logprobs and list(map(len, data.inference_logprobs)) != list(map(len, data.tokens)):
        raise ValueError("inference_logprobs do not have a value for every token")
    for name in UNSERVED:
        if document.get(name):
            raise ValueError(f"{name} are not served: advantages come from the scores of a group")
    for number, overrides in enumerate(data.overrides or ()):
        if any(overrides.values()):
            raise ValueError(f"overrides[{number}] are not served: {reprlib.repr(overrides)}")
    return data


def _check_sequence(number: int, tokens: list[int], mask: list[int], max_context: int, vocab_size: int) -> None:
    if not tokens:
        raise ValueError(f"tokens[{number}] is empty")
    if len(mask) != len(tokens):
        raise ValueError(f"masks[{number}] has {len(mask)} values for the {len(tokens)} of tokens[{number}]")
    if len(tokens) > max_context:
        raise ValueError(f"tokens[{number}] are {len(tokens)}, more than model.max_context {max_context}")
    try:
        ids, masked = np.asarray(tokens, dtype=np.int64), np.asarray(mask, dtype=np.int64)
    except OverflowError:
        raise ValueError(f"tokens[{number}] or masks[{number}] hold a number that no token can be") from None
    for place in np.flatnonzero((ids < 0) | (ids >= vocab_size))[:1].tolist():
        raise ValueError(
            f"tokens[{number}][{place}] is {tokens[place]}, and the model's tokens go up to {vocab_size - 1}: "
            "the environment must use the model's own tokenizer"
        )
    for place in np.flatnonzero((masked != UNTRAINED) & (masked != ids))[:1].tolist():
        token, trained = tokens[place], mask[place]
        raise ValueError(f"masks[{number}][{place}] is {trained}, neither {UNTRAINED} nor the token {token}")


class ProvenanceMatch(NamedTuple):
    """A group matched with the policy's recorded answers."""

    episodes: list[ScoredEpisode]
    num_unknown: int
    """Number of answers without a record of their sampling."""
    num_left_out: int
    """Number of answers left out of the training: tokenised again and followed by later answers."""


class _Sequence(NamedTuple):
    """One sequence of a group."""

    number: int
    tokens: list[int]
    answered: list[tuple[int, int]]
    """[start, end) of each span of the policy's tokens."""
    logprobs: list[float]
    prefixes: Prefixes


class Provenance:
    """Matches pushed tokens with the policy's recorded answers."""

    def __init__(self, cache: GenerationCache, config: Config, chat: ChatTokenizer) -> None:
        self._cache, self._config = cache, config
        self._vocab_size, self._decode = chat.vocab_size, chat.decode

    def match(self, document: object, *, oldest_version: int) -> ProvenanceMatch:
        """Read a group and match all its sequences. `oldest_version`: policy_version of answers without a record.
        Raises ValueError for a group that cannot be trained, or that was sampled with other parameters than the run
        trains with."""
        data = read_group(document, self._config, vocab_size=self._vocab_size)
        counts: Counter[str] = Counter()
        episodes = []
        for number, tokens in enumerate(data.tokens):
            bounds = np.flatnonzero(np.diff(np.asarray(data.masks[number]) != UNTRAINED, prepend=False, append=False))
            logprobs = data.inference_logprobs[number] if data.inference_logprobs else [math.nan] * len(tokens)
            spans = [(int(start), int(end)) for start, end in bounds.reshape(-1, 2)]
            sequence = _Sequence(number, tokens, spans, logprobs, Prefixes(tokens))
            episodes.append(self._episode(sequence, data.scores[number], oldest_version, counts))
        if not any(np.isfinite(segment.logprobs).any() for each in episodes for segment in _segments(each)):
            raise ValueError(
                "inference_logprobs are missing, and the policy has not recently given these answers here, so no token "
                "can be trained: request answers at this address (base_url URL/v1), and push their tokens unchanged"
            )
        return ProvenanceMatch(episodes, counts["unknown"], counts["left out"])

    def _episode(self, sequence: _Sequence, score: float, oldest_version: int, counts: Counter[str]) -> ScoredEpisode:
        """Return a sequence as turns, which hold all its tokens: those that no segment covers are observed."""
        turns: list[Turn] = []
        observed = 0
        for start, end in sequence.answered:
            segments, segments_end = self._recall(sequence, start, end, oldest_version, counts)
            if segments:
                turns.append(Turn(observation_ids=sequence.tokens[observed:start], segments=segments))
                observed = segments_end
        is_truncated = bool(turns) and turns[-1].segments[-1].finish_reason == "length"
        if observed < len(sequence.tokens):
            turns.append(Turn(observation_ids=sequence.tokens[observed:], segments=[]))
        return ScoredEpisode(turns=turns, reward=score, status="truncated" if is_truncated else "completed")

    def _recall(
        self, sequence: _Sequence, start: int, end: int, oldest_version: int, counts: Counter[str]
    ) -> tuple[list[Segment], int]:
        """Return the segments of [start, end), one answer or several in a row, and the place where they end. Without a
        record, they are the tokens as pushed. There are none if the first answer is left out of the training."""
        segments: list[Segment] = []
        place = start
        while place < end and (found := self._find(sequence, place, end)) is not None:
            segment, num_tokens = found
            if segment is None:
                counts["left out"] += 1
                return segments, place
            segments.append(segment)
            place += num_tokens
        if segments:
            return segments, place
        counts["unknown"] += 1
        tokens, logprobs = sequence.tokens[start:end], sequence.logprobs[start:end]
        spans = [VersionSpan(oldest_version, 0, end - start)]
        return [Segment(token_ids=tokens, logprobs=logprobs, spans=spans, finish_reason="stop")], end

    def _find(self, sequence: _Sequence, start: int, end: int) -> tuple[Segment | None, int] | None:
        """Return the recorded answer that begins at `start`, and the number of the sequence's tokens that it covers.
        The answer is None if it is to be left out. The result is None if there is no record."""
        answers = self._cache.answers(sequence.prefixes, start)
        pushed = sequence.tokens[start:end]
        best = max(answers, key=lambda answer: _num_equal(answer, pushed), default=None)
        if best is None:
            return None
        num_equal, length = _num_equal(best, pushed), len(best.token_ids)
        if num_equal == min(length, len(pushed)):
            self._check_sampling(sequence, best)
            return (best.segment() if num_equal == length else best.segment().cut(num_equal, "stop")), num_equal
        text = self._decode(pushed).strip()
        alike = next((answer for answer in answers if self._decode(answer.token_ids.tolist()).strip() == text), None)
        if alike is None:
            return None
        self._check_sampling(sequence, alike)
        is_last = end == sequence.answered[-1][1]
        return (alike.segment() if is_last else None), len(pushed)

    def _check_sampling(self, sequence: _Sequence, answer: CachedAnswer) -> None:
        for name in ("temperature", "top_p", "top_k"):
            sampled, trained = getattr(answer.sampling, name), getattr(self._config.env, name)
            if sampled != trained:
                raise ValueError(
                    f"tokens[{sequence.number}] were sampled at {name} {sampled:g}, and the run trains at env.{name} "
                    f"{trained:g}: make them equal"
                )


def _segments(episode: ScoredEpisode) -> Iterator[Segment]:
    for turn in episode.turns:
        yield from turn.segments


def _num_equal(answer: CachedAnswer, pushed: Sequence[int]) -> int:
    """Return the number of equal tokens at the beginning."""
    length = min(len(answer.token_ids), len(pushed))
    differ = np.flatnonzero(answer.token_ids[:length] != np.asarray(pushed[:length], dtype=np.int64))
    return int(differ[0]) if len(differ) else length
