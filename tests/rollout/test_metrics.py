"""What Prometheus reads."""

from __future__ import annotations

import asyncio
from typing import Any

import aiohttp
from prometheus_client.parser import text_string_to_metric_families
from tiny_policy import Held, serve, until

from penstock.rollout.runner import EngineRunner


async def scrape(session: aiohttp.ClientSession) -> dict[tuple[str, ...], float]:
    """By name and labels."""
    async with session.get("/metrics") as response:
        assert response.headers["Content-Type"].startswith("text/plain; version=")
        text = await response.text()
    samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
    return {(sample.name, *sample.labels.values()): sample.value for sample in samples}


async def generate(session: aiohttp.ClientSession, body: dict[str, Any]) -> None:
    async with session.post("/generate", json=body) as response:
        await response.read()


async def test_what_happened_is_counted(url: str, runner: EngineRunner) -> None:
    sampling = {"max_new_tokens": 4, "ignore_eos": True}
    async with aiohttp.ClientSession(url) as session:
        for body in ({"input_ids": [5, 6, 7], "sampling_params": sampling | {"n": 2}}, {"input_ids": [-1]}):
            await generate(session, body)
        async with session.get("/nowhere/at/all"):
            pass
        found = await scrape(session)
    assert found["penstock_generation_tokens_total",] == 8
    assert found["penstock_prompt_tokens_total",] == 3
    assert found["penstock_prompt_tokens_reused_total",] == found["penstock_cached_tokens_evicted_total",] == 0
    assert found["penstock_http_responses_total", "/generate", "200"] == 1
    assert found["penstock_http_responses_total", "/generate", "400"] == 1
    assert found["penstock_http_responses_total", "/{rest}", "404"] == 1
    assert found["penstock_e2e_request_latency_seconds_count",] == 1
    assert found["penstock_time_to_first_token_seconds_count",] == 1
    assert 0 < found["penstock_time_to_first_token_seconds_sum",] <= found["penstock_e2e_request_latency_seconds_sum",]
    assert (found["penstock_slots",], found["penstock_policy_version",], found["penstock_alive",]) == (4, 0, 1)
    assert found["penstock_busy_seconds_total",] > 0


async def test_reused_prompt_tokens_are_counted_apart(url: str) -> None:
    body = {"input_ids": [5] * 40, "sampling_params": {"max_new_tokens": 4, "ignore_eos": True}}
    async with aiohttp.ClientSession(url) as session:
        for _ in range(2):
            await generate(session, body)
        found = await scrape(session)
    assert (found["penstock_prompt_tokens_total",], found["penstock_prompt_tokens_reused_total",]) == (48, 32)
    assert found["penstock_cached_tokens",] == 32


async def test_what_is_going_on_is_shown(url: str, runner: EngineRunner, held: Held) -> None:
    body = {"input_ids": [5], "sampling_params": {"n": 6, "max_new_tokens": 90, "ignore_eos": True}}
    async with aiohttp.ClientSession(url) as session:
        generation = asyncio.create_task(generate(session, body))
        await until(lambda: runner.engine.num_active)
        await runner.pause("in_place")
        found = await scrape(session)
        assert (found["penstock_num_requests_running",], found["penstock_num_requests_waiting",]) == (4, 2)
        assert found["penstock_paused",] == 1
        await runner.pause("abort")
        await generation
        assert (await scrape(session))["penstock_requests_aborted_total",] == 1


async def test_two_servers_of_a_process_do_not_mix(runner: EngineRunner) -> None:
    async with serve(runner) as one, serve(runner) as other:
        async with aiohttp.ClientSession(one) as session, session.get("/health"):
            pass
        async with aiohttp.ClientSession(other) as session:
            assert ("penstock_http_responses_total", "/health", "200") not in await scrape(session)


async def test_a_scraper_that_asks_for_openmetrics_gets_it(url: str) -> None:
    accept = {"Accept": "application/openmetrics-text; version=1.0.0"}
    async with aiohttp.ClientSession(url) as session, session.get("/metrics", headers=accept) as response:
        assert response.headers["Content-Type"].startswith("application/openmetrics-text")
        assert (await response.text()).endswith("# EOF\n")
