"""Broadcasts of weights to servers that are other processes, which speak SGLang's protocol."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing
from aiohttp import ClientSession, web
from aiohttp.test_utils import TestServer
from published import publish_next
from transformers import PreTrainedModel

from penstock.config import TinyModelConfig
from penstock.deadline import Stalled
from penstock.model.load_policy import load_policy
from penstock.model.tiny import write_tiny_model
from penstock.ports.training import SendingGroup, SendingWay, WeightsNotSent
from penstock.rollout import servers as servers_module
from penstock.rollout.servers import Servers
from penstock.rollout.session import HttpSession, RolloutError
from penstock.rollout.sglang_client import SGLangClient
from penstock.samples import Segment
from penstock.trainer.checkpoint import STATE
from penstock.types import EpisodeId, Sampling, SegmentGrant, UpdateMode, WeightsHandle
from penstock.weights import sender as sender_module
from penstock.weights.publication import WeightsPublisher
from penstock.weights.sender import Sender

pytestmark = [pytest.mark.integration, pytest.mark.long]

CONTEXT, NUM_UPDATES, LIMIT_S = 96, 30, 120
HOST, ELSEWHERE = "127.0.0.3", "http://127.0.0.3:9/weights"
"""The trainer's address; the servers are at 127.0.0.1."""
PROMPT = [5, 6, 7]


class Trainer:
    """It publishes versions, and sends them as the trainer's process does."""

    def __init__(self, model: Path, directory: Path) -> None:
        self._model, self._publisher = model, WeightsPublisher(directory)
        self._paths: dict[int, Path] = {}
        self.sender = Sender(HOST, device=torch.device("cpu"))
        self.on_send: Callable[[], object] = lambda: None
        """Called before a broadcast begins."""

    def policy(self, version: int) -> PreTrainedModel:
        return load_policy(self._model, weights=False, seed=version)

    def publish(self, version: int) -> WeightsHandle:
        handle = publish_next(self._publisher, dict(self.policy(version).named_parameters()), version)
        self._paths[version] = Path(handle.path)
        return replace(handle, url=ELSEWHERE)

    def publish_wrong(self, version: int) -> WeightsHandle:
        """Publish weights that do not fit the model."""
        named = {name: weight[..., :1].contiguous() for name, weight in self.policy(version).named_parameters()}
        handle = publish_next(self._publisher, named, version)
        self._paths[version] = Path(handle.path)
        return replace(handle, url=ELSEWHERE)

    async def open_group(
        self, server: str, policy_version: int, *, world_size: int, way: SendingWay = "rendezvous"
    ) -> SendingGroup:
        open_group, path = partial(self.sender.open, way=way), self._paths[policy_version]
        return await asyncio.to_thread(open_group, server, path, policy_version, world_size=world_size)

    async def send_weights(self, group: str) -> None:
        self.on_send()
        await asyncio.wrap_future(self.sender.send(group))

    async def lend_bucket(self, group: str, number: int) -> str:
        return await asyncio.to_thread(self.sender.lend, group, number)

    async def close_group(self, group: str) -> None:
        await asyncio.to_thread(self.sender.close_group, group)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with weights of policy_version 0."""
    model = tmp_path_factory.mktemp("model")
    write_tiny_model(model, TinyModelConfig(num_layers=2, hidden_size=32), max_context=CONTEXT)
    load_policy(model, weights=False, seed=0).save_pretrained(model)
    (model / STATE).write_text(json.dumps({"policy_version": 0}))
    return model


@contextmanager
def served(model: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    words = ["serve", "--model", str(model), "--port", "0", "--name", "m", f"model.max_context={CONTEXT}"]
    command = [sys.executable, "-m", "penstock.cli.main", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().split(" at ")[1].split()[0], server
        finally:
            server.kill()


@pytest.fixture
def trainer(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Trainer]:
    monkeypatch.setattr(sender_module, "BUCKET_BYTES", 16 * 1024)  # several buckets
    trainer = Trainer(model, tmp_path)
    yield trainer
    trainer.sender.close()


async def answers(servers: Servers, number: int, found: list[Segment]) -> None:
    """Generate without end, and keep the answers."""
    count = 0
    while True:
        count += 1
        grant = SegmentGrant(episode=EpisodeId("tag", number, 0, count), max_tokens=24)
        found += await servers.generate(PROMPT, [grant], Sampling(temperature=1.0), [number * 1000 + count])


def check_versions(trainer: Trainer, found: list[Segment]) -> None:
    """Compute each token with the weights that its label names."""
    models: dict[int, PreTrainedModel] = {}
    for segment in found:
        start, ids = len(PROMPT) - 1, torch.tensor([PROMPT + segment.token_ids])
        for span in segment.spans[:1]:  # later ones continue with keys and values of other weights
            policy = models.setdefault(span.policy_version, trainer.policy(span.policy_version))
            with torch.inference_mode():
                logprobs = policy(ids).logits[0, start:-1].log_softmax(-1)
            expected = logprobs.gather(1, ids[0, start + 1 :, None])[: span.end, 0]
            assert expected.tolist() == pytest.approx(segment.logprobs[: span.end], abs=1e-3)


@pytest.mark.parametrize("update_mode", ["retract", "in_place"])
async def test_updates_in_a_row_under_generation(model: Path, trainer: Trainer, update_mode: UpdateMode) -> None:
    found: list[Segment] = []
    with served(model) as (url, _):
        servers = Servers([url], engine="sglang", update_mode=update_mode, sender=trainer)
        async with asyncio.timeout(LIMIT_S):
            players = [asyncio.create_task(answers(servers, number, found)) for number in range(3)]
            for version in range(1, NUM_UPDATES + 1):
                assert await servers.update_weights(trainer.publish(version)) == {"collective": 1}
                before = len(found)
                while len(found) == before:
                    await asyncio.wait(players, timeout=0.001, return_when=asyncio.FIRST_EXCEPTION)
                    assert not any(player.done() for player in players), "a request was lost"
            for player in players:
                player.cancel()
            await asyncio.wait(players)
            (last,) = await servers.generate(
                PROMPT,
                [SegmentGrant(episode=EpisodeId("tag", 99, 0, 0), max_tokens=8)],
                Sampling(temperature=1.0),
                [1],
            )
        await servers.close()
    assert [span.policy_version for span in last.spans] == [NUM_UPDATES]
    assert len({span.policy_version for segment in found for span in segment.spans}) > NUM_UPDATES // 2
    check_versions(trainer, [*found, last])


class Witness:
    """A connection to a server that checks SGLang's rules for the calls of an update."""

    def __init__(self, url: str, *, has_brackets: bool = True) -> None:
        self._url, self._session, self._has_brackets = url, ClientSession(), has_brackets
        self.calls: list[str] = []
        """The calls of updates, in their order."""
        self.on_call: Callable[[str], object] = lambda path: None
        """Called with the path of each call, before it is passed on."""
        self._is_paused = self._is_open = False
        self._groups: set[str] = set()
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._pass_on)
        self.server = TestServer(app)

    @property
    def url(self) -> str:
        return str(self.server.make_url("")).rstrip("/")

    async def _pass_on(self, request: web.Request) -> web.Response:
        body = json.loads(await request.read() or b"{}")
        if request.path.endswith("_weight_update") and not self._has_brackets:
            return web.json_response({"detail": "Not Found"}, status=404)
        self.on_call(request.path)
        self._check(request.path, body)
        async with self._session.request(request.method, self._url + request.path, json=body) as reply:
            answer = await reply.read()
        if reply.status == 200:
            self._note(request.path, body)
        return web.Response(status=reply.status, body=answer, content_type="application/json")

    def _check(self, path: str, body: dict[str, Any]) -> None:
        if "weight" not in path or path == "/update_weight_version":
            return
        self.calls.append(path)
        match path:
            case "/init_weights_update_group":
                expected = {"master_address": HOST, "rank_offset": 1, "world_size": 2, "backend": "gloo"}
                assert body.items() >= expected.items() and body["group_name"] not in self._groups
            case "/begin_weight_update":
                assert self._is_paused and not self._is_open
            case "/update_weights_from_distributed":
                assert self._is_paused and self._is_open == self._has_brackets and body["group_name"] in self._groups
                assert body["load_format"] == "flattened_bucket" and len(set(body["dtypes"])) == 1
                # A flush fails while requests wait, and a label moves with the bucket that carries it.
                is_last = body["weight_version"] is not None
                assert body["flush_cache"] == is_last
            case "/update_weights_from_tensor":
                assert self._is_paused and self._is_open == self._has_brackets
                assert body.keys() == {"serialized_named_tensors", "load_format", "flush_cache", "weight_version"}
                assert len(body["serialized_named_tensors"]) == 1 and body["load_format"] is None
                assert body["flush_cache"] == (body["weight_version"] is not None)
            case "/end_weight_update":
                assert self._is_open

    def _note(self, path: str, body: dict[str, Any]) -> None:
        match path:
            case "/pause_generation":
                self._is_paused = True
            case "/continue_generation":
                assert not self._is_open
                self._is_paused = False
            case "/begin_weight_update" | "/end_weight_update":
                self._is_open = path == "/begin_weight_update"
            case "/init_weights_update_group":
                self._groups.add(body["group_name"])
            case "/destroy_weights_update_group":
                self._groups.remove(body["group_name"])

    def check_at_rest(self) -> None:
        assert not (self._is_paused or self._is_open or self._groups)

    async def close(self) -> None:
        await self._session.close()
        await self.server.close()


@pytest.fixture
async def server(model: Path) -> AsyncIterator[str]:
    with served(model) as (url, _):
        yield url


async def witness_of(url: str, **options: bool) -> Witness:
    witness = Witness(url, **options)
    await witness.server.start_server()
    return witness


async def sampled_by(servers: Servers) -> int:
    grant = SegmentGrant(episode=EpisodeId("tag", 0, 0, 0), max_tokens=4)
    async with asyncio.timeout(LIMIT_S):
        (segment,) = await servers.generate(PROMPT, [grant], Sampling(temperature=1.0), [1])
    return segment.spans[0].policy_version


@pytest.mark.parametrize("has_brackets", [True, False])
async def test_the_calls_of_an_update_keep_the_rules(server: str, trainer: Trainer, has_brackets: bool) -> None:
    witness = await witness_of(server, has_brackets=has_brackets)
    servers = Servers([witness.url], engine="sglang", sender=trainer)
    for version in (1, 2):
        witness.calls.clear()
        handle = trainer.publish(version)
        assert await servers.update_weights(handle) == {"collective": 1}
        witness.check_at_rest()
        first, *calls, last = witness.calls
        assert (first, last) == ("/init_weights_update_group", "/destroy_weights_update_group")
        assert calls.count("/update_weights_from_distributed") > 2
        assert (calls[0], calls[-1]) == (
            ("/begin_weight_update", "/end_weight_update") if has_brackets else (calls[1], calls[1])
        )
        assert await sampled_by(servers) == version
        witness.calls.clear()
        await servers.update_weights(handle)
        assert witness.calls == [], "the server has these weights"
    await servers.close()
    await witness.close()


@pytest.fixture
def shared_by_name() -> Iterator[None]:
    """Let tensors of a CPU, in the place of a device's memory, be found by name as in SGLang's trainers."""
    before = torch.multiprocessing.get_sharing_strategy()
    torch.multiprocessing.set_sharing_strategy("file_system")
    yield
    torch.multiprocessing.set_sharing_strategy(before)


def lent_segments() -> set[Path]:
    """Segments that are named for this process. An earlier process with the same pid may have left some."""
    return set(Path("/dev/shm").glob(f"torch_{os.getpid()}_*"))


@pytest.mark.usefixtures("shared_by_name")
@pytest.mark.parametrize("has_brackets", [True, False])
async def test_a_server_on_the_trainers_device_copies_its_memory(
    server: str, trainer: Trainer, has_brackets: bool
) -> None:
    before = lent_segments()
    witness = await witness_of(server, has_brackets=has_brackets)
    servers = Servers([witness.url], engine="sglang", direct_weights="memory", sender=trainer)
    for version in (1, 2):
        witness.calls.clear()
        assert await servers.update_weights(replace(trainer.publish(version), url="")) == {"device_memory": 1}
        witness.check_at_rest()
        assert witness.calls.count("/update_weights_from_tensor") > 2
        assert not any("group" in path or "distributed" in path for path in witness.calls)
        assert await sampled_by(servers) == version
    await servers.close()
    await witness.close()
    assert lent_segments() <= before


@pytest.mark.usefixtures("shared_by_name")
async def test_memory_that_is_withdrawn_leaves_no_known_version_and_the_next_update_mends_it(
    server: str, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers_module, "RECOVERY_S", 0.0)
    witness = await witness_of(server)
    servers = Servers([witness.url], engine="sglang", direct_weights="memory", sender=trainer)
    await servers.update_weights(replace(trainer.publish(1), url=""))

    def withdraw(path: str) -> None:
        if witness.calls.count("/update_weights_from_tensor") == 2:
            trainer.sender.close()

    witness.calls.clear()
    witness.on_call = withdraw
    with pytest.raises(RolloutError, match="there is no group"):
        await servers.update_weights(replace(trainer.publish(2), url=""))
    witness.on_call = lambda path: None
    session = HttpSession()
    with pytest.raises(RolloutError, match="the label 'unknown', which no trainer published"):
        await SGLangClient(server, session).served_version()
    await session.close()
    for version, transport in ((3, "file"), (4, "device_memory")):
        assert await servers.update_weights(replace(trainer.publish(version), url="")) == {transport: 1}
        assert await sampled_by(servers) == version
    witness.check_at_rest()
    await servers.close()
    await witness.close()


async def test_a_broadcast_that_breaks_off_leaves_no_known_version_and_the_next_one_mends_it(
    server: str, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers_module, "RECOVERY_S", 0.0)
    witness = await witness_of(server)
    servers = Servers([witness.url], engine="sglang", sender=trainer)
    await servers.update_weights(trainer.publish(1))

    def withdraw(path: str) -> None:
        if witness.calls.count("/update_weights_from_distributed") == 2:
            trainer.sender.close()

    witness.calls.clear()
    witness.on_call = withdraw
    with pytest.raises((RolloutError, Stalled)):
        await servers.update_weights(trainer.publish(2))
    witness.on_call = lambda path: None
    session = HttpSession()
    with pytest.raises(RolloutError, match="the label 'unknown', which no trainer published"):
        await SGLangClient(server, session).served_version()
    await session.close()
    assert await servers.update_weights(trainer.publish(3)) == {"collective": 1}
    assert await sampled_by(servers) == 3
    witness.check_at_rest()
    await servers.close()
    await witness.close()


async def test_a_failure_before_the_first_bucket_leaves_the_weights(
    server: str, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servers_module, "RECOVERY_S", 0.0)
    witness = await witness_of(server)
    client = SGLangClient(witness.url, session := HttpSession())
    servers = Servers([witness.url], engine="sglang", sender=trainer)
    await servers.update_weights(trainer.publish(1))
    handle = trainer.publish(2)
    with monkeypatch.context() as patch:
        patch.setattr(Sender, "open", refuse)
        with pytest.raises(RolloutError, match="no port is free"):
            await servers.update_weights(handle)
    assert await client.served_version() == 1
    witness.check_at_rest()
    assert await servers.update_weights(handle) == {"collective": 1}
    assert await sampled_by(servers) == 2
    await servers.close()
    await session.close()
    await witness.close()


def refuse(*_: object, **__: object) -> SendingGroup:
    raise WeightsNotSent("no port is free")


async def test_weights_that_do_not_fit_are_refused(server: str, trainer: Trainer) -> None:
    servers = Servers([server], engine="sglang", sender=trainer)
    await servers.update_weights(trainer.publish(1))
    with pytest.raises(RolloutError, match="has shape") as refused:
        await servers.update_weights(trainer.publish_wrong(2))
    assert refused.value.status == 400
    assert await servers.update_weights(trainer.publish(3)) == {"collective": 1}
    assert await sampled_by(servers) == 3
    await servers.close()


async def test_a_server_that_dies_in_a_broadcast_holds_neither_the_trainer_nor_the_other_server(
    model: Path, trainer: Trainer
) -> None:
    with served(model) as (one, _), served(model) as (other, dying):
        witness = await witness_of(other)
        servers = Servers([one, witness.url], engine="sglang", sender=trainer)
        assert await servers.update_weights(trainer.publish(1)) == {"collective": 2}

        def kill(path: str) -> None:
            if witness.calls.count("/update_weights_from_distributed") == 2:
                dying.kill()

        witness.calls.clear()
        witness.on_call = kill
        async with asyncio.timeout(LIMIT_S / 4):
            assert await servers.update_weights(trainer.publish(2)) == {"collective": 1}
        assert await sampled_by(servers) == 2
        assert not any(thread.name.startswith("penstock-") for thread in threading.enumerate())
        with served(model) as (again, _):
            servers.set_urls([one, again])
            await servers.bring_up(again)
            assert await servers.update_weights(trainer.publish(3)) == {"collective": 2}
        await servers.close()
        await witness.close()
