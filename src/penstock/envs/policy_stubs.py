"""Players that replace the policy: random words, the environment's own expert, a person, or any OpenAI endpoint.

`PlayedBy` turns a player into a PolicyClient, so that the same manager runs the episodes as in training.
"""

from __future__ import annotations

import os
import random
import sys
from collections.abc import Awaitable, Callable, Sequence
from itertools import cycle
from typing import Any, Protocol

from penstock.config import ConfigError
from penstock.config.imports import import_package
from penstock.deadline import deadline
from penstock.envs.dialogue import EpisodeFailure
from penstock.envs.exception_location import described
from penstock.envs.worker_calls import awaited
from penstock.model.chat import ChatTokenizer
from penstock.model.random_answers import random_word
from penstock.samples import Segment, VersionSpan
from penstock.types import Sampling, SegmentGrant

ANSWER_S = 600.0
"""Time limit for an endpoint's answer."""
PROMPT = "your action> "
ROLES = ("user", "assistant")


class Player(Protocol):
    """Gives the next action."""

    async def act(self, said: Sequence[str]) -> str:
        """Return the next action. `said`: observations and actions so far, alternating, with an observation last."""


class PlayedBy:
    """A PolicyClient that returns a player's actions as tokens."""

    def __init__(self, player: Player, chat: ChatTokenizer) -> None:
        self._player, self._chat = player, chat
        self._said: list[str] = []
        self._num_tokens = 0
        """Number of context tokens that `said` covers."""

    async def generate(
        self, prompt_ids: Sequence[int], grants: Sequence[SegmentGrant], sampling: Sampling, seeds: Sequence[int]
    ) -> list[Segment]:
        """Return the player's next action as the only segment. Supports one episode at a time."""
        self._said.append(self._chat.decode(prompt_ids[self._num_tokens :]))
        action = await self._player.act(self._said)
        self._said.append(action)
        token_ids = [*self._chat.encode_answer(action), self._chat.eos_ids[0]]
        self._num_tokens = len(prompt_ids) + len(token_ids)
        # The grant does not limit the action, because a policy's tokens for the same text would be other tokens.
        spans = [VersionSpan(0, 0, len(token_ids))]
        logprobs = [0.0] * len(token_ids)
        return [Segment(token_ids=token_ids, logprobs=logprobs, spans=spans, finish_reason="stop")]


class Chance:
    """Acts at random, from a seed: a word of the last observation, a number, or random letters."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    async def act(self, said: Sequence[str]) -> str:
        return random_word(self._random, said[-1])


class Demonstrator:
    """Acts as the environment's own expert does."""

    def __init__(self, env: Callable[[], Any]) -> None:
        """`env`: returns the environment that is being played. Called at every action."""
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
    """A person at the terminal."""

    async def act(self, said: Sequence[str]) -> str:
        return _read_action()


class Endpoint:
    """A model behind an OpenAI endpoint."""

    def __init__(self, *, base_url: str | None, model: str | None) -> None:
        """Without `base_url` the address comes from OPENAI_BASE_URL. The key comes from OPENAI_API_KEY. `model`: None
        uses the first model that the endpoint lists. Raises `ConfigError` if neither an address nor a key is set, if
        the address is not http(s), or if the package openai is missing."""
        openai = import_package("openai", needed_by="--policy openai", install="openai")
        key = os.environ.get("OPENAI_API_KEY")
        url = base_url or os.environ.get("OPENAI_BASE_URL")
        if url is None and not key:
            needed = "--base-url or OPENAI_BASE_URL (or OPENAI_API_KEY, for OpenAI's own)"
            raise ConfigError(f"--policy openai needs {needed}")
        if url is not None and not url.startswith(("http://", "https://")):
            raise ConfigError(f"the endpoint {url!r} does not begin with http:// or https://")
        self._client = openai.AsyncOpenAI(base_url=url, api_key=key or "unused")
        self._model = model

    async def act(self, said: Sequence[str]) -> str:
        if self._model is None:
            listed = await self._call(self._client.models.list())
            if not listed.data:
                raise EpisodeFailure(f"{self._client.base_url} has no model")
            self._model = str(listed.data[0].id)
        messages = [{"role": role, "content": text} for role, text in zip(cycle(ROLES), said, strict=False)]
        reply = await self._call(self._client.chat.completions.create(model=self._model, messages=messages))
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


def _read_action() -> str:
    """Read an action from standard input. This blocks the whole process."""
    try:
        action = input(PROMPT)
    except EOFError:
        raise EpisodeFailure("you left") from None
    if not sys.stdin.isatty():  # without a terminal, the input is not echoed
        print(action)
    return action
