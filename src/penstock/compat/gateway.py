"""Gateway between agents and the policy: every episode has its own endpoint with an unguessable key.

The key is the API key, or part of the base URL (`/s/KEY/v1`) for agents that can only set a URL. Agents that work with
tokens can use SGLang's native `/s/KEY/generate`. An agent's requests become the turns of its episode. A repeated prompt
is sampled again, unless the request is a retry. A request is a retry if its headers say so, or if the client of the
earlier request left before it had the answer. A retry gets the answer of its turn, also if it is still being generated.

The run sets the sampling, because its temperature is part of the training. The gateway ignores an agent's temperature,
top_p, seed and the like. It refuses a penalty. An answer ends at the first stop string or stop token; nothing after it
is trained. Requests after the episode's end get 410.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import Any, NamedTuple

import msgspec
from starlette.datastructures import Headers
from starlette.types import Message, Receive, Scope, Send

from penstock.compat.dialects import dialects
from penstock.compat.openai import OpenAI
from penstock.compat.openai_errors import CONTEXT_EXCEEDED, INVALID, refuse
from penstock.deadline import Stalled
from penstock.envs.agents import Answered, Asked, Conversation, Over
from penstock.envs.dialogue import EpisodeFailure
from penstock.model.chat import ChatTokenizer
from penstock.ports.environment import Endpoint
from penstock.rollout.app import ApiKeys, App, key_of
from penstock.rollout.generation import Generation
from penstock.rollout.generator import AnswersOnly, Increment, OnTokens
from penstock.rollout.http import Refused
from penstock.rollout.request import ContextExceeded, GenerateRequest, check_prompt, check_tokens
from penstock.rollout.session import RolloutError
from penstock.runtime.http_client import MAX_MESSAGE_CHARS
from penstock.samples import Segment

ALLOWED = {"temperature", "top_p", "top_k", "min_p", "stop_token_ids"}
"""Sampling parameters that an episode takes. The run sets all of them but the last, whatever a request says. Other
parameters are refused: they would change the policy's own answer, or ask for data that the gateway does not have."""
REFUSALS = frozenset({400, 404, 405, 409, 413, 415, 422})
"""Statuses of requests that are refused for what they ask."""
ERROR_EVENTS = (b'data: {"error"', b"event: error\n")
"""Beginnings of an event with an error, in a stream."""
TURNS_TO_LEAVE = 4
"""Turns of the event loop after which a worker knows that a client has left: it first reads what the client has sent,
then the end of the connection, tells the request of it, and then the request ends."""
MAX_WAITING = 64
"""Maximum number of requests of one episode that wait for their answer."""
REMEMBERED_KEYS = 65_536
"""Maximum number of keys of ended episodes that are kept. Older keys count as unknown."""


class AgentGateway:
    """The gateway as an ASGI application. Implements `envs.agents.Gateway`."""

    def __init__(self, chat: ChatTokenizer, *, model_name: str) -> None:
        self._chat, self._model_name = chat, model_name
        self._sessions: dict[str, Session] = {}
        self._over: OrderedDict[str, None] = OrderedDict()
        self.url = ""
        """Base URL of this application. The code that opens the listening socket sets it."""

    async def open(self, conversation: Conversation) -> Endpoint:
        """Create an endpoint for a conversation and return it. Agents may use it at once."""
        key = secrets.token_urlsafe(24)
        self._sessions[key] = Session(conversation, self._chat, model_name=self._model_name)
        return Endpoint(base_url=f"{self.url}/s/{key}/v1", api_key=key, model=self._model_name)

    async def close(self, endpoint: Endpoint) -> None:
        """Close an endpoint and cancel its running answers. Later requests are told that the episode is over."""
        session = self._sessions.pop(endpoint.api_key, None)
        self._over[endpoint.api_key] = None
        if len(self._over) > REMEMBERED_KEYS:
            self._over.popitem(last=False)
        if session is not None:
            await session.close()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await send({"type": "websocket.close"})
            return
        key, path = _key_and_path(scope)
        session = self._sessions.get(key)
        if session is not None:
            RETRY.set(_retry(scope))
            await session.app({**scope, "path": path}, receive, _telling(send, session.refused))
        elif key in self._over:
            gone = Refused(410, "this episode is over: it takes no further requests")
            await refuse(gone)(scope, receive, send)
        else:
            unknown = Refused(401, "no episode has this key: use the api_key and base_url that the agent was given")
            await refuse(unknown)(scope, receive, send)


class Retry(NamedTuple):
    """What a request says about itself."""

    number: int = 0
    """Number of earlier attempts."""
    idempotency_key: str = ""


NO_RETRY = Retry()
RETRY: ContextVar[Retry] = ContextVar("retry", default=NO_RETRY)
"""Of the request that is being answered."""


@dataclass(slots=True)
class Reply:
    """An answer, possibly still being generated, and who has it."""

    task: asyncio.Task[Answered]
    idempotency_key: str
    num_missing: int
    """Number of earlier attempts of the same request that may still arrive: a busy server may get the retry first."""
    num_waiting: int = 0
    is_taken: bool = False
    """Whether a request has returned it."""


class Session(AnswersOnly):
    """One conversation with its own application. It is the `Generator` and the chat template of its endpoints. It
    identifies requests by their prompts."""

    policy_version = 0
    """A placeholder for the `Generator` interface. Each answer carries its real policy_version."""

    def __init__(self, conversation: Conversation, chat: ChatTokenizer, *, model_name: str) -> None:
        self._conversation, self.max_context = conversation, conversation.max_context
        self.encode, self.decode, self.longest_token = chat.encode, chat.decode, chat.longest_token
        self.answers = chat.answers
        self._vocab_size = chat.vocab_size
        self._is_closed = False
        self._asking = threading.Lock()
        self._asked: OrderedDict[bytes, list[Asked]] = OrderedDict()
        """What the latest prompts ask that were not answered yet, by the digest of their tokens."""
        self._replies: dict[bytes, list[Reply]] = {}
        """Answers by the digest of the prompt's tokens, the oldest first."""
        chats = OpenAI(self, self, model_name=model_name, measure=chat.prompt, renders_inline=True)
        surfaces = chats, *dialects(chats, model_name=model_name), Generation(self, self)
        self.app = App([route for surface in surfaces for route in surface.routes()], ApiKeys())

    def refused(self, error: Mapping[str, Any]) -> None:
        """Note that a request was refused, with this error in the reply."""
        message = str(error.get("message"))
        if error.get("code") == CONTEXT_EXCEEDED:
            self._conversation.exceeded(message)
        self._conversation.refused(message)

    def check(self, request: GenerateRequest) -> None:
        """Raise ValueError for tokens that the model lacks, and for parameters that would change the policy's own
        answer."""
        try:
            check_prompt(request.prompt_ids, vocab_size=self._vocab_size, max_context=self.max_context)
        except ContextExceeded as error:
            self._conversation.exceeded(str(error))
            raise
        check_tokens([*request.params.stop_token_ids], self._vocab_size)
        if min(request.max_new_tokens) < 1:
            raise ValueError(f"max_new_tokens must be at least 1, not {min(request.max_new_tokens)}")
        if len(request.seeds) > MAX_WAITING:
            raise ValueError(f"`n` is {len(request.seeds)}, more than {MAX_WAITING}")
        if asked := request.params.changed() - ALLOWED:
            names = ", ".join(sorted(asked))
            raise ValueError(f"{names}: not served in an episode, which is trained as the policy's own answers")

    async def generate(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> list[Segment]:
        """Return the next answers of this conversation, or the earlier ones if this is a retry. Generation continues if
        the caller leaves, so that a retry finds the answer. Raises `Refused`: 400 if no turn or token is left, 410 if
        the episode has ended, 503 if the rollout server does not answer."""
        for _ in range(TURNS_TO_LEAVE):
            await asyncio.sleep(0)
        if self._is_closed:
            raise Refused(410, "the episode has ended")
        key, segments = _digest(request.prompt_ids), list[Segment]()
        asked = self._take_asked(key)
        replies = self._earlier(key, len(request.seeds))
        for limit in request.max_new_tokens[len(replies) :]:
            replies.append(self._begin(key, request, limit, asked))
        for reply in replies:
            reply.num_waiting += 1
        try:
            for number, reply in enumerate(replies):
                segment = await self._answer(reply.task)
                segments.append(segment)
                if on_tokens is not None:
                    on_tokens([Increment(number, segment.token_ids, segment.logprobs, segment.spans, None)])
            for reply in replies:
                reply.is_taken = True
        finally:
            for reply in replies:
                reply.num_waiting -= 1
        return segments

    def _earlier(self, key: bytes, count: int) -> list[Reply]:
        """Return the earlier answers to this prompt that belong to the current request, at most `count`.

        These are the answers with its idempotency key. Without a key they are the answers that no request has returned
        or waits for, and those that its own retry has begun. A retry that finds none gets the latest answers.
        """
        retry, replies = RETRY.get(), self._replies.get(key, ())
        mine = [each for each in replies if retry.idempotency_key and each.idempotency_key == retry.idempotency_key]
        if mine:
            return mine[-count:]
        left = [each for each in replies if not each.num_waiting and not each.is_taken]
        if not retry.number:
            overtaken = [each for each in replies if each.num_missing and not each.is_taken][-count:]
            for each in overtaken:
                each.num_missing -= 1
            left += [each for each in overtaken if each not in left]
        elif not left:
            left = list(replies)
        return left[-count:]

    def _begin(self, key: bytes, request: GenerateRequest, max_tokens: int, asked: Asked | None) -> Reply:
        """Begin a new answer. Raises `Refused` (503) if too many are not finished."""
        if sum(not each.task.done() for replies in self._replies.values() for each in replies) >= MAX_WAITING:
            raise Refused(503, f"this episode has {MAX_WAITING} requests without an answer: wait for one of them")
        end_in = request.end_in if request.stops else None
        answer = self._conversation.answer(request.prompt_ids, max_tokens, asked, end_in=end_in, shown=request.shown)
        task = asyncio.create_task(answer, name=f"answer-{self._conversation.name}")
        reply = Reply(task, RETRY.get().idempotency_key, num_missing=RETRY.get().number)
        self._replies.setdefault(key, []).append(reply)
        task.add_done_callback(partial(self._forget_if_failed, key, reply))
        return reply

    async def _answer(self, task: asyncio.Task[Answered]) -> Segment:
        """Wait for an answer, which goes on if the caller leaves."""
        try:
            return (await asyncio.shield(task)).answer
        except Over as error:
            raise (ContextExceeded(str(error)) if error.reason == "max_length" else Refused(400, str(error))) from error
        except EpisodeFailure as error:
            raise Refused(410, str(error)) from error
        except (RolloutError, Stalled) as error:
            raise Refused(503, str(error)) from error
        except asyncio.CancelledError:
            if task.cancelled():
                raise Refused(410, "the episode ended before this answer") from None
            raise

    def prompt(
        self, messages: Sequence[Mapping[str, Any]], *, must_call: str | None = None, **settings: Any
    ) -> list[int]:
        """Return the prompt tokens of `messages`. Remember what they ask until `MAX_WAITING` others have come."""
        ids, asked = self._conversation.prompt(messages, must_call=must_call, **settings)
        if len(ids) < self.max_context:
            key = _digest(ids)
            with self._asking:  # conversations are rendered in threads
                self._asked.setdefault(key, []).append(asked)
                self._asked.move_to_end(key)
                if sum(map(len, self._asked.values())) > MAX_WAITING:
                    self._asked.popitem(last=False)
        return ids

    def _take_asked(self, key: bytes) -> Asked | None:
        """Return and forget what the latest request with this prompt asks."""
        with self._asking:
            if key not in self._asked:
                return None
            asked = self._asked[key].pop()
            if not self._asked[key]:
                del self._asked[key]
            return asked

    def _forget_if_failed(self, key: bytes, reply: Reply, task: asyncio.Task[Answered]) -> None:
        if task.cancelled() or task.exception() is not None:
            self._replies[key].remove(reply)
            if not self._replies[key]:
                del self._replies[key]

    async def close(self) -> None:
        """Cancel all running answers and wait until they have ended."""
        self._is_closed = True
        tasks = [each.task for replies in self._replies.values() for each in replies]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


def _digest(token_ids: Sequence[int]) -> bytes:
    return sha256(msgspec.msgpack.encode(token_ids)).digest()


def _telling(send: Send, refused: Callable[[Mapping[str, Any]], None]) -> Send:
    """Return `send` that also calls `refused` with the error of a request that is refused, also in a stream."""
    is_refusal = False

    async def sending(message: Message) -> None:
        nonlocal is_refusal
        if message["type"] == "http.response.start":
            is_refusal = message["status"] in REFUSALS
        elif (body := message.get("body", b"")) and (is_refusal or body.startswith(ERROR_EVENTS)):
            error = _error(body if is_refusal else body.partition(b"data: ")[2])
            if is_refusal or INVALID in (error.get("type"), error.get("code")):
                refused(error)
            is_refusal = False
        await send(message)

    return sending


def _error(body: bytes) -> Mapping[str, Any]:
    try:
        found = json.loads(body)
        error = found.get("error", found)
        return error if isinstance(error, dict) else {"message": error}
    except (ValueError, AttributeError):
        return {"message": body[:MAX_MESSAGE_CHARS].decode(errors="replace")}


def _retry(scope: Scope) -> Retry:
    """Return what the headers of a request say about retries. The official SDKs count theirs."""
    headers = dict(scope["headers"])
    count = headers.get(b"x-stainless-retry-count", b"")[:3]
    return Retry(int(count) if count.isdigit() else 0, headers.get(b"idempotency-key", b"").decode("latin-1"))


def _key_and_path(scope: Scope) -> tuple[str, str]:
    path: str = scope["path"]
    if path.startswith("/s/"):
        key, _, rest = path.removeprefix("/s/").partition("/")
        return key, f"/{rest}"
    return key_of(Headers(scope=scope)), path
