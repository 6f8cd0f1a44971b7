"""SGLang's own light client, and its control surface."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import sglang
from letters import Letters
from published import publish
from sglang.lang.backend.runtime_endpoint import RuntimeEndpoint
from tiny_policy import Held, make_engine, make_request, reference_model, run, until, weights

from penstock.rollout.request import SamplingParams
from penstock.rollout.runner import EngineRunner
from penstock.rollout.session import HttpSession, RolloutError
from penstock.rollout.sglang_client import SGLangClient
from penstock.types import UpdateMode


@pytest.fixture
async def session(url: str) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(total=120)) as session:
        yield session


def greedy(prompt: str, count: int) -> str:
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    request = make_request("a", Letters().encode(prompt), max_new_tokens=count, params=params)
    return Letters().decode(run(make_engine(), request)["a"][0].token_ids)


@sglang.function
def spell(s: Any, word: str) -> None:
    s += word
    s += sglang.gen("more", max_tokens=6, temperature=0, ignore_eos=True)


@sglang.function
def choose(s: Any, word: str) -> None:
    s += word
    s += sglang.select("choice", choices=["AB", "CD", "EF"])


async def test_the_light_client_generates(url: str) -> None:
    def play() -> str:
        return str(spell.run(word="HELLO", backend=RuntimeEndpoint(url))["more"])

    assert await asyncio.to_thread(play) == greedy("HELLO", 6)


async def test_the_light_client_streams(url: str) -> None:
    def play() -> list[str]:
        state = spell.run(word="HELLO", backend=RuntimeEndpoint(url), stream=True)
        return list(state.text_iter("more"))

    pieces = await asyncio.to_thread(play)
    assert "".join(pieces) == greedy("HELLO", 6) and len(pieces) > 1


async def test_the_light_client_selects_the_likeliest_choice(url: str, runner: EngineRunner) -> None:
    def play() -> str:
        return str(choose.run(word="HELLO", backend=RuntimeEndpoint(url))["choice"])

    def mean(choice: str) -> float:
        parts = make_engine().scoring(Letters().encode("HELLO" + choice))
        scores = [token.logprob for part in parts for token in part]
        return sum(scores[-len(choice) :]) / len(choice)

    assert await asyncio.to_thread(play) == max(["AB", "CD", "EF"], key=mean)


async def test_the_light_client_flushes_and_asks_who_serves(url: str) -> None:
    def play() -> dict[str, Any]:
        endpoint = RuntimeEndpoint(url)
        endpoint.flush_cache()
        return endpoint.model_info | endpoint.get_server_info()

    info = await asyncio.to_thread(play)
    assert (info["model_path"], info["weight_version"], info["max_running_requests"]) == ("tiny", "0", 4)
    assert info["dp_size"] == info["tp_size"] == 1


def body(count: int, **more: Any) -> dict[str, Any]:
    return {"text": "HELLO", "sampling_params": {"max_new_tokens": count, "temperature": 0, "ignore_eos": True}, **more}


async def post(session: aiohttp.ClientSession, path: str, given: object = None) -> tuple[int, Any]:
    async with session.post(path, json={} if given is None else given) as response:
        return response.status, await response.json(content_type=None)


async def test_an_abort_pause_ends_what_runs_and_holds_what_comes(
    session: aiohttp.ClientSession, runner: EngineRunner, held: Held
) -> None:
    running = asyncio.create_task(post(session, "/generate", body(80)))
    await until(lambda: runner.engine.num_active)
    assert (await post(session, "/pause_generation"))[1]["status"] == "ok"
    assert (await running)[1]["meta_info"]["finish_reason"]["type"] == "abort"
    held.let_go.set()
    waiting = asyncio.create_task(post(session, "/generate", body(4)))
    await until(lambda: runner.engine.num_waiting)
    async with session.get("/health_generate") as probe:
        assert probe.status == 200
    assert (await post(session, "/pause_generation"))[1]["status"] == "ok"
    assert (await waiting)[1]["output_ids"] == []
    waiting = asyncio.create_task(post(session, "/generate", body(4)))
    await until(lambda: runner.engine.num_waiting)
    await post(session, "/continue_generation")
    assert (await waiting)[1]["text"] == greedy("HELLO", 4)


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_a_pause_without_new_weights_changes_nothing(
    session: aiohttp.ClientSession, runner: EngineRunner, held: Held, mode: str
) -> None:
    running = asyncio.create_task(post(session, "/generate", body(60, return_logprob=True)))
    await until(lambda: runner.engine.num_generated_tokens > 5)
    await post(session, "/pause_generation", {"mode": mode})
    paused_at = runner.engine.num_generated_tokens
    assert 5 < paused_at < 60 and runner.engine.num_active == (mode == "in_place")
    await post(session, "/continue_generation")
    held.let_go.set()
    assert (await running)[1]["text"] == greedy("HELLO", 60)


async def test_retracted_answers_are_computed_again_with_the_new_weights(
    session: aiohttp.ClientSession, runner: EngineRunner, held: Held
) -> None:
    running = asyncio.create_task(post(session, "/generate", body(80, return_logprob=True)))
    await until(lambda: runner.engine.num_generated_tokens > 5)
    await post(session, "/pause_generation", {"mode": "retract"})
    await runner.load_weights(weights(3), 7)
    await post(session, "/continue_generation")
    held.let_go.set()
    _, reply = await running
    old, new = reply["meta_info"]["weight_versions"]
    assert (old["version"], new["version"], new["end"]) == ("0", "7", 80)
    ids = reply["output_ids"]
    prompt = Letters().encode("HELLO") + ids[: new["start"]]
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    alone = make_request("a", prompt, max_new_tokens=80 - new["start"], params=params)
    assert ids[new["start"] :] == run(make_engine(3), alone)["a"][0].token_ids


async def test_a_flush_waits_and_refuses_while_anything_runs(
    session: aiohttp.ClientSession, runner: EngineRunner, held: Held
) -> None:
    running = asyncio.create_task(post(session, "/generate", body(60)))
    await until(lambda: runner.engine.num_active)
    await post(session, "/pause_generation", {"mode": "in_place"})
    async with session.post("/flush_cache") as response:
        assert (response.status, "1 samples run" in await response.text()) == (400, True)
    await post(session, "/continue_generation")
    held.let_go.set()
    async with session.get("/flush_cache?timeout=60") as response:
        assert (response.status, await response.text()) == (200, "Cache flushed.\n")
    await running
    async with session.get("/flush_cache?timeout=soon") as response:
        assert response.status == 400


async def test_weights_can_be_looked_at(session: aiohttp.ClientSession) -> None:
    status, rows = await post(session, "/get_weights_by_name", {"name": "model.norm.weight", "truncate_size": 3})
    assert (status, rows) == (200, [1.0, 1.0, 1.0])
    status, reply = await post(session, "/get_weights_by_name", {"name": "nothing"})
    assert (status, reply["error"]["message"]) == (400, "the model has no parameter 'nothing'")


async def test_weights_come_from_a_model_directory(
    session: aiohttp.ClientSession, runner: EngineRunner, tmp_path: Path
) -> None:
    reference_model(3).save_pretrained(tmp_path)
    status, reply = await post(session, "/update_weights_from_disk", {"model_path": str(tmp_path)})
    assert (status, reply["success"], runner.policy_version) == (200, True, 1)
    _, answered = await post(session, "/generate", body(4))
    params = SamplingParams(temperature=0.0, ignore_eos=True)
    request = make_request("a", Letters().encode("HELLO"), max_new_tokens=4, params=params)
    assert answered["output_ids"] == run(make_engine(3), request)["a"][0].token_ids
    given = {"model_path": str(tmp_path), "weight_version": "9"}
    assert (await post(session, "/update_weights_from_disk", given))[0] == 200
    async with session.get("/get_model_info") as response:
        told = await response.json()
    assert (told["weight_version"], told["model_path"]) == ("9", str(tmp_path))


async def test_a_bad_update_leaves_the_old_weights(
    session: aiohttp.ClientSession, runner: EngineRunner, tmp_path: Path
) -> None:
    before = (await post(session, "/generate", body(4)))[1]["output_ids"]
    reference_model(3).save_pretrained(tmp_path)
    for given, message in [
        ({"model_path": str(tmp_path / "nowhere")}, "does not exist"),
        ({"model_path": str(tmp_path), "weight_version": "0"}, "not newer than the served 0"),
    ]:
        status, reply = await post(session, "/update_weights_from_disk", given)
        assert (status, reply["success"], message in reply["message"]) == (400, False, True), reply
    given = {"model_path": str(tmp_path), "weight_version": "step_7"}
    status, reply = await post(session, "/update_weights_from_disk", given)
    assert (status, "whole number" in reply["message"]) == (400, True)
    for given, message in (
        ({"serialized_named_tensors": ["gASV"], "flush_cache": True}, "the pickle cannot be read"),
        ({"flush_cache": True}, "give one of `serialized_named_tensors` and `handle`; for the second one, send a JSON"),
    ):
        status, reply = await post(session, "/update_weights_from_tensor", given)
        assert (status, reply["success"], reply["message"].startswith(message)) == (400, False, True), reply
    assert runner.policy_version == 0
    assert (await post(session, "/generate", body(4)))[1]["output_ids"] == before


async def test_weights_come_by_handle_inside_a_bracket_or_without(
    session: aiohttp.ClientSession, runner: EngineRunner, tmp_path: Path
) -> None:
    for version, bracket in ((1, False), (2, True)):
        handle = publish(weights(version), directory=tmp_path, policy_version=version)
        if bracket:
            assert (await post(session, "/begin_weight_update"))[1]["success"]
            assert (await post(session, "/begin_weight_update"))[0] == 400
        given = {"handle": dataclasses.asdict(handle), "flush_cache": True}
        assert (await post(session, "/update_weights_from_tensor", given))[1]["success"]
        assert runner.policy_version == 1
    assert (await post(session, "/end_weight_update"))[0] == 200
    assert runner.policy_version == 2
    assert (await post(session, "/end_weight_update"))[0] == 400
    gone = dataclasses.asdict(handle) | {"path": str(tmp_path / "gone"), "policy_version": 3}
    assert (await post(session, "/begin_weight_update"))[0] == 200
    assert (await post(session, "/update_weights_from_tensor", {"handle": gone}))[0] == 400
    status, reply = await post(session, "/end_weight_update")
    assert (status, "part of it was refused" in reply["message"]) == (400, True)


@pytest.mark.parametrize("mode", ["in_place", "retract", "drain"])
async def test_our_own_client_of_it_updates_the_weights(
    url: str, runner: EngineRunner, tmp_path: Path, mode: UpdateMode
) -> None:
    calls = HttpSession()
    client = SGLangClient(url, calls, update_mode=mode)
    await client.check()
    assert await client.served_version() == 0
    handle = publish(weights(1), directory=tmp_path, policy_version=1)
    await client.begin_weights(handle)
    await client.commit_weights(handle)
    assert await client.served_version() == runner.policy_version == 1
    assert not runner.engine.paused
    gone = dataclasses.replace(handle, path=str(tmp_path / "gone"))
    with pytest.raises(RolloutError, match="has -1 bytes"):
        await client.begin_weights(gone)
    other = publish(weights(2), directory=tmp_path / "other", policy_version=1)
    with pytest.raises(RolloutError, match="is not newer than the served 1"):
        await client.commit_weights(other)
    assert not runner.engine.paused
    await client.forget_weights()
    with pytest.raises(RolloutError, match="which no trainer published"):
        await client.served_version()
    await client.commit_weights(other)
    assert await client.served_version() == 1
    await calls.close()
