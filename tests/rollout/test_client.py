"""The client of one server, and failures named by url."""

from __future__ import annotations

import asyncio
import gzip
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from tiny_policy import make_handle, print_of, serve

from penstock.deadline import Stalled
from penstock.rollout.app import ApiKeys
from penstock.rollout.client import RolloutClient
from penstock.rollout.runner import EngineRunner
from penstock.rollout.session import LARGE_BYTES, HttpSession, RolloutError
from penstock.types import EpisodeId, Sampling, SegmentGrant


@asynccontextmanager
async def connected(url: str, **settings: Any) -> AsyncIterator[RolloutClient]:
    session = HttpSession(**settings)
    yield RolloutClient(url, session)
    await session.close()


GRANT = SegmentGrant(episode=EpisodeId("tag", 0, 0, 0), max_tokens=4)


async def test_another_fingerprint_under_a_served_version_is_noticed(url: str) -> None:
    async with connected(url) as client:
        await client.begin_weights(make_handle(1, path="1"))
        await client.commit_weights(make_handle(1, path="1"))
        with pytest.raises(RolloutError, match="not newer than the served 1"):
            await client.begin_weights(make_handle(1, path="2"))
        with pytest.raises(RolloutError, match=f"{print_of('1')}, not 1 with {print_of('2')}"):
            await client.commit_weights(make_handle(1, path="2"))


async def test_a_server_that_is_gone_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    async with connected(f"http://127.0.0.1:{port}") as client:
        with pytest.raises(RolloutError, match=f"http://127.0.0.1:{port}: POST /generate got no answer"):
            await client.generate([5], [GRANT], Sampling(), [1])


async def test_a_server_that_does_not_answer_is_a_stall() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        async with connected(url, timeout_s=0.05) as client:
            with pytest.raises(Stalled, match=f"rollout client waited 0.05 s for POST /weights/abort, held by {url}"):
                await client.abort_weights()


def reply(output_ids: list[int], logprobs: list[float] | None, *, version: str = "0") -> dict[str, Any]:
    count = len(output_ids)
    meta = {
        "id": "a",
        "finish_reason": {"type": "length", "length": count},
        "prompt_tokens": 1,
        "completion_tokens": count,
        "weight_version": version,
        "weight_versions": [{"version": version, "start": 0, "end": count}],
        "e2e_latency": 0.0,
    }
    if logprobs is not None:
        meta["output_token_logprobs"] = [
            [logprob, token, None] for logprob, token in zip(logprobs, output_ids, strict=True)
        ]
    return {"text": "", "output_ids": output_ids, "meta_info": meta}


def labelled(output_ids: list[int], *spans: tuple[int, int]) -> dict[str, Any]:
    found = reply(output_ids, [-1.0] * len(output_ids))
    found["meta_info"]["weight_versions"] = [{"version": "0", "start": start, "end": end} for start, end in spans]
    return found


def unfinished(output_ids: list[int]) -> dict[str, Any]:
    found = reply(output_ids, [-1.0] * len(output_ids))
    found["meta_info"]["finish_reason"] = None
    return found


def scored(output_ids: list[int], scored_ids: list[int], logprobs: list[float | None]) -> dict[str, Any]:
    found = reply(output_ids, [-1.0] * len(output_ids))
    triples = [[logprob, token, None] for logprob, token in zip(logprobs, scored_ids, strict=True)]
    found["meta_info"]["output_token_logprobs"] = triples
    return found


@asynccontextmanager
async def answering(body: bytes | dict[str, Any], *, status: int = 200) -> AsyncIterator[RolloutClient]:
    """The client of a server that answers everything so."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()

    async def answer(_: web.Request) -> web.Response:
        return web.Response(body=data, status=status, content_type="application/json")

    app = web.Application()
    app.router.add_route("*", "/{path:.*}", answer)
    async with TestServer(app) as server, connected(str(server.make_url("")).rstrip("/")) as client:
        yield client


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (reply([5, 6], None), 200, "use an engine that honours return_logprob"),
        (reply([5] * 5, [-1.0] * 5), 200, "returned 5 tokens, more than the 4 that it was asked for"),
        (reply([5, 6], [-1.0, 0.5]), 200, "returned numbers above zero, below -10000, or none, as log-probabilities"),
        (reply([5, 6], [-1.0, -1e300]), 200, "below -10000"),
        (reply([5, 6], [-1.0, -1.0], version=str(2**31)), 503, "label '2147483648', which no trainer published"),
        (reply([5, 6], [-1.0, -1.0], version="9" * 5000), 503, "label '9{99}', which no trainer published"),
        (labelled([5, 6], (0, 10**8), (10**8, 2)), 200, "version spans.* which do not cover them"),
        (labelled([5, 6], (0, -5), (-5, 2)), 200, "version spans.* which do not cover them"),
        (labelled([5, 6], *[(0, 1)] * 26_000), 200, "2 tokens with 26000 version spans, beginning with .{,400}$"),
        (reply([5, -5], [-1.0, -1.0]), 200, "returned numbers that are no tokens"),
        (reply([2**31], [-1.0]), 200, "returned numbers that are no tokens"),
        (reply([2**70], [-1.0]), 200, "returned numbers that are no tokens|unexpected body"),
        (unfinished([5, 6]), 200, "returned an answer that is not finished"),
        (scored([5, 6], [5, 7], [-1.0, -1.0]), 200, "returned log-probabilities of other tokens than it sampled"),
        (scored([5, 6], [5, 5, 6], [-1.0, None, -1.0]), 200, "of other tokens than it sampled"),
        (scored([5, 6], [5, 6], [-1.0, None]), 200, "or none, as log-probabilities"),
    ],
)
async def test_a_reply_that_cannot_be_trained_is_refused(body: dict[str, Any], status: int, message: str) -> None:
    async with answering(body) as client:
        with pytest.raises(RolloutError, match=message) as caught:
            await client.generate([5], [GRANT], Sampling(), [0])
    assert caught.value.status == status


async def test_parts_that_the_client_does_not_need_are_skipped() -> None:
    """They are neither decoded nor checked, however many there are."""
    body = reply([5, 6], [-1.0, -1.0])
    body["meta_info"]["output_top_logprobs"] = body["meta_info"]["input_token_logprobs"] = [[]] * 20_000
    async with answering(body) as client:
        (segment,) = await client.generate([5], [GRANT], Sampling(), [0])
    assert segment.token_ids == [5, 6]


async def test_large_replies_leave_other_tasks_time() -> None:
    """Between two large replies that came together, other tasks run."""
    turns, beats = 0, list[int]()

    async def beat() -> None:
        while True:
            beats.append(turns)
            await asyncio.sleep(0)

    body = json.dumps({"zeros": [0] * LARGE_BYTES}).encode()
    async with answering(body) as client:

        async def ask() -> None:
            nonlocal turns
            with pytest.raises(RolloutError, match="unexpected body"):
                await client.ready()
            turns += 1

        beating = asyncio.create_task(beat())
        await asyncio.gather(*(ask() for _ in range(8)))
        beating.cancel()
    assert {*range(8)} <= {*beats}


@pytest.mark.parametrize(
    ("body", "shown"),
    [
        (b"[" * 200_000, "[" * 500 + "..."),
        (b'{"message": "\xff"}', '{"message": "\ufffd"}'),
        (b'{"message": "' + b"x" * 60_000 + b'"}', "x" * 500 + "..."),
        (b'{"message": "' + b"x" * 1_000_000 + b'"}', '{"message": "' + "x" * 487 + "..."),
        (b'{"error":[' + b"[0]," * 1_000_000 + b"0]}", '{"error":[' + "[0]," * 122 + "[0..."),
    ],
)
async def test_an_odd_error_is_told_in_a_few_words(body: bytes, shown: str) -> None:
    async with answering(body, status=500) as client:
        with pytest.raises(RolloutError) as caught:
            await client.generate([5], [GRANT], Sampling(), [0])
    assert caught.value.message == f"POST /generate answered 500: {shown}"


async def test_a_packed_reply_is_not_unpacked() -> None:
    async with answering(gzip.compress(json.dumps(reply([5], [-1.0])).encode())) as client:
        with pytest.raises(RolloutError, match="unexpected body"):
            await client.generate([5], [GRANT], Sampling(), [0])


async def test_replies_without_a_request_end_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hostile server answers, and then goes on answering while the connection is idle."""
    monkeypatch.setattr("penstock.rollout.session.KEEP_ALIVE_S", 3600.0)
    is_idle, ended = asyncio.Event(), asyncio.Event()
    reply = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n"

    async def flood(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(reply)
        await is_idle.wait()
        with suppress(ConnectionError):
            while True:
                writer.write(reply * 100)
                await writer.drain()
        ended.set()
        writer.close()

    server = await asyncio.start_server(flood, "127.0.0.1", 0)
    session = HttpSession()
    try:
        await session.send("GET", f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", "/health")
        is_idle.set()
        async with asyncio.timeout(30.0):
            await ended.wait()
        assert ended.is_set(), "the client has ended the connection"
    finally:
        await session.close()
        server.close()


async def test_the_servers_own_words_are_passed_on(url: str) -> None:
    async with connected(url) as client:
        with pytest.raises(RolloutError, match=r"answered 400: token id 999 is outside the vocabulary") as caught:
            await client.generate([999], [GRANT], Sampling(), [1])
        assert (caught.value.url, caught.value.status) == (url, 400)


async def test_readiness_carries_the_identity(url: str) -> None:
    async with connected(url) as client:
        ready = await client.ready()
        assert (ready.run_id, ready.nonce, ready.policy_version) == ("run", "abc", 0)


async def test_the_key_is_sent(runner: EngineRunner) -> None:
    async with serve(runner, keys=ApiKeys(generation="secret")) as url, connected(url, api_key="secret") as client:
        assert len(await client.generate([5], [GRANT], Sampling(), [1])) == 1
