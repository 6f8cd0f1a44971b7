"""A cache of the policy's recent answers, by prompt.

An external program may return sampled tokens without their log-probabilities and versions. The cache restores both,
exactly as they were sampled."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.samples import Segment, VersionSpan
from penstock.types import FinishReason, Sampling

MAX_TOKENS = 2**22
"""Maximum number of cached tokens, about 40 MB."""
MAX_ANSWERS = 4096
"""Maximum number of cached answers per prompt."""


@dataclass(frozen=True, slots=True, eq=False)
class CachedAnswer:
    """One answer in compact arrays."""

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    sampling: Sampling

    def segment(self) -> Segment:
        ids, logprobs = self.token_ids.tolist(), self.logprobs.tolist()
        return Segment(token_ids=ids, logprobs=logprobs, spans=list(self.spans), finish_reason=self.finish_reason)


class GenerationCache:
    """The latest answers, up to `max_tokens` tokens. Answers to the least recently added prompt are dropped first."""

    def __init__(self, *, max_tokens: int = MAX_TOKENS) -> None:
        self._max_tokens, self._num_tokens = max_tokens, 0
        self._answers: OrderedDict[bytes, list[CachedAnswer]] = OrderedDict()
        """Answers by prompt. A new answer moves its prompt to the end of the order."""

    def add(self, prompt_ids: Sequence[int], segment: Segment, sampling: Sampling) -> None:
        """Store `segment` as an answer to `prompt_ids`."""
        if not segment.token_ids:
            return
        ids, logprobs = np.asarray(segment.token_ids, dtype=np.int32), np.asarray(segment.logprobs, dtype=np.float32)
        answer = CachedAnswer(ids, logprobs, tuple(segment.spans), segment.finish_reason, sampling)
        key = Prefixes(prompt_ids).key(len(prompt_ids))
        answers = self._answers.setdefault(key, [])
        answers.append(answer)
        self._answers.move_to_end(key)
        self._num_tokens += len(answer.token_ids)
        if len(answers) > MAX_ANSWERS:
            self._num_tokens -= len(answers.pop(0).token_ids)
        while self._num_tokens > self._max_tokens and len(self._answers) > 1:
            _, forgotten = self._answers.popitem(last=False)
            self._num_tokens -= sum(len(each.token_ids) for each in forgotten)

    def answers(self, tokens: Prefixes, length: int) -> Sequence[CachedAnswer]:
        """Return the answers to the prompt that consists of the first `length` tokens, the latest answer first."""
        return self._answers.get(tokens.key(length), [])[::-1]


class Prefixes:
    """Digests of the prefixes of some tokens. Ask for short prefixes first: then all of them cost one pass."""

    def __init__(self, token_ids: Sequence[int]) -> None:
        self._ids = np.asarray(token_ids, dtype=np.int64)
        self._hash, self._length = hashlib.blake2b(digest_size=16), 0

    def key(self, length: int) -> bytes:
        """Return the digest of the first `length` tokens. `length` must not be below that of the call before."""
        assert length >= self._length
        self._hash.update(self._ids[self._length : length].tobytes())
        self._length = length
        return self._hash.copy().digest()
