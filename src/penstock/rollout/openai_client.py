"""The client of a model behind an endpoint of the OpenAI API (chat completions), which is not trained here.

A request that the endpoint puts off (429) or fails (5xx, no answer) is sent again after a pause: the one of
`Retry-After`, or one that doubles. All requests of this process wait for a pause that the endpoint asks for.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections import Counter
from collections.abc import Mapping
from email.utils import parsedate_to_datetime
from typing import Any

from msgspec import Struct

from penstock.config import ConfigError, PolicyConfig
from penstock.config.secret_settings import resolved
from penstock.deadline import Stalled
from penstock.model.message_tokens import Chat, call_text
from penstock.observe.log_lines import Paced
from penstock.rollout.message_policy import MessagePolicy, RandomPolicy, Said, demanded
from penstock.rollout.session import HttpSession, RolloutError
from penstock.types import Sampling

logger = logging.getLogger(__name__)

CHECK_S = 20.0
"""Time limit for the endpoint to answer before a run starts."""
LATER = (408, 409, 425, 429)
"""Statuses below 500 of a request that may succeed later."""
FIRST_PAUSE_S, MAX_PAUSE_S = 1.0, 60.0
"""Pause before the first retry, which doubles with each, and the longest one."""
LONGEST_WAIT_S = 3600.0
"""The longest pause that the endpoint may ask for."""
MAX_ANSWER_BYTES = 1 << 24


class Function(Struct):
    """A called function. `arguments` is JSON as text."""

    name: str
    arguments: str | None = None


class ToolCall(Struct):
    function: Function


class Part(Struct):
    """A part of a message."""

    text: str = ""


class Message(Struct):
    content: str | list[Part] | None = None
    tool_calls: list[ToolCall] | None = None


class Choice(Struct):
    message: Message
    finish_reason: str | None = None


class Usage(Struct):
    """The endpoint's own counts of tokens."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


class Completion(Struct):
    """The reply to a chat request."""

    choices: list[Choice]
    usage: Usage | None = None


class EndpointError(RolloutError):
    """A request to the endpoint failed."""

    def __init__(self, url: str, message: str, status: int | None = None) -> None:
        super().__init__(url, message, status)
        self.args = (f"endpoint {url}: {self.message}",)


class OpenAIPolicy(MessagePolicy):
    """A model behind an endpoint."""

    def __init__(self, settings: PolicyConfig) -> None:
        """Raises `ConfigError` if `policy.options` name a variable that is not set."""
        super().__init__()
        assert settings.base_url is not None
        self.name = self._url = settings.base_url.rstrip("/")
        self._settings, self._options = settings, resolved(settings.options, "policy.options")
        key = os.environ.get(settings.api_key_variable) or None
        self._session = HttpSession(api_key=key, timeout_s=settings.timeout_s)
        self._resume_at = 0.0
        """Time of the event loop before which the endpoint wants no request."""
        self._calls_tools: bool | None = None
        """Whether the endpoint takes requests with tools; None: not known yet."""
        self._counted: Counter[str] = Counter()
        self._log = Paced(logger)

    async def check(self) -> None:
        """Check that the endpoint answers and takes the key. Raises `ConfigError`."""
        try:
            await self._session.send("GET", self._url, "/models", timeout_s=CHECK_S, max_bytes=MAX_ANSWER_BYTES)
        except Stalled:
            raise ConfigError(f"policy.base_url: {self._url} has not answered for {CHECK_S:g} s") from None
        except RolloutError as error:
            self._raise_if_hopeless(error, known=(404, 405))
            if error.status is None:
                raise ConfigError(f"policy.base_url: {self._url}: {error.message}") from None

    async def close(self) -> None:
        await self._session.close()

    def counts(self) -> Mapping[str, float]:
        return self._counted

    async def answer(self, chat: Chat, sampling: Sampling, max_tokens: int, seed: int) -> Said:
        """Return the endpoint's answer. Raises `ConfigError` if no request can succeed, and `EndpointError` if this
        one has failed."""
        body: dict[str, Any] = {
            "model": self._settings.model,
            "messages": chat.messages,
            "max_tokens": max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "seed": seed % 2**31,
        }
        if sampling.top_k:
            body["top_k"] = sampling.top_k
        if chat.tools:
            body["tools"] = chat.tools
        if (tool := demanded(chat.begun)) is not None:
            body["tool_choice"] = {"type": "function", "function": {"name": tool}} if tool else "required"
        body = {name: value for name, value in (body | self._options).items() if value is not None}
        try:
            reply = await self._sent(body)
        except EndpointError as error:
            if chat.tools and error.status is not None and 400 <= error.status < 500 and not self._calls_tools:
                await self._raise_if_without_tools(body, error)
            raise
        self._calls_tools = self._calls_tools or bool(chat.tools)
        return self._read(reply)

    def _read(self, reply: Completion) -> Said:
        if not reply.choices:
            raise EndpointError(self._url, "returned no answer", 200)
        choice = reply.choices[0]
        if choice.finish_reason == "content_filter":
            raise EndpointError(self._url, "has filtered the answer out", 200)
        content = choice.message.content or ""
        text = content if isinstance(content, str) else "".join(part.text for part in content)
        calls = [_as_text(each.function) for each in choice.message.tool_calls or ()]
        return Said(text, calls, is_finished=choice.finish_reason != "length")

    async def _sent(self, body: Mapping[str, Any]) -> Completion:
        """Send a request until it has an answer. Raises `EndpointError` after the last retry."""
        now, path = asyncio.get_running_loop().time, "/chat/completions"
        for number in range(self._settings.max_retries + 1):
            await asyncio.sleep(max(self._resume_at - now(), 0.0))
            try:
                self._counted["endpoint_requests"] += 1
                reply = await self._session.call("POST", self._url, path, body, Completion, max_bytes=MAX_ANSWER_BYTES)
            except RolloutError as error:
                self._raise_if_hopeless(error)
                is_late = error.status is None or error.status in LATER or error.status >= 500
                if not is_late or number == self._settings.max_retries:
                    raise EndpointError(self._url, error.message, error.status) from None
                await self._pause(error, min(FIRST_PAUSE_S * 2**number, MAX_PAUSE_S))
            else:
                if reply.usage is not None:
                    self._counted["endpoint_prompt_tokens"] += reply.usage.prompt_tokens
                    self._counted["endpoint_completion_tokens"] += reply.usage.completion_tokens
                return reply
        raise AssertionError("unreachable")

    async def _pause(self, error: RolloutError, seconds: float) -> None:
        """Wait before a retry: as long as the endpoint says, else `seconds`. Raises `EndpointError` if that is
        too long."""
        asked_s = _seconds(error.retry_after)
        self._counted["endpoint_retries"] += 1
        if asked_s is None:
            self._log.info(f"tries again in {seconds:g} s: {error.message}")
            await asyncio.sleep(seconds)
            return
        if asked_s > LONGEST_WAIT_S:
            raise EndpointError(self._url, f"asks to wait for {asked_s:.0f} s: {error.message}", error.status) from None
        self._log.info(f"waits for {asked_s:g} s, as the endpoint asks: {error.message}")
        self._resume_at = max(self._resume_at, asyncio.get_running_loop().time() + asked_s)

    def _raise_if_hopeless(self, error: RolloutError, *, known: tuple[int, ...] = ()) -> None:
        """Raise `ConfigError` for an error that every request would get. `known`: statuses that say nothing here."""
        variable = self._settings.api_key_variable
        if error.status in (401, 403):
            key = f"the key in {variable}" if os.environ.get(variable) else f"a request without a key: set {variable}"
            raise ConfigError(f"policy.api_key_variable: {self._url} refuses {key}: {error.message}") from None
        if error.status in (404, 405) and error.status not in known:
            raise ConfigError(
                f"policy.base_url {self._url} or policy.model {self._settings.model} is wrong: {error.message}"
            ) from None

    async def _raise_if_without_tools(self, body: Mapping[str, Any], error: EndpointError) -> None:
        """Raise `ConfigError` if the endpoint takes the same request without tools."""
        try:
            await self._sent({name: value for name, value in body.items() if name not in ("tools", "tool_choice")})
        except EndpointError:
            return
        raise ConfigError(
            f"policy.model {self._settings.model}: {self._url} takes no tools, and the environment has some: choose a "
            f"model and an endpoint that call tools: {error.message}"
        ) from None


def _as_text(function: Function) -> str:
    """Return a call as text. Arguments that are no JSON object stay as they are: the environment is told."""
    try:
        arguments = json.loads(function.arguments or "{}")
    except ValueError:
        return call_text(function.name, function.arguments or "")
    return call_text(function.name, arguments if isinstance(arguments, dict) else function.arguments or "")


def _seconds(retry_after: str | None) -> float | None:
    """Return the seconds of a `Retry-After`: a number, or a date. None for another form."""
    if retry_after is None:
        return None
    try:
        return max(float(retry_after), 0.0)
    except ValueError:
        pass
    try:
        return max(parsedate_to_datetime(retry_after).timestamp() - time.time(), 0.0)
    except ValueError:
        return None


def check_endpoint(settings: PolicyConfig) -> None:
    """Check the endpoint before a run starts. Raises `ConfigError`."""

    async def check() -> None:
        policy = OpenAIPolicy(settings)
        try:
            await policy.check()
        finally:
            await policy.close()

    asyncio.run(check())


def policy_of(settings: PolicyConfig) -> MessagePolicy:
    """Return the policy without tokens that the settings name."""
    return OpenAIPolicy(settings) if settings.name == "openai" else RandomPolicy()
