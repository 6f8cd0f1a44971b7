"""Servers that a run uses with the weights that they have: real HTTP, in the protocols of vLLM and our own."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from tiny_policy import serve

from penstock.rollout.client import Claimed
from penstock.rollout.runner import EngineRunner
from penstock.rollout.servers import Engine, Servers, connect
from penstock.rollout.session import HttpSession, RolloutError
from penstock.samples import Segment, VersionSpan
from penstock.types import NO_VERSION, EpisodeId, Sampling, SegmentGrant

GRANTS = [SegmentGrant(episode=EpisodeId("t", 0, 0, 0), max_tokens=3)]
SPANS = [{"version": "default", "start": 0, "end": 2}, {"version": "12", "start": 2, "end": 3}]


class Vllm(ThreadingHTTPServer):
    """Some routes of vLLM. Without its development mode there is no `/weight_info`."""

    daemon_threads = True
    label: str | None = None
    spans: list[dict[str, Any]] | None = None
    control: list[str]


class Handler(BaseHTTPRequestHandler):
    server: Vllm

    def do_GET(self) -> None:
        bodies: dict[str, Any] = {"/health": {}, "/v1/models": {"data": [{"id": "given"}]}}
        if self.server.label is not None:
            bodies["/weight_info"] = {"weight_version": self.server.label}
        self._send(200 if self.path in bodies else 404, bodies.get(self.path, {"error": "no route"}))

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.path != "/inference/v1/generate":
            self.server.control.append(self.path)
        if "token_ids" not in body:
            self._send(422, {"error": "token_ids are missing"})
            return
        choice: dict[str, Any] = {"index": 0, "finish_reason": "length", "token_ids": [5, 6, 7]}
        choice |= {"logprobs": {"content": [{"logprob": -1.0}] * 3}, "weight_versions": self.server.spans}
        self._send(200, {"choices": [choice]})

    def _send(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@pytest.fixture
def vllm() -> Iterator[Vllm]:
    with Vllm(("127.0.0.1", 0), Handler) as server:
        server.control = []
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        server.shutdown()
        thread.join()


@asynccontextmanager
async def servers_at(url: str, engine: Engine, *, keeps_weights: bool = True) -> AsyncIterator[Servers]:
    servers = Servers([url], engine=engine, keeps_weights=keeps_weights, timeout_s=60)
    try:
        yield servers
    finally:
        await servers.close()


async def generate(servers: Servers) -> Segment:
    (segment,) = await servers.generate([1, 2], GRANTS, Sampling(max_new_tokens=3), [0])
    return segment


async def test_weights_without_a_version_are_of_no_version(vllm: Vllm) -> None:
    url = f"http://127.0.0.1:{vllm.server_port}"
    async with servers_at(url, "vllm") as servers:
        assert (await generate(servers)).spans == [VersionSpan(NO_VERSION, 0, 3)]
        assert await servers.claimed() == [Claimed(url, "given", None)]
        vllm.label, vllm.spans = "default", SPANS
        segment = await generate(servers)
        assert segment.spans == [VersionSpan(NO_VERSION, 0, 2), VersionSpan(12, 2, 3)]
        assert all(map(math.isfinite, segment.logprobs)), "these numbers are the server's"
        assert await servers.claimed() == [Claimed(url, "given", "default")]
    assert vllm.control == [], "nothing is changed on the server"


async def test_such_a_server_needs_no_development_mode(vllm: Vllm) -> None:
    url, session = f"http://127.0.0.1:{vllm.server_port}", HttpSession()
    try:
        kept = connect("vllm", url, session, keeps_weights=True)
        await kept.check()
        assert await kept.served_version() == NO_VERSION
        with pytest.raises(RolloutError, match="VLLM_SERVER_DEV_MODE"):
            await connect("vllm", url, session).check()
    finally:
        await session.close()


async def test_our_own_server_says_what_it_serves(runner: EngineRunner) -> None:
    async with serve(runner) as url, servers_at(url, "penstock") as servers:
        segment = await generate(servers)
        (claimed,) = await servers.claimed()
        assert {span.policy_version for span in segment.spans} == {runner.policy_version}
        assert claimed.weights == str(runner.policy_version)
