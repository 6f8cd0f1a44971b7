"""A proxy that requires an API key, in front of an engine that checks none on its control routes.

The engine listens on the loopback interface only. The proxy listens on the rollout server's address. It forwards each
request that has the right key to the engine, and returns the engine's answer. Torch-free.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from urllib.parse import quote

import aiohttp
from starlette.requests import Request
from starlette.responses import Response

from penstock.deadline import warn_if_stalled
from penstock.rollout.app import ApiKeys, App
from penstock.rollout.http import Access, Refused, Route, read_bytes, unless_disconnected
from penstock.rollout.session import open_session
from penstock.runtime.http_server import bind, listening, url_of

OPEN: Mapping[str, Access] = {
    "/health": "public",
    "/generate": "generation",
    "/model_info": "generation",
    "/inference/v1/generate": "generation",
    "/weight_info": "generation",
}
"""Routes open to clients without the admin key, for all engines. All other routes are control."""
STALL_WARNING_S = 300.0
"""Seconds without an answer before a stall is reported. The client has its own deadline."""
UNREACHED = 502
MAX_BODY_BYTES = 1 << 28
"""The limit is large because a group's request repeats a long prompt once for each sample."""


@asynccontextmanager
async def auth_proxy(engine: str, *, host: str, port: int, keys: ApiKeys) -> AsyncIterator[str]:
    """Run the proxy in front of `engine`, a URL, for the length of the body. Yield the URL of the proxy."""
    own = {"Authorization": f"Bearer {keys.generation}"} if keys.generation else {}

    async def forward(request: Request) -> Response:
        body = await read_bytes(request, max_bytes=MAX_BODY_BYTES)
        return await unless_disconnected(request, _answer(session, engine, request, body))

    routes = [Route(path, ["GET", "POST"], forward, access) for path, access in OPEN.items()]
    routes.append(Route("/{path}", ["GET", "POST", "PUT", "DELETE"], forward))
    with bind(host, port) as listener:
        async with open_session(own) as session, listening(App(routes, keys), listener):
            yield url_of(host, listener)


async def _answer(session: aiohttp.ClientSession, engine: str, request: Request, body: bytes) -> Response:
    """Return the engine's answer. The forwarded path is the same one for which the key was checked."""
    path, query = quote(request.scope["path"]), request.url.query
    headers = {"Content-Type": request.headers.get("content-type", "application/json")}
    url = f"{engine}{path}{'?' if query else ''}{query}"
    with warn_if_stalled(STALL_WARNING_S, waiter="the auth proxy", resource=path, holder=engine):
        try:
            async with session.request(request.method, url, data=body, headers=headers) as answer:
                kind = answer.headers.get("content-type")
                return Response(await answer.read(), answer.status, media_type=kind)
        except aiohttp.ClientError as error:
            raise Refused(UNREACHED, f"the engine behind this proxy does not answer: {error}") from None
