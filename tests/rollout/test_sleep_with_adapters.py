"""Engines of others that serve adapters give the device to the trainer, and keep the weights to which they belong."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

import pytest
from sleeping_engines import (
    ENGINES,
    NOTHING,
    SleepingEngine,
    SleepingSGLang,
    SleepingVllm,
    answered,
    ask,
    lose,
    rarely,
    started,
)

from penstock.deadline import Stalled
from penstock.rollout import servers as servers_module
from penstock.rollout.client import ASLEEP, ServerClient
from penstock.rollout.servers import Engine, Servers, connect
from penstock.rollout.session import HttpSession, RolloutError
from penstock.samples import Segment
from penstock.types import AdaptersForm, WeightsHandle

BASE = "the weights at model.path"


def published(folder: Path, version: int) -> WeightsHandle:
    """Adapters in a file, as a trainer publishes them."""
    path = folder / f"v{version}" / "adapter_model.safetensors"
    path.parent.mkdir(exist_ok=True)
    path.write_text(f"adapters {version}")
    form = AdaptersForm(base=None, rank=2, alpha=4, targets=("w",))
    num_bytes = path.stat().st_size
    return WeightsHandle(policy_version=version, path=str(path), num_bytes=num_bytes, fingerprint="none", adapters=form)


def restart(engine: SleepingEngine) -> None:
    """Start the engine again. It loads the weights by itself."""
    engine.restart()
    engine.weights = BASE


@pytest.fixture(params=["vllm", "sglang"])
def kind(request: pytest.FixtureRequest) -> Engine:
    found: Engine = request.param
    return found


@pytest.fixture
async def engine(kind: Engine) -> AsyncIterator[SleepingEngine]:
    engine = ENGINES[kind]()
    engine.weights = BASE
    if isinstance(engine, SleepingSGLang):
        engine.backs_up = True
    async with started(engine):
        yield engine


@pytest.fixture
async def client(engine: SleepingEngine, kind: Engine) -> AsyncIterator[ServerClient]:
    session = HttpSession()
    yield connect(kind, engine.url, session, takes_turns=True, serves_adapters=True)
    await session.close()


async def update(client: ServerClient, handle: WeightsHandle) -> None:
    await client.begin_weights(handle)
    await client.commit_weights(handle)
    await client.resume()


async def test_the_calls_of_a_turn_in_their_order(engine: SleepingEngine, client: ServerClient, tmp_path: Path) -> None:
    await client.check()
    engine.calls = []
    await client.release()
    assert (engine.released, engine.label) == (set(engine.memory), ASLEEP)
    given, engine.calls = engine.calls, []
    await update(client, published(tmp_path, 3))
    if isinstance(engine, SleepingVllm):
        assert given == ["/pause?mode=abort", "/update_weight_version asleep", "/sleep?level=1&mode=abort"]
        assert engine.calls == [
            "/wake_up?tags=weights",
            "/v1/load_lora_adapter policy-3",
            "/update_weight_version 3",
            "/wake_up?tags=kv_cache",
        ]
    else:
        assert given[-1] == "/release_memory_occupation"
        assert engine.calls == [
            "/resume_memory_occupation ['weights']",
            "/load_lora_adapter policy-3",
            "/update_weight_version 3",
            "/resume_memory_occupation ['kv_cache', 'cuda_graph']",
            "/continue_generation",
        ]
    assert (engine.weights, engine.released, engine.paused, engine.death) == (BASE, set(), False, "")
    assert await client.served_version() == 3


async def test_each_turn_serves_new_adapters_of_the_same_weights_and_unloads_old_ones(
    engine: SleepingEngine, client: ServerClient, tmp_path: Path
) -> None:
    for version in range(1, 12):
        await client.release()
        assert await ask(client) == NOTHING
        await update(client, published(tmp_path, version))
        segment = await answered(engine, asyncio.create_task(ask(client)))
        assert {span.policy_version for span in segment.spans} == {version}
        assert list(engine.adapters) == [f"policy-{each}" for each in (version - 1, version) if each]
    assert (engine.weights, engine.death) == (BASE, "")


@pytest.mark.parametrize(
    "failing", ["/wake_up", "/resume_memory", "/v1/load", "/load", "/update_weight", "a lost file"]
)
async def test_a_failed_update_leaves_it_asleep_and_the_next_one_wakes_it(
    engine: SleepingEngine, client: ServerClient, tmp_path: Path, failing: str
) -> None:
    for version in (1, 2):
        await client.release()
        await update(client, published(tmp_path, version))
    await client.release()
    handle, failures = published(tmp_path, 3), iter([True])
    if failing == "a lost file":
        lose(handle)
    engine.failing = lambda path: path.startswith(failing) and next(failures, False)
    with suppress(RolloutError):  # a call may belong to the other engine
        await client.commit_weights(handle)
    if engine.label == ASLEEP:
        assert engine.released == set(engine.memory)
        await update(client, published(tmp_path, 1))  # of the checkpoint to which the run goes back
    assert engine.label in ("1", "3") and f"policy-{engine.label}" in engine.adapters
    assert not (engine.death or engine.released or engine.paused) and engine.weights == BASE


async def mended(servers: Servers, handle: WeightsHandle) -> None:
    await servers.release()
    await servers.update_weights(handle)
    await servers.resume()


@pytest.mark.parametrize("seed", range(6))
async def test_no_token_has_another_version_than_its_adapters(
    engine: SleepingEngine, kind: Engine, tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Turns with random failures of calls, restarts and lost files, beside requests of another process."""
    for name in ("RETRY_S", "POLL_S", "RECOVERY_S"):
        monkeypatch.setattr(servers_module, name, 0.0)
    chance, version, told = random.Random(seed), 0, list[tuple[str, str]]()
    servers, requests = (Servers([engine.url], engine=kind, takes_turns=True, serves_adapters=True) for _ in range(2))
    answers, seen = list[asyncio.Task[Segment]](), engine.generate

    async def generate(max_tokens: int, adapter: str | None = None) -> tuple[list[tuple[str, str]], str]:
        found = await seen(max_tokens, adapter)
        told.extend(found[0])
        return found

    engine.generate = generate  # type: ignore[method-assign]
    try:
        for _ in range(40):
            engine.failing = rarely(chance)
            action = chance.choice(["turn", "turn", "step", "step", "ask", "restart"])
            if action == "ask":
                answers.append(asyncio.create_task(ask(requests, len(answers) + 1, 6)))
            elif action == "restart":
                restart(engine)
                with suppress(RolloutError, Stalled):
                    await servers.bring_up(engine.url)
            elif action == "turn":
                version += 1
                handle = published(tmp_path, version)
                with suppress(RolloutError, Stalled):
                    await servers.release()
                    if chance.random() < 0.2:
                        lose(handle)
                    await servers.update_weights(handle)
                    await servers.resume()
            for _ in range(5):
                engine.step()
                await asyncio.sleep(0)
            if engine.death:
                assert kind == "sglang", engine.death  # it survives no second failure while the first is mended
                restart(engine)
        engine.failing = lambda path: False
        try:
            await mended(servers, published(tmp_path, version + 1))
        except RolloutError:
            assert kind == "sglang" and engine.death  # of two failures in the last turn
            restart(engine)
            await servers.bring_up(engine.url)
            await mended(servers, published(tmp_path, version + 1))
        last = await answered(engine, asyncio.create_task(ask(servers)))
        assert {span.policy_version for span in last.spans} == {version + 1}
    finally:
        for answer in answers:
            answer.cancel()
        await asyncio.gather(*answers, return_exceptions=True)
        await asyncio.gather(servers.close(), requests.close())
    assert told and all(text == f"adapters {name.removeprefix('policy-')} on {BASE}" for name, text in told)
