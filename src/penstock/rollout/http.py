"""Helpers for all routes of the rollout server: read bodies, write answers, and map errors to statuses."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from contextlib import suppress
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from penstock.deadline import Stalled, deadline
from penstock.ports.inference import WeightsOutOfReach
from penstock.rollout import bodies
from penstock.rollout.generator import Conflict, EngineDead, GenerationFailed, Overloaded, Stopped

MAX_BODY_BYTES = 16 * 2**20
BODY_S = 30.0
"""Time limit for a whole body to arrive, also over a slow connection."""
HANDLE_FORMAT = (
    "send a JSON handle with policy_version, path, num_bytes and fingerprint; `path` names a safetensors file in "
    "shared memory or on disk; the server accepts no tensors in the body"
)

T = TypeVar("T")


class Refused(Exception):
    """A request that the server refuses with `status`."""

    def __init__(self, status: int, message: str, headers: dict[str, str] | None = None) -> None:
        self.status, self.headers = status, headers or {}
        super().__init__(message)


STATUSES: dict[type[Exception], int] = {
    Conflict: 409,
    ValueError: 400,
    msgspec.DecodeError: 400,
    WeightsOutOfReach: 424,
    Stalled: 504,
    Stopped: 503,
    Overloaded: 503,
    EngineDead: 500,
    GenerationFailed: 500,
    ClientDisconnect: 499,  # only metrics show it
}
"""HTTP status of each error. A subclass comes before its base class."""
EXPECTED: tuple[type[Exception], ...] = (Refused, *STATUSES)
"""Errors that are answered with their own status. Any other error is a defect, logged with its traceback."""


def status_of(error: Exception) -> int:
    """Return the HTTP status of an `EXPECTED` error."""
    if isinstance(error, Refused):
        return error.status
    return next(status for kind, status in STATUSES.items() if isinstance(error, kind))


def error_object(message: str) -> bodies.ErrorReply:
    """Return an error in SGLang's format."""
    return bodies.ErrorReply(error=bodies.ErrorMessage(message=message))


def answer_error(error: Exception) -> Response:
    """Answer any error in SGLang's format for bad values. SGLang itself has another format for unreadable bodies."""
    return answer(error_object(str(error)), status_of(error))


async def read_body(request: Request, kind: type[bodies.T]) -> bodies.T:
    """Return the decoded body. Raises Refused as soon as the body is too long."""
    body = await read_bytes(request)
    found = bodies.decode(body, kind)
    bodies.refuse_misspelt(body, kind)
    return found


async def read_bytes(request: Request, *, max_bytes: int = MAX_BODY_BYTES) -> bytes:
    """Return the raw body. Raises Refused if it is too long (413) or too slow (408)."""
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > max_bytes:
        raise Refused(413, f"the body exceeds {max_bytes} bytes")
    body = bytearray()
    try:
        async with deadline(BODY_S, waiter="server", resource="the body of a request", holder="its client"):
            async for chunk in request.stream():
                body += chunk
                if len(body) > max_bytes:
                    raise Refused(413, f"the body exceeds {max_bytes} bytes")
    except Stalled:
        raise Refused(408, f"the body did not arrive within {BODY_S:g} s") from None
    return bytes(body)


def answer(value: object, status: int = 200) -> Response:
    """Return a JSON response."""
    return Response(bodies.encode(value), status, media_type="application/json")


def event(value: object) -> bytes:
    """Return one server-sent event."""
    return b"data: " + bodies.encode(value) + b"\n\n"


LAST_EVENT = b"data: [DONE]\n\n"

Access = Literal["public", "generation", "control"]
"""The key that a route needs: none, the generation key, or the control key."""


class Route(NamedTuple):
    """One path of a server.

    A path that ends in `{name}` matches any continuation, including slashes. A route without methods refuses paths
    below it that do not exist."""

    path: str
    methods: list[str]
    endpoint: Callable[[Request], Awaitable[Response]]
    access: Access = "control"
    body: Any = None
    """Type of the JSON request body; None if the route reads none."""
    reply: Any = Any
    """Type of the JSON reply; None for plain text."""
    query: Mapping[str, Any] = {}
    """Names and types of the query parameters."""
    streams: bool = False
    """Whether the route can also answer with server-sent events."""
    refuse: Callable[[Exception], Response] = answer_error
    """Function that formats an error as this route does."""
    error: Any = bodies.ErrorReply
    """Type of the JSON error reply."""


class Surface(Protocol):
    """A group of routes."""

    def routes(self) -> list[Route]: ...


async def not_found(request: Request) -> Response:
    """Refuse a path that does not exist."""
    raise Refused(404, f"the path {request.scope['path']} does not exist on this server")


class EventStream(StreamingResponse):
    """Server-sent events. The stream ends when its client disconnects."""

    media_type = "text/event-stream"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with suppress(ClientDisconnect):
            await unless_disconnected(receive, self.stream_response(send))


async def unless_disconnected(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Return the result of `work`. Cancel `work` and raise ClientDisconnect if the client disconnects.

    `receive` belongs to the request. Its body must be read before, so that only the disconnect message can still
    arrive."""
    caller, left = asyncio.current_task(), False
    assert caller is not None

    async def watch() -> None:
        nonlocal left
        while (await receive())["type"] != "http.disconnect":
            pass
        left = True
        caller.cancel()

    watching = asyncio.ensure_future(watch())
    try:
        return await work
    except asyncio.CancelledError:
        if left and not caller.uncancel():
            raise ClientDisconnect from None
        raise
    finally:
        watching.cancel()
