"""Clients without a request take neither memory nor descriptors for long, and lock out no others, on real sockets."""

from __future__ import annotations

import asyncio
import resource
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from typing import Any

import pytest
import uvloop
from starlette.types import Receive, Scope, Send

from penstock.runtime import bounded_connections, http_server
from penstock.runtime.bounded_connections import MAX_HEAD_BYTES, MAX_HEADERS
from penstock.runtime.http_server import HttpServer, bind, listening

Client = tuple[asyncio.StreamReader, asyncio.StreamWriter]
Scenario = Callable[[int], Coroutine[Any, Any, None]]

HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
HALF = b"GET /health HTTP/1.1\r\nHost: x\r\n"
NEVER = b"GET /never HTTP/1.1\r\nHost: x\r\n\r\n"
UPGRADE = b"Host: x\r\nConnection: Upgrade\r\nUpgrade: h2c\r\n"
CHUNKED = b"POST /body HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n"
SOON_S = 0.1
LIMIT_S = 20


async def app(scope: Scope, receive: Receive, send: Send) -> None:
    """Answer `/health` at once, `/body` after its body, `/never` never."""
    if scope["path"] == "/never":
        while (await receive())["type"] != "http.disconnect":
            pass
        return
    size = 0
    while scope["path"] == "/body":
        message = await receive()
        size += len(message.get("body", b""))
        if not message.get("more_body"):
            break
    text = str(size).encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(text))]})
    await send({"type": "http.response.body", "body": text})


@pytest.fixture(params=[asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def served(request: pytest.FixtureRequest) -> Callable[[Scenario], None]:
    """Run a scenario with the port of a server, on each of the two event loops that serve."""

    async def run(scenario: Scenario) -> None:
        with bind("127.0.0.1", 0) as listener:
            async with listening(app, listener):  # it ends in order, however the scenario ends
                tried = asyncio.wait_for(scenario(listener.getsockname()[1]), LIMIT_S)
                [failure] = await asyncio.gather(tried, return_exceptions=True)
        if failure:
            raise failure

    return lambda scenario: request.param(run(scenario))


@asynccontextmanager
async def client(port: int, sent: bytes = b"") -> AsyncIterator[Client]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def answer(reader: asyncio.StreamReader) -> bytes:
    """Read one answer of `app`, and return its status line and its body."""
    head = await reader.readuntil(b"\r\n\r\n")
    length = next(line for line in head.split(b"\r\n") if line.lower().startswith(b"content-length"))
    return head.split(b"\r\n")[0] + b" " + await reader.readexactly(int(length.split(b":")[1]))


async def until_closed(reader: asyncio.StreamReader) -> bytes:
    received = b""
    with suppress(ConnectionError):
        while data := await reader.read(2**16):
            received += data
    return received


async def is_served(port: int) -> bool:
    async with client(port, HEALTH) as (reader, _):
        return (await reader.readline()).startswith(b"HTTP/1.1 200")


@pytest.mark.parametrize("rest", [b"a: b\r\n", b"v"], ids=["headers", "value"])
@pytest.mark.parametrize("before", [b"", HEALTH], ids=["first", "later"])
def test_a_head_has_a_maximum_size(served: Callable[[Scenario], None], before: bytes, rest: bytes) -> None:
    async def scenario(port: int) -> None:
        async with client(port, before) as (reader, writer):
            if before:
                assert (await answer(reader)).startswith(b"HTTP/1.1 200")
            start = HALF + b"X: "
            writer.write((start + rest * MAX_HEAD_BYTES)[:MAX_HEAD_BYTES])
            assert (await until_closed(reader)).startswith(b"HTTP/1.1 431")

    served(scenario)


def test_a_head_of_the_maximum_size_and_a_large_body_are_served(served: Callable[[Scenario], None]) -> None:
    async def scenario(port: int) -> None:
        length = 1_000_000
        head = b"POST /body HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\nX: " % length
        head += b"v" * (MAX_HEAD_BYTES - len(head) - 4) + b"\r\n\r\n"
        async with client(port) as (reader, writer):
            for _ in range(2):
                writer.write(head + bytes(length))
                assert await answer(reader) == b"HTTP/1.1 200 OK %d" % length

    served(scenario)


@pytest.mark.parametrize(("number", "status"), [(MAX_HEADERS, b"200"), (MAX_HEADERS + 1, b"431")])
def test_a_head_has_a_maximum_number_of_headers(served: Callable[[Scenario], None], number: int, status: bytes) -> None:
    """Short ones take forty times their bytes in memory."""

    async def scenario(port: int) -> None:
        head = b"GET /health HTTP/1.1\r\nHost: x\r\n" + b"a:\r\n" * (number - 1) + b"\r\n"
        async with client(port, head) as (reader, _):
            assert (await reader.readline()).startswith(b"HTTP/1.1 " + status)

    served(scenario)


@pytest.mark.parametrize("rest", [b"a: b\r\n", b"v"], ids=["headers", "value"])
def test_trailers_have_a_maximum_size(served: Callable[[Scenario], None], rest: bytes) -> None:
    async def scenario(port: int) -> None:
        async with client(port, CHUNKED + b"X: " + rest * 2 * MAX_HEAD_BYTES) as (reader, _):
            assert await until_closed(reader) == b""

    served(scenario)


def test_one_further_request_may_wait_for_an_answer(served: Callable[[Scenario], None]) -> None:
    async def scenario(port: int) -> None:
        async with client(port) as (reader, writer):
            for _ in range(3):
                writer.write(HEALTH + HEALTH)
                for _ in range(2):
                    assert await answer(reader) == b"HTTP/1.1 200 OK 0"

    served(scenario)


@pytest.mark.parametrize("count", [3, 3600])
def test_a_second_waiting_request_ends_the_connection(served: Callable[[Scenario], None], count: int) -> None:
    async def scenario(port: int) -> None:
        async with client(port, HEALTH * count) as (reader, _):
            assert await until_closed(reader) == b""
        assert await is_served(port)

    served(scenario)


@pytest.mark.parametrize("rest", [b"", HEALTH], ids=["head", "body"])
@pytest.mark.parametrize(
    "head",
    [
        b"GET /health HTTP/1.1\r\n" + UPGRADE + b"\r\n",
        b"POST /body HTTP/1.1\r\n" + UPGRADE + b"Content-Length: %d\r\n\r\n" % len(HEALTH),
        b"POST /body HTTP/1.1\r\n" + UPGRADE + b"Transfer-Encoding: chunked\r\n\r\n",
        b"CONNECT x:80 HTTP/1.1\r\nHost: x\r\n\r\n",
        b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
        b"nonsense\r\n\r\n",
    ],
    ids=["without body", "length", "chunked", "connect", "http2", "nonsense"],
)
def test_an_upgrade_or_an_invalid_request_is_refused_whole_and_without_a_line_of_the_log(
    served: Callable[[Scenario], None], capfd: pytest.CaptureFixture[str], head: bytes, rest: bytes
) -> None:
    async def scenario(port: int) -> None:
        for before in (b"", HEALTH):
            async with client(port, before) as (reader, writer):
                if before:
                    assert (await answer(reader)).startswith(b"HTTP/1.1 200")
                writer.write(head + rest)
                assert (await answer(reader)).startswith(b"HTTP/1.1 400")
                assert await until_closed(reader) == b""

    served(scenario)
    assert capfd.readouterr().err == ""


def test_an_invalid_request_does_not_answer_the_one_before_it(served: Callable[[Scenario], None]) -> None:
    async def scenario(port: int) -> None:
        async with client(port, NEVER + b"nonsense\r\n\r\n") as (reader, _):
            assert await until_closed(reader) == b""

    served(scenario)


@pytest.mark.parametrize("sent", [b"", HALF], ids=["silent", "half"])
@pytest.mark.parametrize("before", [b"", HEALTH], ids=["first", "later"])
def test_a_head_must_come_in_time(
    served: Callable[[Scenario], None], monkeypatch: pytest.MonkeyPatch, before: bytes, sent: bytes
) -> None:
    monkeypatch.setattr(http_server, "IDLE_S", SOON_S)

    async def scenario(port: int) -> None:
        if not before:
            monkeypatch.setattr(bounded_connections, "HEAD_S", SOON_S)
        async with client(port, before) as (reader, writer):
            if before:
                assert (await answer(reader)).startswith(b"HTTP/1.1 200")
                monkeypatch.setattr(bounded_connections, "HEAD_S", SOON_S)
            writer.write(sent)
            assert await until_closed(reader) == b""

    served(scenario)


@pytest.mark.parametrize("sent", [b"\r\n", b"a: b\r\n"], ids=["empty lines", "headers"])
def test_bytes_do_not_extend_the_time_of_a_later_head(
    served: Callable[[Scenario], None], monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    async def drip(writer: asyncio.StreamWriter) -> None:
        while True:
            writer.write(sent)
            await asyncio.sleep(SOON_S / 10)

    async def scenario(port: int) -> None:
        async with client(port, HEALTH) as (reader, writer):
            assert (await answer(reader)).startswith(b"HTTP/1.1 200")
            monkeypatch.setattr(bounded_connections, "HEAD_S", SOON_S)
            writer.write(b"" if sent == b"\r\n" else HALF)
            dripping = asyncio.create_task(drip(writer))
            assert await until_closed(reader) == b""
            dripping.cancel()

    served(scenario)


def test_a_request_may_last_longer_than_its_head(
    served: Callable[[Scenario], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def scenario(port: int) -> None:
        async with client(port, NEVER) as (reader, _):
            assert await is_served(port)
            monkeypatch.setattr(bounded_connections, "HEAD_S", SOON_S)
            async with client(port) as (silent, _):
                assert await until_closed(silent) == b""
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(reader.read(1), SOON_S)

    served(scenario)


@pytest.mark.parametrize("sent", [b"", HALF, HEALTH], ids=["silent", "half", "idle"])
def test_clients_without_a_request_lock_out_no_others(
    served: Callable[[Scenario], None], monkeypatch: pytest.MonkeyPatch, sent: bytes
) -> None:
    monkeypatch.setattr(http_server, "MAX_CONNECTIONS", 4)

    async def scenario(port: int) -> None:
        async with AsyncExitStack() as clients:
            working, _ = await clients.enter_async_context(client(port, NEVER))
            idle = []
            for _ in range(12):
                idle.append(await clients.enter_async_context(client(port, sent)))
                if sent == HEALTH:
                    assert (await answer(idle[-1][0])).startswith(b"HTTP/1.1 200")
                assert await is_served(port)
            for reader, _ in idle[:8]:  # the oldest ones were closed
                assert await until_closed(reader) == b""
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(working.read(1), SOON_S)

    served(scenario)


def test_a_connection_beyond_the_limit_is_closed_at_once(
    served: Callable[[Scenario], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(http_server, "MAX_CONNECTIONS", 3)

    async def scenario(port: int) -> None:
        async with AsyncExitStack() as clients:
            for _ in range(3):
                held = await clients.enter_async_context(client(port, HEALTH + NEVER))
                assert (await answer(held[0])).startswith(b"HTTP/1.1 200")
            for _ in range(5):
                async with client(port) as (reader, _):
                    assert await until_closed(reader) == b""
        while not await is_served_or_closed(port):
            pass

    served(scenario)


async def is_served_or_closed(port: int) -> bool:
    with suppress(ConnectionError):
        return await is_served(port)
    return False


def test_the_limit_is_below_half_of_the_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda _: (256, 1024))
    raised: list[tuple[int, int]] = []
    monkeypatch.setattr(resource, "setrlimit", lambda _, limits: raised.append(limits))
    assert HttpServer(app).server_state.most < 512  # type: ignore[attr-defined]
    assert raised == [(1024, 1024)]
