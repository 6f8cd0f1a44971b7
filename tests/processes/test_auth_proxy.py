"""The gate in front of an engine that asks for no key: a server of ours that has none, behind it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import aiohttp
import pytest
from tiny_policy import Held, serve, until

from penstock.processes.foreign_server import Place, auth_proxy
from penstock.rollout.app import ApiKeys
from penstock.rollout.claim import CLAIM, Claim
from penstock.rollout.client import ServerClient
from penstock.rollout.runner import EngineRunner
from penstock.rollout.servers import connect
from penstock.rollout.session import HttpSession, RolloutError
from penstock.types import EpisodeId, Sampling, SegmentGrant

KEYS = ApiKeys(generation="play", admin="rule")
CLAIM_OF_RUN = "claim"
OWN_KEY = "own"
"""The engine's."""


def proxy(place: Place) -> AbstractAsyncContextManager[str]:
    claim = Claim("run", CLAIM_OF_RUN)
    return auth_proxy(place, OWN_KEY, "/health", host="127.0.0.1", port=0, keys=KEYS, claim=claim)


@pytest.fixture
async def url(runner: EngineRunner) -> AsyncIterator[str]:
    async with serve(runner) as engine, proxy(int(engine.rpartition(":")[2])) as url:
        yield url


@asynccontextmanager
async def client(url: str, key: str, claim: str | None = None) -> AsyncIterator[ServerClient]:
    session = HttpSession(api_key=key, claim=claim)
    try:
        yield connect("penstock", url, session)
    finally:
        await session.close()


@pytest.mark.parametrize("key", ["play", "rule"])
async def test_who_may_generate_does(url: str, key: str) -> None:
    grant = SegmentGrant(episode=EpisodeId("tag", 0, 0, 0), max_tokens=3)
    async with client(url, key) as playing:
        (segment,) = await playing.generate([1, 2], [grant], Sampling(), [0])
        assert 0 < len(segment.token_ids) <= 3
        await playing.alive()


async def test_only_who_may_control_does(url: str) -> None:
    async with client(url, "play", CLAIM_OF_RUN) as playing, client(url, "rule", CLAIM_OF_RUN) as ruling:
        with pytest.raises(RolloutError, match="answered 401: the admin API key is missing or wrong"):
            await playing.forget_weights()
        await ruling.forget_weights()


@pytest.mark.parametrize("claim", [None, "another"])
async def test_who_may_control_does_not_without_the_claim(url: str, claim: str | None) -> None:
    async with client(url, "rule", claim) as ruling:
        with pytest.raises(RolloutError, match="answered 409: run run uses this server"):
            await ruling.forget_weights()


async def test_nobody_else_gets_in_and_whether_it_lives_is_no_secret(url: str) -> None:
    async with aiohttp.ClientSession() as session:
        for path in ("/generate", "/pause_generation", "/%67enerate", "/generate/", "//generate", "/x/../generate"):
            async with session.post(url + path, json={}) as answer:
                assert answer.status == 401, path
        async with session.get(f"{url}/health") as answer:
            assert answer.status == 200


async def test_what_the_engine_answers_comes_back_as_it_is(url: str) -> None:
    headers = {"Authorization": "Bearer rule", CLAIM: CLAIM_OF_RUN}
    async with aiohttp.ClientSession(headers=headers) as session:
        async with session.get(f"{url}/metrics") as answer:
            assert answer.status == 200 and answer.content_type == "text/plain"
        async with session.post(f"{url}/generate", json={"input_ids": "?"}) as answer:
            assert answer.status == 400 and "error" in await answer.json()
        async with session.get(f"{url}/nowhere?a=b") as answer:
            assert answer.status == 404


async def test_who_leaves_ends_what_it_asked_for(
    url: str, runner: EngineRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runner.engine, "step", Held(runner.engine))
    body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 90, "temperature": 0.0}}
    async with aiohttp.ClientSession(headers={"Authorization": "Bearer play"}) as session:
        asked = asyncio.create_task(session.post(f"{url}/generate", json=body))
        await until(lambda: runner.engine.num_active)
        asked.cancel()
        await until(lambda: not runner.engine.has_work)
    assert runner.engine.num_generated_tokens < 90


async def test_an_engine_that_is_gone_is_told_apart_from_a_proxy_that_is() -> None:
    async with (
        proxy(9) as url,
        client(url, "play") as playing,
    ):
        with pytest.raises(RolloutError, match="answered 502: the engine behind this proxy does not answer") as refused:
            await playing.alive()
    assert refused.value.status == 502
