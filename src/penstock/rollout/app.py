"""The ASGI application: finds the route, checks the API key, formats errors as the route does, counts responses. Its
OpenAPI 3.1 description is made from the routes and the types of their bodies.

At hundreds of requests per second, a web framework's routing, middleware and validation would be most of the work. This
module implements only the parts that the server needs.
"""

from __future__ import annotations

import asyncio
import hmac
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

import penstock
from penstock.config.run_settings import RolloutConfig
from penstock.rollout.generator import Stopped
from penstock.rollout.http import EXPECTED, Access, Refused, Route, not_found

REFERENCE = "#/components/schemas/{name}"
STREAMS: dict[str, Any] = {"text/event-stream": {}}
REST_S = 5.0
"""Time limit for the rest of a refused body to arrive."""
NOT_FOUND = Route("/{rest}", [], not_found, access="generation")


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiKeys:
    """The keys that `Authorization: Bearer` must carry, with the same rules as SGLang.

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
        given = bearer(request.headers.get("authorization", "")).encode("latin-1")
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


class IncomingBody:
    """The body of one request."""

    def __init__(self, scope: Scope, receive: Receive) -> None:
        self._receive = receive
        headers = Headers(scope=scope)
        self.has_ended = headers.get("content-length", "0") == "0" and "transfer-encoding" not in headers

    async def receive(self) -> Message:
        """Return the next message, as ASGI defines it."""
        message = await self._receive()
        self.has_ended = not message.get("more_body", False)
        return message

    async def discard_rest(self) -> None:
        """Read the rest of the body, for at most `REST_S`. A connection that is closed with unread data may be reset
        before its client has read the answer."""
        with suppress(TimeoutError):
            async with asyncio.timeout(REST_S):
                while not self.has_ended:
                    await self.receive()


def bearer(authorization: str) -> str:
    """Return the key in an `Authorization` header, or "" if it carries none. The scheme is case-insensitive."""
    scheme, _, key = authorization.partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


class App:
    """Serves `routes`. For an internal defect, the client gets no details, and the HTTP server logs the traceback."""

    def __init__(self, routes: Iterable[Route], keys: ApiKeys) -> None:
        self.responses: Counter[tuple[str, int]] = Counter()
        """Number of responses by route path and status."""
        self._keys = keys
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
        routes, rest = self._find(scope["path"])
        method = "GET" if scope["method"] == "HEAD" else scope["method"]
        route = next((route for route in routes if method in route.methods), routes[0])
        scope["path_params"] = {"rest": rest}
        body = IncomingBody(scope, receive)
        request, defect = Request(scope, body.receive), None
        try:
            self._keys.check(route.access, request)
            if route.access == "control" and "origin" in request.headers and not self._keys.accepted("control"):
                raise Refused(403, "this server has no API key, so web pages may not control it")
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
            await response(scope, receive, send)
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
