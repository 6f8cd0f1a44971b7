"""Gateway between agents and the policy: every episode has its own OpenAI endpoint with an unguessable key.

The key is the API key, or part of the base URL (`/s/KEY/v1`) for agents that can only set a URL. Agents that work with
tokens can use SGLang's native `/s/KEY/generate`. An agent's requests become the turns of its episode. A repeated prompt
gets the same answer, even while that answer is still being generated, so a retry of the SDK draws no second sample.

The run sets the sampling, because its temperature is part of the training. The gateway ignores an agent's temperature,
top_p, seed and the like, and refuses a stop string, a second choice or a penalty. Requests after the episode's end get
410.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from hashlib import sha256
from typing import Any

from starlette.types import Message, Receive, Scope, Send

from penstock.compat.openai import CONTEXT_EXCEEDED, OpenAI, refuse
from penstock.deadline import Stalled
from penstock.envs.agents import Asked, Conversation, Over
from penstock.envs.dialogue import EpisodeFailure
from penstock.model.chat import ChatTokenizer
from penstock.ports.environment import Endpoint
from penstock.rollout.app import ApiKeys, App, bearer
from penstock.rollout.generation import Generation
from penstock.rollout.generator import AnswersOnly, Increment, OnTokens
from penstock.rollout.http import Refused
from penstock.rollout.request import ContextExceeded, GenerateRequest, check_prompt
from penstock.rollout.session import RolloutError
from penstock.runtime.http_client import MAX_MESSAGE_CHARS
from penstock.samples import Segment

IGNORED = {"temperature", "top_p", "top_k", "min_p"}
"""Sampling parameters that the run sets. An episode refuses the others: they would change the policy's own answer, or
ask for data that the gateway does not have."""
REFUSALS = frozenset({400, 404, 405, 409, 413, 415, 422})
"""Statuses of requests that are refused for what they ask."""
ERROR_EVENT = b'data: {"error"'
"""Beginning of an event with an error, in a stream."""
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
            await session.app({**scope, "path": path}, receive, _telling(send, session.refused))
        elif key in self._over:
            gone = Refused(410, "this episode is over: it takes no further requests")
            await refuse(gone)(scope, receive, send)
        else:
            unknown = Refused(401, "no episode has this key: use the api_key and base_url that the agent was given")
            await refuse(unknown)(scope, receive, send)


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
        self._rendered: OrderedDict[tuple[int, ...], tuple[bytes, Asked]] = OrderedDict()
        """The latest prompts that wait to be answered, by their tokens: the digest of the request, and what it asks."""
        self._prompts: dict[bytes, list[int]] = {}
        """Prompt tokens by the digest of a request (messages and settings). Kept if there is an answer, because
        rendering the same messages again after it would give another result."""
        self._answers: dict[tuple[int, ...], asyncio.Task[Segment]] = {}
        """Answers by the prompt's tokens."""
        surfaces = OpenAI(self, self, model_name=model_name, measure=chat.prompt), Generation(self, self)
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
        if min(request.max_new_tokens) < 1:
            raise ValueError(f"max_new_tokens must be at least 1, not {min(request.max_new_tokens)}")
        if len(request.seeds) != 1:
            raise ValueError("one answer at a time: `n` must be 1 in an episode")
        asked = request.params.changed() - IGNORED
        if request.ends is not None:
            asked.add("stop")
        if asked:
            names = ", ".join(sorted(asked))
            raise ValueError(f"{names}: not served in an episode, which is trained as the policy's own answers")

    async def generate(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> list[Segment]:
        """Return the conversation's next answer, or its earlier answer to the same prompt. Generation continues if the
        caller leaves, so that a retry finds the answer. Raises `Refused`: 400 if no turn or token is left, 410 if the
        episode has ended, 503 if the rollout server does not answer."""
        key = tuple(request.prompt_ids)
        task = self._answers.get(key)
        if sum(not each.done() for each in self._answers.values()) >= MAX_WAITING and task is None:
            raise Refused(503, f"this episode has {MAX_WAITING} requests without an answer: wait for one of them")
        if task is None:
            digest, asked = self._rendered.pop(key, (b"", None))
            answer = self._conversation.answer(request.prompt_ids, request.max_new_tokens[0], asked)
            task = self._answers[key] = asyncio.create_task(answer, name=f"answer-{self._conversation.name}")
            task.add_done_callback(partial(self._forget_if_failed, key, digest))
        try:
            segment = await asyncio.shield(task)
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
        if on_tokens is not None:
            on_tokens([Increment(0, segment.token_ids, segment.logprobs, segment.spans, None)])
        return [segment]

    def prompt(self, messages: Sequence[Mapping[str, Any]], **settings: Any) -> list[int]:
        """Return the prompt tokens of `messages`. The same messages always get the same tokens, even after an answer,
        because a retry refers to its original turn."""
        digest = sha256(json.dumps([messages, settings], sort_keys=True, default=str).encode()).digest()
        ids = self._prompts.get(digest)
        if ids is None:
            ids = self._conversation.prompt(messages, **settings)
            if len(ids) < self.max_context and (key := tuple(ids)) not in self._answers:
                self._remember(key, digest, Asked(messages, settings.get("tools") or ()))
        return ids

    def _remember(self, key: tuple[int, ...], digest: bytes, asked: Asked) -> None:
        """Keep a prompt until its answer begins, or until `MAX_WAITING` later ones have come."""
        if (replaced := self._rendered.get(key)) is not None:
            self._prompts.pop(replaced[0], None)
        self._prompts[digest] = list(key)
        self._rendered[key] = digest, asked
        if len(self._rendered) > MAX_WAITING:
            self._prompts.pop(self._rendered.popitem(last=False)[1][0], None)

    def _forget_if_failed(self, key: tuple[int, ...], digest: bytes, task: asyncio.Task[Segment]) -> None:
        if task.cancelled() or task.exception() is not None:
            self._prompts.pop(digest, None)
            del self._answers[key]

    async def close(self) -> None:
        """Cancel all running answers and wait until they have ended."""
        for task in self._answers.values():
            task.cancel()
        await asyncio.gather(*self._answers.values(), return_exceptions=True)


def _telling(send: Send, refused: Callable[[Mapping[str, Any]], None]) -> Send:
    """Return `send` that also calls `refused` with the error of a request that is refused, also in a stream."""
    is_refusal = False

    async def sending(message: Message) -> None:
        nonlocal is_refusal
        if message["type"] == "http.response.start":
            is_refusal = message["status"] in REFUSALS
        elif (body := message.get("body", b"")) and (is_refusal or body.startswith(ERROR_EVENT)):
            error = _error(body.removeprefix(b"data: "))
            if is_refusal or error.get("type") == "invalid_request_error":
                refused(error)
            is_refusal = False
        await send(message)

    return sending


def _error(body: bytes) -> Mapping[str, Any]:
    try:
        error = json.loads(body)["error"]
        return error if isinstance(error, dict) else {"message": error}
    except (ValueError, LookupError, TypeError):
        return {"message": body[:MAX_MESSAGE_CHARS].decode(errors="replace")}


def _key_and_path(scope: Scope) -> tuple[str, str]:
    path: str = scope["path"]
    if path.startswith("/s/"):
        key, _, rest = path.removeprefix("/s/").partition("/")
        return key, f"/{rest}"
    headers = dict(scope["headers"])
    return bearer(headers.get(b"authorization", b"").decode("latin-1")), path
