"""Where agents find the policy: an OpenAI endpoint of its own for every episode, told by an unguessable key.

The key is the API key, or a part of the base URL (`/s/KEY/v1`) for agents that have only that. Agents that speak tokens
find SGLang's native `/s/KEY/generate` beside it. What an agent asks there becomes the turns of its episode. The same
prompt again gets the same answer, also while that is still being generated: an SDK that retries draws no second sample.
Sampling is the run's own (its temperature is part of what is trained): temperature, top_p, seed and the like are not
the agent's to choose here, and a stop string, a second choice or a penalty is refused. Requests after the episode's end
get 410.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from starlette.types import Receive, Scope, Send

from penstock.compat.openai import OpenAI, refuse
from penstock.deadline import Stalled
from penstock.envs.agents import Conversation, Over
from penstock.envs.calls import EpisodeFailure
from penstock.model.chat import ChatTokenizer
from penstock.rollout.app import App
from penstock.rollout.generation import Generation
from penstock.rollout.generator import Increment, OnTokens, Scored
from penstock.rollout.http import Refused
from penstock.rollout.keys import Keys, bearer
from penstock.rollout.request import GenerateRequest, SamplingParams
from penstock.rollout.session import RolloutError
from penstock.types import Endpoint, Segment

REMEMBERED_KEYS = 65_536
"""Of episodes that are over; an older one is unknown."""


class AgentGateway:
    """An ASGI application, and `envs.agents.Gateway`."""

    def __init__(self, chat: ChatTokenizer, *, model_name: str) -> None:
        self._chat, self._model_name = chat, model_name
        self._sessions: dict[str, Session] = {}
        self._over: OrderedDict[str, None] = OrderedDict()
        self.url = ""
        """Set by whoever listens for this application."""

    async def open(self, conversation: Conversation) -> Endpoint:
        """Agents may ask there from now on."""
        key = secrets.token_urlsafe(24)
        self._sessions[key] = Session(conversation, self._chat, model_name=self._model_name)
        return Endpoint(base_url=f"{self.url}/s/{key}/v1", api_key=key, model=self._model_name)

    async def close(self, endpoint: Endpoint) -> None:
        """Give up what is still being generated there; later requests are told that it is over."""
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
            await session.app({**scope, "path": path}, receive, send)
        elif key in self._over:
            gone = Refused(410, "this episode is over: nothing that is said now becomes part of it")
            await refuse(gone)(scope, receive, send)
        else:
            unknown = Refused(401, "no episode has this key: use the api_key and base_url that the agent was given")
            await refuse(unknown)(scope, receive, send)


class Session:
    """One conversation behind its own application; a `Generator` and a chat template for its surfaces."""

    error: BaseException | None = None
    policy_version = 0
    """Some; answers say which one made them."""

    def __init__(self, conversation: Conversation, chat: ChatTokenizer, *, model_name: str) -> None:
        self._conversation, self._chat = conversation, chat
        self._messages: dict[tuple[int, ...], Sequence[Mapping[str, Any]]] = {}
        """What the prompts were rendered from."""
        self._prompts: dict[str, list[int]] = {}
        """By what was asked: the history is another one once it has been answered."""
        self._answers: dict[tuple[int, ...], asyncio.Task[Segment]] = {}
        surfaces = OpenAI(self, self, model_name=model_name), Generation(self, self)
        self.app = App([route for surface in surfaces for route in surface.routes()], Keys())

    @property
    def max_context(self) -> int:
        return self._conversation.max_context

    def serves(self, rid: str) -> bool:
        """Requests are told apart by their prompts."""
        return False

    def check(self, request: GenerateRequest) -> None:
        """Raise ValueError for what would make the answer another than the policy's own."""
        if len(request.seeds) != 1:
            raise ValueError("one answer at a time: `n` must be 1 in an episode")
        params, plain = request.params, SamplingParams()
        asked = {name: getattr(params, name) for name in CHANGING if getattr(params, name) != getattr(plain, name)}
        if request.ends is not None:
            asked["stop"] = "strings"
        if asked:
            names = ", ".join(sorted(asked))
            raise ValueError(f"{names}: not served in an episode, which is trained as the policy's own answers")

    def check_prompt(self, prompt_ids: list[int]) -> None:
        """Raise ValueError: prompts are answered here, not scored."""
        raise ValueError("prompts are not scored in an episode")

    async def score(self, prompt_ids: list[int]) -> Scored:
        raise ValueError("prompts are not scored in an episode")

    async def generate(self, request: GenerateRequest, on_tokens: OnTokens | None = None) -> list[Segment]:
        """The conversation's next answer, or the one it has already given to this prompt. It goes on when the caller
        leaves: a retry finds it."""
        key = tuple(request.prompt_ids)
        task = self._answers.get(key)
        if task is None or (task.done() and (task.cancelled() or task.exception() is not None)):
            answer = self._conversation.answer(request.prompt_ids, request.max_new_tokens[0], self._messages.get(key))
            task = self._answers[key] = asyncio.create_task(answer, name=f"answer-{self._conversation.name}")
        try:
            said = await asyncio.shield(task)
        except Over as error:
            raise Refused(400, str(error)) from error
        except EpisodeFailure as error:
            raise Refused(410, str(error)) from error
        except (RolloutError, Stalled) as error:
            raise Refused(503, str(error)) from error
        except asyncio.CancelledError:
            if task.cancelled():
                raise Refused(410, "the episode ended before this answer") from None
            raise
        if on_tokens is not None:
            on_tokens([Increment(0, said.token_ids, said.logprobs, said.spans, None)])
        return [said]

    def prompt(self, messages: Sequence[Mapping[str, Any]], **settings: Any) -> list[int]:
        """The same for the same messages, whatever has been said since: a retry means the turn it asked for."""
        asked = json.dumps([messages, settings], sort_keys=True, default=str)
        if asked not in self._prompts:
            ids = self._prompts[asked] = self._conversation.prompt(messages, **settings)
            self._messages[tuple(ids)] = messages
        return self._prompts[asked]

    def encode(self, text: str) -> list[int]:
        return self._chat.encode(text)

    def decode(self, token_ids: Sequence[int], *, skip_special: bool = True) -> str:
        return self._chat.decode(token_ids, skip_special=skip_special)

    async def close(self) -> None:
        """Give up what is still being generated."""
        for task in self._answers.values():
            task.cancel()
        await asyncio.gather(*self._answers.values(), return_exceptions=True)


CHANGING = (
    "stop_token_ids",
    "ignore_eos",
    "min_new_tokens",
    "frequency_penalty",
    "presence_penalty",
    "repetition_penalty",
    "logit_bias",
    "top_logprobs",
)
"""Sampling parameters that make an answer another than the policy's own, or that nobody here can tell."""


def _key_and_path(scope: Scope) -> tuple[str, str]:
    path: str = scope["path"]
    if path.startswith("/s/"):
        key, _, rest = path.removeprefix("/s/").partition("/")
        return key, f"/{rest}"
    headers = dict(scope["headers"])
    return bearer(headers.get(b"authorization", b"").decode("latin-1")), path
