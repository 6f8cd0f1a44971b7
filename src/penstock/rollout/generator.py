"""What answers requests, seen from the HTTP surfaces: the engine's runner, or one episode of an agent. Torch-free."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from penstock.rollout.request import GenerateRequest
from penstock.types import Segment, VersionSpan


class Increment(NamedTuple):
    """What a sample of a running request has grown by."""

    sample: int
    token_ids: list[int]
    logprobs: list[float]
    spans: list[VersionSpan]
    """Of these tokens."""
    top_logprobs: list[list[tuple[float, int]]] | None


class Scored(NamedTuple):
    """Log-probabilities of a prompt's tokens, and which versions computed the first and the last of them."""

    logprobs: list[float]
    versions: tuple[int, ...]


OnTokens = Callable[[list[Increment]], None]


class Generator(Protocol):
    """Answers requests."""

    @property
    def error(self) -> BaseException | None:
        """Why it answers no more."""
        ...

    @property
    def policy_version(self) -> int:
        """NO_VERSION while there is nothing to answer with."""
        ...

    @property
    def max_context(self) -> int:
        """Tokens of prompt and answer."""
        ...

    def serves(self, rid: str) -> bool:
        """Whether somebody waits for this request."""
        ...

    def check(self, request: GenerateRequest) -> None:
        """Raise ValueError if it cannot be served."""
        ...

    def check_prompt(self, prompt_ids: list[int]) -> None:
        """Raise ValueError for a prompt that cannot be scored."""
        ...

    async def generate(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> list[Segment]:
        """One segment per seed. `on_tokens` may hear of tokens before this returns."""
        ...

    async def score(self, prompt_ids: list[int]) -> Scored:
        """Of every token of a prompt but the first."""
        ...
