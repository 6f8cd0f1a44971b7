"""A `Generator` in front of all servers of a run, for programs that ask the policy on their own account.

What it answers is remembered. An answer that a server gave up goes on, on any server, from its tokens; one that is to
end at a string or a token of the caller's ends there.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Sequence

from penstock.deadline import Stalled
from penstock.ports import PolicyClient
from penstock.rollout.generator import Increment, OnTokens, Scored
from penstock.rollout.http import Refused
from penstock.rollout.remembered import Remembered
from penstock.rollout.request import GenerateRequest, SamplingParams
from penstock.rollout.session import RolloutError
from penstock.types import NO_VERSION, EpisodeId, Sampling, Segment, SegmentGrant

PAUSE_S = 0.25
"""Before a server that gives way is asked again."""
UNAVAILABLE = 503
PASSED_ON = ("temperature", "top_p", "top_k", "stop_token_ids")
"""Sampling parameters that are served: servers are asked for these, or the answer is cut."""


class Relay:
    """Answers with whatever weights the servers hold."""

    error: BaseException | None = None

    def __init__(
        self,
        policy: PolicyClient,
        remembered: Remembered,
        *,
        name: str,
        max_context: int,
        is_open: Callable[[], bool],
    ) -> None:
        """`is_open`: whether the run has begun; before that there is nothing to answer with."""
        self._policy, self._remembered, self._name = policy, remembered, name
        self._max_context, self._is_open = max_context, is_open
        self._numbers = itertools.count()
        self.served = Served()

    @property
    def policy_version(self) -> int:
        return max(self.served.newest, 0) if self._is_open() else NO_VERSION

    @property
    def max_context(self) -> int:
        """Tokens of prompt and answer."""
        return self._max_context

    def serves(self, rid: str) -> bool:
        """Requests are told apart by numbers of its own."""
        return False

    def check(self, request: GenerateRequest) -> None:
        """Raise ValueError for what servers are not asked for from here."""
        params, plain = request.params, SamplingParams()
        asked = [name for name in params.__slots__ if getattr(params, name) != getattr(plain, name)]
        if unserved := sorted(set(asked) - set(PASSED_ON)):
            raise ValueError(f"{', '.join(unserved)}: not served here; {', '.join(PASSED_ON)} and stop strings are")
        needed = len(request.prompt_ids) + max(request.max_new_tokens)
        if not request.prompt_ids or needed > self._max_context:
            raise ValueError(
                f"{len(request.prompt_ids)} prompt tokens and {max(request.max_new_tokens)} new ones do not fit into "
                f"model.max_context {self._max_context}"
            )

    def check_prompt(self, prompt_ids: list[int]) -> None:
        """Raise ValueError: prompts are answered here, not scored."""
        raise ValueError("prompts are not scored here")

    async def score(self, prompt_ids: list[int]) -> Scored:
        raise ValueError("prompts are not scored here")

    async def generate(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> list[Segment]:
        """One segment per seed; they are told of when they have ended."""
        params = request.params
        sampling = Sampling(
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            max_new_tokens=max(request.max_new_tokens),
        )
        try:
            begun = await self._ask(request.prompt_ids, request.max_new_tokens, sampling, request.seeds)
            samples = zip(begun, request.max_new_tokens, request.seeds, strict=True)
            segments = await asyncio.gather(*(self._complete(request, sampling, *sample) for sample in samples))
        except RolloutError as error:
            status = error.status or UNAVAILABLE
            raise Refused(status if status < 500 else UNAVAILABLE, error.message) from error
        except Stalled as error:
            raise Refused(UNAVAILABLE, str(error)) from error
        self.served.note(segments, now=asyncio.get_running_loop().time())
        for number, segment in enumerate(segments):
            self._remembered.add(request.prompt_ids, segment, sampling)
            if on_tokens is not None:
                on_tokens([Increment(number, segment.token_ids, segment.logprobs, segment.spans, None)])
        return list(segments)

    async def _complete(
        self, request: GenerateRequest, sampling: Sampling, segment: Segment, limit: int, seed: int
    ) -> Segment:
        """The whole of an answer that has begun."""
        parts, said = [segment], len(segment.token_ids)
        while parts[-1].finish_reason == "abort" and said < limit:
            if not parts[-1].token_ids:
                await asyncio.sleep(PAUSE_S)
            context = [*request.prompt_ids, *(token for part in parts for token in part.token_ids)]
            parts += await self._ask(context, [limit - said], sampling, [seed])
            said += len(parts[-1].token_ids)
        whole = Segment.joined(parts, "stop" if parts[-1].finish_reason == "stop" else "length")
        return _ended(request, whole)

    async def _ask(
        self, prompt_ids: Sequence[int], limits: Sequence[int], sampling: Sampling, seeds: Sequence[int]
    ) -> list[Segment]:
        number = next(self._numbers)
        episodes = [EpisodeId(self._name, number, member, 0) for member in range(len(limits))]
        grants = [SegmentGrant(episode=each, max_tokens=limit) for each, limit in zip(episodes, limits, strict=True)]
        return await self._policy.generate(prompt_ids, grants, sampling, seeds)


class Served:
    """Which policy_version was served when, as answers tell; seconds of any clock."""

    def __init__(self) -> None:
        self._changes: deque[tuple[float, int]] = deque(maxlen=4096)

    @property
    def newest(self) -> int:
        return self._changes[-1][1] if self._changes else NO_VERSION

    def note(self, segments: Sequence[Segment], *, now: float) -> None:
        """These were just sampled."""
        version = max((span.policy_version for each in segments for span in each.spans), default=NO_VERSION)
        if version > self.newest:
            self._changes.append((now, version))

    def oldest_since(self, then: float) -> int:
        """The oldest one that may have been served after `then`."""
        before = [version for time, version in self._changes if time <= then]
        return before[-1] if before else self._changes[0][1] if self._changes else NO_VERSION


def _ended(request: GenerateRequest, segment: Segment) -> Segment:
    """Up to where the caller wants it to end."""
    stops, ends = request.params.stop_token_ids, request.ends
    if not stops and ends is None:
        return segment
    ids = segment.token_ids
    for length in range(1, len(ids) + 1):
        if ids[length - 1] in stops or (ends is not None and ends(ids[:length])):
            return segment.cut(length, "stop")
    return segment
