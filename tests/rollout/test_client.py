"""Servers: load, the transaction over several of them, and failures named by url."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from tiny_policy import make_engine, make_handle, print_of, serve, weights

from penstock.deadline import Stalled
from penstock.rollout.client import RolloutClient, RolloutError, Servers
from penstock.rollout.keys import Keys
from penstock.rollout.runner import EngineRunner
from penstock.rollout.update import WeightsUpdate
from penstock.types import EpisodeId, Sampling, SegmentGrant
from penstock.weights.shared_memory import fingerprint

GRANT = SegmentGrant(episode=EpisodeId("tag", 0, 0, 0), max_tokens=4)


@pytest.fixture
async def other() -> AsyncIterator[EngineRunner]:
    """A second server's engine, which already serves policy_version 5."""
    runner = EngineRunner(make_engine(policy_version=5), process="rollout-1")
    runner.start()
    yield runner
    await runner.stop()


async def test_an_update_reaches_every_server(runner: EngineRunner, other: EngineRunner) -> None:
    async with serve(runner) as first, serve(other) as second:
        servers = Servers([first, second])
        await servers.update_weights(make_handle(6))
        await servers.update_weights(make_handle(6))
        await servers.close()
    assert (runner.policy_version, other.policy_version) == (6, 6)


async def test_an_update_that_one_server_refuses_changes_none(runner: EngineRunner, other: EngineRunner) -> None:
    async with serve(runner) as first, serve(other) as second:
        servers = Servers([first, second])
        with pytest.raises(RolloutError, match=f"{second}.*409.*not newer than 5"):
            await servers.update_weights(make_handle(3))
        client = RolloutClient(first)
        with pytest.raises(RolloutError, match="nothing is staged"):
            await client.commit_weights(make_handle(3))
        await client.close()
        await servers.close()
    assert (runner.policy_version, other.policy_version) == (0, 5)


async def test_another_fingerprint_under_a_served_version_is_noticed(url: str) -> None:
    client = RolloutClient(url)
    await client.begin_weights(make_handle(1, path="1"))
    await client.commit_weights(make_handle(1, path="1"))
    with pytest.raises(RolloutError, match="not newer than 1"):
        await client.begin_weights(make_handle(1, path="2"))
    with pytest.raises(RolloutError, match=f"{print_of('1')}, not 1 with {print_of('2')}"):
        await client.commit_weights(make_handle(1, path="2"))
    await client.close()


async def test_a_server_that_holds_other_weights_than_announced_is_noticed(runner: EngineRunner) -> None:
    update = WeightsUpdate(runner, lambda handle: weights(3), fingerprint)
    async with serve(runner, update=update) as url:
        servers = Servers([url])
        with pytest.raises(RolloutError, match=f"{url}.*{print_of('3')}, not 1 with {print_of('1')}"):
            await servers.update_weights(make_handle(1))
        await servers.close()


async def test_requests_go_to_the_server_with_the_least_load(runner: EngineRunner, other: EngineRunner) -> None:
    async with serve(runner) as first, serve(other) as second:
        servers = Servers([first, second])
        sampling = Sampling(temperature=0.0)
        answers = await asyncio.gather(*(servers.generate([5], [GRANT] * 2, sampling, [1, 2]) for _ in range(10)))
        await servers.close()
    versions = [segments[0].spans[0].policy_version for segments in answers]
    assert (versions.count(0), versions.count(5)) == (5, 5)


async def test_a_server_that_is_gone_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    client = RolloutClient(f"http://127.0.0.1:{port}")
    with pytest.raises(RolloutError, match=f"http://127.0.0.1:{port}: POST /generate got no answer"):
        await client.generate([5], [GRANT], Sampling(), [1])
    await client.close()


async def test_a_server_that_does_not_answer_is_a_stall() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        client = RolloutClient(url, timeout_s=0.05)
        with pytest.raises(Stalled, match=f"rollout client waited 0.05 s for POST /generate, held by {url}"):
            await client.generate([5], [GRANT], Sampling(), [1])
        await client.close()


async def test_tokens_without_log_probabilities_are_refused_at_the_first_reply() -> None:
    meta = {"id": "a", "finish_reason": {"type": "length", "length": 2}, "prompt_tokens": 1, "completion_tokens": 2}
    meta |= {"weight_version": "0", "weight_versions": [{"version": "0", "start": 0, "end": 2}], "e2e_latency": 0.0}

    async def generate(_: web.Request) -> web.Response:
        return web.json_response({"text": "", "output_ids": [5, 6], "meta_info": meta})

    app = web.Application()
    app.router.add_post("/generate", generate)
    async with TestServer(app) as server:
        client = RolloutClient(str(server.make_url("/")))
        with pytest.raises(RolloutError, match="the server must honour return_logprob"):
            await client.generate([5], [GRANT], Sampling(), [0])
        await client.close()


async def test_the_servers_own_words_are_passed_on(url: str) -> None:
    client = RolloutClient(url)
    with pytest.raises(RolloutError, match=r"answered 400: token id 999 is outside the vocabulary") as caught:
        await client.generate([999], [GRANT], Sampling(), [1])
    assert (caught.value.url, caught.value.status) == (url, 400)
    await client.close()


async def test_readiness_carries_the_identity(url: str) -> None:
    client = RolloutClient(url)
    ready = await client.ready()
    assert (ready.run_id, ready.nonce, ready.policy_version) == ("run", "abc", 0)
    await client.close()


async def test_the_key_is_sent(runner: EngineRunner) -> None:
    async with serve(runner, keys=Keys(generation="secret")) as url:
        client = RolloutClient(url, api_key="secret")
        assert len(await client.generate([5], [GRANT], Sampling(), [1])) == 1
        await client.close()
