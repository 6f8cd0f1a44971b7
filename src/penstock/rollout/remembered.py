"""What the policy said lately, by prompt: so that tokens which come back from elsewhere get their log-probabilities and
versions back, exactly as they were sampled."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from penstock.types import FinishReason, Sampling, Segment, VersionSpan

REMEMBERED_TOKENS = 2**22
"""About 40 MB."""
REMEMBERED_ANSWERS = 4096
"""Of one prompt."""


@dataclass(frozen=True, slots=True, eq=False)
class Said:
    """One answer, packed."""

    token_ids: npt.NDArray[np.int32]
    logprobs: npt.NDArray[np.float32]
    spans: tuple[VersionSpan, ...]
    finish_reason: FinishReason
    temperature: float
    top_p: float
    top_k: int

    def segment(self) -> Segment:
        return Segment(
            token_ids=self.token_ids.tolist(),
            logprobs=self.logprobs.tolist(),
            spans=list(self.spans),
            finish_reason=self.finish_reason,
        )


class Remembered:
    """The latest answers, as many as fit; the oldest are forgotten first."""

    def __init__(self, *, max_tokens: int = REMEMBERED_TOKENS) -> None:
        self._max_tokens, self._num_tokens = max_tokens, 0
        self._said: OrderedDict[bytes, list[Said]] = OrderedDict()
        """By prompt; a prompt that was asked again is young again."""

    def add(self, prompt_ids: Sequence[int], segment: Segment, sampling: Sampling) -> None:
        """`segment` was the answer to `prompt_ids`."""
        if not segment.token_ids:
            return
        said = Said(
            np.asarray(segment.token_ids, dtype=np.int32),
            np.asarray(segment.logprobs, dtype=np.float32),
            tuple(segment.spans),
            segment.finish_reason,
            sampling.temperature,
            sampling.top_p,
            sampling.top_k,
        )
        key = _key(prompt_ids)
        answers = self._said.setdefault(key, [])
        answers.append(said)
        self._said.move_to_end(key)
        self._num_tokens += len(said.token_ids)
        if len(answers) > REMEMBERED_ANSWERS:
            self._num_tokens -= len(answers.pop(0).token_ids)
        while self._num_tokens > self._max_tokens and len(self._said) > 1:
            _, forgotten = self._said.popitem(last=False)
            self._num_tokens -= sum(len(each.token_ids) for each in forgotten)

    def answers(self, prompt_ids: Sequence[int]) -> Sequence[Said]:
        """To exactly this prompt, the latest one first."""
        return self._said.get(_key(prompt_ids), [])[::-1]


def _key(prompt_ids: Sequence[int]) -> bytes:
    return hashlib.blake2b(np.asarray(prompt_ids, dtype=np.int64).tobytes(), digest_size=16).digest()
