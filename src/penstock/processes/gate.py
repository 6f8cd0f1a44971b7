"""In front of an engine that lets whoever reaches it control it: where others than this machine's do, they need a key.

The engine listens on the loopback interface; what comes with the right key is passed on to it, and its answer back.
Torch-free.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from urllib.parse import quote

import aiohttp
from starlette.requests import Request
from starlette.responses import Response

from penstock.deadline import patient
from penstock.processes.listening import bind, listening, url_of
from penstock.rollout.app import App
from penstock.rollout.http import Access, Refused, Route, read_bytes, unless_gone
from penstock.rollout.keys import Keys
from penstock.rollout.session import open_session

OPEN: Mapping[str, Access] = {
    "/health": "everybody",
    "/generate": "generation",
    "/model_info": "generation",
    "/inference/v1/generate": "generation",
    "/weight_info": "generation",
}
"""What others than who controls an engine may ask, of whatever engine. The rest is control."""
PATIENCE_S = 300.0
"""With an answer, before it is worth a report: whoever asked has a deadline."""
UNREACHED = 502
MAX_BODY_BYTES = 1 << 28
"""A prompt of a long context comes once for each of its samples."""


class Gate:
    """Passes on to `engine`, a URL, with the headers of `session`."""

    def __init__(self, engine: str, session: aiohttp.ClientSession) -> None:
        self._engine, self._session = engine, session

    def routes(self) -> Sequence[Route]:
        known = [Route(path, ["GET", "POST"], self.pass_on, access) for path, access in OPEN.items()]
        return [*known, Route("/{path}", ["GET", "POST", "PUT", "DELETE"], self.pass_on)]

    async def pass_on(self, request: Request) -> Response:
        """The path that a key was asked for is the one that is passed on."""
        return await unless_gone(request, self._ask(request, await read_bytes(request, max_bytes=MAX_BODY_BYTES)))

    async def _ask(self, request: Request, body: bytes) -> Response:
        path, query = quote(request.scope["path"]), request.url.query
        headers = {"Content-Type": request.headers.get("content-type", "application/json")}
        url = f"{self._engine}{path}{'?' if query else ''}{query}"
        with patient(PATIENCE_S, waiter="the gate", resource=path, holder=self._engine):
            try:
                async with self._session.request(request.method, url, data=body, headers=headers) as answer:
                    kind = answer.headers.get("content-type")
                    return Response(await answer.read(), answer.status, media_type=kind)
            except aiohttp.ClientError as error:
                raise Refused(UNREACHED, f"the engine behind this does not answer: {error}") from None


@asynccontextmanager
async def gate(engine: str, *, host: str, port: int, keys: Keys) -> AsyncIterator[str]:
    """For the length of the body; yields where it is reached."""
    own = {"Authorization": f"Bearer {keys.generation}"} if keys.generation else {}
    with bind(host, port) as listener:
        async with open_session(own) as session, listening(App(Gate(engine, session).routes(), keys), listener):
            yield url_of(host, listener)
