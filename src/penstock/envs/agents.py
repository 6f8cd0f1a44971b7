"""Agents: programs with their own loop that play an episode through an unchanged OpenAI client.

A gateway gives each agent its own endpoint. The agent's requests there become the turns of its episode: prompts are
what the agent sent, answers are the tokens that the policy sampled. A conversation only grows. For the part of the
history that the gateway has already answered, the recorded tokens are used, never a new tokenisation of their text.
"""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, TypeVar

from penstock.deadline import deadline, holding
from penstock.envs.episode import Episode
from penstock.model.answer_format import Tools, call_ids, with_decoded_arguments
from penstock.model.chat import ChatTokenizer
from penstock.ports.environment import Endpoint
from penstock.samples import Segment
from penstock.sendable import sendable
from penstock.types import StopReason

Message = Mapping[str, Any]
T = TypeVar("T")

LONGEST_CHARACTER = 4
"""Maximum number of tokens of one character."""
UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""A tokenizer decodes an incomplete character to this."""

MOST_REFUSALS = 64
"""Most messages of refused requests that are kept."""
MAX_REFUSAL_CHARS = 500
TURN_S = 6 * 3600.0
"""How long a request of an agent may wait for the agent's other request. The lease ends earlier."""


class Gateway(Protocol):
    """Gives agents access to their conversations."""

    async def open(self, conversation: Conversation) -> Endpoint:
        """Return the endpoint of this conversation. It is valid until `close`."""

    async def close(self, endpoint: Endpoint) -> None:
        """Cancel the endpoint's running requests and wait until they have ended. Later requests are told that the
        episode is over."""


class Over(RuntimeError):
    """The episode has no turn or no token left, so the policy cannot answer in it again."""

    def __init__(self, reason: StopReason, message: str) -> None:
        self.reason = reason
        super().__init__(message)


class Diverged(ValueError):
    """The agent's history differs from the recorded conversation."""


Generate = Callable[[Episode, bool], Awaitable[Segment]]
"""Requests the next segment of the open turn. The flag is True if the segment continues a cut answer."""


class Asked(NamedTuple):
    """A chat request."""

    messages: Sequence[Message]
    tools: Tools
    """Tools that the request offers."""


class Conversation:
    """One episode as its agent sees it. Requests are answered one at a time."""

    def __init__(self, episode: Episode, chat: ChatTokenizer, generate: Generate, *, max_context: int) -> None:
        """`max_context`: maximum number of tokens of a prompt and its answer together."""
        self._episode, self._chat, self._generate, self.max_context = episode, chat, generate, max_context
        self._bounds, self._format = episode.bounds, chat.answers
        self._history: list[Message] = []
        """The messages behind the tokens of the episode's context, including the last answer."""
        self._turn = asyncio.Lock()
        self.refusals: list[str] = []
        """The first messages with which requests were refused, without those for lack of turns or tokens."""
        self.num_refused = 0
        self._overs: set[str] = set()
        self.over: str | None = None
        """Reason why a request was refused for lack of turns or tokens; None if none was refused."""
        self.cut = False
        """Whether the last answer ended at a limit."""
        self.stop_reason: StopReason = "terminated"
        """Why the episode ends, if its agent sends no further request."""

    @property
    def name(self) -> str:
        return str(self._episode.lease.episode)

    def refused(self, message: str) -> None:
        """Note that a request was refused."""
        if message in self._overs:
            return
        self.num_refused += 1
        if len(self.refusals) < MOST_REFUSALS:
            self.refusals.append(sendable(message, MAX_REFUSAL_CHARS))

    def exceeded(self, message: str) -> None:
        """Note that a request was too long for the context: the episode has no tokens left."""
        self._end("max_length", message)

    def prompt(self, messages: Sequence[Message], **settings: Any) -> list[int]:
        """Return the tokens of a conversation, up to the start of the assistant's next answer. Where the conversation
        repeats recorded messages, the recorded tokens are used. Raises `Diverged` if it adds nothing to them."""
        known = len(self._history)
        asked = _plain(messages)
        if not known or len(asked) < known or not all(map(_matches, asked, self._history)):
            return self._chat.prompt(messages, **settings)
        if len(asked) == known:
            raise Diverged("the conversation ends with the assistant's own answer: add a message to it")
        ended = self._episode.context[-1] in self._chat.eos_ids
        self._episode.num_drifts += self._has_drifted(asked[known - 1])
        return self._episode.context + self._chat.continuation(messages[known:], ended=ended, **settings)

    def _has_drifted(self, answer: Message) -> bool:
        """Return whether the latest answer, as the agent sends it back, tokenises differently from the recorded
        tokens."""
        if self._history[-1]["content"] != self._episode.text:
            return False  # the message is not the text of the answer
        said = [token for segment in self._episode.turns[-1].segments for token in segment.token_ids]
        shown = self._chat.encode_answer(answer.get("content") or "")
        return shown != [token for token in said if token not in self._chat.eos_ids]

    def _healed(self, prompt_ids: list[int]) -> list[int] | None:
        """Return the recorded tokens followed by the new tokens of the prompt. None if the prompt's text does not begin
        with the recorded text, or adds nothing to it."""
        known = self._chat.decode(self._episode.context, skip_special=False)
        text = self._chat.decode(prompt_ids, skip_special=False)
        if not known or not text.startswith(known) or len(text) == len(known):
            return None
        self._episode.num_drifts += 1
        return self._episode.context + self._tokens_after(known, prompt_ids)

    def _tokens_after(self, known: str, prompt_ids: list[int]) -> list[int]:
        """Return the tokens of the prompt after its beginning `known`. They are not tokenised again from their text:
        text that spells a control token would become one. Only the rest of a token that begins inside `known` is."""

        def beginning(num_tokens: int) -> str:
            return self._chat.decode(prompt_ids[:num_tokens], skip_special=False)

        nearly = bisect_left(range(len(prompt_ids)), len(known), key=lambda num_tokens: len(beginning(num_tokens)))
        last = min(nearly + 2 * LONGEST_CHARACTER, len(prompt_ids) - 1)
        for num_tokens in range(max(0, nearly - LONGEST_CHARACTER), last + 1):
            text = beginning(num_tokens)
            if text.startswith(known) and (num_tokens == last or not text.endswith(UNFINISHED)):
                return self._chat.encode_answer(text[len(known) :]) + prompt_ids[num_tokens:]
        return self._chat.encode_answer(beginning(len(prompt_ids))[len(known) :])

    async def answer(self, prompt_ids: list[int], max_tokens: int, asked: Asked | None = None) -> Segment:
        """Generate one turn and return its segments joined into one. `asked`: the request behind `prompt_ids`, if
        `prompt` made them. Raises `Diverged` if the history differs from the recorded one, and `Over` when no turn or
        token is left."""
        given_ids = prompt_ids
        async with holding(self._turn, TURN_S, waiter=self.name, resource="its turn", holder="its other request"):
            episode, known = self._episode, len(self._episode.context)
            episode.bounds = self._bounds
            if prompt_ids[:known] != episode.context:
                prompt_ids = self._healed(prompt_ids) or []
            if len(prompt_ids) <= known:
                raise Diverged(
                    "the prompt does not begin with the recorded conversation: an episode is one "
                    "conversation that only grows; branches and rewritten histories cannot be trained as one"
                )
            limit = min(max_tokens, episode.turn_budget, self.max_context - len(prompt_ids))
            if len(episode.turns) >= (max_turns := episode.settings.max_turns):
                raise self._end("max_turns", f"the episode has used its {max_turns} turns (env.max_turns)")
            if limit < 1:
                raise self._end(
                    "max_length",
                    f"the prompt has {len(prompt_ids)} tokens, which leaves no room to answer: the maximum context "
                    f"length is {self.max_context} tokens (model.max_context), and the episode has a budget",
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
            if asked is not None:
                self._history = [*_plain(asked.messages), self._message(given_ids, said.token_ids, asked.tools)]
            return said

    def _message(self, prompt_ids: Sequence[int], token_ids: Sequence[int], tools: Tools) -> Message:
        """Return an answer as its agent reads it, and sends it back."""
        is_thinking = self._format.is_thinking(prompt_ids, self._chat.decode)
        answer = self._format.read(self._episode.text, tools, is_thinking=is_thinking)
        message: dict[str, Any] = {"role": "assistant", "content": answer.content}
        if answer.calls:
            names = call_ids(self._format, prompt_ids, token_ids, len(answer.calls))
            calls = (each.tool_call(name) for name, each in zip(names, answer.calls, strict=True))
            message["tool_calls"] = [with_decoded_arguments(call) for call in calls]
        return message

    def _end(self, reason: StopReason, message: str) -> Over:
        self.stop_reason, self.over = reason, message
        self._overs.add(message)
        return Over(reason, message)


class PausableTimeout:
    """Time limit of an agent's play: the seconds of its lease. The clock pauses while the agent waits for the
    scheduler."""

    def __init__(self, seconds: float, *, waiter: str) -> None:
        self._seconds, self._waiter = seconds, waiter
        self._timer: asyncio.Timeout | None = None
        """None before and after the play."""

    async def run(self, play: Awaitable[T]) -> T:
        """Return the result of `play`. Raises `Stalled` when the time is up."""
        try:
            async with deadline(
                self._seconds, waiter=self._waiter, resource="the end of play", holder="its agent"
            ) as self._timer:
                return await play
        finally:
            self._timer = None

    async def paused(self, waiting: Awaitable[T]) -> T:
        """Return the result of `waiting`. The clock is paused meanwhile."""
        now = asyncio.get_running_loop().time
        when = self._timer.when() if self._timer is not None else None
        if self._timer is None or when is None:
            return await waiting
        left = when - now()
        self._timer.reschedule(None)
        try:
            return await waiting
        finally:
            if self._timer is not None:
                self._timer.reschedule(now() + left)


def _matches(asked: Message, known: Message) -> bool:
    """Return whether both are the same message. An answer is the same if its text is, but for spaces around it, and
    its calls are: clients drop reasoning and other fields, and add their own. A client that wants one call at a time
    knows only the first."""
    if known.get("role") != "assistant" or not isinstance(asked.get("content"), str):
        return asked == known
    calls, known_calls = _calls(asked), _calls(known)
    is_said = asked.get("role") == "assistant" and asked["content"].strip() == known["content"].strip()
    return is_said and bool(calls) == bool(known_calls) and calls == known_calls[: len(calls)]


def _calls(answer: Message) -> list[tuple[Any, Any]]:
    functions = [call.get("function", {}) for call in answer.get("tool_calls", ()) if isinstance(call, Mapping)]
    return [(each.get("name"), each.get("arguments")) for each in functions if isinstance(each, Mapping)]


def _plain(messages: Sequence[Message]) -> list[Message]:
    """Return the messages without empty fields, which do not affect the tokens. Clients add such fields when they echo
    answers."""
    empty: tuple[Any, ...] = (None, [], {}, "")
    return [{key: value for key, value in each.items() if key == "content" or value not in empty} for each in messages]
