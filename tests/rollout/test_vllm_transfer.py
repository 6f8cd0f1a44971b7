"""vLLM gets weights in its own weight transfer: over gloo, from the trainer's real sender. A stand-in, or vLLM's own
receiving code, checks every message."""

from __future__ import annotations

import asyncio
import json
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from published import publish_next
from torch import Tensor
from transferring_vllm import TransferringVllm, gloo_id, lend_files

from penstock.ports.training import SendingGroup, SendingWay, TrainerLost, WeightsNotSent
from penstock.rollout import servers as servers_module
from penstock.rollout import weights_group
from penstock.rollout.servers import Servers
from penstock.rollout.session import HttpSession, RolloutError
from penstock.rollout.vllm_client import BACKENDS, VllmClient
from penstock.types import DirectWeights, UpdateMode, WeightsHandle
from penstock.weights import sender as sender_module
from penstock.weights.lent_memory import LentMemory
from penstock.weights.live_weights import LiveWeights
from penstock.weights.publication import WeightsPublisher
from penstock.weights.sender import Sender

HOST, LIMIT_S = "127.0.0.1", 60
ENVIRONMENT = Path(__file__).parents[2] / ".venv-vllm"
SHAPES = {"embed.weight": (40, 16), "layers.0.weight": (16, 16), "layers.1.weight": (48, 16), "head.weight": (40, 16)}


def weights_of(version: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(version)
    named = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in SHAPES.items()}
    return named | {"norm.weight": torch.randn(16, generator=generator)}


class Trainer:
    """It publishes versions, and sends them as the trainer's process does."""

    def __init__(self, directory: Path) -> None:
        self._publisher = WeightsPublisher(directory)
        self._paths: dict[int, Path] = {}
        self.live = LiveWeights()
        self.sender = Sender(HOST, device=torch.device("cpu"), live=self.live)
        self.on_open: Callable[[], object] = lambda: None
        """Called before a group is opened."""

    def publish(self, version: int, named: Mapping[str, Tensor] | None = None) -> WeightsHandle:
        handle = publish_next(self._publisher, named or weights_of(version), version)
        self._paths[version] = Path(handle.path)
        return handle

    async def open_group(
        self, server: str, policy_version: int, *, world_size: int, way: SendingWay = "rendezvous"
    ) -> SendingGroup:
        self.on_open()
        open_group, path = partial(self.sender.open, way=way), self._paths[policy_version]
        return await asyncio.to_thread(open_group, server, path, policy_version, world_size=world_size)

    async def send_weights(self, group: str) -> None:
        await asyncio.wrap_future(self.sender.send(group))

    async def lend_bucket(self, group: str, number: int) -> str:
        return await asyncio.to_thread(self.sender.lend, group, number)

    async def close_group(self, group: str) -> None:
        await asyncio.to_thread(self.sender.close_group, group)


@pytest.fixture
def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Trainer]:
    monkeypatch.setattr(sender_module, "BUCKET_BYTES", 2048)  # several buckets
    monkeypatch.setattr(sender_module, "communicator_id", gloo_id)
    monkeypatch.setattr(servers_module, "RECOVERY_S", 0.0)
    lend_files(monkeypatch, tmp_path)
    trainer = Trainer(tmp_path)
    yield trainer
    trainer.sender.close()


@asynccontextmanager
async def served(num: int = 1, **options: Any) -> AsyncIterator[list[TransferringVllm]]:
    engines = [TransferringVllm(weights_of(0), **options) for _ in range(num)]
    for engine in engines:
        await engine.server.start_server()
    try:
        async with asyncio.timeout(LIMIT_S):
            yield engines
    finally:
        for engine in engines:
            await engine.close()


@asynccontextmanager
async def updated_by(
    trainer: Trainer, engines: list[TransferringVllm], update_mode: UpdateMode | None = None
) -> AsyncIterator[Servers]:
    urls = [engine.url for engine in engines]
    way: DirectWeights = "memory" if engines[0].backend == "ipc" else "nccl"
    servers = Servers(urls, engine="vllm", update_mode=update_mode, direct_weights=way, sender=trainer)
    try:
        yield servers
    finally:
        await servers.close()


def has(engine: TransferringVllm, version: int) -> bool:
    named = weights_of(version)
    is_equal = all(torch.equal(engine.weights[name], named[name]) for name in named)
    return is_equal and engine.label == str(version)


@pytest.mark.parametrize(
    ("options", "update_mode"),
    [
        ({"num_workers": 1}, "in_place"),
        ({"num_workers": 2}, "retract"),
        ({"num_workers": 1}, "drain"),
        ({"backend": "ipc"}, "in_place"),
        ({"backend": "ipc"}, "drain"),
    ],
)
async def test_updates_in_a_row_keep_the_rules(
    trainer: Trainer, options: dict[str, Any], update_mode: UpdateMode
) -> None:
    transport = "device_memory" if "backend" in options else "collective"
    async with served(**options) as (engine,), updated_by(trainer, [engine], update_mode) as servers:
        for version in (1, 2, 3):
            engine.calls.clear()
            assert await servers.update_weights(trainer.publish(version)) == {transport: 1}
            assert has(engine, version)
            engine.check_at_rest()
            first, second, third, fourth, *buckets, finish, resume, last = engine.calls
            assert (first, second) == ("/init_weight_transfer_engine", "/pause"), "it joins before its pause"
            assert (third, fourth) == ("/update_weight_version", "/start_weight_update")
            assert len(buckets) > 2 and set(buckets) == {"/update_weights"}
            assert (finish, resume, last) == ("/finish_weight_update", "/resume", "/shutdown_weight_transfer_engine")
    assert engine.refused == []


async def test_a_group_that_cannot_be_opened_leaves_the_file(trainer: Trainer) -> None:
    def refuse() -> None:
        raise WeightsNotSent("no port is free")

    async with served() as (engine,), updated_by(trainer, [engine]) as servers:
        trainer.on_open = refuse
        assert await servers.update_weights(trainer.publish(1)) == {"file": 1}
        assert has(engine, 1)
        engine.check_at_rest()
        trainer.on_open = lambda: None
        assert await servers.update_weights(trainer.publish(2)) == {"collective": 1}
        assert has(engine, 2)


async def test_a_server_that_refuses_to_join_reads_the_file(trainer: Trainer) -> None:
    async with served(num_workers=2) as (engine,), updated_by(trainer, [engine]) as servers:

        def refuse(path: str) -> None:
            assert path != "/init_weight_transfer_engine", "Weight transfer not configured"

        engine.on_call = refuse
        assert await servers.update_weights(trainer.publish(1)) == {"file": 1}
        assert has(engine, 1)
        engine.check_at_rest()


async def test_after_the_death_of_the_trainer_its_file_remains(trainer: Trainer) -> None:
    def die() -> None:
        raise TrainerLost("it was killed")

    async with served() as (engine,), updated_by(trainer, [engine]) as servers:
        trainer.on_open = die
        assert await servers.update_weights(trainer.publish(1)) == {"file": 1}
        assert has(engine, 1)
        engine.check_at_rest()


@pytest.mark.parametrize("backend", ["nccl", "ipc"])
async def test_weights_that_change_meanwhile_are_those_of_the_file(trainer: Trainer, backend: str) -> None:
    """The sender takes the first buckets from the trainer's weights, in their own dtype, and the others from the
    file."""
    async with served(backend=backend) as (engine,), updated_by(trainer, [engine]) as servers:
        named = {name: weight.float() for name, weight in weights_of(1).items()}
        handle = trainer.publish(1)
        trainer.live.hold(1, named)

        def step(path: str) -> None:
            if engine.calls.count("/update_weights") == 2:
                trainer.live.withdraw()
                for weight in named.values():
                    weight.fill_(7.0)

        engine.on_call = step
        await servers.update_weights(handle)
        assert has(engine, 1) and named["norm.weight"][0] == 7.0


@pytest.mark.parametrize("backend", ["nccl", "ipc"])
async def test_a_transfer_that_breaks_off_leaves_no_known_version_and_the_next_one_mends_it(
    trainer: Trainer, backend: str
) -> None:
    transport = {"nccl": "collective", "ipc": "device_memory"}[backend]
    async with served(backend=backend) as (engine,), updated_by(trainer, [engine]) as servers:

        def withdraw(path: str) -> None:
            if engine.calls.count("/update_weights") == 2:
                trainer.sender.close()

        engine.on_call = withdraw
        with pytest.raises(RolloutError):
            await servers.update_weights(trainer.publish(1))
        assert engine.label == "unknown" and not has(engine, 1)
        engine.check_at_rest()
        engine.on_call = lambda path: None
        assert await servers.update_weights(trainer.publish(2)) == {"file": 1}
        assert has(engine, 2)
        assert await servers.update_weights(trainer.publish(3)) == {transport: 1}
        assert has(engine, 3)
        engine.check_at_rest()


async def test_a_bracket_of_a_dead_controller_is_ended(trainer: Trainer) -> None:
    async with served() as (engine,), updated_by(trainer, [engine]) as servers:
        session = HttpSession()
        for path in ("/pause", "/start_weight_update"):
            await session.send("POST", engine.url, path)
        await session.close()
        assert await servers.update_weights(trainer.publish(1)) == {"collective": 1}
        assert has(engine, 1)
        engine.check_at_rest()


async def test_a_bracket_whose_beginning_was_not_confirmed_is_ended(trainer: Trainer) -> None:
    async with served() as (engine,), updated_by(trainer, [engine]) as servers:
        engine.unanswered = {"/start_weight_update"}
        with suppress(RolloutError):
            await servers.update_weights(trainer.publish(1))
        assert not engine.bare and "/start_weight_update" in engine.calls and not engine.unanswered
        await servers.update_weights(trainer.publish(2))
        assert has(engine, 2)
        engine.check_at_rest()


async def test_a_server_whose_layers_cannot_compute_stays_paused(
    trainer: Trainer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(weights_group, "LEAVE_S", 1.0)
    async with served() as (engine,), updated_by(trainer, [engine]) as servers:

        def fail(path: str) -> None:
            is_late = engine.calls.count("/update_weights") > 1
            assert not is_late or path in ("/resume", "/shutdown_weight_transfer_engine"), "the worker is out of memory"

        engine.on_call = fail
        with pytest.raises(RolloutError, match="the worker is out of memory"):
            await servers.update_weights(trainer.publish(1))
        assert engine.is_paused and engine.bare and "/resume" not in engine.calls
        engine.on_call = lambda path: None
        assert await servers.update_weights(trainer.publish(2)) == {"file": 1}
        assert has(engine, 2) and not engine.is_paused
        assert await servers.update_weights(trainer.publish(3)) == {"collective": 1}
        assert has(engine, 3)
        engine.check_at_rest()


async def test_without_a_file_for_the_server_the_next_weights_come_directly_too(trainer: Trainer) -> None:
    async with served() as (engine,), updated_by(trainer, [engine]) as servers:

        def withdraw(path: str) -> None:
            if engine.calls.count("/update_weights") == 2:
                trainer.sender.close()

        engine.on_call = withdraw
        with pytest.raises(RolloutError):
            await servers.update_weights(trainer.publish(1))
        engine.on_call = lambda path: None
        elsewhere = replace(trainer.publish(2), url="http://127.0.0.3:9/weights")
        assert await servers.update_weights(elsewhere) == {"collective": 1}
        assert has(engine, 2)
        engine.check_at_rest()


async def test_a_server_that_dies_in_a_broadcast_holds_neither_the_trainer_nor_the_other_server(
    trainer: Trainer,
) -> None:
    async with served(2) as (one, dying), updated_by(trainer, [one, dying]) as servers:

        def die(path: str) -> None:
            if dying.calls.count("/update_weights") == 2:
                dying.is_dead = True
                dying.leave()

        dying.on_call = die
        assert await servers.update_weights(trainer.publish(1)) == {"collective": 1}
        assert has(one, 1)
        one.check_at_rest()


@pytest.mark.parametrize(
    ("backend", "way", "told"),
    [
        (None, "nccl", "no weight transfer of its own, and rollout.direct_weights needs 'nccl'"),
        ("ipc", "nccl", "weight transfer 'ipc', and rollout.direct_weights needs 'nccl'"),
        ("nccl", "memory", "weight transfer 'nccl', and rollout.direct_weights needs 'ipc'"),
    ],
)
async def test_a_server_that_shares_no_transport_is_named_with_the_remedy(
    backend: str | None, way: DirectWeights, told: str
) -> None:
    engine, session = TransferringVllm({}, backend=backend), HttpSession()
    await engine.server.start_server()
    client = VllmClient(engine.url, session)
    try:
        with pytest.raises(RolloutError, match=f"{told}: start it with --weight-transfer-config .*, or set rollout"):
            client._check_transfer(await client._settings(), way)
        engine.backend = BACKENDS[way]
        client._check_transfer(await client._settings(), way)
    finally:
        await session.close()
        await engine.close()


async def test_memory_that_cannot_be_lent_leaves_the_file(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(memory: LentMemory, num_bytes: int) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(LentMemory, "_new", fail)
    async with served(backend="ipc") as (engine,), updated_by(trainer, [engine]) as servers:
        assert await servers.update_weights(trainer.publish(1)) == {"file": 1}
        assert has(engine, 1)
        engine.check_at_rest()


async def test_a_server_of_several_devices_copies_no_memory_and_reads_the_file(trainer: Trainer) -> None:
    async with served(backend="ipc", num_workers=2) as (engine,), updated_by(trainer, [engine]) as servers:
        assert await servers.update_weights(trainer.publish(1)) == {"file": 1}
        assert has(engine, 1)
        engine.check_at_rest()


@pytest.mark.vllm
@pytest.mark.integration
@pytest.mark.skipif(not (ENVIRONMENT / ".installed").exists(), reason="there is no .venv-vllm: make vllm-env")
@pytest.mark.parametrize(("backend", "transport"), [("nccl", "collective"), ("ipc", "device_memory")])
async def test_vllms_own_code_takes_the_messages(trainer: Trainer, backend: str, transport: str) -> None:
    named = weights_of(0)
    form = {name: (list(weight.shape), str(weight.dtype).removeprefix("torch.")) for name, weight in named.items()}
    words = [str(Path(__file__).with_name("vllm_receiver.py")), backend, json.dumps(form)]
    receiver = await asyncio.create_subprocess_exec(ENVIRONMENT / "bin" / "python", *words, stdout=PIPE)
    session = HttpSession()
    try:
        assert receiver.stdout is not None
        url = f"http://127.0.0.1:{(await receiver.stdout.readline()).decode().strip()}"
        way: DirectWeights = "memory" if backend == "ipc" else "nccl"
        servers = Servers([url], engine="vllm", direct_weights=way, sender=trainer)
        for version in (1, 2):
            assert await servers.update_weights(trainer.publish(version)) == {transport: 1}
            held = json.loads(await session.send("GET", url, "/held"))
            expected = {name: weight.double().flatten().tolist() for name, weight in weights_of(version).items()}
            assert held == {"weights": expected, "label": str(version), "paused": False}
        await servers.close()
    finally:
        receiver.kill()
        await receiver.wait()
        await session.close()
