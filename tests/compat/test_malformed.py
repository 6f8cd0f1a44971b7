"""Thousands of requests that no client should send, at every path of a server on a socket."""

from __future__ import annotations

import asyncio
import itertools
import json
from typing import Any

import aiohttp
import pytest
from malformed_requests import VALID, Malformed, malformed
from tiny_policy import MAX_CONTEXT, VOCAB_SIZE

pytestmark = pytest.mark.integration

CONNECTIONS = 16


async def greedy(session: aiohttp.ClientSession) -> Any:
    body = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 20, "temperature": 0, "ignore_eos": True}}
    async with session.post("/generate", json=body) as response:
        return (await response.json())["output_ids"]


def check(given: Malformed, status: int, headers: Any, body: bytes) -> None:
    """Refused, and in the shape of its path."""
    assert 400 <= status < 500, (given.why, given[:3], given.body[:200], status, body[:300])
    if given.method == "TRACE" or (given.path == "/flush_cache" and headers["Content-Type"].startswith("text/plain")):
        return
    reply = json.loads(body)
    if "/messages" in given.path and given.path in VALID:
        assert reply.keys() == {"type", "error"} and reply["error"].keys() == {"message", "type", "code"}, (
            given,
            reply,
        )
        assert reply["error"]["type"].endswith("_error") or reply["error"]["type"] == "request_too_large"
        assert headers["x-should-retry"] == "false"
    elif given.path.startswith("/v1/"):
        assert reply["error"].keys() == {"message", "type", "param", "code"}, (given, reply)
        assert reply["error"]["type"] == "invalid_request_error"
        assert headers["x-should-retry"] == "false"
    elif "success" in reply:
        assert not reply["success"] and reply["message"], (given, reply)
    else:
        assert isinstance(reply["error"]["message"], str), (given, reply)


@pytest.mark.parametrize("count", [1_000, pytest.param(10_000, marks=pytest.mark.long)])
async def test_every_malformed_request_is_refused_and_the_server_goes_on_as_before(url: str, count: int) -> None:
    timeout = aiohttp.ClientTimeout(total=120)
    async with aiohttp.ClientSession(url, timeout=timeout) as session:
        before = await greedy(session)
        async with session.get("/openapi.json") as response:
            schema = await response.json()
        with_bodies = {
            path for path, here in schema["paths"].items() if any("requestBody" in it for it in here.values())
        }
        assert with_bodies == VALID.keys()
        given = malformed(schema, count, 0, vocab_size=VOCAB_SIZE, max_context=MAX_CONTEXT)
        wrong: list[str] = []

        async def send() -> None:
            for one in given:
                try:
                    async with session.request(one.method, one.path, data=one.body, headers=one.headers) as response:
                        check(one, response.status, response.headers, await response.read())
                except (AssertionError, aiohttp.ClientError, TimeoutError, ValueError) as error:
                    wrong.append(f"{one.why} {one.method} {one.path} {one.body[:200]!r} {one.headers}: {error!r:.400}")

        await asyncio.gather(*(send() for _ in range(CONNECTIONS)))
        assert not wrong, "\n".join([f"{len(wrong)} of {count}", *wrong[:20]])
        assert await greedy(session) == before
        async with session.get("/ready") as response:
            assert response.status == 200
        async with session.get("/metrics") as response:
            assert 'status="5' not in await response.text()


RAW = [
    b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 99999999999\r\n\r\n",
    b"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 99999999999\r\n\r\n",
    b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: -1\r\n\r\n",
    b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 5\r\nContent-Length: 6\r\n\r\nhello",
    b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
    b"GET /\xff\xfe HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    b"NONSENSE / HTTP/1.1\r\n\r\n",
    b"OPTIONS * HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    b"GET nowhere HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    b"GET http://elsewhere/generate HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    b"CONNECT x:1 HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    b"GET / HTTP/9.9\r\n\r\n",
    b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
    b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\nna me: \x00\r\n\r\n",
    b"GET /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nConnection: Upgrade\r\nUpgrade: websocket\r\n"
    b"Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n",
    b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n\r\n{",
    b"POST /generate HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Length: 100\r\n",
    b"",
]


async def test_what_is_hardly_http_is_refused_or_hung_up_on(url: str) -> None:
    host, port = url.removeprefix("http://").split(":")

    async def send(raw: bytes) -> bytes:
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(raw)
        writer.write_eof()
        try:
            return await asyncio.wait_for(reader.read(), 20)
        except ConnectionResetError:
            return b""
        finally:
            writer.close()

    async with aiohttp.ClientSession(url) as session:
        before = await greedy(session)
        answers = await asyncio.gather(*(send(raw) for raw in itertools.chain(*[RAW] * 5)))
        assert all(not answer or answer.startswith(b"HTTP/1.1 4") for answer in answers), answers
        assert [answer[9:12] for answer in answers[:2]] == [b"413", b"413"]
        assert await greedy(session) == before
