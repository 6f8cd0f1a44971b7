"""An engine that a run starts is reached only through the proxy that asks for the keys of the run, and what an engine
sends does not end the run."""

from __future__ import annotations

import sys
from asyncio.subprocess import Process
from pathlib import Path

import aiohttp
import psutil
import pytest
from starlette.requests import Request
from starlette.responses import Response
from tiny_policy import until

from penstock.config import Config
from penstock.processes.foreign_server import HEALTH, EngineMetrics, auth_proxy, engine_of
from penstock.rollout.app import ApiKeys, App
from penstock.rollout.claim import Claim
from penstock.rollout.http import Route
from penstock.rollout.servers import connect
from penstock.rollout.session import HttpSession
from penstock.runtime.http_server import bind, listening, url_of
from penstock.supervisor.child import Child

HOST = "127.0.0.1"
ENGINE = f"""#!{sys.executable}
import socketserver, sys
from http.server import BaseHTTPRequestHandler

class Answer(BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def address_string(self):
        return "the proxy"

socketserver.UnixStreamServer(sys.argv[sys.argv.index("--uds") + 1], Answer).serve_forever()
"""
"""It takes vLLM's arguments, and listens as vLLM does."""


@pytest.fixture
def child(tmp_path: Path) -> Child:
    (tmp_path / "rollout-0.sock").touch()  # as an engine that was killed leaves it
    return Child(name="rollout-0", run_dir=tmp_path, runtime_dir=tmp_path, run_id="run", nonce="nonce")


async def test_vllm_listens_on_no_port_that_other_users_reach(child: Child, tmp_path: Path) -> None:
    python = tmp_path / "python"
    python.write_text(ENGINE)
    python.chmod(0o700)
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    settings = {"engine": "vllm", "python": str(python), "api_key": "play", "admin_api_key": "rule"}
    path, prepared = tmp_path / "rollout-0.sock", list[str]()

    async def prepare(url: str, process: Process | None) -> None:
        await until(path.is_socket)
        prepared.append(url)

    async with engine_of(child, Config.model_validate({"rollout": settings}), prepare) as (url, process):
        assert process is not None and prepared and url not in prepared, "others reach it only afterwards"
        async with aiohttp.ClientSession(headers={"Authorization": "Bearer play"}) as session:
            async with session.get(f"{url}/weight_info") as answer:
                assert answer.status == 200
            async with session.get(f"{url}/pause") as answer:
                assert answer.status == 401
        async with aiohttp.ClientSession() as session, session.post(f"{url}/health", data=bytes(100_000)) as answer:
            assert answer.status in (401, 405), "without a key, the proxy takes no body"
        assert psutil.Process(process.pid).net_connections("inet") == []


async def test_a_client_without_a_key_makes_sglang_generate_nothing_and_learns_nothing() -> None:
    asked = []

    async def model_info(request: Request) -> Response:
        asked.append(request.url.path)
        return Response("about the model")

    listener = bind(HOST, 0)
    place: int = listener.getsockname()[1]
    engine = listening(App([Route("/{path}", ["GET"], model_info, "public")], ApiKeys()), listener)
    keys = ApiKeys(generation="play", admin="rule")
    proxy = auth_proxy(place, "own", HEALTH["sglang"], host=HOST, port=0, keys=keys, claim=Claim())
    async with engine, proxy as url, aiohttp.ClientSession(url) as session, session.get("/health") as answer:
        assert (answer.status, await answer.read()) == (200, b"")
    assert asked == ["/model_info"]


METRICS = """\
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total {tokens}
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running {running}
"""
ODD = ("NaN", "+Inf", "-Inf", "-1", "1e300", "9007199254740992", "x", "")


@pytest.mark.parametrize(
    "odd",
    [
        *(METRICS.format(tokens=value, running=2) for value in ODD),
        *(METRICS.format(tokens=1, running=value) for value in ODD),
        METRICS.format(tokens=f"1 {'9' * 400}", running=2),  # with a time
        'vllm:generation_tokens_total{b="' + '\\"' * 1000 + '"} 9',  # the time for such lines is quadratic
        "\x0b".join(['vllm:generation_tokens_total{b="' + '\\"' * 100] * 20),  # one line for the parser
        "\n".join(["vllm:generation_tokens_total 9"] * 1000),
        "\xff",
        "{",
        'a{b="c", ="d"} 1',
    ],
)
async def test_odd_metrics_are_ignored(odd: str) -> None:
    texts = iter([METRICS.format(tokens=7, running=0), odd, METRICS.format(tokens=2**53 - 1, running=3)])

    async def metrics(request: Request) -> Response:
        return Response(next(texts).encode("latin-1"))

    config, session, listener = Config.model_validate({"rollout": {"engine": "vllm"}}), HttpSession(), bind(HOST, 0)
    async with listening(App([Route("/metrics", ["GET"], metrics, "public")], ApiKeys()), listener):
        reader = EngineMetrics("rollout-0", config, connect("vllm", url_of(HOST, listener), session), session)
        counters = []
        for _ in range(3):
            await reader._read()
            counters.append(reader.telemetry().counters)
        await session.close()
    assert counters == [
        {"tokens": 7, "active": 0},
        {"tokens": 7, "active": 0},
        {"tokens": 2**53 - 1, "active": 3},
    ]


@pytest.mark.parametrize(("urls", "doing"), [([], "generation"), (["http://127.0.0.1:1"], "")])
async def test_a_server_that_dies_or_lies_does_not_count_as_stuck(urls: list[str], doing: str) -> None:
    """A process that makes no progress with what it does is restarted, which would repair no server of others."""
    texts = iter([METRICS.format(tokens=7, running=3)])

    async def metrics(request: Request) -> Response:
        return Response(next(texts, "{").encode())

    config = Config.model_validate({"rollout": {"engine": "vllm", "urls": urls}})
    session, listener = HttpSession(), bind(HOST, 0)
    async with listening(App([Route("/metrics", ["GET"], metrics, "public")], ApiKeys()), listener):
        reader = EngineMetrics("rollout-0", config, connect("vllm", url_of(HOST, listener), session), session)
        found = []
        for _ in range(2):
            await reader._read()
            found.append(reader.telemetry().doing)
        await session.close()
    assert found == [doing, ""]
