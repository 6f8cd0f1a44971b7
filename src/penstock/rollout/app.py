"""The ASGI application: finds the route, asks for the key, answers errors in the route's own shape, keeps count.

At hundreds of requests per second a web framework's routing, middleware and validation would be the larger part of the
work; what is needed of them is this.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.rollout.failures import Stopped
from penstock.rollout.http import EXPECTED, Refused, Route, nowhere
from penstock.rollout.keys import Keys

NOWHERE = Route("/{rest}", [], nowhere, access="generation")


class App:
    """Serves `routes`. Errors that are nobody's fault outside are told without details, and logged by whoever calls."""

    def __init__(self, routes: Iterable[Route], keys: Keys) -> None:
        self.responses: Counter[tuple[str, int]] = Counter()
        """By path, as its route has it, and status."""
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
        request, defect = Request(scope, receive), None
        try:
            self._keys.check(route.access, request)
            if route.access == "control" and self._keys.open and "origin" in request.headers:
                raise Refused(403, "a page in a browser may not control a server that has no key")
            if route.methods and method not in route.methods:
                methods = ", ".join(method for route in routes for method in route.methods)
                raise Refused(405, f"{route.path} takes {methods}", {"Allow": methods})
            response = await route.endpoint(request)
        except EXPECTED as error:
            response = refuse(route, error)
        except asyncio.CancelledError:  # the HTTP server has waited long enough for this to end
            response = refuse(route, Stopped("the server is shutting down"))
        except Exception as error:  # a defect: its traceback goes into the log, and to the client that there was one
            response, defect = refuse(route, Refused(500, "internal error")), error
        self.responses[route.path, response.status_code] += 1
        await response(scope, receive, send)
        if defect is not None:
            raise defect

    def _find(self, path: str) -> tuple[list[Route], str]:
        """All routes of a path, at least one, and what follows theirs."""
        if routes := self._exact.get(path):
            return routes, ""
        found = ((above, route) for above, route in self._below if path.startswith(above))
        above, route = next(found, ("", NOWHERE))
        return [route], path[len(above) :]


def refuse(route: Route, error: Exception) -> Response:
    """The error in the route's shape."""
    response = route.refuse(error)
    if isinstance(error, Refused):
        response.headers.update(error.headers)
    return response
