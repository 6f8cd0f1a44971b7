"""Who may play an environment where no policy is at hand: chance, its own expert, a person, any OpenAI endpoint.

`PlayedBy` makes a PolicyClient of a player, so that the very manager that plays for training plays for it too.
"""

from __future__ import annotations

import os
import random
import string
import sys
from collections.abc import Awaitable, Callable, Sequence
from itertools import cycle
from typing import Any, Protocol

from penstock import types
from penstock.config import ConfigError
from penstock.deadline import deadline
from penstock.envs.calls import EpisodeFailure
from penstock.envs.hosted import awaited
from penstock.envs.origin import described
from penstock.model.chat import ChatTokenizer
from penstock.types import Sampling, Segment, SegmentGrant, VersionSpan

ANSWER_S = 600.0
"""For an endpoint to answer."""
LONGEST_WORD = 6
PROMPT = "your action> "
ROLES = ("user", "assistant")


class Player(Protocol):
    """Says something when it is asked."""

    async def act(self, said: Sequence[str]) -> str:
        """The next action; `said` are observations and actions in turn, an observation last."""
        ...


class PlayedBy:
    """A player as a PolicyClient: what it says, in tokens."""

    def __init__(self, player: Player, chat: ChatTokenizer) -> None:
        self._player, self._chat = player, chat
        self._said: list[str] = []
        self._num_tokens = 0
        """Of the context that `said` stands for."""

    async def generate(
        self, prompt_ids: Sequence[int], grants: Sequence[SegmentGrant], sampling: Sampling, seeds: Sequence[int]
    ) -> list[Segment]:
        """Of one episode."""
        self._said.append(self._chat.decode(prompt_ids[self._num_tokens :]))
        action = await self._player.act(self._said)
        self._said.append(action)
        segment = self._segment(action)
        self._num_tokens = len(prompt_ids) + len(segment.token_ids)
        return [segment]

    def _segment(self, action: str) -> Segment:
        """The whole of it, whatever was granted: bytes are not what a policy's tokens would have been."""
        token_ids = [*self._chat.encode(action), self._chat.eos_ids[0]]
        return Segment(
            token_ids=token_ids,
            logprobs=[0.0] * len(token_ids),
            spans=[VersionSpan(0, 0, len(token_ids))],
            finish_reason="stop",
        )


class Chance:
    """Words of what it was shown, numbers and letters, as the seed has it."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    async def act(self, said: Sequence[str]) -> str:
        draw = self._random
        letters = "".join(draw.choices(string.ascii_lowercase, k=draw.randint(1, LONGEST_WORD)))
        return draw.choice([letters, str(draw.randint(0, 99)), *said[-1].split()])


class Demonstrator:
    """Does what the environment's own expert would."""

    def __init__(self, env: Callable[[], Any]) -> None:
        """`env`: what is played, once there is something to say."""
        self._env = env

    async def act(self, said: Sequence[str]) -> str:
        env = self._env()
        called = f"{getattr(env, 'class_name', type(env).__name__)}.demonstrate"
        try:
            action = await awaited(env.demonstrate())
        except Exception as error:
            raise EpisodeFailure(f"{called}: {described(error)}") from error
        if not isinstance(action, str):
            raise EpisodeFailure(f"{called} returned {action!r}, not a string")
        return action


class Person:
    """Whoever sits at the terminal."""

    async def act(self, said: Sequence[str]) -> str:
        return _ask()


class Endpoint:
    """A model behind an OpenAI endpoint."""

    def __init__(self, *, base_url: str | None, model: str | None) -> None:
        """Address and key are those of OPENAI_BASE_URL and OPENAI_API_KEY, if not given. Raises `ConfigError`."""
        self._client = _client(base_url)
        self._model = model

    async def describe(self) -> types.Endpoint:
        """As an agent would be told of it. The model is the one asked for, or the first that is there."""
        if self._model is None:
            listed = await self._call(self._client.models.list())
            if not listed.data:
                raise EpisodeFailure(f"{self._client.base_url} has no model")
            self._model = str(listed.data[0].id)
        return types.Endpoint(base_url=str(self._client.base_url), api_key=self._client.api_key, model=self._model)

    async def act(self, said: Sequence[str]) -> str:
        endpoint = await self.describe()
        messages = [{"role": role, "content": text} for role, text in zip(cycle(ROLES), said, strict=False)]
        reply = await self._call(self._client.chat.completions.create(model=endpoint.model, messages=messages))
        return reply.choices[0].message.content or ""

    async def close(self) -> None:
        await self._client.close()

    async def _call(self, request: Awaitable[Any]) -> Any:
        from openai import OpenAIError

        url = str(self._client.base_url)
        try:
            async with deadline(ANSWER_S, waiter="the episode", resource="an answer", holder=url):
                return await request
        except OpenAIError as error:
            raise EpisodeFailure(f"{url} does not answer: {type(error).__name__}: {error}") from None


def _client(base_url: str | None) -> Any:
    try:
        from openai import AsyncOpenAI
    except ImportError:
        raise ConfigError("--policy openai needs the package openai: pip install openai") from None
    key = os.environ.get("OPENAI_API_KEY")
    url = base_url or os.environ.get("OPENAI_BASE_URL")
    if url is None and not key:
        raise ConfigError("--policy openai needs --base-url or OPENAI_BASE_URL (or OPENAI_API_KEY, for OpenAI's own)")
    if url is not None and not url.startswith(("http://", "https://")):
        raise ConfigError(f"the endpoint {url!r} does not begin with http:// or https://")
    return AsyncOpenAI(base_url=url, api_key=key or "unused")


def _ask() -> str:
    """Everything else in this process waits too."""
    try:
        said = input(PROMPT)
    except EOFError:
        raise EpisodeFailure("you left") from None
    if not sys.stdin.isatty():  # nobody pressed return there
        print(said)
    return said
