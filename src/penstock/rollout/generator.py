"""The interface between HTTP routes and generation: the engine's runner, or one episode of an agent. Torch-free."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, NamedTuple, NoReturn, Protocol, TypeVar

from penstock.rollout.request import GenerateRequest
from penstock.samples import Segment, VersionSpan

T = TypeVar("T")


class EngineDead(RuntimeError):
    """The engine's thread has ended. `__cause__` gives the reason."""

    self_explanatory = True


class Stopped(EngineDead):
    """The server is shutting down. Another server may answer."""


class GenerationFailed(RuntimeError):
    """The engine could not finish this request, but serves other requests."""


class Overloaded(RuntimeError):
    """The engine holds as many requests as it may. The same request may succeed later, or on another server."""


class Conflict(ValueError):
    """The call conflicts with the server's current state, for example an open weights update or another run's claim."""


class Increment(NamedTuple):
    """New tokens of one sample of a running request."""

    sample: int
    token_ids: list[int]
    logprobs: list[float]
    spans: list[VersionSpan]
    """Version spans of these tokens. The first token has index 0."""
    top_logprobs: list[list[tuple[float, int]]] | None


class ScoredToken(NamedTuple):
    """The log-probability of a prompt's token."""

    logprob: float
    top_logprobs: list[tuple[float, int]]
    """The likeliest tokens at its place, if requested: (log-probability, token), best first."""


class PromptScores(NamedTuple):
    """Scores of a prompt's tokens."""

    tokens: list[ScoredToken]
    """Of each token but the first."""
    versions: tuple[int, ...]
    """The policy_versions that computed the first and the last score; empty if there is none."""


OnTokens = Callable[[list[Increment]], None]


class Generator(Protocol):
    """Generates samples for requests."""

    @property
    def policy_version(self) -> int:
        """The policy_version of the weights; NO_VERSION before the first weights."""

    @property
    def max_context(self) -> int:
        """Maximum number of tokens of prompt and answer together."""

    def serves(self, rid: str) -> bool:
        """Return whether a request with this id is pending."""

    def check(self, request: GenerateRequest) -> None:
        """Raise ValueError if the request cannot be served."""

    def check_prompt(self, prompt_ids: list[int]) -> None:
        """Raise ValueError for a prompt that cannot be scored."""

    async def generate(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> list[Segment]:
        """Return one segment per seed. `on_tokens` may receive tokens before this returns."""

    async def score(self, prompt_ids: list[int], *, num_top: int = 0) -> PromptScores:
        """Return the log-probability of every prompt token except the first, and `num_top` likelier ones at each
        place."""


class AnswersOnly:
    """Base class of generators that score no prompts, and that identify requests without their ids."""

    def serves(self, rid: str) -> bool:
        """Return False, so that any request id is free."""
        return False

    def check_prompt(self, prompt_ids: list[int]) -> NoReturn:
        """Raise ValueError: prompts are not scored."""
        raise ValueError(
            "this endpoint scores no prompts: leave out `echo` and `logprob_start_len`, and sample some tokens"
        )

    async def score(self, prompt_ids: list[int], *, num_top: int = 0) -> PromptScores:
        self.check_prompt(prompt_ids)


async def all_of(calls: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Return the results of concurrent calls. The first failure cancels the other calls and is raised."""
    calls = [*calls]
    if len(calls) == 1:  # needs no task of its own
        return [await calls[0]]
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(call) for call in calls]
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    return [task.result() for task in tasks]
