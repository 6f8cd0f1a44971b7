"""Clients that send or read too slowly, or too many of them, on real sockets: their requests end, others are served."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing, suppress
from http.client import HTTPConnection

import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.rollout import app, http
from penstock.rollout.app import ApiKeys, App
from penstock.rollout.http import Route, read_body
from penstock.runtime import http_server
from penstock.runtime.http_server import bind, listening

SOON_S = 0.05


async def echo(request: Request) -> Response:
    return http.answer(await read_body(request, dict))


APP = App(
    [Route("/echo", ["POST"], echo, "public"), Route("/secret", ["POST"], echo, "generation")],
    ApiKeys(generation="secret"),
)


@pytest.fixture
async def port() -> AsyncIterator[int]:
    listener = bind("127.0.0.1", 0)
    async with listening(APP, listener):
        yield listener.getsockname()[1]


@asynccontextmanager
async def client(port: int) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


def posted(body: bytes, length: int | None = None, path: str = "/echo") -> bytes:
    head = (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: {len(body) if length is None else length}\r\n\r\n"
    )
    return head.encode() + body


async def drip(writer: asyncio.StreamWriter) -> None:
    """A byte now and then, for ever."""
    while True:
        writer.write(b"x")
        await asyncio.sleep(0.005)


async def rest(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bytes:
    """What still comes before the server hangs up, though more is sent all the time."""
    dripping, received = asyncio.create_task(drip(writer)), b""
    with suppress(ConnectionError):
        async with asyncio.timeout(60):
            while data := await reader.read(2**16):
                received += data
    dripping.cancel()
    return received


async def is_served(port: int) -> bool:
    async with client(port) as (reader, writer):
        writer.write(posted(b"{}"))
        return (await reader.readline()).startswith(b"HTTP/1.1 200")


async def test_a_body_must_come_in_time(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "BODY_S", SOON_S)
    async with client(port) as (reader, writer):
        writer.write(posted(b"{", length=10_000))
        answer = await rest(reader, writer)
    assert answer.startswith(b"HTTP/1.1 408")
    assert b'"message":"the body did not arrive within 0.05 s"' in answer


@pytest.mark.parametrize(
    ("path", "length", "status"), [("/echo", http.MAX_BODY_BYTES + 1, 413), ("/secret", 10_000_000, 401)]
)
async def test_the_body_of_a_refused_request_must_come_in_time_too(
    port: int, monkeypatch: pytest.MonkeyPatch, path: str, length: int, status: int
) -> None:
    monkeypatch.setattr(app, "REST_S", SOON_S)
    async with client(port) as (reader, writer):
        writer.write(posted(b"{", length=length, path=path))
        answer = await rest(reader, writer)
    assert answer.startswith(f"HTTP/1.1 {status}".encode())


def post_with_standard_library(port: int, length: int) -> tuple[int, str]:
    """Post a body in one piece, with a client that reads nothing before it has sent all; then a second request."""
    connection = HTTPConnection("127.0.0.1", port, timeout=60)
    with closing(connection):
        connection.request("POST", "/echo", body=bytes(length))
        status = connection.getresponse().status
        connection.request("POST", "/echo", body=b"{}")
        return status, connection.getresponse().reason


async def test_a_client_that_sends_too_much_reads_that_it_is_refused(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(app, "REST_S", 60.0)
    answers = await asyncio.to_thread(post_with_standard_library, port, 4 * http.MAX_BODY_BYTES)
    assert answers == (413, "OK")


async def test_an_answer_must_be_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel ends the connection: otherwise what sends the answer would wait for its client."""
    monkeypatch.setattr(http_server, "UNREAD_S", 0.2)
    ended = asyncio.Event()

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        for _ in range(256):
            await send({"type": "http.response.body", "body": bytes(2**16), "more_body": True})
        ended.set()

    with bind("127.0.0.1", 0) as listener:
        async with listening(app, listener), client(listener.getsockname()[1]) as (_, writer):
            writer.transport.pause_reading()  # type: ignore[attr-defined]
            writer.write(b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n")
            async with asyncio.timeout(60):
                await ended.wait()


async def test_who_is_slow_holds_up_nobody(port: int) -> None:
    slow = [client(port) for _ in range(200)]
    held = [await each.__aenter__() for each in slow]
    try:
        for number, (_, writer) in enumerate(held):
            writer.write(b"GET / HTT" if number % 2 else posted(b"{", length=100))
        assert all([await is_served(port) for _ in range(20)])
    finally:
        for each in slow:
            await each.__aexit__(None, None, None)
