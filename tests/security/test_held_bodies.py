"""The bodies that a server holds at once have a bound, however many requests have one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest
from starlette.requests import Request
from starlette.responses import Response
from tiny_policy import until

from penstock.processes.foreign_server import auth_proxy
from penstock.rollout import app, http
from penstock.rollout.app import ApiKeys, App, IncomingBody
from penstock.rollout.claim import Claim
from penstock.rollout.http import Route
from penstock.runtime.http_server import bind, listening, url_of

NO_KEYS = ApiKeys()
MOST, LARGE, SMALL = 300_000, b"x" * 200_000, b"x" * 10_000


class Server:
    """Answers each request with the size of its body, large ones when told."""

    def __init__(self) -> None:
        self.may_answer = asyncio.Event()
        self.num_held = 0

    async def size(self, request: Request) -> Response:
        body = await http.read_bytes(request)
        if len(body) > len(SMALL):
            self.num_held += 1
            await self.may_answer.wait()
        return http.answer(len(body))

    def app(self, keys: ApiKeys) -> App:
        return App([Route("/size", ["POST"], self.size, "generation")], keys)


@pytest.fixture(autouse=True)
def bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(app, "MAX_HELD_BYTES", MOST)
    assert IncomingBody.num_held_bytes == 0


@asynccontextmanager
async def serving(server: Server, keys: ApiKeys = NO_KEYS) -> AsyncIterator[str]:
    listener = bind("127.0.0.1", 0)
    async with listening(server.app(keys), listener):
        yield url_of("127.0.0.1", listener)


async def post(session: aiohttp.ClientSession, body: bytes) -> tuple[int, str, str | None]:
    async with session.post("/size", data=body) as response:
        return response.status, await response.text(), response.headers.get("Retry-After")


async def test_a_body_beyond_the_bound_is_refused_until_another_request_has_ended() -> None:
    server = Server()
    async with serving(server) as url, aiohttp.ClientSession(url) as session:
        first = asyncio.create_task(post(session, LARGE))
        await until(lambda: server.num_held)
        for _ in range(3):
            status, text, retry_after = await post(session, LARGE)
            assert (status, retry_after) == (503, "1") and "takes no more" in text
        assert (await post(session, SMALL))[:2] == (200, "10000"), "short requests, such as control, are served"
        server.may_answer.set()
        assert (await first)[0] == 200 and (await post(session, LARGE))[0] == 200
        assert IncomingBody.num_held_bytes == 0


async def test_an_unfinished_body_counts_until_its_client_leaves() -> None:
    server = Server()
    server.may_answer.set()
    async with serving(server) as url, aiohttp.ClientSession(url) as session:
        host, port = url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        writer.write(f"POST /size HTTP/1.1\r\nHost: {host}\r\nContent-Length: 900000\r\n\r\n".encode() + LARGE)
        await until(lambda: IncomingBody.num_held_bytes == len(LARGE))
        assert (await post(session, LARGE))[0] == 503
        writer.transport.abort()
        await until(lambda: IncomingBody.num_held_bytes == 0)
        assert (await post(session, LARGE))[0] == 200


async def test_bodies_without_the_key_are_not_held() -> None:
    async with serving(Server(), ApiKeys(generation="secret")) as url, aiohttp.ClientSession(url) as session:
        assert (await post(session, LARGE * 2))[0] == 401


async def test_the_proxy_in_front_of_an_engine_has_the_same_bound() -> None:
    listener = bind("127.0.0.1", 0)  # an engine that never answers
    port: int = listener.getsockname()[1]
    headers = {"Authorization": "Bearer play"}
    proxy = auth_proxy(port, "own", "/health", host="127.0.0.1", port=0, keys=ApiKeys(generation="play"), claim=Claim())
    async with proxy as url, aiohttp.ClientSession(url, headers=headers) as session:
        first = asyncio.create_task(post(session, LARGE))
        await until(lambda: IncomingBody.num_held_bytes == len(LARGE))
        assert (await post(session, LARGE))[0] == 503
        listener.close()
        assert (await first)[0] == 502


async def test_a_body_that_needs_no_key_takes_no_room() -> None:
    async def health(request: Request) -> Response:
        async for _ in request.stream():
            pass
        return http.answer(IncomingBody.num_held_bytes)

    listener = bind("127.0.0.1", 0)
    server = App([Route("/health", ["GET"], health, "public")], ApiKeys(generation="play"))
    url = url_of("127.0.0.1", listener)
    async with listening(server, listener), aiohttp.request("GET", f"{url}/health", data=LARGE) as response:
        assert (response.status, await response.json()) == (200, 0)
