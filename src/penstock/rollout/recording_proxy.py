"""A `Generator` in front of all servers of a run, for external programs that generate with the policy.

The proxy stores its answers in a `GenerationCache`. If a server aborts an answer, the proxy continues it from its
tokens on any server. The proxy cuts an answer at the caller's stop strings and stop tokens.
"""

from __future__ import annotations

import asyncio
import itertools
from collections import deque
from collections.abc import Callable, Sequence

from penstock.deadline import Stalled, deadline
from penstock.ports.environment import PolicyClient
from penstock.rollout.generation_cache import GenerationCache
from penstock.rollout.generator import AnswersOnly, Increment, OnTokens
from penstock.rollout.http import Refused
from penstock.rollout.request import GenerateRequest
from penstock.rollout.session import RolloutError
from penstock.samples import Segment
from penstock.types import NO_VERSION, EpisodeId, Sampling, SegmentGrant

PAUSE_S = 0.25
"""Pause before an answer that was aborted without tokens is requested again."""
CUT_S = 300.0
UNAVAILABLE = 503
SUPPORTED = ("temperature", "top_p", "top_k", "stop_token_ids")
"""Supported sampling parameters. The proxy passes them to the servers, or cuts the answer at the stop tokens."""


class RecordingProxy(AnswersOnly):
    """Generates with the weights that the servers hold, and records the answers. It numbers requests itself."""

    def __init__(
        self,
        policy: PolicyClient,
        cache: GenerationCache,
        *,
        name: str,
        max_context: int,
        is_open: Callable[[], bool],
        published: Callable[[], int],
    ) -> None:
        """`is_open` returns whether the run has begun. Before that, `policy_version` is NO_VERSION. `published` returns
        the newest policy_version that servers may have."""
        self._policy, self._cache, self._name = policy, cache, name
        self.max_context = max_context
        self._is_open, self._published = is_open, published
        self._numbers = itertools.count()
        self.served = ServedVersions()

    @property
    def policy_version(self) -> int:
        return max(self.served.newest, 0) if self._is_open() else NO_VERSION

    def check(self, request: GenerateRequest) -> None:
        """Raise ValueError if the request is too long or uses unsupported sampling parameters."""
        if refused := sorted(request.params.changed() - set(SUPPORTED)):
            raise ValueError(
                f"this endpoint does not serve {', '.join(refused)}, only for {', '.join(SUPPORTED)} and stop strings"
            )
        needed = len(request.prompt_ids) + max(request.max_new_tokens)
        if not request.prompt_ids or needed > self.max_context:
            raise ValueError(
                f"{len(request.prompt_ids)} prompt tokens and {max(request.max_new_tokens)} new ones do not fit into "
                f"model.max_context {self.max_context}"
            )

    async def generate(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> list[Segment]:
        """Return one segment per seed. `on_tokens` gets each segment as a whole, after all have ended."""
        params = request.params
        most = max(request.max_new_tokens)
        sampling = Sampling(temperature=params.temperature, top_p=params.top_p, top_k=params.top_k, max_new_tokens=most)
        try:
            begun = await self._sample(request.prompt_ids, request.max_new_tokens, sampling, request.seeds)
            samples = zip(begun, request.max_new_tokens, request.seeds, strict=True)
            segments = await asyncio.gather(*(self._complete(request, sampling, *sample) for sample in samples))
        except RolloutError as error:
            status = error.status or UNAVAILABLE
            raise Refused(status if status < 500 else UNAVAILABLE, error.message) from error
        except Stalled as error:
            raise Refused(UNAVAILABLE, str(error)) from error
        self.served.note(segments, published=self._published(), now=asyncio.get_running_loop().time())
        for number, segment in enumerate(segments):
            self._cache.add(request.prompt_ids, segment, sampling)
            if on_tokens is not None:
                on_tokens([Increment(number, segment.token_ids, segment.logprobs, segment.spans, None)])
        return list(segments)

    async def _complete(
        self, request: GenerateRequest, sampling: Sampling, segment: Segment, limit: int, seed: int
    ) -> Segment:
        """Return a whole answer, given its first segment. Request more tokens while servers abort it."""
        parts, num_tokens = [segment], len(segment.token_ids)
        while parts[-1].finish_reason == "abort" and num_tokens < limit:
            if not parts[-1].token_ids:
                await asyncio.sleep(PAUSE_S)
            context = [*request.prompt_ids, *(token for part in parts for token in part.token_ids)]
            parts += await self._sample(context, [limit - num_tokens], sampling, [seed])
            num_tokens += len(parts[-1].token_ids)
        whole = Segment.joined(parts, "stop" if parts[-1].finish_reason == "stop" else "length")
        # In a thread: a long answer takes seconds, and other answers may be as long.
        async with deadline(CUT_S, waiter="a recorded answer", resource="its end", holder="its text"):
            length = await asyncio.to_thread(request.end_in, whole.token_ids)
        return whole if length is None else whole.cut(length, "stop")

    async def _sample(
        self, prompt_ids: Sequence[int], limits: Sequence[int], sampling: Sampling, seeds: Sequence[int]
    ) -> list[Segment]:
        number = next(self._numbers)
        episodes = [EpisodeId(self._name, number, member, 0) for member in range(len(limits))]
        grants = [SegmentGrant(episode=each, max_tokens=limit) for each, limit in zip(episodes, limits, strict=True)]
        return await self._policy.generate(prompt_ids, grants, sampling, seeds)


class ServedVersions:
    """The times at which a newer policy_version first appeared in answers. Times are seconds of any clock."""

    def __init__(self) -> None:
        self._changes: deque[tuple[float, int]] = deque(maxlen=4096)

    @property
    def newest(self) -> int:
        return self._changes[-1][1] if self._changes else NO_VERSION

    def note(self, segments: Sequence[Segment], *, published: int, now: float) -> None:
        """Note the newest policy_version of segments that were just sampled. `published` is the newest version that the
        controller has named. Versions above it are ignored, because a server may claim any number."""
        versions = [span.policy_version for each in segments for span in each.spans]
        version = max((each for each in versions if each <= published), default=NO_VERSION)
        if version > self.newest:
            self._changes.append((now, version))

    def oldest_since(self, then: float) -> int:
        """Return the oldest policy_version that may have been served after time `then`."""
        before = [version for time, version in self._changes if time <= then]
        return before[-1] if before else self._changes[0][1] if self._changes else NO_VERSION
