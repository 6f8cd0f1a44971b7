"""The OpenAI Responses API, whole or streamed, over the chat of `openai.py`: the same prompts, tokens and limits.

Messages, function calls, their outputs and reasoning are served. Nothing is stored: a request brings its whole
conversation as `input`. Reasoning that a client sends back is left out of the prompt, unless it belongs to a recorded
answer of an agent. A field that would change the answer and is not served is refused. The header `X-Policy-Version` has
the policy_version.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from functools import partial
from typing import Any

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from penstock.compat import openai_wire as wire
from penstock.compat.openai import OpenAI
from penstock.compat.openai_errors import INVALID, refuse, short
from penstock.compat.openai_formats import ChatFormat
from penstock.compat.openai_requests import text_of
from penstock.rollout import bodies, convert, http
from penstock.rollout.convert import PromptRequest

UNSERVED = ("previous_response_id", "conversation", "background", "prompt", "max_tool_calls")
ROLES = ("user", "assistant", "system", "developer")


class ResponsesBody(Struct, kw_only=True):
    """The request of `/v1/responses`."""

    model: str | None = None
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    text: dict[str, Any] | None = None
    stream: bool | None = False
    store: bool | None = None
    metadata: dict[str, str] | None = None
    # Known but not served.
    previous_response_id: Any = None
    conversation: Any = None
    background: Any = None
    prompt: Any = None
    max_tool_calls: Any = None


class ResponseReply(Struct, kw_only=True):
    """The reply, or its state so far."""

    id: str
    object: str = "response"
    created_at: int
    status: str
    error: dict[str, Any] | None = None
    incomplete_details: dict[str, str] | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    metadata: dict[str, Any] | None = None
    model: str
    output: list[dict[str, Any]]
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    reasoning: dict[str, Any]
    store: bool = False
    temperature: float | None = None
    text: dict[str, Any]
    tool_choice: Any = "auto"
    tools: list[dict[str, Any]]
    top_p: float | None = None
    truncation: str = "disabled"
    usage: dict[str, Any] | None = None


class OpenAIResponses:
    """The endpoint of the Responses API."""

    def __init__(self, chats: OpenAI, *, model_name: str) -> None:
        self._chats, self._model_name = chats, model_name

    def routes(self) -> list[http.Route]:
        route = partial(http.Route, access="generation", refuse=refuse, error=wire.OpenAIError)
        route = partial(route, body=ResponsesBody, reply=ResponseReply, streams=True)
        return [route("/v1/responses", ["POST"], self.respond)]

    async def respond(self, request: Request) -> Response:
        """Generate the next output of a conversation."""
        body = await http.read_body(request, ResponsesBody)
        self._chats.check_length(body.instructions, body.input, body.tools)
        generate, form = await self._chats.prepare_chat(_chat_body(body))
        prompts = await self._chats.requests_of(generate, form)
        state, num_prompt = self._state(body), len(prompts[0].prompt_ids)
        if body.stream:
            return http.EventStream(self._stream(prompts, form, state))
        (answer,) = await self._chats.give(request, prompts)
        (segment,) = answer.segments
        choice = form.choice(0, answer, segment)
        message = choice["message"]
        output = Output()
        if thought := message.get("reasoning_content"):
            output.add_text("reasoning", thought)
        if (said := message["content"]) or not message.get("tool_calls"):
            output.add_text("message", said or "")
        for call in message.get("tool_calls", ()):
            output.add_call(call)
        output.close()
        response = http.answer(_ended(state, output.items, choice, num_prompt, len(segment.token_ids)))
        response.headers.update(convert.version_header([answer]))
        return response

    def _state(self, body: ResponsesBody) -> ResponseReply:
        return ResponseReply(
            id=f"resp_{secrets.token_hex(16)}",
            created_at=int(time.time()),
            status="in_progress",
            instructions=body.instructions,
            max_output_tokens=body.max_output_tokens,
            metadata=body.metadata or {},
            model=self._model_name,
            output=[],
            parallel_tool_calls=body.parallel_tool_calls is not False,
            reasoning={"effort": None, "summary": None},
            temperature=body.temperature,
            text=body.text or {"format": {"type": "text"}},
            tool_choice=body.tool_choice or "auto",
            tools=body.tools or [],
            top_p=body.top_p,
        )

    async def _stream(
        self, prompts: Sequence[PromptRequest], form: ChatFormat, state: ResponseReply
    ) -> AsyncIterator[bytes]:
        """Yield the events of a response: its items grow one after the other."""
        output, ended, num_tokens = Output(), dict[str, Any](), 0
        yield output.event("response.created", response=state)
        yield output.event("response.in_progress", response=state)
        try:
            async for sample, choice in self._chats.follow(prompts, form):
                delta = choice["delta"]
                if thought := delta.get("reasoning_content"):
                    output.add_text("reasoning", thought)
                if said := delta.get("content"):
                    output.add_text("message", said)
                for call in delta.get("tool_calls", ()):
                    output.add_call(call)
                num_tokens, ended = sample.num_tokens, choice
                for event in output.take():
                    yield event
        except http.EXPECTED as error:
            state.status, state.error = "failed", {"code": "server_error", "message": str(error)}
            code = INVALID if http.status_of(error) < 500 else "server_error"
            yield output.event("error", code=code, message=str(error), param=None)
            yield output.event("response.failed", response=state)
            return
        if not output.items:
            output.add_text("message", "")
        output.close()
        for event in output.take():
            yield event
        reply = _ended(state, output.items, ended, len(prompts[0].prompt_ids), num_tokens)
        yield output.event(f"response.{reply.status}", response=reply)


class Output:
    """The output of a response: its items, and the events that a stream tells of them."""

    def __init__(self) -> None:
        self.items: list[dict[str, Any]] = []
        self._is_open = False
        self._events: list[bytes] = []
        self._number = 0

    def event(self, kind: str, **fields: Any) -> bytes:
        """Return the next event."""
        self._number += 1
        body = {"type": kind, "sequence_number": self._number - 1, **fields}
        return f"event: {kind}\n".encode() + http.event(body)

    def take(self) -> list[bytes]:
        """Return the events since the last call."""
        events, self._events = self._events, []
        return events

    def add_text(self, kind: str, text: str) -> None:
        """Add text to the open item, or to a new one if that is of another kind (`message` or `reasoning`)."""
        if not self._is_open or self.items[-1]["type"] != kind:
            self.close()
            item = {"id": f"{PREFIXES[kind]}_{secrets.token_hex(16)}", "type": kind, "status": "in_progress"}
            role: dict[str, Any] = {"role": "assistant"} if kind == "message" else {"summary": []}
            self._open({**item, **role, "content": []})
            part = self._part("")
            self.items[-1]["content"].append(part)
            self._tell("response.content_part.added", content_index=0, part=dict(part))
        if text:
            self.items[-1]["content"][0]["text"] += text
            self._tell_text("delta", delta=text)

    def add_call(self, call: Mapping[str, Any]) -> None:
        """Add a function call as a whole."""
        self.close()
        function, item_id = call["function"], f"fc_{secrets.token_hex(16)}"
        item = {"id": item_id, "type": "function_call", "status": "in_progress", "call_id": call["id"]}
        self._open({**item, "name": function["name"], "arguments": ""})
        self.items[-1]["arguments"] = function["arguments"]
        self._tell("response.function_call_arguments.delta", delta=function["arguments"])
        self._tell("response.function_call_arguments.done", name=function["name"], arguments=function["arguments"])
        self.close()

    def close(self) -> None:
        """End the open item, if there is one."""
        if not self._is_open:
            return
        self._is_open, item = False, self.items[-1]
        item["status"] = "completed"
        if item["type"] != "function_call":
            (part,) = item["content"]
            self._tell_text("done", text=part["text"])
            self._tell("response.content_part.done", content_index=0, part=part)
        self._events.append(self.event("response.output_item.done", output_index=len(self.items) - 1, item=dict(item)))

    def _open(self, item: dict[str, Any]) -> None:
        self.items.append(item)
        self._is_open = True
        shown = {**item, **({"content": []} if "content" in item else {})}
        self._events.append(self.event("response.output_item.added", output_index=len(self.items) - 1, item=shown))

    def _part(self, text: str) -> dict[str, Any]:
        if self.items[-1]["type"] == "reasoning":
            return {"type": "reasoning_text", "text": text}
        return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}

    def _tell_text(self, kind: str, **fields: Any) -> None:
        name = self.items[-1]["content"][0]["type"]
        logprobs: dict[str, Any] = {"logprobs": []} if name == "output_text" else {}
        self._tell(f"response.{name}.{kind}", content_index=0, **fields, **logprobs)

    def _tell(self, kind: str, **fields: Any) -> None:
        item_id, index = self.items[-1]["id"], len(self.items) - 1
        self._events.append(self.event(kind, item_id=item_id, output_index=index, **fields))


PREFIXES = {"message": "msg", "reasoning": "rs"}


def _ended(
    state: ResponseReply, items: list[dict[str, Any]], choice: Mapping[str, Any], num_prompt: int, num_tokens: int
) -> ResponseReply:
    """Return the whole response."""
    is_cut = choice.get("finish_reason") == "length"
    state.status = "incomplete" if is_cut else "completed"
    state.incomplete_details = {"reason": "max_output_tokens"} if is_cut else None
    state.output = items
    state.usage = {
        "input_tokens": num_prompt,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": num_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": num_prompt + num_tokens,
    }
    return state


def _chat_body(body: ResponsesBody) -> wire.ChatBody:
    """Return the request as one of chat completions. Raises ValueError for what is not served."""
    if unserved := [name for name in UNSERVED if bodies.asks(getattr(body, name))]:
        raise ValueError(f"{', '.join(unserved)}: not served; give the whole conversation as `input`")
    form = (body.text or {}).get("format") or {"type": "text"}
    if not isinstance(form, dict) or form.get("type") != "text":
        raise ValueError(f"text.format: {short(form)} is not served, only the type 'text'")
    messages: list[dict[str, Any]] = []
    if body.instructions:
        messages.append({"role": "system", "content": body.instructions})
    items = [{"role": "user", "content": body.input}] if isinstance(body.input, str) else body.input
    for place, item in enumerate(items):
        _add(messages, item, f"input[{place}]")
    given = {name: value for name in ("temperature", "top_p") if (value := getattr(body, name)) is not None}
    return wire.ChatBody(
        messages=messages,
        max_tokens=body.max_output_tokens,
        tools=[_tool(each, place) for place, each in enumerate(body.tools or ())] or None,
        tool_choice=_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        return_token_ids=False,
        **given,
    )


def _add(messages: list[dict[str, Any]], item: Mapping[str, Any], where: str) -> None:
    """Add an item to a conversation. An assistant's text and calls that follow each other are one message."""
    last = messages[-1] if messages and messages[-1]["role"] == "assistant" else None
    match item.get("type", "message"):
        case "message":
            if item.get("role") not in ROLES:
                raise ValueError(f"{where}.role: {short(item.get('role'))} is none of {', '.join(ROLES)}")
            role = "system" if item["role"] == "developer" else item["role"]
            content = text_of(item.get("content"), f"{where}.content")
            if role == "assistant" and last is not None and "tool_calls" not in last:
                last["content"] += content
            else:
                messages.append({"role": role, "content": content})
        case "function_call":
            fields = [item.get(name) for name in ("call_id", "name", "arguments")]
            if not all(isinstance(each, str) for each in fields):
                raise ValueError(f"{where}: a function call has a `call_id`, a `name` and `arguments`")
            if last is None:
                last = {"role": "assistant", "content": ""}
                messages.append(last)
            function = {"name": item["name"], "arguments": item["arguments"]}
            last.setdefault("tool_calls", []).append({"id": item["call_id"], "type": "function", "function": function})
        case "function_call_output":
            if not isinstance(item.get("call_id"), str):
                raise ValueError(f"{where}.call_id: missing")
            content = text_of(item.get("output"), f"{where}.output")
            messages.append({"role": "tool", "tool_call_id": item["call_id"], "content": content})
        case "reasoning":
            pass
        case kind:
            raise ValueError(f"{where}.type: {short(kind)} is not served")


def _choice(choice: Any) -> Any:
    """Return a choice of tools as Chat Completions has it."""
    match choice:
        case {"type": "function", "name": str(name)}:
            return {"type": "function", "function": {"name": name}}
    return choice


def _tool(tool: Mapping[str, Any], place: int) -> dict[str, Any]:
    if tool.get("type") != "function":
        raise ValueError(f"tools[{place}].type: {short(tool.get('type'))} is not served: this server runs no tools")
    if not isinstance(tool.get("name"), str):
        raise ValueError(f"tools[{place}].name: missing")
    shown = {name: tool[name] for name in ("name", "description", "parameters") if tool.get(name) is not None}
    return {"type": "function", "function": shown}
