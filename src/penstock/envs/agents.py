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
from penstock.types import Endpoint, Segment, StopReason

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
        self.stop_reason: StopReason = "terminated"
        """Why it goes no further, if its agent says nothing more."""

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
        if not known or not _same(asked[:known], self._history):
            return self._chat.prompt(messages, **settings)
        if len(asked) == known:
            raise Diverged("the conversation ends with the assistant's own words: say something to it first")
        ended = self._episode.context[-1] in self._chat.eos_ids
        self._episode.num_drifts += self._has_drifted(asked[known - 1])
        return self._episode.context + self._chat.continuation(messages[known:], ended=ended, **settings)

    def _has_drifted(self, answer: Message) -> bool:
        """Whether the tokens of the latest answer, as its agent shows it back, are others than those recorded."""
        said = [token for segment in self._episode.turns[-1].segments for token in segment.token_ids]
        shown = self._chat.encode(answer.get("content") or "")
        return shown != [token for token in said if token not in self._chat.eos_ids]

    def _healed(self, prompt_ids: list[int]) -> list[int] | None:
        """The recorded tokens, and what the prompt adds to their text; None if it does not begin with that."""
        known = self._chat.decode(self._episode.context, skip_special=False)
        text = self._chat.decode(prompt_ids, skip_special=False)
        if not known or not text.startswith(known) or len(text) == len(known):
            return None
        self._episode.num_drifts += 1
        return self._episode.context + self._chat.encode(text[len(known) :])

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
            if prompt_ids[:known] != episode.context:
                prompt_ids = self._healed(prompt_ids) or []
            if len(prompt_ids) <= known:
                raise Diverged(
                    "the prompt does not begin with what was said so far: an episode is one "
                    "conversation that only grows; branches and rewritten histories cannot be trained as one"
                )
            limit = min(max_tokens, episode.turn_budget, self._max_context - len(prompt_ids))
            if len(episode.turns) >= self._max_turns:
                raise self._end("max_turns", f"the episode has had its {self._max_turns} turns (env.max_turns)")
            if limit < 1:
                raise self._end(
                    "max_length",
                    f"{len(prompt_ids)} prompt tokens leave no room to answer within model.max_context "
                    f"{self._max_context} and the episode's budget",
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
            self.stop_reason = "max_length" if self.cut else "terminated"
            said = Segment.joined(episode.turns[-1].segments, "stop" if finished else "length")
            episode.text = self._chat.decode(said.token_ids)
            self._history = []
            if messages is not None:
                self._history = [*_plain(messages), {"role": "assistant", "content": episode.text}]
            return said

    def _end(self, reason: StopReason, why: str) -> Over:
        self.stop_reason, self.over = reason, why
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


def _same(asked: Sequence[Message], history: Sequence[Message]) -> bool:
    """But for spaces around answers, which some clients cut off."""
    return len(asked) == len(history) and all(map(_matches, asked, history))


def _matches(asked: Message, known: Message) -> bool:
    if known.get("role") != "assistant" or not isinstance(asked.get("content"), str):
        return asked == known
    return {**asked, "content": asked["content"].strip()} == {**known, "content": known["content"].strip()}


def _plain(messages: Sequence[Message]) -> list[Message]:
    """As they matter for the tokens: clients echo answers with fields of their own that are empty."""
    empty: tuple[Any, ...] = (None, [], {}, "")
    return [
        {key: value for key, value in message.items() if key == "content" or value not in empty} for message in messages
    ]
