"""Clients that send or read too slowly, or too many of them, on real sockets: they lose, the others are served."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

import pytest
from starlette.requests import Request
from starlette.responses import Response

from penstock.processes import connection
from penstock.processes.connection import Connection
from penstock.processes.listening import bind, listening
from penstock.rollout import http
from penstock.rollout.app import App
from penstock.rollout.http import Route, read_body
from penstock.rollout.keys import Keys

SOON_S = 0.05
LONG_ANSWER = b"x" * 2**24


async def echo(request: Request) -> Response:
    return http.answer(await read_body(request, dict))


async def tell(request: Request) -> Response:
    return Response(LONG_ANSWER)


APP = App(
    [Route("/echo", ["POST"], echo, "everybody"), Route("/long", ["GET"], tell, "everybody")],
    Keys(generation="secret"),
)


@pytest.fixture(autouse=True)
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "LAST_CHANCE_S", SOON_S)


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
        async with asyncio.timeout(10):
            while data := await reader.read(2**16):
                received += data
    dripping.cancel()
    return received


async def is_served(port: int) -> bool:
    async with client(port) as (reader, writer):
        writer.write(posted(b"{}"))
        return (await reader.readline()).startswith(b"HTTP/1.1 200")


async def test_headers_must_come_in_time(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "HEADERS_S", SOON_S)
    async with client(port) as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nX-Slow: ")
        assert await rest(reader, writer) == b""


async def test_so_must_those_of_the_next_request(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    async with client(port) as (reader, writer):
        writer.write(posted(b"{}"))
        answer = await reader.readuntil(b"{}")
        assert answer.startswith(b"HTTP/1.1 200")
        monkeypatch.setattr(connection, "HEADERS_S", SOON_S)
        writer.write(b"GET / HTTP/1.1\r\nX-Slow: ")
        assert await rest(reader, writer) == b""


async def test_headers_have_a_bound(port: int) -> None:
    async with client(port) as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\n" + b"X-Long: x\r\n" * connection.MAX_HEADER_BYTES)
        assert await rest(reader, writer) == b""


async def test_a_body_must_come_in_time(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(http, "BODY_S", SOON_S)
    monkeypatch.setattr(connection, "REST_S", SOON_S)
    async with client(port) as (reader, writer):
        writer.write(posted(b"{", length=10_000))
        answer = await rest(reader, writer)
    assert answer.startswith(b"HTTP/1.1 408")
    assert b'"message":"the body was not there within 0.05 s"' in answer


async def test_a_refused_body_must_end_too(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "REST_S", SOON_S)
    async with client(port) as (reader, writer):
        writer.write(posted(b"{", length=10_000, path="/elsewhere"))
        answer = await rest(reader, writer)
    assert answer.startswith(b"HTTP/1.1 401")


async def test_an_answer_must_be_fetched(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "FETCH_S", 0.0)
    async with client(port) as (reader, writer):
        writer.write(b"GET /long HTTP/1.1\r\nHost: localhost\r\n\r\n")
        answer = await rest(reader, writer)
    assert 0 < len(answer) < len(LONG_ANSWER)


@pytest.mark.parametrize("kept_alive", [False, True])
async def test_what_came_while_the_server_was_stopped_is_answered(
    port: int, monkeypatch: pytest.MonkeyPatch, kept_alive: bool
) -> None:
    """A process that is woken runs its timers before it reads."""
    made: list[Connection] = []
    monkeypatch.setattr(connection, "LAST_CHANCE_S", 10.0)
    begin = Connection.connection_made

    def note(self: Connection, transport: asyncio.Transport) -> None:
        made.append(self)
        begin(self, transport)

    monkeypatch.setattr(Connection, "connection_made", note)
    async with client(port) as (reader, writer):
        if kept_alive:
            writer.write(posted(b"{}"))
            await reader.readuntil(b"{}")
        while not made:  # noqa: ASYNC110
            await asyncio.sleep(0)
        timer = made[0].timeout_keep_alive_task if kept_alive else made[0].sending
        assert timer is not None
        writer.write(posted(b"{}"))
        timer._run()
        assert (await reader.readuntil(b"{}")).startswith(b"HTTP/1.1 200")


async def test_too_many_take_the_place_of_whoever_is_slowest(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connection, "MAX_CONNECTIONS", 3)
    async with client(port) as (first, _), client(port) as (second, asking), client(port):
        assert await is_served(port)
        async with asyncio.timeout(10):
            assert await first.read() == b""
        asking.write(posted(b"{}"))
        assert (await second.readline()).startswith(b"HTTP/1.1 200")


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
