"""A policy that follows a script: the PolicyClient for tests of environments and of whatever drives them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from penstock.samples import Segment, VersionSpan
from penstock.types import FinishReason, Sampling, SegmentGrant

Answer = Callable[[list[int], int], Sequence[int]]
"""(prompt_ids, seed) -> the whole answer's tokens, stop token included."""


class ScriptedPolicy:
    """Answers each grant with what `answer` returns, cut to the grant, one token per turn of the event loop.

    Records what it was asked in `prompts`. Tokens carry the `policy_version` at the time; it may be changed any time.
    """

    def __init__(self, answer: Answer | Sequence[Sequence[int]], *, policy_version: int = 0) -> None:
        self.policy_version = policy_version
        self.prompts: list[list[int]] = []
        self.num_sampled = 0
        """Tokens so far."""
        self._answer = answer if callable(answer) else _in_order(answer)
        self._released = False
        self._num_releases = 0

    async def release(self) -> None:
        """End what is being generated; later requests are aborted before their first token, until `resume`."""
        self._num_releases += not self._released
        self._released = True

    async def resume(self) -> None:
        """Answer again."""
        self._released = False

    async def generate(
        self, prompt_ids: Sequence[int], grants: Sequence[SegmentGrant], sampling: Sampling, seeds: Sequence[int]
    ) -> list[Segment]:
        """One segment per grant; what a release interrupts or precedes is aborted."""
        self.prompts.append(list(prompt_ids))
        if self._released:
            await asyncio.sleep(0)
            return [_segment([], grant.max_tokens, []) for grant in grants]
        answers = [list(self._answer(list(prompt_ids), seed)) for seed in seeds]
        limits = [min(len(answer), grant.max_tokens) for answer, grant in zip(answers, grants, strict=True)]
        versions: list[int] = []
        num_releases = self._num_releases
        while len(versions) < max(limits) and self._num_releases == num_releases:
            self.num_sampled += sum(len(versions) < limit for limit in limits)
            versions.append(self.policy_version)
            await asyncio.sleep(0)
        return [_segment(answer, limit, versions[:limit]) for answer, limit in zip(answers, limits, strict=True)]


def _segment(answer: list[int], limit: int, versions: list[int]) -> Segment:
    tokens = answer[: len(versions)]
    reason: FinishReason = "stop" if limit == len(answer) else "length"
    return Segment(
        token_ids=tokens,
        logprobs=[-1.0] * len(tokens),
        spans=_spans(versions),
        finish_reason=reason if len(tokens) == limit else "abort",
    )


def _spans(versions: list[int]) -> list[VersionSpan]:
    starts = [i for i, version in enumerate(versions) if i == 0 or version != versions[i - 1]]
    ends = [*starts[1:], len(versions)]
    return [VersionSpan(versions[start], start, end) for start, end in zip(starts, ends, strict=False)]


def _in_order(answers: Sequence[Sequence[int]]) -> Answer:
    remaining = iter(answers)

    def answer(prompt_ids: list[int], seed: int) -> Sequence[int]:
        try:
            return next(remaining)
        except StopIteration:
            raise LookupError("the script has no answers left") from None

    return answer
