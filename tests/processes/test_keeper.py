"""The keeper of servers that run already: whose they are, and what is wrong with those that cannot be used."""

from __future__ import annotations

import asyncio
import http.server
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
from tiny_policy import serve

from penstock.config import Config, default_config
from penstock.processes import foreign_server
from penstock.processes.foreign_server import Claiming, answering
from penstock.rollout.keys import Keys
from penstock.rollout.runner import EngineRunner
from penstock.rollout.servers import connect
from penstock.rollout.session import HttpSession, RolloutError


@pytest.fixture
def web_page() -> Iterator[str]:
    """A web server that is no rollout server."""
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), http.server.SimpleHTTPRequestHandler) as server:
        serving = threading.Thread(target=server.serve_forever)
        serving.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        serving.join()


def settings(url: str, engine: str = "penstock") -> Config:
    return default_config([f"rollout.urls=[{url}]", f"rollout.engine={engine}"])


@asynccontextmanager
async def keeper(url: str, run_id: str, **options: Any) -> AsyncIterator[Claiming]:
    session = HttpSession(**options)
    try:
        yield Claiming(connect("penstock", url, session), run_id, nonce=f"nonce of {run_id}")
    finally:
        await session.close()


async def test_a_second_run_on_a_server_is_refused_and_the_first_is_named(
    runner: EngineRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serve(runner) as url, keeper(url, "v1") as first, keeper(url, "v2") as second:
        config = settings(url)
        await answering(config, first, None)
        monkeypatch.setattr(foreign_server, "PATIENCE_S", 0.0)
        async with first.renewed():
            with pytest.raises(RolloutError, match="run v1 uses this server: end that run, or give this one a server"):
                await answering(config, second, None)
        await answering(config, second, None)


async def test_a_dead_runs_claim_is_waited_out(runner: EngineRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign_server, "ASK_EVERY_S", 0.01)
    async with serve(runner) as url, keeper(url, "dead") as dead, keeper(url, "new") as new:
        await dead.client.claim("dead", "nonce of dead", lease_s=1.0)
        with pytest.raises(RolloutError, match="run dead uses this server"):
            await new.take()
        await answering(settings(url), new, None)
        with pytest.raises(RolloutError, match="run new uses this server"):
            await dead.take()


async def test_a_run_whose_server_was_taken_over_ends(runner: EngineRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serve(runner) as url, keeper(url, "hung") as hung, keeper(url, "other") as other:
        await hung.take()
        await hung.client.claim("hung", "nonce of hung", lease_s=0.0)
        await other.take()
        monkeypatch.setattr(foreign_server, "LEASE_S", 0.01)
        with pytest.raises(ExceptionGroup) as ended:
            async with hung.renewed():
                await asyncio.sleep(60)
        assert "run other uses this server" in str(ended.value.exceptions[0])


async def test_a_wrong_url_is_named_with_its_remedy(web_page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign_server, "PATIENCE_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        nobody = f"http://127.0.0.1:{listener.getsockname()[1]}"
    async with keeper(nobody, "v1") as claim:
        with pytest.raises(RolloutError, match=f"{nobody}: GET /health got no answer: Connection refused; start it"):
            await answering(settings(nobody), claim, None)
    async with keeper(web_page, "v1") as claim:
        told = f"{web_page}: GET /health answered 404: a web page; it is no server that rollout.engine penstock can use"
        with pytest.raises(RolloutError, match=told):
            await answering(settings(web_page), claim, None)


@pytest.mark.parametrize("keys", [Keys(generation="play"), Keys(generation="play", admin="rule")])
async def test_a_missing_key_is_named_at_once(runner: EngineRunner, keys: Keys) -> None:
    given = "play" if keys.admin else None
    async with serve(runner, keys=keys) as url, keeper(url, "v1", api_key=given) as claim:
        with pytest.raises(RolloutError, match=r"answered 401: .* API key; set PENSTOCK_API_KEY, and PENSTOCK_ADMIN"):
            await answering(settings(url), claim, None)
