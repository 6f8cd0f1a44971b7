"""SGLang's own router, unmodified, in front of two servers, of which one is killed."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import aiohttp
import openai
import pytest
from free_port import free_port

from penstock.config import TinyModelConfig
from penstock.model.load_policy import load_policy
from penstock.model.tiny import write_tiny_model

pytestmark = pytest.mark.integration


@contextmanager
def process(*words: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen([sys.executable, "-m", *words], stdout=subprocess.PIPE, text=True) as started:
        try:
            yield started
        finally:
            started.kill()


class Fleet:
    """Two servers, and the router's URL."""

    def __init__(self, url: str, servers: dict[str, subprocess.Popen[str]]) -> None:
        self.url, self.servers = url, servers


@pytest.fixture
async def fleet(tmp_path: Path) -> AsyncIterator[Fleet]:
    model = tmp_path / "model"
    model.mkdir()
    write_tiny_model(model, TinyModelConfig(num_layers=1, hidden_size=32), max_context=64)
    load_policy(model, weights=False, seed=0).save_pretrained(model)
    serve = ("penstock.cli.main", "serve", "--model", str(model), "--port", "0")
    with ExitStack() as stack:
        started = [stack.enter_context(process(*serve)) for _ in range(2)]
        servers = {}
        for one in started:
            assert one.stdout is not None
            servers[(await asyncio.to_thread(one.stdout.readline)).split(" at ")[1].split()[0]] = one
        port, metrics = free_port(), free_port()
        words = [
            "--host",
            "127.0.0.1",
            "--port",
            str(port),
            "--prometheus-port",
            str(metrics),
            "--policy",
            "round_robin",
        ]
        words += ["--worker-urls", *servers, "--log-level", "error"]
        stack.enter_context(process("sglang_router.launch_router", *words))
        url = f"http://127.0.0.1:{port}"
        await until_both_serve(url)
        yield Fleet(url, servers)


async def until_both_serve(url: str) -> None:
    """The router says what it has found only when it is asked."""
    async with asyncio.timeout(240), aiohttp.ClientSession() as session:
        while True:
            try:
                async with session.get(f"{url}/workers") as response:
                    workers = (await response.json())["workers"]
                if sum(worker["is_healthy"] for worker in workers) == 2:
                    return
            except (aiohttp.ClientError, KeyError):
                pass
            await asyncio.sleep(0.05)


@pytest.mark.long
async def test_versions_pass_the_router_and_a_killed_server_is_routed_around(fleet: Fleet) -> None:
    body = {"input_ids": [5, 6], "sampling_params": {"max_new_tokens": 4, "temperature": 0, "ignore_eos": True}}
    async with (
        aiohttp.ClientSession(fleet.url, timeout=aiohttp.ClientTimeout(total=120)) as session,
        openai.AsyncOpenAI(base_url=f"{fleet.url}/v1", api_key="any", timeout=120, max_retries=0) as client,
    ):

        async def generate() -> list[int]:
            async with session.post("/generate", json=body) as response:
                assert response.status == 200, await response.text()
                assert response.headers["X-Policy-Version"] == "0"
                reply = await response.json()
            assert reply["meta_info"]["weight_versions"] == [{"version": "0", "start": 0, "end": 4}]
            ids: list[int] = reply["output_ids"]
            return ids

        async def chat() -> str:
            raw = await client.chat.completions.with_raw_response.create(
                model="any", messages=[{"role": "user", "content": "hello"}], max_tokens=4, temperature=0
            )
            assert raw.headers["X-Policy-Version"] == "0"
            done = raw.parse()
            assert done.system_fingerprint == "policy_version-0"
            return str(done.choices[0].message.content)

        answers, said = await generate(), await chat()
        for _ in range(3):
            assert (await generate(), await chat()) == (answers, said)
        counts = [await answered(url) for url in fleet.servers]
        assert all(counts) and sum(counts) == 8, "both servers have worked"
        next(iter(fleet.servers.values())).kill()
        for _ in range(4):
            assert (await generate(), await chat()) == (answers, said)


async def answered(url: str) -> int:
    """Requests that a server has answered with tokens."""
    async with aiohttp.ClientSession() as session, session.get(f"{url}/metrics") as response:
        lines = (await response.text()).splitlines()
    return int(
        float(next(line for line in lines if line.startswith("penstock_e2e_request_latency_seconds_count")).split()[1])
    )
