"""Published weights come to the machine of a foreign engine before its pause. Only the engine is a stand-in."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from aiohttp.test_utils import TestServer
from published import publish_next
from safetensors.torch import load_file
from sleeping_engines import ENGINES, SleepingEngine
from test_served_adapters import PROTOCOLS, StandIn
from torch import Tensor

from penstock.model.low_rank import names_of
from penstock.processes import weights_fetcher
from penstock.processes.foreign_server import auth_proxy
from penstock.processes.weights_fetcher import WeightsFetcher
from penstock.rollout.app import ApiKeys
from penstock.rollout.claim import Claim
from penstock.rollout.client import ServerClient
from penstock.rollout.http import Refused
from penstock.rollout.servers import Engine, Servers, connect
from penstock.rollout.session import HttpSession, RolloutError
from penstock.runtime.file_service import serving_files
from penstock.supervisor.child import Child
from penstock.types import AdaptersForm, UpdateMode, WeightsHandle
from penstock.weights.broadcast import Offers
from penstock.weights.publication import WeightsPublisher
from penstock.weights.receiver import linked
from penstock.weights.shared_memory import layout

pytestmark = pytest.mark.integration

HOST, SECRET, CLAIM = "127.0.0.1", "rule", "claim"
HERE, THERE = "boot-of-the-engine", "boot-of-the-trainer"
KEYS = ApiKeys(generation="play", admin="rule")
MODES: list[tuple[Engine, UpdateMode]] = [("vllm", "in_place"), ("sglang", "drain")]


def policy(version: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {name: torch.randn(40, 30, generator=generator) for name in ("embed", "head")}


def named(version: int) -> str:
    """What a stand-in calls these weights."""
    return str(policy(version)["head"][0, 0].item())


class Trainer:
    """It publishes on its own machine, which no other machine can read but by its file service and its broadcasts."""

    def __init__(self, directory: Path, service: str) -> None:
        self.publisher, self._service, self.offers = WeightsPublisher(directory / "weights"), service, Offers(HOST)

    def published(self, version: int, *, offered: bool = True) -> WeightsHandle:
        handle = publish_next(self.publisher, policy(version), version)
        return self.link(handle, offered=offered)

    def link(self, handle: WeightsHandle, *, offered: bool) -> WeightsHandle:
        handle = linked(handle, service=self._service, secret=SECRET, machine=THERE)
        return self.offers.add(handle) if offered else handle

    def forget(self, handle: WeightsHandle) -> None:
        Path(handle.path).unlink()

    def damage(self, handle: WeightsHandle) -> WeightsHandle:
        with Path(handle.path).open("r+b") as file:
            file.seek(-1, os.SEEK_END)
            file.write(b"\x7f")
        return handle

    def adapters(self, version: int) -> WeightsHandle:
        tensors = dict(zip(names_of("layers.0.q.weight"), (torch.ones(2, 4), torch.ones(3, 2)), strict=True))
        form = AdaptersForm(base=None, rank=2, alpha=6, targets=("layers.0.q.weight",))
        with self.publisher.open(layout(tensors), version, adapters=True) as opened:
            return self.link(opened.write_whole(tensors.items(), version, adapters=form), offered=True)


def proxied(engine: str, fetcher: WeightsFetcher) -> AbstractAsyncContextManager[str]:
    """Return the proxy in front of an engine."""
    port, claim = int(engine.rpartition(":")[2]), Claim("run", CLAIM)
    return auth_proxy(port, None, "/health", host=HOST, port=0, keys=KEYS, claim=claim, own_routes=fetcher.routes())


class Machine:
    """The machine of the engines: its runtime directory, and our processes in front of them."""

    def __init__(self, runtime_dir: Path) -> None:
        self.runtime_dir = runtime_dir
        self.read: list[Path] = []
        """Directories that the engines have loaded."""

    def fetcher(self, number: int = 0) -> WeightsFetcher:
        child = Child(
            name=f"rollout-{number}",
            run_dir=self.runtime_dir / "none",
            runtime_dir=self.runtime_dir,
            run_id="run",
            nonce=SECRET,
            address=HOST,
        )
        return WeightsFetcher(child, Path("the model"))

    def load(self, engine: SleepingEngine, path: str) -> bool:
        folder = Path(path)
        self.read.append(folder)
        if [each.name for each in folder.glob("*.safetensors")] != ["model.safetensors"]:
            return False
        engine.weights = str(load_file(folder / "model.safetensors")["head"][0, 0].item())
        return True

    @asynccontextmanager
    async def serving(
        self, kind: Engine, fetcher: WeightsFetcher, monkeypatch: pytest.MonkeyPatch
    ) -> AsyncIterator[tuple[SleepingEngine, str]]:
        """Yield an engine, and the URL of the proxy in front of it."""
        engine = ENGINES[kind]()
        monkeypatch.setattr(engine, "load", lambda path: self.load(engine, path))
        await engine.server.start_server()
        try:
            async with proxied(engine.url, fetcher) as url:
                yield engine, url
        finally:
            await engine.server.close()

    def kept(self) -> list[str]:
        """Return the files that lie on this machine."""
        return sorted(str(path.relative_to(self.runtime_dir)) for path in self.runtime_dir.rglob("*.safetensors"))


@pytest.fixture
async def trainer(tmp_path: Path) -> AsyncIterator[Trainer]:
    async with serving_files([tmp_path / "trainer"], address=HOST, secret=SECRET) as service:
        trainer = Trainer(tmp_path / "trainer", service)
        yield trainer
        trainer.offers.close()


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    machine = Machine(tmp_path / "engines")
    machine.runtime_dir.mkdir()
    monkeypatch.setattr(weights_fetcher, "boot_id", lambda: HERE)
    monkeypatch.setattr(weights_fetcher, "runtime_dirs", lambda _: [machine.runtime_dir])
    yield machine


@pytest.fixture
async def fetcher(machine: Machine) -> AsyncIterator[WeightsFetcher]:
    fetcher = machine.fetcher()
    yield fetcher
    await fetcher.close()


@asynccontextmanager
async def client(kind: Engine, url: str, mode: UpdateMode, *, key: str = "rule") -> AsyncIterator[ServerClient]:
    session = HttpSession(api_key=key, claim=CLAIM)
    try:
        yield connect(kind, url, session, mode)
    finally:
        await session.close()


@asynccontextmanager
async def connected(
    urls: list[str], kind: Engine = "vllm", mode: UpdateMode = "in_place", **options: Any
) -> AsyncIterator[Servers]:
    servers = Servers(urls, engine=kind, update_mode=mode, api_key="rule", claim=CLAIM, **options)
    try:
        yield servers
    finally:
        await servers.close()


@pytest.mark.parametrize(("kind", "mode"), MODES)
async def test_an_engine_loads_a_file_that_came_to_its_machine_before_the_pause(
    machine: Machine,
    fetcher: WeightsFetcher,
    trainer: Trainer,
    monkeypatch: pytest.MonkeyPatch,
    kind: Engine,
    mode: UpdateMode,
) -> None:
    async with (
        machine.serving(kind, fetcher, monkeypatch) as (engine, url),
        client(kind, url, mode) as one,
        connected([url], kind, mode) as servers,
    ):
        assert await servers.update_weights(trainer.published(1)) == {"collective": 1}
        handle = trainer.published(2)
        calls = list(engine.calls)
        await one.begin_weights(handle)
        assert (engine.calls, engine.weights, engine.label) == (calls, named(1), "1"), "the engine generates on"
        name = f"2-{handle.fingerprint}"
        ours = [f"engine/rollout-0/{name}/model.safetensors", f"received/rollout-0/{name}.safetensors"]
        assert machine.kept() == ours, "of the older one nothing is left"
        trainer.forget(handle)
        await one.commit_weights(handle)
        assert (engine.weights, engine.label) == (named(2), "2")
        assert all(folder.is_relative_to(machine.runtime_dir) for folder in machine.read)
        without_broadcast = trainer.published(3, offered=False)
        assert await servers.update_weights(without_broadcast) == {"file": 1} and engine.weights == named(3)
        other = connect(kind, url, one._session, mode)
        with pytest.raises(RolloutError, match="has not fetched policy_version 3") as refused:
            await other.commit_weights(without_broadcast)
        assert refused.value.status == 409, "so that it begins first"


async def test_engines_of_one_machine_share_a_file_and_only_control_asks_for_it(
    machine: Machine, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with AsyncExitStack() as stack:
        urls = []
        for number in range(2):
            fetcher = machine.fetcher(number)
            stack.push_async_callback(fetcher.close)
            urls.append((await stack.enter_async_context(machine.serving("vllm", fetcher, monkeypatch)))[1])
        servers = await stack.enter_async_context(connected(urls))
        assert await servers.update_weights(trainer.published(1)) == {"collective": 1, "shared_memory": 1}
        assert len(machine.read) == 2 and machine.read[0] != machine.read[1]
        assert len({path.stat().st_ino for path in machine.runtime_dir.rglob("*.safetensors")}) == 1
        async with client("vllm", urls[0], "in_place", key="play") as playing:
            with pytest.raises(RolloutError, match="answered 401: the admin API key is missing or wrong"):
                await playing.begin_weights(trainer.published(2))


async def test_on_the_trainers_machine_the_file_is_read_where_it_lies(
    machine: Machine, fetcher: WeightsFetcher, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_fetcher, "boot_id", lambda: THERE)
    async with machine.serving("vllm", fetcher, monkeypatch) as (engine, url), connected([url]) as servers:
        handle = trainer.published(1)
        assert await servers.update_weights(handle) == {"shared_memory": 1} and engine.weights == named(1)
    assert machine.read == [Path(handle.path).parent] and machine.kept() == []
    with pytest.raises(ValueError, match=r"has \d+ bytes, expected 5"):
        await fetcher.fetch(replace(handle, num_bytes=5))
    assert fetcher._child is None, "and no process was needed"


@pytest.mark.parametrize("kind", PROTOCOLS)
async def test_adapters_come_with_what_says_how_they_are_added(
    machine: Machine, fetcher: WeightsFetcher, trainer: Trainer, kind: Engine
) -> None:
    engine = StandIn()
    async with (
        TestServer(PROTOCOLS[kind](engine)) as server,
        proxied(str(server.make_url("")).rstrip("/"), fetcher) as url,
        connected([url], kind, serves_adapters=True) as servers,
    ):
        for version in (1, 2):
            assert await servers.update_weights(trainer.adapters(version)) == {"collective": 1}
            assert engine.label == str(version)
    folders = [Path(path) for path in engine.adapters.values()]
    assert len(folders) == 2 and all(folder.is_relative_to(machine.runtime_dir) for folder in folders)
    for folder in folders[1:]:  # the engine has the older ones in its memory
        assert sorted(each.name for each in folder.iterdir()) == ["adapter_config.json", "adapter_model.safetensors"]
        settings: dict[str, Any] = json.loads((folder / "adapter_config.json").read_text())
        assert (settings["r"], settings["lora_alpha"], settings["target_modules"]) == (2, 6, ["q"])


async def test_what_does_not_come_changes_nothing(
    machine: Machine, fetcher: WeightsFetcher, trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each failure has an error of its own. The old weights serve on, and the next ones come."""
    async with machine.serving("vllm", fetcher, monkeypatch) as (engine, url), client("vllm", url, "in_place") as one:
        await one.begin_weights(handle := trainer.published(1))
        await one.commit_weights(handle)
        calls = list(engine.calls)
        gone = replace(trainer.published(2), meeting="")
        trainer.forget(gone)
        for bad, status, told in [
            (gone, 424, r"policy_version 2 cannot be read from http://127.0.0.1:.*HTTP 404"),
            (trainer.damage(trainer.published(3, offered=False)), 400, "its bytes changed"),
            (replace(trainer.published(4), num_bytes=2**60), 424, r"has room for \d+: free some, or mount it"),
        ]:
            with pytest.raises(RolloutError, match=told) as failed:
                await one.begin_weights(bad)
            assert failed.value.status == status and "token" not in str(failed.value)
            assert (engine.calls, engine.weights, machine.kept()) == (calls, named(1), [])
        await one.begin_weights(handle := trainer.published(5))
        await fetcher.close()
        await one.commit_weights(handle)  # the file stays where it came
        assert engine.weights == named(5)


async def test_a_killed_or_cancelled_fetch_is_an_error_and_the_next_one_works(
    machine: Machine, fetcher: WeightsFetcher, trainer: Trainer
) -> None:
    asked = asyncio.Event()

    async def hang(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.set()
        with suppress(ConnectionError):
            await reader.read()
        writer.close()

    silent = await asyncio.start_server(hang, HOST, 0)
    async with silent:
        port = silent.sockets[0].getsockname()[1]
        handle = replace(trainer.published(1), url=f"http://{HOST}:{port}/weights", meeting="")
        for number in range(2):
            asked.clear()
            fetching = asyncio.create_task(fetcher.fetch(handle))
            async with asyncio.timeout(120):
                await asked.wait()
            assert fetcher._child is not None
            if number:
                fetching.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await fetching
            else:
                os.kill(fetcher._child.pid, signal.SIGKILL)
                with pytest.raises(Refused, match="the process that gets weights to this machine ended: SIGKILL"):
                    await fetching
            assert fetcher._child is None
    fetched = await fetcher.fetch(trainer.published(2))
    assert load_file(fetched.path)["head"].equal(policy(2)["head"])
    assert list(machine.runtime_dir.rglob("*.unfinished")) == [], "what was cut off is removed"
