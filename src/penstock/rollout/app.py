"""The ASGI application: finds the route, checks origin and API key, formats errors as the route does, counts responses.
Its OpenAPI 3.1 description is made from the routes and the types of their bodies.

A server that generates without an API key listens on loopback, where each program of the machine reaches it, also a
browser. So it answers only requests to a loopback address (a page may point a name of its own at 127.0.0.1), and none
of a page of another origin.

At hundreds of requests per second, a web framework's routing, middleware and validation would be most of the work. This
module implements only the parts that the server needs.
"""

from __future__ import annotations

import asyncio
import functools
import hmac
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import closing, suppress
from dataclasses import dataclass, field
from typing import Any, ClassVar

import msgspec
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

import penstock
from penstock.config.loopback import is_loopback
from penstock.config.run_settings import RolloutConfig
from penstock.rollout.claim import CLAIM, Claim
from penstock.rollout.generator import Overloaded, Stopped
from penstock.rollout.http import EXPECTED, Access, Refused, Route, not_found

REFERENCE = "#/components/schemas/{name}"
STREAMS: dict[str, Any] = {"text/event-stream": {}}
TAKE_CLAIM = "/claim"
"""Path of the route that takes the claim, and so controls the server without it."""
OWN_SITES = (b"same-origin", b"none")
"""Values of `Sec-Fetch-Site` of a page of this server, and of an address that a user typed."""
MAX_HELD_BYTES = 2**30
"""Maximum number of bytes in the bodies that a process holds, each until its request is answered."""
SMALL_BODY_BYTES = 2**16
"""Size up to which a body does not count for `MAX_HELD_BYTES`, so that a full server can still be controlled. The
number of connections bounds such bodies."""
REST_S = 5.0
"""Time limit for the rest of a refused body to arrive."""
NOT_FOUND = Route("/{rest}", [], not_found, access="generation")


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKeys:
    """The keys that `Authorization: Bearer` or `X-Api-Key` must carry, with the same rules as SGLang.

    Without an `admin` key, the `generation` key also allows control. With an `admin` key, control requires it, and it
    allows every route. A route without a key is open."""

    generation: str | None = field(default=None, repr=False)
    admin: str | None = field(default=None, repr=False)

    @classmethod
    def of(cls, rollout: RolloutConfig) -> ApiKeys:
        """Return the keys of a run's servers."""
        return cls(generation=rollout.api_key or None, admin=rollout.admin_api_key or None)

    def check(self, access: Access, request: Request) -> None:
        """Check the key of a request. Raises Refused with status 401 if the key is missing or wrong."""
        accepted = self.accepted(access)
        if not accepted:
            return
        given = key_of(request.headers).encode("latin-1")
        if not any(hmac.compare_digest(given, key.encode()) for key in accepted):
            which = "admin API key" if access == "control" and self.admin is not None else "API key"
            raise Refused(401, f"the {which} is missing or wrong", {"WWW-Authenticate": "Bearer"})

    def accepted(self, access: Access) -> list[str]:
        """Return the keys that allow this access. The list is empty if no key is needed."""
        if access == "public" or (access == "generation" and self.generation is None):
            return []
        control = self.admin if self.admin is not None else self.generation
        keys = {control} if access == "control" else {self.generation, control}
        return [key for key in keys if key is not None]


def refuse_foreign(scope: Scope) -> None:
    """Raise Refused with status 403 unless the request came to a loopback address, and not from a page of another
    origin."""
    given: dict[bytes, list[bytes]] = {b"host": [], b"origin": [], b"sec-fetch-site": []}
    for name, value in scope["headers"]:
        if name in given:
            given[name].append(value)
    hosts, keyless = given[b"host"], "this server has no API key, so it"
    if len(hosts) != 1 or not names_loopback(hosts[0]):
        shown = ", ".join(host.decode("latin-1") for host in hosts) or "none"
        remedy = "ask for 127.0.0.1 or localhost, or start it with PENSTOCK_API_KEY"
        raise Refused(403, f"{keyless} answers only requests to a loopback address, and the Host is {shown}: {remedy}")
    foreign = [origin for origin in given[b"origin"] if origin.lower() != b"http://" + hosts[0].lower()]
    if foreign or any(site.lower() not in OWN_SITES for site in given[b"sec-fetch-site"]):
        raise Refused(403, f"{keyless} answers no web pages of another origin: start it with PENSTOCK_API_KEY")


@functools.lru_cache(maxsize=256)
def names_loopback(host: bytes) -> bool:
    """Return whether a Host header names this machine: localhost or a loopback address, with any port."""
    name, colon, port = host.decode("latin-1").lower().rpartition(":")
    if not colon or port.endswith("]"):
        name, port = host.decode("latin-1").lower(), ""
    if "%" in name or not all(digit in "0123456789" for digit in port):  # a Host header has no zone
        return False
    return is_loopback(name[1:-1] if name.startswith("[") and name.endswith("]") else name)


def check_claim(claim: Claim, request: Request) -> None:
    """Check that a request for control carries the server's claim. Raises Conflict."""
    claim.check(request.headers.get(CLAIM, ""), now=asyncio.get_running_loop().time())


class IncomingBody:
    """The body of one request. Raises Overloaded while it is read if the process holds too many bytes of bodies."""

    num_held_bytes: ClassVar[int] = 0
    """Number of bytes in all bodies that this process holds."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self._receive = receive
        self._size = self._held = 0
        headers = Headers(scope=scope)
        self.has_ended = headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers

    async def receive(self) -> Message:
        """Return the next message, as ASGI defines it."""
        message = await self.receive_uncounted()
        self._size += len(message.get("body", b""))
        if self._size > SMALL_BODY_BYTES:
            self._hold(self._size - self._held)
        return message

    async def receive_uncounted(self) -> Message:
        """Return the next message of a body of which nothing is kept."""
        message = await self._receive()
        self.has_ended = not message.get("more_body", False)
        return message

    def _hold(self, num_bytes: int) -> None:
        if IncomingBody.num_held_bytes + num_bytes > MAX_HELD_BYTES:
            raise Overloaded(f"this server holds request bodies of {MAX_HELD_BYTES} bytes and takes no more: try later")
        IncomingBody.num_held_bytes += num_bytes
        self._held += num_bytes

    def close(self) -> None:
        """Count the body no longer."""
        IncomingBody.num_held_bytes -= self._held
        self._held = 0

    async def discard_rest(self) -> None:
        """Read the rest of the body, for at most `REST_S`. A connection that is closed with unread data may be reset
        before its client has read the answer."""
        with suppress(TimeoutError):
            async with asyncio.timeout(REST_S):
                while not self.has_ended:
                    await self.receive_uncounted()


def key_of(headers: Mapping[str, str]) -> str:
    """Return the API key of a request: in its `Authorization` header, whose scheme is case-insensitive, or in
    `X-Api-Key`, as Anthropic's clients send it. "" if it carries none."""
    scheme, _, key = headers.get("authorization", "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else headers.get("x-api-key", "").strip()


class App:
    """Serves `routes`. For an internal defect, the client gets no details, and the HTTP server logs the traceback."""

    def __init__(self, routes: Iterable[Route], keys: ApiKeys, claim: Claim | None = None) -> None:
        """`claim`: the claim that requests for control must carry; None for a server that cannot be claimed."""
        self.responses: Counter[tuple[str, int]] = Counter()
        """Number of responses by route path and status."""
        self._keys, self._claim = keys, claim
        self._exact: dict[str, list[Route]] = {}
        self._below: list[tuple[str, Route]] = []
        for route in routes:
            above, brace, _ = route.path.partition("{")
            if brace:
                self._below.append((above, route))
            else:
                self._exact.setdefault(route.path, []).append(route)
        self._below.sort(key=lambda entry: -len(entry[0]))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await send({"type": "websocket.close"})
            return
        with closing(IncomingBody(scope, receive)) as body:
            await self._answer(scope, body, send)

    async def _answer(self, scope: Scope, body: IncomingBody, send: Send) -> None:
        routes, rest = self._find(scope["path"])
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        route = next((route for route in routes if method in route.methods), routes[0])
        scope["path_params"] = {"rest": rest}
        # A route that needs no key keeps no body. Otherwise clients without the key could use up the room.
        request = Request(scope, body.receive_uncounted if route.access == "public" else body.receive)
        defect = None
        try:
            if self._keys.generation is None:
                refuse_foreign(scope)
            self._keys.check(route.access, request)
            if self._claim is not None and route.access == "control" and route.path != TAKE_CLAIM:
                check_claim(self._claim, request)
            if route.methods and method not in route.methods:
                methods = ", ".join(method for route in routes for method in route.methods)
                raise Refused(405, f"{route.path} accepts only {methods}", {"Allow": methods})
            response = await route.endpoint(request)
        except EXPECTED as error:
            response = refuse(route, error)
        except asyncio.CancelledError:  # the HTTP server stops and no longer waits for this request
            response = refuse(route, Stopped("the server is shutting down"))
        except Exception as error:  # a defect: the log gets the traceback, the client a plain 500
            response, defect = refuse(route, Refused(500, "internal error")), error
        self.responses[route.path, response.status_code] += 1
        if 400 <= response.status_code < 500 and not body.has_ended:
            await _refuse_early(response, body, send)
        else:
            await response(scope, body.receive_uncounted, send)
        if defect is not None:
            raise defect

    def _find(self, path: str) -> tuple[list[Route], str]:
        """Return all routes of a path (at least one) and the part of the path that `{name}` stands for."""
        if routes := self._exact.get(path):
            return routes, ""
        found = ((above, route) for above, route in self._below if path.startswith(above))
        above, route = next(found, ("", NOT_FOUND))
        return [route], path[len(above) :]


async def _refuse_early(response: Response, body: IncomingBody, send: Send) -> None:
    """Send a whole response before the request's body has ended. Then read the rest, and close the connection."""
    response.headers["Connection"] = "close"
    await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": response.body, "more_body": True})
    await body.discard_rest()
    await send({"type": "http.response.body"})


def refuse(route: Route, error: Exception) -> Response:
    """Return the error as a response in the route's format."""
    response = route.refuse(error)
    if isinstance(error, Refused):
        response.headers.update(error.headers)
    if isinstance(error, Overloaded):
        response.headers["Retry-After"] = "1"
    return response


def openapi(routes: Iterable[Route], keys: ApiKeys) -> dict[str, Any]:
    """Return the OpenAPI description. It omits routes without methods and marks routes that need one of `keys`."""
    shown = [route for route in routes if route.methods]
    named = [(route.body, route.reply, route.error, *route.query.values()) for route in shown]
    kinds = [kind for kinds in named for kind in kinds if kind is not None]
    found, components = msgspec.json.schema_components(kinds, ref_template=REFERENCE)
    schemas = dict(zip(map(repr, kinds), found, strict=True))
    paths: dict[str, Any] = {}
    for route in shown:
        for method in route.methods:
            operation = _operation(route, method, schemas)
            operation["security"] = [{"key": []}] if keys.accepted(route.access) else []
            paths.setdefault(route.path, {})[method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "Penstock rollout server", "version": penstock.__version__},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}},
    }


def _operation(route: Route, method: str, schemas: dict[str, Any]) -> dict[str, Any]:
    summary = (route.endpoint.__doc__ or "").split("\n\n")[0]
    content = {"text/plain": {}} if route.reply is None else _json(schemas[repr(route.reply)])
    refused = _json(schemas[repr(route.error)]) | (content if route.reply is None else {})
    operation: dict[str, Any] = {
        "operationId": f"{method.lower()}{route.path}",
        "summary": " ".join(summary.split()),
        "responses": {
            "200": {"description": "Done.", "content": content | (STREAMS if route.streams else {})},
            "default": {"description": "Refused or failed.", "content": refused},
        },
    }
    places = [(name, "query", schemas[repr(kind)]) for name, kind in route.query.items()]
    if "{" in route.path:
        places.append((route.path.partition("{")[2].rstrip("}"), "path", {"type": "string"}))
    operation["parameters"] = [
        {"name": name, "in": place, "required": place == "path", "schema": schema} for name, place, schema in places
    ]
    if route.body is not None:
        operation["requestBody"] = {"required": True, "content": _json(schemas[repr(route.body)])}
    return operation


def _json(schema: dict[str, Any]) -> dict[str, Any]:
    return {"application/json": {"schema": schema}}
