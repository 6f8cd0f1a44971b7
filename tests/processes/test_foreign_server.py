"""The process of a server that runs already: the claim on it, and errors that name the remedy."""

from __future__ import annotations

import asyncio
import http.server
import re
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from sleeping_engines import ENGINES, SleepingVllm
from tiny_policy import serve

from penstock.config import Config, default_config
from penstock.processes import foreign_server
from penstock.processes.foreign_server import EngineMetrics, ServerClaim, await_server
from penstock.processes.visible import direct_way
from penstock.rollout.app import ApiKeys
from penstock.rollout.runner import EngineRunner
from penstock.rollout.servers import Engine, connect
from penstock.rollout.session import HttpSession, RolloutError

TURNS = ["scheduler.mode=colocated", "scheduler.max_staleness=0"]
RELEASING = ("--enable-sleep-mode", "--enable-memory-saver")


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
async def claim_of(url: str, run_id: str, **options: Any) -> AsyncIterator[ServerClaim]:
    session = HttpSession(**options)
    try:
        yield ServerClaim(connect("penstock", url, session), run_id, nonce=f"nonce of {run_id}")
    finally:
        await session.close()


async def test_a_second_run_on_a_server_is_refused_and_the_first_is_named(
    runner: EngineRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serve(runner) as url, claim_of(url, "v1") as first, claim_of(url, "v2") as second:
        config = settings(url)
        await await_server(config, first, None)
        monkeypatch.setattr(foreign_server, "CLAIM_TIMEOUT_S", 0.0)
        async with first.renewed():
            with pytest.raises(RolloutError, match="run v1 already uses this server: stop that run, or set rollout"):
                await await_server(config, second, None)
        await await_server(config, second, None)


async def test_a_dead_runs_claim_is_waited_out(runner: EngineRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign_server, "ASK_EVERY_S", 0.01)
    async with serve(runner) as url, claim_of(url, "dead") as dead, claim_of(url, "new") as new:
        await dead.client.claim("dead", "nonce of dead", lease_s=60.0)
        with pytest.raises(RolloutError, match="run dead already uses this server"):
            await new.take()
        await dead.client.claim("dead", "nonce of dead", lease_s=0.2)
        await await_server(settings(url), new, None)
        with pytest.raises(RolloutError, match="run new already uses this server"):
            await dead.take()


async def test_a_run_whose_server_was_taken_over_ends(runner: EngineRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serve(runner) as url, claim_of(url, "hung") as hung, claim_of(url, "other") as other:
        await hung.take()
        await hung.client.claim("hung", "nonce of hung", lease_s=0.0)
        await other.take()
        monkeypatch.setattr(foreign_server, "LEASE_S", 0.01)
        with pytest.raises(ExceptionGroup) as ended:
            async with hung.renewed():
                await asyncio.sleep(60)
        assert "run other already uses this server" in str(ended.value.exceptions[0])


async def test_a_run_with_other_servers_goes_on_without_the_one_that_was_taken(
    runner: EngineRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused = asyncio.Event()
    async with serve(runner) as url, claim_of(url, "hung") as hung, claim_of(url, "other") as other:
        shared = ServerClaim(hung.client, "hung", "nonce of hung", is_only=False)
        await other.take()
        monkeypatch.setattr(foreign_server, "LEASE_S", 0.01)
        monkeypatch.setattr(foreign_server.Paced, "info", lambda log, line: refused.set())
        async with asyncio.timeout(60), shared.renewed():
            await refused.wait()
        with pytest.raises(RolloutError, match="run other already uses this server"):
            await shared.take()


async def test_a_wrong_url_is_named_with_its_remedy(web_page: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(foreign_server, "CLAIM_TIMEOUT_S", 0.0)
    with socket.create_server(("127.0.0.1", 0)) as listener:
        nobody = f"http://127.0.0.1:{listener.getsockname()[1]}"
    async with claim_of(nobody, "v1") as claim:
        with pytest.raises(RolloutError, match=f"{nobody}: GET /health got no answer: Connection refused; start it"):
            await await_server(settings(nobody), claim, None)
    async with claim_of(web_page, "v1") as claim:
        told = f"{web_page}: GET /health answered 404: a web page; this server does not fit rollout.engine penstock"
        with pytest.raises(RolloutError, match=told):
            await await_server(settings(web_page), claim, None)


@pytest.mark.parametrize("keys", [ApiKeys(generation="play"), ApiKeys(generation="play", admin="rule")])
async def test_a_missing_key_is_named_at_once(runner: EngineRunner, keys: ApiKeys) -> None:
    given = "play" if keys.admin else None
    async with serve(runner, keys=keys) as url, claim_of(url, "v1", api_key=given) as claim:
        with pytest.raises(
            RolloutError,
            match=r"answered 401: .* API key is missing or wrong; set PENSTOCK_API_KEY, and PENSTOCK_ADMIN",
        ):
            await await_server(settings(url), claim, None)


@pytest.mark.parametrize(("pipeline", "is_dummy"), [("train", True), ("rollout", False), ("eval", False)])
def test_an_engine_loads_weights_that_no_trainer_sends(tmp_path: Path, pipeline: str, is_dummy: bool) -> None:
    (tmp_path / "config.json").write_text("{}")
    tree: dict[str, Any] = {"pipeline": pipeline, "model": {"path": str(tmp_path)}, "rollout": {"engine": "vllm"}}
    config = Config.model_validate(tree)
    child: Any = SimpleNamespace(run_dir=tmp_path, name="rollout-0")
    words = foreign_server.command(child, config, tmp_path / "socket", None)
    assert words[words.index("--model") + 1] == str(tmp_path)
    assert ("dummy" in words) is ("--hf-overrides" in words) is is_dummy


@pytest.mark.parametrize(
    ("engine", "device", "expected"),
    [("vllm", "cuda", "--enable-sleep-mode"), ("vllm", "cpu", None), ("sglang", "cuda", "--enable-memory-saver")],
)
@pytest.mark.parametrize("in_turns", [False, True])
def test_an_engine_that_takes_turns_can_give_its_memory(
    tmp_path: Path, engine: str, device: str, expected: str | None, in_turns: bool
) -> None:
    (tmp_path / "config.json").write_text("{}")
    words = [f"rollout.engine={engine}", f"model={{path: {tmp_path}, device: {device}}}", "rollout.args=[--own, '1']"]
    config = default_config([*words, *(TURNS if in_turns else [])])
    child: Any = SimpleNamespace(run_dir=tmp_path, runtime_dir=tmp_path, name="rollout-0")
    given = foreign_server.command(child, config, tmp_path / "socket", None)
    assert [word for word in given if word in RELEASING] == ([expected] if in_turns and expected else [])
    assert given[-2:] == ["--own", "1"], "what the user says comes last and wins"


@pytest.mark.parametrize(
    ("engine", "devices", "way", "backend"),
    [
        ("vllm", "0", "memory", "ipc"),
        ("vllm", "0,1", "nccl", "nccl"),
        ("sglang", "0", "memory", None),
        ("sglang", "0,1", None, None),
    ],
)
def test_the_way_of_direct_weights_follows_from_the_devices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str, devices: str, way: str | None, backend: str | None
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", devices)
    (tmp_path / "config.json").write_text("{}")
    model = f"model={{path: {tmp_path}, device: cuda}}"
    config = default_config([f"rollout.engine={engine}", model, "rollout.direct_weights=true"])
    child: Any = SimpleNamespace(run_dir=tmp_path, runtime_dir=tmp_path, name="rollout-0")
    words = foreign_server.command(child, config, 8001, "key")
    option = "--weight-transfer-config"
    assert direct_way(config) == way
    assert words[words.index(option) + 1 :][:1] == [f'{{"backend": "{backend}"}}'] if backend else option not in words
    variables = foreign_server.environment(config, 0)
    assert (variables.get("VLLM_ALLOW_INSECURE_SERIALIZATION") == "1") is (backend == "ipc")


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
async def test_a_server_that_cannot_give_its_memory_is_named_with_the_remedy(kind: Engine) -> None:
    engine = ENGINES[kind](enabled=False)
    await engine.server.start_server()
    session = HttpSession()
    try:
        claim = ServerClaim(connect(kind, engine.url, session, takes_turns=True), "run", "nonce")
        told = f"{engine.url}: cannot give its memory to the trainer, .* start it with {engine.option}, or use another"
        with pytest.raises(RolloutError, match=told):
            await await_server(default_config([f"rollout.urls=[{engine.url}]", *TURNS]), claim, None)
    finally:
        await session.close()
        await engine.server.close()


async def test_an_engine_in_its_sleep_does_not_count_as_busy() -> None:
    """The counts of an engine may be those before it fell asleep."""
    engine = SleepingVllm()
    await engine.server.start_server()
    session = HttpSession()
    client = connect("vllm", engine.url, session, takes_turns=True)
    engine.metrics = "vllm:generation_tokens_total 7\nvllm:num_requests_running 3\n"
    reader = EngineMetrics("rollout-0", default_config([*TURNS, "rollout.engine=vllm"]), client, session)
    await reader._read()
    awake = reader.telemetry()
    await client.release()
    await reader._read()
    asleep = reader.telemetry()
    await session.close()
    await engine.server.close()
    assert (awake.counters["active"], awake.doing) == (3, "generation")
    assert (asleep.counters["active"], asleep.doing) == (0, "")


@pytest.mark.parametrize(
    ("engine", "targets", "expected"),
    [
        ("vllm", "all-linear", "--enable-lora --max-lora-rank 16 --max-loras 8 --max-cpu-loras 8"),
        ("sglang", "all-linear", "--enable-lora --max-lora-rank 12 .* --max-loaded-loras 8 --lora-target-modules all"),
        ("sglang", ["self_attn.v_proj", "q_proj"], "--lora-target-modules q_proj v_proj"),
    ],
)
def test_an_engine_that_the_run_starts_serves_adapters_of_its_own_weights(
    tmp_path: Path, engine: str, targets: Any, expected: str
) -> None:
    (tmp_path / "config.json").write_text("{}")
    tree: dict[str, Any] = {"model": {"path": str(tmp_path)}, "rollout": {"engine": engine}}
    config = Config.model_validate(tree | {"trainer": {"lora": {"rank": 12, "targets": targets}}})
    child: Any = SimpleNamespace(run_dir=tmp_path, name="rollout-0", runtime_dir=tmp_path)
    words = foreign_server.command(child, config, 8001, "key")
    assert re.search(expected, " ".join(words)) and "dummy" not in words and "--hf-overrides" not in words
    assert foreign_server.environment(config, 0)["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] == "1"
    assert config.sends_adapters
    in_turns = Config.model_validate(config.model_dump() | {"scheduler": {"mode": "colocated", "max_staleness": 0}})
    assert in_turns.sends_adapters
    given = set(foreign_server.command(child, in_turns, 8001, "key")) - set(words)
    assert given <= {"--enable-sleep-mode", "--enable-memory-saver", "--enable-weights-cpu-backup"}
    assert ("--enable-weights-cpu-backup" in given) is (engine == "sglang")
    others: list[dict[str, Any]] = [
        {"rollout": {"engine": engine, "urls": ["http://127.0.0.1:1"]}},
        {"model": {"path": "tiny"}},
        {"model": {"path": str(tmp_path), "warm_start": {"steps": 3}}},
        {"trainer": {}},
    ]
    for other in others:
        merged = Config.model_validate(tree | {"trainer": {"lora": {"rank": 12}}} | other)
        assert not merged.sends_adapters and not merged.engine_serves_adapters
        assert "VLLM_ALLOW_RUNTIME_LORA_UPDATING" not in foreign_server.environment(merged, 0)
    assert "--enable-lora" not in foreign_server.command(child, merged, 8001, "key")
