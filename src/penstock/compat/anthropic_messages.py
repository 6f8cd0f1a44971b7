"""The Anthropic Messages API, whole or streamed, over the chat of `openai.py`: the same prompts, tokens and limits.

Blocks of text, tool use, tool results and thinking are served. Thinking that a client sends back is left out of the
prompt, unless it belongs to a recorded answer of an agent. A field that would change the answer and is not served is
refused. The header `X-Policy-Version` has the policy_version.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from typing import Any

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from penstock.compat import openai_wire as wire
from penstock.compat.openai import OpenAI
from penstock.compat.openai_errors import INVALID, code_of, short, should_retry
from penstock.compat.openai_formats import ChatFormat
from penstock.compat.openai_requests import text_of
from penstock.rollout import bodies, convert, http
from penstock.rollout.convert import PromptRequest

KINDS = {
    400: INVALID,
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
}
REASONS = {"stop": "end_turn", "length": "max_tokens", "tool_calls": "tool_use", "abort": "end_turn"}


class MessagesBody(Struct, kw_only=True):
    """The request of `/v1/messages`."""

    model: str | None = None
    messages: list[dict[str, Any]]
    max_tokens: int | None = None
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: list[str] | None = None
    stream: bool = False
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    # Known but not served.
    container: Any = None
    mcp_servers: Any = None
    output_format: Any = None


class CountReply(Struct, kw_only=True):
    """The reply of `/v1/messages/count_tokens`."""

    input_tokens: int


class MessageReply(Struct, kw_only=True):
    """The assistant's message."""

    id: str
    type: str = "message"
    role: str = "assistant"
    model: str
    content: list[dict[str, Any]]
    stop_reason: str | None
    stop_sequence: str | None = None
    usage: dict[str, int]


class ErrorDetails(Struct, kw_only=True):
    """Message and kind of an error."""

    type: str
    message: str
    code: str | None = None
    """As in the OpenAI API."""


class AnthropicError(Struct, kw_only=True):
    """The reply to a request that failed."""

    type: str = "error"
    error: ErrorDetails


class AnthropicMessages:
    """The endpoints of the Messages API. The SDK adds `/v1/messages` to its `base_url`, which may end in `/v1` too."""

    def __init__(self, chats: OpenAI, *, model_name: str) -> None:
        self._chats, self._model_name = chats, model_name

    def routes(self) -> list[http.Route]:
        route = partial(http.Route, access="generation", refuse=refuse, error=AnthropicError, body=MessagesBody)
        create = partial(route, methods=["POST"], endpoint=self.messages, reply=MessageReply, streams=True)
        count = partial(route, methods=["POST"], endpoint=self.count, reply=CountReply)
        paths = [f"{prefix}/messages" for prefix in ("/v1", "/v1/v1")]
        return [*map(create, paths), *(count(f"{path}/count_tokens") for path in paths)]

    async def count(self, request: Request) -> Response:
        """Return the number of tokens of a conversation."""
        body = await http.read_body(request, MessagesBody)
        self._chats.check_length(body.system, body.messages, body.tools)
        return http.answer(CountReply(input_tokens=await self._chats.count(_chat_body(body))))

    async def messages(self, request: Request) -> Response:
        """Generate the assistant's next message."""
        body = await http.read_body(request, MessagesBody)
        if body.max_tokens is None:
            raise ValueError("max_tokens: field required")
        self._chats.check_length(body.system, body.messages, body.tools)
        generate, form = await self._chats.prepare_chat(_chat_body(body))
        prompts = await self._chats.requests_of(generate, form)
        head = MessageReply(
            id=f"msg_{secrets.token_hex(12)}",
            model=self._model_name,
            content=[],
            stop_reason=None,
            usage={"input_tokens": len(prompts[0].prompt_ids), "output_tokens": 0},
        )
        if body.stream:
            return http.EventStream(self._stream(prompts, form, head))
        (answer,) = await self._chats.give(request, prompts)
        (segment,) = answer.segments
        choice = form.choice(0, answer, segment)
        head.content = _blocks(choice["message"])
        head.stop_reason, head.stop_sequence = _stop(choice)
        head.usage["output_tokens"] = len(segment.token_ids)
        response = http.answer(head)
        response.headers.update(convert.version_header([answer]))
        return response

    async def _stream(
        self, prompts: Sequence[PromptRequest], form: ChatFormat, head: MessageReply
    ) -> AsyncIterator[bytes]:
        """Yield the events of a message: its blocks grow one after the other."""
        yield _event("message_start", message=head)
        blocks, ended = Blocks(), dict[str, Any]()
        num_tokens = 0
        try:
            async for sample, choice in self._chats.follow(prompts, form):
                for event in blocks.grow(choice["delta"]):
                    yield event
                num_tokens, ended = sample.num_tokens, choice
        except http.EXPECTED as error:
            yield _event("error", error=_details(error))
            return
        for event in blocks.close():
            yield event
        reason, sequence = _stop(ended)
        delta = {"stop_reason": reason, "stop_sequence": sequence}
        yield _event("message_delta", delta=delta, usage={"output_tokens": num_tokens})
        yield _event("message_stop")


class Blocks:
    """The blocks of a streamed message."""

    def __init__(self) -> None:
        self._index, self._kind = -1, ""

    def grow(self, delta: Mapping[str, Any]) -> list[bytes]:
        """Return the events for the new part of a chat."""
        events: list[bytes] = []
        if thought := delta.get("reasoning_content"):
            events += self._open("thinking", {"type": "thinking", "thinking": "", "signature": ""})
            events.append(self._delta({"type": "thinking_delta", "thinking": thought}))
        if said := delta.get("content"):
            events += self._open("text", {"type": "text", "text": ""})
            events.append(self._delta({"type": "text_delta", "text": said}))
        for call in delta.get("tool_calls", ()):
            events += [*self.close(), *self._open("tool_use", _tool_use(call) | {"input": {}})]
            events.append(self._delta({"type": "input_json_delta", "partial_json": call["function"]["arguments"]}))
        return events

    def close(self) -> list[bytes]:
        """Return the event that ends the open block, if there is one."""
        if not self._kind:
            return []
        self._kind = ""
        return [_event("content_block_stop", index=self._index)]

    def _open(self, kind: str, block: dict[str, Any]) -> list[bytes]:
        """Return the events that make a block of this kind the open one."""
        if kind == self._kind:
            return []
        closed = self.close()
        self._index, self._kind = self._index + 1, kind
        return [*closed, _event("content_block_start", index=self._index, content_block=block)]

    def _delta(self, delta: dict[str, Any]) -> bytes:
        return _event("content_block_delta", index=self._index, delta=delta)


def _event(kind: str, **fields: Any) -> bytes:
    return f"event: {kind}\n".encode() + http.event({"type": kind, **fields})


def _blocks(message: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return a chat's message as blocks."""
    found: list[dict[str, Any]] = []
    if thought := message.get("reasoning_content"):
        found.append({"type": "thinking", "thinking": thought, "signature": ""})
    if said := message["content"]:
        found.append({"type": "text", "text": said})
    return [*found, *map(_tool_use, message.get("tool_calls", ()))]


def _tool_use(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call["function"]
    return {"type": "tool_use", "id": call["id"], "name": function["name"], "input": json.loads(function["arguments"])}


def _stop(choice: Mapping[str, Any]) -> tuple[str, str | None]:
    """Return the reason why a choice ended, and the stop sequence if it ended at one."""
    matched = choice.get("matched_stop")
    if choice.get("finish_reason") == "stop" and isinstance(matched, str):
        return "stop_sequence", matched
    return REASONS[choice.get("finish_reason") or "stop"], None


def _chat_body(body: MessagesBody) -> wire.ChatBody:
    """Return the request as one of chat completions. Raises ValueError for what is not served."""
    unserved = [name for name in ("container", "mcp_servers", "output_format") if bodies.asks(getattr(body, name))]
    if unserved:
        raise ValueError(f"{', '.join(unserved)}: not served")
    choice = body.tool_choice or {"type": "auto"}
    system = [{"role": "system", "content": text}] if (text := text_of(body.system, "system")) else []
    messages = [each for place, message in enumerate(body.messages) for each in _messages(message, place)]
    given = {name: value for name in ("temperature", "top_p", "top_k") if (value := getattr(body, name)) is not None}
    return wire.ChatBody(
        messages=[*system, *messages],
        max_tokens=body.max_tokens,
        stop=list[str | int](body.stop_sequences) if body.stop_sequences else None,
        tools=[_tool(each, place) for place, each in enumerate(body.tools or ())] or None,
        tool_choice=_choice(choice),
        parallel_tool_calls=not choice.get("disable_parallel_tool_use"),
        return_token_ids=False,
        **given,
    )


def _choice(choice: Mapping[str, Any]) -> Any:
    """Return a choice of tools as Chat Completions has it. Raises ValueError for other choices."""
    match choice:
        case {"type": "auto" | "none" as kind}:
            return kind
        case {"type": "any"}:
            return "required"
        case {"type": "tool", "name": str(name)}:
            return {"type": "function", "function": {"name": name}}
    raise ValueError(f"tool_choice: {short(dict(choice))} is none of 'auto', 'any', 'none' and 'tool' with a name")


def _tool(tool: Mapping[str, Any], place: int) -> dict[str, Any]:
    name, schema = tool.get("name"), tool.get("input_schema")
    if tool.get("type") not in (None, "custom"):
        raise ValueError(f"tools.{place}.type: {short(tool.get('type'))} is not served: this server runs no tools")
    if not isinstance(name, str) or not isinstance(schema, dict):
        raise ValueError(f"tools.{place}: a tool has a `name` and an `input_schema`")
    description = {"description": tool["description"]} if tool.get("description") else {}
    return {"type": "function", "function": {"name": name, **description, "parameters": schema}}


def _messages(message: Mapping[str, Any], place: int) -> list[dict[str, Any]]:
    """Return the messages of a chat that a message is: each tool result is one of its own."""
    where, role, content = f"messages.{place}", message.get("role"), message.get("content")
    if role not in ("user", "assistant"):
        raise ValueError(f"{where}.role: {short(role)} is neither 'user' nor 'assistant'")
    if isinstance(content, str):
        return [{"role": role, "content": content}]
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise ValueError(f"{where}.content: neither text nor a list of blocks")
    results: list[dict[str, Any]] = []
    texts: list[str] = []
    calls: list[dict[str, Any]] = []
    for number, block in enumerate(content):
        match role, block.get("type"):
            case _, "text":
                texts.append(text_of([block], f"{where}.content.{number}"))
            case "assistant", "thinking" | "redacted_thinking":
                pass
            case "assistant", "tool_use":
                calls.append(_call(block, f"{where}.content.{number}"))
            case "user", "tool_result":
                results.append(_result(block, f"{where}.content.{number}"))
            case _, kind:
                raise ValueError(
                    f"{where}.content.{number}.type: {short(kind)} is not served in a message of the {role}"
                )
    if role == "assistant":
        return [{"role": role, "content": "".join(texts), **({"tool_calls": calls} if calls else {})}]
    return [*results, *([{"role": role, "content": "".join(texts)}] if texts or not results else [])]


def _call(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    call_id, name, given = block.get("id"), block.get("name"), block.get("input")
    if not isinstance(call_id, str) or not isinstance(name, str) or not isinstance(given, dict):
        raise ValueError(f"{where}: a tool use has an `id`, a `name` and an `input`")
    function = {"name": name, "arguments": json.dumps(given, ensure_ascii=False)}
    return {"id": call_id, "type": "function", "function": function}


def _result(block: Mapping[str, Any], where: str) -> dict[str, Any]:
    if not isinstance(block.get("tool_use_id"), str):
        raise ValueError(f"{where}.tool_use_id: field required")
    return {"role": "tool", "tool_call_id": block["tool_use_id"], "content": text_of(block.get("content"), where)}


def refuse(error: Exception) -> Response:
    """Return an error in the format of the Messages API."""
    response = http.answer(AnthropicError(error=_details(error)), http.status_of(error))
    response.headers["x-should-retry"] = should_retry(error)
    return response


def _details(error: Exception) -> ErrorDetails:
    status = http.status_of(error)
    kind = KINDS.get(status, KINDS[400] if status < 500 else "api_error")
    return ErrorDetails(type=kind, message=str(error), code=code_of(error))
