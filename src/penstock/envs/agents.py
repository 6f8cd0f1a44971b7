"""Agents: programs with their own loop that play an episode through a client of an OpenAI or Anthropic API.

A gateway gives each agent its own endpoint. The agent's requests there become the turns of its episode: prompts are
what the agent sent, answers are the tokens that the policy sampled. For the part of the history that the gateway has
already answered, the recorded tokens are used, never a new tokenisation of their text.

The turns form a tree. If a prompt begins with the whole context of a turn, the request continues this turn; if it does
so for several turns, the one with the longest context. Other requests begin a new branch. This happens when the agent
begins another conversation, compacts its history, or changes what was said. An agent may have several requests at once.
"""

from __future__ import annotations

import asyncio
import logging
from bisect import bisect_left, insort
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from penstock.deadline import deadline
from penstock.envs.episode import Episode, OpenTurn
from penstock.model.answer_format import call_ids, with_decoded_arguments
from penstock.model.chat import ChatTokenizer
from penstock.ports.environment import Endpoint
from penstock.samples import CalledTool, Segment, place_of
from penstock.sendable import sendable
from penstock.types import StopReason

Message = Mapping[str, Any]
T = TypeVar("T")

LONGEST_CHARACTER = 4
"""Maximum number of tokens of one character."""
UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""A tokenizer decodes an incomplete character to this."""

MOST_HEALED = 4
"""Number of latest branches that are compared with a prompt by their text."""
LEAVE_S = 60.0
"""How long a cancelled agent may take to end."""
END_S = 300.0
"""Limit of the search for stop strings in an answer."""
MOST_REFUSALS = 64
"""Most messages of refused requests that are kept."""
MAX_REFUSAL_CHARS = 500
ROOM_S = 6 * 3600.0
"""How long a request of an agent may wait for the agent's other requests. The lease ends earlier."""


logger = logging.getLogger(__name__)

_left_behind: set[asyncio.Task[Any]] = set()
"""Agents that have not ended. The event loop itself keeps no strong reference to a task."""


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


class NothingAsked(ValueError):
    """A request repeats a recorded conversation, and adds nothing to it."""


Generate = Callable[[OpenTurn], Awaitable[Segment]]
"""Requests the next segment of an open turn."""


class Answered(NamedTuple):
    """A turn that has its whole answer."""

    turn: int
    """Its index in the episode."""
    answer: Segment


class Said(NamedTuple):
    """The messages behind the context of a turn, including its answer."""

    turn: int
    messages: Sequence[Message]
    settings: Mapping[str, Any]
    is_text: bool
    """Whether the content of its answer is the text of all its tokens, without a thought, a call or a stop string."""


class Asked(NamedTuple):
    """A chat request."""

    messages: Sequence[Message]
    """Without empty fields."""
    settings: Mapping[str, Any]
    """How the template renders them: the offered `tools`, and its own keywords."""
    must_call: str | None = None
    """Name of the tool that the answer must call; empty for any tool; None if it need not call one."""
    repeated: Said | None = None
    """The recorded conversation with which it begins."""


class Conversation:
    """One episode as its agent sees it."""

    def __init__(self, episode: Episode, chat: ChatTokenizer, generate: Generate, *, max_context: int) -> None:
        """`max_context`: maximum number of tokens of a prompt and its answer together."""
        self._episode, self._chat, self._generate, self.max_context = episode, chat, generate, max_context
        self._format = chat.answers
        self._said: list[Said] = []
        """What turns said that answer chat requests, the shortest conversations first."""
        self._continued: dict[int, list[int]] = {}
        """The turns that continue a turn, by its index."""
        self._turn_ended = asyncio.Event()
        """Set when the next turn ends."""
        self.refusals: list[str] = []
        """The first messages with which requests were refused, without those for lack of turns or tokens."""
        self.num_refused = 0
        self.num_unread = 0
        """Number of answers that call a tool in a format that the endpoint does not read."""
        self._overs: set[str] = set()
        self.over: str | None = None
        """Reason why a request was refused for lack of turns or tokens; None if none was refused."""
        self.cut = False
        """Whether the latest answer ended at a limit."""
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

    def prompt(
        self, messages: Sequence[Message], *, must_call: str | None = None, **settings: Any
    ) -> tuple[list[int], Asked]:
        """Return the tokens of a conversation, up to the start of the assistant's next answer, and the request for
        `answer`. Where the conversation repeats recorded messages, the recorded tokens are used. Raises `NothingAsked`
        if it adds nothing to them."""
        plain = _plain(messages)
        said = next((each for each in self._said[::-1] if _repeats(plain, settings, each)), None)  # the longest one
        asked = Asked(plain, settings, must_call, said)
        if said is None:
            return self._chat.prompt(messages, must_call=must_call, **settings), asked
        known, context = len(said.messages), self._episode.context_after(said.turn)
        if len(plain) == known:
            raise NothingAsked("the conversation ends with the assistant's own answer: add a message to it")
        self._episode.num_drifts += self._has_drifted(said, plain[known - 1])
        ended = context[-1] in self._chat.eos_ids
        added = self._chat.continuation(messages[known:], ended=ended, **settings)
        return self._chat.begun_call(context + added, must_call), asked

    def _has_drifted(self, said: Said, answer: Message) -> bool:
        """Return whether a recorded answer, as the agent sends it back, tokenises differently from its tokens."""
        if not said.is_text:
            return False
        token_ids = self._episode.turns[said.turn].token_ids
        shown = self._chat.encode_answer(answer.get("content") or "")
        return shown != [token for token in token_ids if token not in self._chat.eos_ids]

    def _healed(self, prompt_ids: list[int]) -> tuple[int, int, list[int]] | None:
        """Find a branch whose text the prompt repeats in other tokens. Return its last turn, the length of its context,
        and the prompt with the recorded tokens. None if there is no such branch, or if the prompt adds nothing to it.
        """
        ends = [index for index in range(len(self._episode.turns)) if index not in self._continued]
        text, marks = self._chat.decode(prompt_ids, skip_special=False), self._control_tokens(prompt_ids)
        for index in reversed(ends[-MOST_HEALED:]):
            context = self._episode.context_after(index)
            known = self._chat.decode(context, skip_special=False)
            if not text.startswith(known) or len(text) == len(known):
                continue
            own = self._control_tokens(context)
            if marks[: len(own)] == own:  # otherwise the prompt spells control tokens, and has other ones
                self._episode.num_drifts += 1
                return index, len(context), context + self._tokens_after(known, prompt_ids)
        return None

    def _control_tokens(self, token_ids: Sequence[int]) -> list[int]:
        return [token for token in token_ids if token in self._chat.special_ids]

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

    async def answer(
        self,
        prompt_ids: list[int],
        max_tokens: int,
        asked: Asked | None = None,
        *,
        end_in: Callable[[Sequence[int]], int | None] | None = None,
        shown: Callable[[Segment], str] | None = None,
    ) -> Answered:
        """Generate one turn, and return it with its segments joined into one.

        `asked`: the request behind `prompt_ids`, if `prompt` made them. `end_in` returns the number of tokens after
        which the agent wants an answer to end; tokens after them are dropped. It may take seconds. `shown` returns the
        text of an answer as the agent reads it. Raises `NothingAsked` if the prompt ends with a recorded answer, and
        `Over` when no turn or token is left.
        """
        given_ids, episode = prompt_ids, self._episode
        wanted = max(min(max_tokens, episode.bounds.max_turn_tokens, self.max_context - len(prompt_ids)), 1)
        while episode.open and not self._has_room(wanted):
            holder = "the episode's other answers"
            async with deadline(ROOM_S, waiter=self.name, resource="turns and tokens that they may use", holder=holder):
                await self._turn_ended.wait()
        parent, known = place_of(prompt_ids, episode.turns, self._continued)
        if known == len(prompt_ids):
            raise NothingAsked("the prompt ends with the policy's own answer: add something to it")
        if self._continued.get(parent) and (healed := self._healed(prompt_ids)):
            parent, known, prompt_ids = healed
        limit = min(max_tokens, episode.turn_budget, self.max_context - len(prompt_ids))
        if len(episode.turns) >= (max_turns := episode.settings.max_turns):
            raise self._end("max_turns", f"the episode has used its {max_turns} turns (env.max_turns)")
        if limit < 1:
            raise self._end(
                "max_length",
                f"the prompt has {len(prompt_ids)} tokens, which leaves no room to answer: the maximum context "
                f"length is {self.max_context} tokens (model.max_context), and the episode has a budget",
            )
        opened, num_overs = episode.open_turn(prompt_ids[known:], limit, parent=parent), len(self._overs)
        try:
            first = await self._generate(opened)
            finished = await opened.complete(first, lambda: self._generate(opened))
            if end_in is not None:
                async with deadline(END_S, waiter=self.name, resource="the end of its answer", holder="its text"):
                    length = await asyncio.to_thread(end_in, opened.turn.token_ids)
                if length is not None:
                    opened.cut(length)
                    finished = True
            turn = opened.close()
        except BaseException:
            opened.drop()
            raise
        finally:
            self._turn_ended.set()
            self._turn_ended = asyncio.Event()
        self.cut = not finished
        if len(self._overs) == num_overs:  # a request that was refused meanwhile says why the episode ends
            self.stop_reason = "max_length" if self.cut else "terminated"
        answer = Segment.joined(opened.turn.segments, "stop" if finished else "length")
        episode.text = self._chat.decode(answer.token_ids) if shown is None else shown(answer)
        self._continued.setdefault(parent, []).append(turn)
        if asked is not None:
            message = self._message(given_ids, answer.token_ids, asked)
            if calls := message.get("tool_calls"):
                episode.called(turn, [CalledTool(each["function"]["name"], each["id"]) for each in calls])
            shared = () if asked.repeated is None else asked.repeated.messages  # kept once, however often it is sent
            is_text = "tool_calls" not in message and message["content"] == self._chat.decode(opened.turn.token_ids)
            said = Said(turn, [*shared, *asked.messages[len(shared) :], message], asked.settings, is_text)
            insort(self._said, said, key=lambda each: len(each.messages))
        return Answered(turn, answer)

    def _has_room(self, num_tokens: int) -> bool:
        """Return whether a turn with so many tokens is left, whatever the open turns use."""
        episode = self._episode
        num_turns = len(episode.turns) + len(episode.open)
        return num_turns < episode.settings.max_turns and episode.turn_budget >= num_tokens

    def texts(self) -> list[list[Message]]:
        """Return each conversation of the episode as messages, to the answer that came last, in the order of their
        first answers."""
        said = {each.turn: list(each.messages) for each in self._said}
        return [said.get(turns[-1]) or self._decoded(turns[-1]) for turns in self._episode.trajectory().conversations()]

    def _decoded(self, turn: int) -> list[Message]:
        """Return the context of an answer to a request without messages."""
        action = self._episode.turns[turn].token_ids
        prompt = self._episode.context_after(turn)[: -len(action) or None]
        return [
            {"role": role, "content": self._chat.decode(token_ids, skip_special=False)}
            for role, token_ids in (("user", prompt), ("assistant", action))
        ]

    def _message(self, prompt_ids: Sequence[int], token_ids: Sequence[int], asked: Asked) -> Message:
        """Return an answer as its agent reads it, and sends it back."""
        is_thinking = self._format.is_thinking(prompt_ids, self._chat.decode)
        begun = "" if asked.must_call is None else self._format.beginning(asked.must_call)
        tools = asked.settings.get("tools") or ()
        answer = self._format.read(begun + self._episode.text, tools, is_thinking=is_thinking)
        self.num_unread += bool(tools) and not answer.calls and self._format.foreign_format(answer.content) is not None
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
        self._num_pauses = 0
        self._left: float | None = None
        """Seconds that were left when the clock paused. None while it runs."""

    async def run(self, play: Coroutine[Any, Any, T], close: Callable[[], Awaitable[None]]) -> T:
        """Return the result of `play`. Raises `Stalled` when the time is up. `close` ends the access to the policy, in
        any case. If `play` ignores that it is cancelled, it is left behind after `LEAVE_S`: the episode ends whatever
        an agent does."""
        playing = asyncio.create_task(play, name=f"play-{self._waiter}")
        try:
            async with deadline(
                self._seconds, waiter=self._waiter, resource="the end of play", holder="its agent"
            ) as self._timer:
                return await asyncio.shield(playing)
        finally:
            self._timer = None
            playing.cancel()
            try:
                await close()
                await asyncio.wait([playing], timeout=LEAVE_S)
            finally:
                if not playing.done():
                    _left_behind.add(playing)
                    logger.error("%s: its agent ignores that it was cancelled, and is left behind", self._waiter)
                playing.add_done_callback(_forget)

    async def paused(self, waiting: Awaitable[T]) -> T:
        """Return the result of `waiting`. The clock is paused meanwhile."""
        now = asyncio.get_running_loop().time
        when = self._timer.when() if self._timer is not None else None
        if self._timer is not None and when is not None and not self._timer.expired():
            self._left = when - now()
            self._timer.reschedule(None)
        self._num_pauses += 1
        try:
            return await waiting
        finally:
            self._num_pauses -= 1
            if self._timer is not None and self._left is not None and not self._num_pauses:
                self._timer.reschedule(now() + self._left)
                self._left = None


def _forget(playing: asyncio.Task[Any]) -> None:
    """Read the exception of an agent that has ended. Otherwise asyncio would log it as never retrieved."""
    _left_behind.discard(playing)
    if not playing.cancelled():
        playing.exception()


def _repeats(asked: Sequence[Message], settings: Mapping[str, Any], said: Said) -> bool:
    """Return whether a request begins with the messages of a recorded conversation, and is rendered as it was."""
    known = len(said.messages)
    return len(asked) >= known and settings == said.settings and all(map(_matches, asked, said.messages))


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
