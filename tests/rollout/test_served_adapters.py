"""Policy versions as adapters of vLLM and SGLang. Their stand-ins check every message."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp import web
from aiohttp.test_utils import TestServer

from penstock.model.low_rank import names_of
from penstock.rollout.client import ServerClient
from penstock.rollout.served_adapters import HELD
from penstock.rollout.servers import Engine, Servers, connect
from penstock.rollout.session import HttpSession, RolloutError
from penstock.samples import Segment, VersionSpan
from penstock.types import AdaptersForm, EpisodeId, Sampling, SegmentGrant, UpdateMode, WeightsHandle
from penstock.weights.publication import WeightsPublisher
from penstock.weights.shared_memory import layout

GRANT = SegmentGrant(episode=EpisodeId("t", 0, 0, 0), max_tokens=3)


@dataclass
class StandIn:
    """An engine with adapters: its state, and what both protocols do with it."""

    label: str = "default"
    adapters: dict[str, str] = field(default_factory=dict)
    """Path by name."""
    running: dict[asyncio.Future[None], str] = field(default_factory=dict)
    """The adapter of each running request. It ends when its future is done; cancelled, it is aborted."""
    paused: bool = False
    lingering: bool = False
    """Whether requests run until they are aborted or ended."""
    messages: list[str] = field(default_factory=list)
    computed_with: str | None = None
    """The adapter that a reply names, if not that of the request."""

    def load(self, body: dict[str, Any]) -> str | None:
        """Load an adapter as the engines do, from a directory in peft's format. Return an error, or None."""
        assert body.keys() == {"lora_name", "lora_path"}, body
        name, folder = body["lora_name"], Path(body["lora_path"])
        self.messages.append(f"load {name}")
        if name in self.adapters:
            return f"the adapter {name} is loaded already"
        if len(self.adapters) == HELD:
            return "there is no room for another adapter"
        config = json.loads((folder / "adapter_config.json").read_text())
        if not (folder / "adapter_model.safetensors").is_file() or config["peft_type"] != "LORA":
            return "no adapter"
        self.adapters[name] = str(folder)
        return None

    def unload(self, body: dict[str, Any]) -> str | None:
        assert body.keys() == {"lora_name"}, body
        name = body["lora_name"]
        self.messages.append(f"unload {name}")
        if name in self.running.values():
            return f"the adapter {name} is in use"
        if self.adapters.pop(name, None) is None:
            return f"there is no adapter {name}"
        return None

    def pause(self) -> None:
        self.messages.append("pause")
        self.paused = True
        for request in self.running:
            request.cancel()
        self.running.clear()

    def resume(self) -> None:
        self.messages.append("resume")
        self.paused = False

    def name(self, label: str) -> None:
        self.messages.append(f"label {label}")
        self.label = label

    async def compute(self, adapter: str) -> str:
        """Return the finish reason."""
        assert adapter in self.adapters and not self.paused
        request = asyncio.get_running_loop().create_future()
        self.running[request] = adapter
        if not self.lingering:
            request.set_result(None)
        try:
            await request
        except asyncio.CancelledError:
            return "abort"
        finally:
            self.running.pop(request, None)
        return "length"

    def end(self) -> None:
        for request in list(self.running):
            request.set_result(None)


def vllm(stand_in: StandIn) -> web.Application:
    app = web.Application()

    def routes(path: str) -> Any:
        return lambda handler: app.router.add_post(path, handler)

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": each} for each in ("given", *stand_in.adapters)]})

    async def info(_: web.Request) -> web.Response:
        return web.json_response({"weight_version": stand_in.label})

    @routes("/v1/load_lora_adapter")
    async def load(request: web.Request) -> web.Response:
        if not (body := await request.json()):
            return web.json_response({"error": "lora_name is missing"}, status=422)
        error = stand_in.load(body)
        return web.json_response({"error": {"message": error}}, status=400 if error else 200)

    @routes("/v1/unload_lora_adapter")
    async def unload(request: web.Request) -> web.Response:
        error = stand_in.unload(await request.json())
        return web.json_response({"error": {"message": error}}, status=500 if error else 200)

    @routes("/pause")
    async def pause(request: web.Request) -> web.Response:
        assert dict(request.query) == {"mode": "abort"}
        stand_in.pause()
        return web.json_response({})

    @routes("/resume")
    async def resume(_: web.Request) -> web.Response:
        stand_in.resume()
        return web.json_response({})

    @routes("/update_weight_version")
    async def label(request: web.Request) -> web.Response:
        stand_in.name((await request.json())["new_version"])
        return web.json_response({})

    @routes("/inference/v1/generate")
    async def generate(request: web.Request) -> web.Response:
        body = await request.json()
        if not body:
            return web.json_response({"error": "token_ids are missing"}, status=422)
        if "model" not in body or body["model"] not in stand_in.adapters:
            return web.json_response({"error": {"message": "no such model"}}, status=404)
        assert "cache_salt" not in body
        before = stand_in.label
        reason = await stand_in.compute(body["model"])
        labels = [{"version": before, "start": 0, "end": 1}, {"version": stand_in.label, "start": 1, "end": 3}]
        choice = {"index": 0, "finish_reason": reason, "token_ids": [5, 6, 7], "weight_versions": labels}
        choice["logprobs"] = {"content": [{"logprob": -1.0}] * 3}
        return web.json_response({"choices": [choice], "model": stand_in.computed_with or body["model"]})

    app.router.add_get("/v1/models", models)
    app.router.add_get("/weight_info", info)
    return app


def sglang(stand_in: StandIn) -> web.Application:
    app = web.Application()

    def routes(path: str) -> Any:
        return lambda handler: app.router.add_post(path, handler)

    async def models(_: web.Request) -> web.Response:
        return web.json_response({"data": [{"id": each} for each in ("given", *stand_in.adapters)]})

    async def info(_: web.Request) -> web.Response:
        return web.json_response({"weight_version": stand_in.label})

    @routes("/load_lora_adapter")
    async def load(request: web.Request) -> web.Response:
        error = stand_in.load(await request.json())
        body = {"success": error is None, "error_message": error, "loaded_adapters": stand_in.adapters}
        return web.json_response(body, status=400 if error else 200)

    @routes("/unload_lora_adapter")
    async def unload(request: web.Request) -> web.Response:
        error = stand_in.unload(await request.json())
        return web.json_response({"success": error is None, "error_message": error}, status=400 if error else 200)

    @routes("/pause_generation")
    async def pause(request: web.Request) -> web.Response:
        assert await request.json() == {"mode": "abort"}
        stand_in.pause()
        return web.json_response({})

    @routes("/continue_generation")
    async def resume(_: web.Request) -> web.Response:
        stand_in.resume()
        return web.json_response({})

    @routes("/update_weight_version")
    async def label(request: web.Request) -> web.Response:
        body = await request.json()
        assert body["abort_all_requests"] is False
        stand_in.name(body["new_version"])
        return web.json_response({})

    @routes("/generate")
    async def generate(request: web.Request) -> web.Response:
        body = await request.json()
        adapters = body["lora_path"]
        assert isinstance(adapters, list) and len(adapters) == len(body["input_ids"])
        replies = []
        for adapter in adapters:
            reason = await stand_in.compute(adapter)
            kind = {"type": reason, **({"length": 3} if reason == "length" else {"message": "aborted"})}
            scored = [[-1.0, token, None] for token in (5, 6, 7)]
            meta = {"finish_reason": kind, "weight_version": stand_in.label, "output_token_logprobs": scored}
            meta["weight_versions"] = [{"version": stand_in.label, "start": 0, "end": 3}]
            replies.append({"output_ids": [5, 6, 7], "meta_info": meta})
        return web.json_response(replies)

    app.router.add_get("/v1/models", models)
    app.router.add_get("/model_info", info)
    return app


PROTOCOLS = {"vllm": vllm, "sglang": sglang}


@pytest.fixture
def stand_in() -> StandIn:
    return StandIn()


@pytest.fixture(params=PROTOCOLS)
async def server(request: pytest.FixtureRequest, stand_in: StandIn) -> AsyncIterator[tuple[Engine, str]]:
    """Its protocol and URL."""
    async with TestServer(PROTOCOLS[request.param](stand_in)) as served:
        yield request.param, str(served.make_url("")).rstrip("/")


@pytest.fixture
async def session() -> AsyncIterator[HttpSession]:
    session = HttpSession(timeout_s=60.0)
    yield session
    await session.close()


def client_of(server: tuple[Engine, str], session: HttpSession, mode: UpdateMode) -> ServerClient:
    return connect(*server, session, mode, serves_adapters=True)


class Trainer:
    """Publishes adapters of weights that servers load by themselves."""

    def __init__(self, directory: Path) -> None:
        self.publisher = WeightsPublisher(directory)

    def publish(self, version: int) -> WeightsHandle:
        named = dict(zip(names_of("q.weight"), (torch.randn(2, 4), torch.randn(3, 2)), strict=True))
        form = AdaptersForm(base=None, rank=2, alpha=4, targets=("q.weight",))
        with self.publisher.open(layout(named), version, adapters=True) as opened:
            (opened.folder / "adapter_config.json").write_text('{"peft_type": "LORA", "r": 2, "lora_alpha": 4}')
            return opened.write_whole(named.items(), version, adapters=form)


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    return Trainer(tmp_path)


async def update(client: ServerClient, handle: WeightsHandle) -> None:
    await client.begin_weights(handle)
    await client.commit_weights(handle)


async def generate(client: ServerClient) -> Segment:
    (segment,) = await client.generate([1, 2], [GRANT], Sampling(), [0])
    return segment


async def until_runs(stand_in: StandIn, number: int) -> None:
    async with asyncio.timeout(60):
        while len(stand_in.running) < number:  # noqa: ASYNC110
            await asyncio.sleep(0)


async def test_a_running_answer_keeps_its_adapters_and_new_ones_get_the_newest(
    server: tuple[Engine, str], session: HttpSession, stand_in: StandIn, trainer: Trainer
) -> None:
    client = client_of(server, session, "in_place")
    with pytest.raises(RolloutError, match="label 'default', which no trainer published") as raised:
        await generate(client)
    assert raised.value.status == 503
    await update(client, trainer.publish(0))
    assert await client.served_version() == 0
    stand_in.lingering = True
    old = asyncio.create_task(generate(client))
    await until_runs(stand_in, 1)
    handle = trainer.publish(1)
    await client.begin_weights(handle)
    assert await client.served_version() == 0, "it is only staged"
    await client.commit_weights(handle)
    new = asyncio.create_task(generate(client))
    await until_runs(stand_in, 2)
    assert list(stand_in.running.values()) == ["policy-0", "policy-1"]
    stand_in.end()
    for version, task in enumerate((old, new)):
        segment = await task
        assert segment.spans == [VersionSpan(version, 0, 3)] and segment.finish_reason == "length"
    assert "pause" not in stand_in.messages


async def test_retracted_answers_go_on_with_the_newest_adapters(
    server: tuple[Engine, str], session: HttpSession, stand_in: StandIn, trainer: Trainer
) -> None:
    client = client_of(server, session, "retract")
    await update(client, trainer.publish(0))
    stand_in.lingering = True
    running = asyncio.create_task(generate(client))
    await until_runs(stand_in, 1)
    await update(client, trainer.publish(1))
    segment = await running
    assert segment.spans == [VersionSpan(0, 0, 3)] and segment.finish_reason == "abort"
    stand_in.lingering = False
    assert (await generate(client)).spans == [VersionSpan(1, 0, 3)]
    assert stand_in.messages[-4:] == ["load policy-1", "pause", "label 1", "resume"]
    await update(client, trainer.publish(2))
    assert list(stand_in.adapters) == ["policy-1", "policy-2"], "requests on their way may name the version before"


@pytest.mark.parametrize("mode", ["in_place", "drain"])
async def test_few_adapters_are_held_and_none_is_unloaded_in_use(
    server: tuple[Engine, str], session: HttpSession, stand_in: StandIn, trainer: Trainer, mode: UpdateMode
) -> None:
    """An answer that outlives too many updates ends with its tokens so far."""
    client = client_of(server, session, mode)
    await update(client, trainer.publish(0))
    stand_in.lingering = True
    running = asyncio.create_task(generate(client))
    await until_runs(stand_in, 1)
    for version in range(1, 21):
        await update(client, trainer.publish(version))
        assert len(stand_in.adapters) <= HELD and f"policy-{version}" in stand_in.adapters
        assert await client.served_version() == version and not stand_in.paused
        assert running.done() == (version >= HELD - 1)
    assert (await running).finish_reason == "abort"
    assert stand_in.messages.count("pause") == 3, "at the versions 7, 13 and 19"


async def test_a_server_that_was_restarted_gets_the_adapters_again(
    server: tuple[Engine, str], stand_in: StandIn, trainer: Trainer
) -> None:
    engine, url = server
    servers = Servers([url], engine=engine, serves_adapters=True, timeout_s=60)
    await servers.update_weights(trainer.publish(3))
    stand_in.adapters.clear()
    stand_in.label = "default"
    await servers.bring_up(url)
    assert stand_in.label == "3" and list(stand_in.adapters) == ["policy-3"]
    (segment,) = await servers.generate([1, 2], [GRANT], Sampling(), [0])
    assert segment.spans == [VersionSpan(3, 0, 3)]
    await servers.close()


async def test_a_restart_between_staging_and_commit_is_noticed(
    server: tuple[Engine, str], session: HttpSession, stand_in: StandIn, trainer: Trainer
) -> None:
    client, handle = client_of(server, session, "in_place"), trainer.publish(3)
    await client.begin_weights(handle)
    await client.begin_weights(handle)
    assert stand_in.messages == ["load policy-3"], "a repeated call loads nothing"
    stand_in.adapters.clear()
    with pytest.raises(RolloutError, match="does not hold the adapters of policy_version 3") as raised:
        await client.commit_weights(handle)
    assert raised.value.status == 409 and stand_in.label == "default"


async def test_an_update_that_is_given_up_leaves_no_adapters(
    server: tuple[Engine, str], session: HttpSession, stand_in: StandIn, trainer: Trainer
) -> None:
    client = client_of(server, session, "in_place")
    await update(client, trainer.publish(1))
    await client.begin_weights(trainer.publish(2))
    await client.abort_weights()
    assert list(stand_in.adapters) == ["policy-1"] and await client.served_version() == 1
    await update(client, trainer.publish(3))
    assert list(stand_in.adapters) == ["policy-1", "policy-3"]


async def test_what_the_engine_cannot_load_leaves_the_old_version(
    server: tuple[Engine, str], session: HttpSession, stand_in: StandIn, trainer: Trainer
) -> None:
    client = client_of(server, session, "in_place")
    await update(client, trainer.publish(1))
    stand_in.adapters |= {f"other-{number}": "" for number in range(HELD - 1)}
    with pytest.raises(RolloutError, match="no room for another adapter"):
        await client.begin_weights(trainer.publish(2))
    assert (await generate(client)).spans == [VersionSpan(1, 0, 3)]


async def test_a_sample_of_other_adapters_is_refused(session: HttpSession, stand_in: StandIn, trainer: Trainer) -> None:
    async with TestServer(vllm(stand_in)) as served:
        client = client_of(("vllm", str(served.make_url("")).rstrip("/")), session, "in_place")
        await client.check()
        await update(client, trainer.publish(1))
        stand_in.computed_with = "policy-7"
        with pytest.raises(RolloutError, match="computed a sample with 'policy-7' instead of 'policy-1'"):
            await generate(client)
