"""The client of one server, and failures named by url."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from tiny_policy import make_handle, print_of, serve

from penstock.deadline import Stalled
from penstock.rollout.app import ApiKeys
from penstock.rollout.client import RolloutClient
from penstock.rollout.runner import EngineRunner
from penstock.rollout.session import HttpSession, RolloutError
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


async def test_tokens_without_log_probabilities_are_refused_at_the_first_reply() -> None:
    meta = {"id": "a", "finish_reason": {"type": "length", "length": 2}, "prompt_tokens": 1, "completion_tokens": 2}
    meta |= {"weight_version": "0", "weight_versions": [{"version": "0", "start": 0, "end": 2}], "e2e_latency": 0.0}

    async def generate(_: web.Request) -> web.Response:
        return web.json_response({"text": "", "output_ids": [5, 6], "meta_info": meta})

    app = web.Application()
    app.router.add_post("/generate", generate)
    async with TestServer(app) as server, connected(str(server.make_url("")).rstrip("/")) as client:
        with pytest.raises(RolloutError, match="use an engine that honours return_logprob"):
            await client.generate([5], [GRANT], Sampling(), [0])


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
