"""A policy that follows a script: the PolicyClient for tests of environments and of whatever drives them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.types import FinishReason, Sampling, Segment, SegmentGrant, VersionSpan

Answer = Callable[[list[int], int], Sequence[int]]
"""(prompt_ids, seed) -> the whole answer's tokens, stop token included."""


class ScriptedPolicy:
    """Answers each grant with what `answer` returns, cut to the grant. Records what it was asked in `prompts`."""

    def __init__(self, answer: Answer | Sequence[Sequence[int]], *, policy_version: int = 0) -> None:
        self.policy_version = policy_version
        self.prompts: list[list[int]] = []
        self._answer = answer if callable(answer) else _in_order(answer)

    async def generate(
        self, prompt_ids: Sequence[int], grants: Sequence[SegmentGrant], sampling: Sampling, seeds: Sequence[int]
    ) -> list[Segment]:
        """One segment per grant, without waiting."""
        self.prompts.append(list(prompt_ids))
        return [
            self._segment(list(self._answer(list(prompt_ids), seed)), grant.max_tokens)
            for grant, seed in zip(grants, seeds, strict=True)
        ]

    def _segment(self, answer: list[int], max_tokens: int) -> Segment:
        tokens = answer[:max_tokens]
        reason: FinishReason = "stop" if len(answer) <= max_tokens else "length"
        spans = [VersionSpan(self.policy_version, 0, len(tokens))] if tokens else []
        return Segment(token_ids=tokens, logprobs=[-1.0] * len(tokens), spans=spans, finish_reason=reason)


def _in_order(answers: Sequence[Sequence[int]]) -> Answer:
    remaining = iter(answers)

    def answer(prompt_ids: list[int], seed: int) -> Sequence[int]:
        try:
            return next(remaining)
        except StopIteration:
            raise LookupError("the script has no answers left") from None

    return answer
