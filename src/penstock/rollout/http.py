"""What every route of the rollout server shares: bodies in, bodies out, errors with their status."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from typing import Any, Literal, NamedTuple, Protocol, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from penstock.deadline import Stalled, deadline
from penstock.ports import WeightsOutOfReach
from penstock.rollout import wire
from penstock.rollout.failures import Conflict, EngineDead, GenerationFailed, Stopped

MAX_BODY_BYTES = 16 * 2**20
BODY_S = 30.0
"""For a whole body to come, over a slow line too."""
HANDLE_FORMAT = (
    "weights are announced by a JSON handle with policy_version, path, num_bytes and fingerprint, "
    "where path names a safetensors file in shared memory or on disk; tensors in the body are not accepted"
)


T = TypeVar("T")

GONE = 499
"""For the books only: the client left before its answer."""


class Refused(Exception):
    """A request turned down with `status`."""

    def __init__(self, status: int, message: str, headers: dict[str, str] | None = None) -> None:
        self.status, self.headers = status, headers or {}
        super().__init__(message)


EXPECTED: tuple[type[Exception], ...] = (
    msgspec.DecodeError,
    ValueError,
    Refused,
    Conflict,
    WeightsOutOfReach,
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
        case WeightsOutOfReach():
            return 424
        case Stalled():
            return 504
        case Stopped():
            return 503
        case ClientDisconnect():
            return GONE
        case _:
            return 500


def error_object(message: str) -> wire.ErrorReply:
    """SGLang's shape."""
    return wire.ErrorReply(error=wire.ErrorMessage(message=message))


def answer_error(error: Exception) -> Response:
    """In SGLang's shape for bad values, whatever is wrong; its own for a body that cannot be read is another."""
    return answer(error_object(str(error)), status_of(error))


async def read_body(request: Request, kind: type[wire.T]) -> wire.T:
    """The decoded body, refused as soon as it turns out too long."""
    body = await read_bytes(request)
    found = wire.decode(body, kind)
    wire.refuse_misspelt(body, kind)
    return found


async def read_bytes(request: Request, *, max_bytes: int = MAX_BODY_BYTES) -> bytes:
    """The body as it came."""
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
        raise Refused(408, f"the body was not there within {BODY_S:g} s") from None
    return bytes(body)


def answer(value: object, status: int = 200) -> Response:
    """As JSON."""
    return Response(wire.encode(value), status, media_type="application/json")


def event(value: object) -> bytes:
    """One server-sent event."""
    return b"data: " + wire.encode(value) + b"\n\n"


LAST_EVENT = b"data: [DONE]\n\n"

Access = Literal["everybody", "generation", "control"]
"""Whose key a route needs."""


class Route(NamedTuple):
    """One path of a server. A path that ends in `{name}` stands for whatever follows, slashes included; one without
    methods refuses what lies below it and does not exist."""

    path: str
    methods: list[str]
    endpoint: Callable[[Request], Awaitable[Response]]
    access: Access = "control"
    body: Any = None
    """Type of the JSON it reads; None if it reads none."""
    reply: Any = Any
    """Type of the JSON it answers with; None if that is plain text."""
    query: Mapping[str, Any] = {}
    """Names and types of what may follow the question mark."""
    streams: bool = False
    """Whether it can answer with server-sent events too."""
    refuse: Callable[[Exception], Response] = answer_error
    """An error in the route's own shape."""
    error: Any = wire.ErrorReply
    """Type of that."""


class Surface(Protocol):
    """A family of paths."""

    def routes(self) -> list[Route]: ...


async def nowhere(request: Request) -> Response:
    """A path that does not exist."""
    raise Refused(404, f"there is no {request.url.path}")


async def unless_gone(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """What `work` returns; cancelled when the client leaves. The body is read, so that all that can still arrive is the
    news of its departure."""
    caller, left = asyncio.current_task(), False
    assert caller is not None

    async def watch() -> None:
        nonlocal left
        while (await request.receive())["type"] != "http.disconnect":
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
