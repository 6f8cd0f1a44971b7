"""Engines of others give the device to the trainer: the calls in their order, and no token of other weights than its
label says, whatever fails."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import Any

import pytest
from sleeping_engines import DUMMY, ENGINES, NOTHING, SleepingEngine, SleepingVllm, answered, ask, lose, rarely, started
from tiny_policy import until

from penstock.deadline import Stalled
from penstock.rollout import servers as servers_module
from penstock.rollout.client import ASLEEP, ServerClient
from penstock.rollout.servers import Engine, Servers, connect
from penstock.rollout.session import HttpSession, RolloutError
from penstock.samples import Segment
from penstock.types import WeightsHandle


def contents(version: int) -> str:
    return f"the weights of version {version}"


def published(folder: Path, version: int) -> WeightsHandle:
    """Weights in a file, as a trainer publishes them."""
    path = folder / f"v{version}" / "model.safetensors"
    path.parent.mkdir(exist_ok=True)
    path.write_text(contents(version))
    return WeightsHandle(policy_version=version, path=str(path), num_bytes=path.stat().st_size, fingerprint="none")


@pytest.fixture(params=["vllm", "sglang"])
async def engine(request: pytest.FixtureRequest) -> AsyncIterator[SleepingEngine]:
    async with started(ENGINES[request.param]()) as engine:
        yield engine


@pytest.fixture
def kind(engine: SleepingEngine) -> Engine:
    return "vllm" if isinstance(engine, SleepingVllm) else "sglang"


@pytest.fixture
async def client(engine: SleepingEngine, kind: Engine) -> AsyncIterator[ServerClient]:
    session = HttpSession()
    yield connect(kind, engine.url, session, takes_turns=True)
    await session.close()


@pytest.fixture
async def servers(engine: SleepingEngine, kind: Engine) -> AsyncIterator[Servers]:
    servers = Servers([engine.url], engine=kind, takes_turns=True)
    yield servers
    await servers.close()


async def test_the_calls_of_a_turn_in_their_order(
    engine: SleepingEngine, client: ServerClient, kind: Engine, tmp_path: Path
) -> None:
    handle = published(tmp_path, 3)
    await client.check()
    await client.release()
    assert (engine.released, engine.label) == (set(engine.memory), ASLEEP)
    given, engine.calls = engine.calls, []
    await client.begin_weights(handle)
    await client.commit_weights(handle)
    await client.resume()
    if kind == "vllm":
        assert given == ["/pause?mode=abort", "/update_weight_version asleep", "/sleep?level=2&mode=abort"]
        assert engine.calls == [
            "/wake_up?tags=weights",
            "/collective_rpc update_config",
            "/collective_rpc reload_weights",
            "/update_weight_version 3",
            "/wake_up?tags=kv_cache",
        ]
    else:
        assert given == [
            "/pause_generation abort",
            "/flush_cache?timeout=30",
            "/update_weight_version asleep",
            "/release_memory_occupation",
        ]
        assert engine.calls == [
            "/resume_memory_occupation ['weights']",
            "/update_weights_from_disk 3 False",
            "/resume_memory_occupation ['kv_cache', 'cuda_graph']",
            "/continue_generation",
        ]
    assert (engine.weights, engine.released, engine.paused) == (contents(3), set(), False)
    assert await client.served_version() == 3


async def test_running_requests_end_with_what_they_have_and_later_ones_at_once(
    engine: SleepingEngine, client: ServerClient, tmp_path: Path
) -> None:
    await client.commit_weights(published(tmp_path, 1))
    running = asyncio.create_task(ask(client, max_tokens=9))
    await until(lambda: engine.running)
    engine.step()
    engine.step()
    await client.release()
    part = await running
    assert (part.token_ids, part.finish_reason, part.spans[-1].policy_version) == ([5, 5], "abort", 1)
    async with asyncio.timeout(60):
        assert await ask(client) == NOTHING
    await client.commit_weights(published(tmp_path, 2))
    whole = await answered(engine, asyncio.create_task(ask(client)))
    assert {span.policy_version for span in whole.spans} == {2} and whole.finish_reason == "length"
    assert not engine.death


async def test_a_request_that_comes_between_the_calls_gets_no_token_of_discarded_weights(
    engine: SleepingEngine, client: ServerClient, kind: Engine, tmp_path: Path
) -> None:
    client.takes_turns = False  # so it asks without looking, as a request that is already on its way
    await client.commit_weights(published(tmp_path, 1))
    late: list[asyncio.Task[Segment]] = []

    def coming(path: str) -> bool:
        if path in ("/sleep", "/flush_cache") and not late:
            late.append(asyncio.create_task(ask(client)))
        return False

    engine.failing = coming
    await client.release()
    await client.commit_weights(published(tmp_path, 2))
    (call,) = late
    segment = await answered(engine, call)
    assert segment == NOTHING or {span.policy_version for span in segment.spans} == {2}
    assert not engine.death


async def test_an_engine_that_is_asleep_is_alive_and_serves_no_version(
    engine: SleepingEngine, client: ServerClient
) -> None:
    await client.release()
    await client.release()
    await client.alive()
    await client.forget_weights()
    assert await client.is_asleep()
    with pytest.raises(RolloutError, match="label 'asleep'"):
        await client.served_version()
    with pytest.raises(RolloutError, match="is asleep: it has given its memory away"):
        await client.resume()
    assert not engine.death


@pytest.mark.parametrize("failing", ["/wake_up", "/resume_memory", "/collective_rpc", "/update_weight", "a lost file"])
async def test_a_failed_update_leaves_it_asleep_and_the_next_one_wakes_it(
    engine: SleepingEngine, client: ServerClient, tmp_path: Path, failing: str
) -> None:
    await client.commit_weights(published(tmp_path, 1))
    await client.release()
    handle, failures = published(tmp_path, 2), iter([True])
    if failing == "a lost file":
        lose(handle)
    engine.failing = lambda path: path.startswith(failing) and next(failures, False)
    with suppress(RolloutError):  # a call may belong to the other engine
        await client.commit_weights(handle)
    if engine.label == ASLEEP:
        assert engine.released == set(engine.memory)
        await client.commit_weights(published(tmp_path, 1))  # the file of the older weights still exists
    assert await client.served_version() in (1, 2)
    assert engine.weights == contents(int(engine.label))
    assert not (engine.death or engine.released or engine.paused)


async def test_the_next_controller_finds_it_asleep(engine: SleepingEngine, kind: Engine, tmp_path: Path) -> None:
    first, second = (Servers([engine.url], engine=kind, takes_turns=True) for _ in range(2))
    await first.update_weights(published(tmp_path, 1))
    await first.release()
    await first.close()
    await second.release()
    await second.update_weights(published(tmp_path, 2))
    await second.resume()
    await second.close()
    assert (engine.label, engine.released, engine.paused, engine.death) == ("2", set(), False, "")


async def test_a_server_killed_in_its_sleep_stays_asleep_until_the_swap(
    engine: SleepingEngine, servers: Servers, tmp_path: Path
) -> None:
    await servers.update_weights(published(tmp_path, 1))
    await servers.release()
    engine.restart()
    await servers.bring_up(engine.url)
    assert engine.released == set(engine.memory), "the trainer has the device"
    await servers.update_weights(published(tmp_path, 2))
    await servers.resume()
    assert (engine.label, engine.weights, engine.released) == ("2", contents(2), set())


async def test_a_server_that_is_back_in_the_midst_of_a_swap_is_woken(
    engine: SleepingEngine, client: ServerClient, servers: Servers, tmp_path: Path
) -> None:
    """The update finds the new engine before its process has put it to sleep."""
    await servers.update_weights(published(tmp_path, 1))
    await servers.release()
    engine.restart()
    await servers.update_weights(published(tmp_path, 2))
    await client.release()
    await servers.bring_up(engine.url)
    await servers.resume()
    assert (engine.label, engine.weights, engine.released) == ("2", contents(2), set())
    await servers.release()
    assert engine.released == set(engine.memory)


async def test_a_server_that_is_back_after_a_swap_gives_its_memory_for_the_next_step(
    engine: SleepingEngine, client: ServerClient, servers: Servers, tmp_path: Path
) -> None:
    await servers.update_weights(published(tmp_path, 1))
    await client.release()
    await servers.resume()  # it is asleep, which is no error: its process will bring it back
    await servers.bring_up(engine.url)
    assert (engine.label, engine.released) == ("1", set())
    await servers.release()
    assert engine.released == set(engine.memory)


async def test_a_server_that_restarts_while_others_generate_is_woken(
    engine: SleepingEngine, client: ServerClient, servers: Servers, tmp_path: Path
) -> None:
    await servers.update_weights(published(tmp_path, 1))
    engine.restart()
    await client.release()  # its process does so once it is ready
    await servers.bring_up(engine.url)
    assert (engine.label, engine.weights, engine.released) == ("1", contents(1), set())
    assert not engine.death


async def test_memory_is_not_released_while_a_server_is_brought_up(
    engine: SleepingEngine, client: ServerClient, servers: Servers, kind: Engine, tmp_path: Path
) -> None:
    await servers.update_weights(published(tmp_path, 1))
    engine.restart()
    await client.release()
    loading, loaded, answer = asyncio.Event(), asyncio.Event(), engine.answer

    async def held(request: Any, body: Any) -> Any:
        if request.path == ("/collective_rpc" if kind == "vllm" else "/update_weights_from_disk"):
            loading.set()
            await loaded.wait()
        return await answer(request, body)

    engine.answer = held  # type: ignore[method-assign]
    bringing = asyncio.create_task(servers.bring_up(engine.url))
    await loading.wait()
    releasing = asyncio.create_task(servers.release())
    await asyncio.sleep(0)
    loaded.set()
    await asyncio.gather(bringing, releasing)
    assert not engine.death and engine.released == set(engine.memory)


async def test_a_server_that_was_away_for_long_gives_its_memory_again(kind: Engine, tmp_path: Path) -> None:
    async with AsyncExitStack() as stack:
        both = [await stack.enter_async_context(started(ENGINES[kind]())) for _ in range(2)]
        servers = Servers([each.url for each in both], engine=kind, takes_turns=True)
        stack.push_async_callback(servers.close)
        for version in range(1, 7):
            await servers.release()
            if version > 5:
                assert all(each.released == set(each.memory) for each in both)
            if version == 2:
                both[1].failing = lambda path: True  # type: ignore[method-assign]
            if version == 4:
                both[1].failing = lambda path: False  # type: ignore[method-assign]
                both[1].restart()
            await servers.update_weights(published(tmp_path, version))
            await servers.resume()


async def test_a_server_without_the_option_is_refused(engine: SleepingEngine, client: ServerClient) -> None:
    engine.enabled = False
    message = f"{engine.url}: cannot give its memory to the trainer, .* start it with {engine.option}"
    with pytest.raises(RolloutError, match=message):
        await client.check()
    client.takes_turns = False
    await client.check()


async def test_vllm_on_a_cpu_has_no_sleep_mode_and_needs_none() -> None:
    async with started(SleepingVllm()) as engine:
        engine.enabled, engine.device = False, "cpu"
        session = HttpSession()
        await connect("vllm", engine.url, session, takes_turns=True).check()
        await session.close()


@pytest.mark.parametrize("seed", range(12))
async def test_no_token_has_another_label_than_its_weights(
    engine: SleepingEngine,
    kind: Engine,
    servers: Servers,
    tmp_path: Path,
    seed: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Turns with random failures of calls, restarts and lost files, beside requests of another process."""
    monkeypatch.setattr(servers_module, "RETRY_S", 0.0)
    monkeypatch.setattr(servers_module, "POLL_S", 0.0)
    monkeypatch.setattr(servers_module, "RECOVERY_S", 0.0)
    chance, asked = random.Random(seed), 0
    requests = Servers([engine.url], engine=kind, takes_turns=True)
    seen = engine.generate

    async def generate(max_tokens: int, adapter: str | None = None) -> tuple[list[tuple[str, str]], str]:
        found = await seen(max_tokens, adapter)
        told.append(found[0])
        return found

    told, deaths = list[list[tuple[str, str]]](), list[str]()
    engine.generate = generate  # type: ignore[method-assign]
    version, answers = 0, list[asyncio.Task[Segment]]()
    try:
        for _ in range(40):
            engine.failing = rarely(chance)
            action = chance.choice(["turn", "turn", "step", "step", "ask", "restart"])
            if action == "ask":
                asked += 1
                answers.append(asyncio.create_task(ask(requests, asked, 6)))
            elif action == "restart":
                engine.restart()
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
                deaths.append(engine.death)
                engine.restart()
        engine.failing = lambda path: False
        await servers.release()
        if engine.death:
            deaths.append(engine.death)
            engine.restart()
        await servers.update_weights(published(tmp_path, version + 1))
        await servers.resume()
        last = await answered(engine, asyncio.create_task(ask(servers)))
        assert {span.policy_version for span in last.spans} == {version + 1}
    finally:
        for answer in answers:
            answer.cancel()
        await asyncio.gather(*answers, return_exceptions=True)
        await requests.close()
    assert kind == "sglang" or not deaths  # SGLang survives no second failure while the first is mended
    for label, weights in (each for tokens in told for each in tokens):
        assert not label.isdecimal() or weights == contents(int(label))
        assert label.isdecimal() or weights == DUMMY or label == "unknown"
