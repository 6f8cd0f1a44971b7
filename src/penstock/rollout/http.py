"""What every route of the rollout server shares: bodies in, bodies out, errors with their status, the key."""

from __future__ import annotations

import asyncio
import hmac
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, NamedTuple, Protocol, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.deadline import Stalled
from penstock.rollout import wire
from penstock.rollout.runner import EngineDead, GenerationFailed
from penstock.rollout.update import Conflict

MAX_BODY_BYTES = 16 * 2**20
HANDLE_FORMAT = (
    "weights are announced by a JSON handle with policy_version, path, num_bytes and fingerprint, "
    "where path names a safetensors file in shared memory or on disk; tensors in the body are not accepted"
)


T = TypeVar("T")


class Route(NamedTuple):
    """One path of a server."""

    path: str
    methods: list[str]
    endpoint: Callable[[Request], Awaitable[Response]]


class Surface(Protocol):
    """A family of paths."""

    def routes(self) -> list[Route]: ...


class Refused(Exception):
    """A request turned down with `status`."""

    def __init__(self, status: int, message: str) -> None:
        self.status = status
        super().__init__(message)


EXPECTED: tuple[type[Exception], ...] = (
    msgspec.DecodeError,
    ValueError,
    Refused,
    Conflict,
    EngineDead,
    GenerationFailed,
    Stalled,
    ClientDisconnect,
)
"""What is answered with a status; anything else is a defect, logged with its traceback."""


def status_of(error: Exception) -> int:
    """Of an `EXPECTED` error."""
    match error:
        case Refused():
            return error.status
        case Conflict():
            return 409
        case ValueError() | msgspec.DecodeError():
            return 400
        case Stalled():
            return 504
        case _:
            return 500


def error_object(message: str) -> dict[str, dict[str, str]]:
    """SGLang's shape."""
    return {"error": {"message": message}}


async def answer_error(request: Request, error: Exception) -> Response:
    """In SGLang's shapes, of which that for a malformed body is another."""
    body: object = {"error": str(error)} if isinstance(error, msgspec.DecodeError) else error_object(str(error))
    return answer(body, status_of(error))


async def read_body(request: Request, kind: type[wire.T]) -> wire.T:
    """The decoded body, refused as soon as it turns out too long."""
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise Refused(413, f"the body exceeds {MAX_BODY_BYTES} bytes")
    return wire.decode(bytes(body), kind)


def answer(value: object, status: int = 200) -> Response:
    """As JSON."""
    return Response(wire.encode(value), status, media_type="application/json")


def event(value: object) -> bytes:
    """One server-sent event."""
    return b"data: " + wire.encode(value) + b"\n\n"


LAST_EVENT = b"data: [DONE]\n\n"


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns; cancelled when the client leaves. The body is read, so that all that can still arrive is the
    news of its departure."""

    async def departure() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    working, gone = asyncio.ensure_future(work), asyncio.ensure_future(departure())
    try:
        await asyncio.wait((working, gone), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        working.cancel()
        gone.cancel()
        await asyncio.gather(working, gone, return_exceptions=True)


class BearerAuth:
    """ASGI middleware: every path but `/health` needs `Authorization: Bearer <api_key>`."""

    def __init__(self, app: ASGIApp, api_key: str) -> None:
        self._app = app
        self._expected = f"Bearer {api_key}".encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] != "/health":
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._expected):
                await answer(error_object("missing or wrong API key"), 401)(scope, receive, send)
                return
        await self._app(scope, receive, send)
