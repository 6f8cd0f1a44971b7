"""Agents that bring their own loop: programs that play an episode through an OpenAI client, unchanged.

A gateway shows each of them an endpoint of its own. What it says there becomes the turns of its episode: prompts are
what the agent sent, answers are the policy's tokens as they were sampled. A conversation only grows: of a history that
the gateway itself has answered, the recorded tokens count, never a new tokenisation of their text.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Protocol, TypeVar

from penstock.deadline import deadline, holding
from penstock.envs.episode import Episode
from penstock.model.chat import ChatTokenizer
from penstock.types import Endpoint, Segment

Message = Mapping[str, Any]
T = TypeVar("T")

TURN_S = 6 * 3600.0
"""For an agent's request to wait for another of its own: its lease ends before."""


class Gateway(Protocol):
    """Shows conversations to agents."""

    async def open(self, conversation: Conversation) -> Endpoint:
        """Where this conversation is held, until it is closed."""
        ...

    async def close(self, endpoint: Endpoint) -> None:
        """Give up what is still being answered there, and wait until it has been; whoever asks later is told that it is
        over."""
        ...


class Over(RuntimeError):
    """The episode has no turn or no token left: nothing more can be said in it."""


class Diverged(ValueError):
    """The agent's history is not what was said so far."""


Generate = Callable[[Episode, bool], Awaitable[Segment]]
"""Asks for the next segment of the open turn; the flag says whether it goes on with an answer that was cut."""


class Conversation:
    """One episode as its agent sees it. Requests are answered one after the other."""

    def __init__(
        self,
        episode: Episode,
        chat: ChatTokenizer,
        generate: Generate,
        *,
        max_turns: int,
        max_context: int,
    ) -> None:
        self._episode, self._chat, self._generate = episode, chat, generate
        self._max_turns, self._max_context = max_turns, max_context
        self._bounds = episode.bounds
        self._history: list[Message] = []
        """Messages whose tokens are the episode's context, the last answer included."""
        self._turn = asyncio.Lock()
        self.over: str | None = None
        """Why something was refused, because no turn or no token was left."""
        self.cut = False
        """The last answer ended at a limit."""

    @property
    def name(self) -> str:
        return str(self._episode.lease.episode)

    @property
    def max_context(self) -> int:
        """Tokens of prompt and answer."""
        return self._max_context

    def prompt(self, messages: Sequence[Message], **settings: Any) -> list[int]:
        """The tokens of a conversation up to where the assistant speaks; recorded ones as far as it repeats them."""
        known = len(self._history)
        asked = _plain(messages)
        if not known or asked[:known] != self._history:
            return self._chat.prompt(messages, **settings)
        if len(asked) == known:
            raise Diverged("the conversation ends with the assistant's own words: say something to it first")
        ended = self._episode.context[-1] in self._chat.eos_ids
        return self._episode.context + self._chat.continuation(messages[known:], ended=ended, **settings)

    async def answer(
        self, prompt_ids: list[int], max_tokens: int, messages: Sequence[Message] | None = None
    ) -> Segment:
        """One turn, all its segments joined; `messages` are what `prompt` made the ids of. Raises `Diverged` for
        another history than this, `Over` when nothing more can be said."""
        async with holding(
            self._turn, TURN_S, waiter=self.name, resource="its turn", holder="its agent's other request"
        ):
            episode, known = self._episode, len(self._episode.context)
            episode.bounds = self._bounds
            if prompt_ids[:known] != episode.context or len(prompt_ids) == known:
                raise Diverged(
                    "the prompt does not begin with what was said so far, token by token: an episode is one "
                    "conversation that only grows; branches and rewritten histories cannot be trained as one"
                )
            limit = min(max_tokens, episode.turn_budget, self._max_context - len(prompt_ids))
            if len(episode.turns) >= self._max_turns:
                raise self._end(f"the episode has had its {self._max_turns} turns (env.max_turns)")
            if limit < 1:
                raise self._end(
                    f"{len(prompt_ids)} prompt tokens leave no room to answer within model.max_context "
                    f"{self._max_context} and the episode's budget"
                )
            episode.bounds = replace(self._bounds, max_new_tokens=limit)
            episode.open_turn(prompt_ids[known:])
            try:
                first = await self._generate(episode, False)
                finished = await episode.complete(first, lambda: self._generate(episode, True))
            except BaseException:
                episode.forget_turn()
                raise
            self.cut = not finished
            said = Segment.joined(episode.turns[-1].segments, "stop" if finished else "length")
            episode.text = self._chat.decode(said.token_ids)
            self._history = []
            if messages is not None:
                self._history = [*_plain(messages), {"role": "assistant", "content": episode.text}]
            return said

    def _end(self, why: str) -> Over:
        self.over = why
        return Over(why)


class Patience:
    """Bounds an agent's play to the seconds of its lease; waiting for the scheduler costs it none."""

    def __init__(self, seconds: float, *, waiter: str) -> None:
        self._seconds, self._waiter = seconds, waiter
        self._timer: asyncio.Timeout | None = None
        self._played = False

    async def bound(self, play: Awaitable[T]) -> T:
        """What `play` returns. Stalled when the time is up."""
        try:
            async with deadline(
                self._seconds, waiter=self._waiter, resource="the end of play", holder="its agent"
            ) as self._timer:
                return await play
        finally:
            self._played = True

    async def excuse(self, waiting: Awaitable[T]) -> T:
        """What `waiting` returns; the clock stands still meanwhile."""
        now = asyncio.get_running_loop().time
        timer = self._timer
        when = timer.when() if timer is not None else None
        if timer is None or when is None:
            return await waiting
        left = when - now()
        timer.reschedule(None)
        try:
            return await waiting
        finally:
            if not self._played:
                timer.reschedule(now() + left)


def _plain(messages: Sequence[Message]) -> list[Message]:
    """As they matter for the tokens: clients echo answers with fields of their own that are empty."""
    empty: tuple[Any, ...] = (None, [], {}, "")
    return [
        {key: value for key, value in message.items() if key == "content" or value not in empty} for message in messages
    ]
