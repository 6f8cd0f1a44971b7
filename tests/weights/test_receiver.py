"""Weights on another machine come in parts; on the same one they are mapped where they lie."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import BinaryIO

import pytest
import torch
from published import publish_next
from starlette.types import Message, Receive, Scope, Send
from torch import Tensor

from penstock.model.low_rank import names_of
from penstock.ports.inference import WeightsOutOfReach
from penstock.runtime import file_service
from penstock.runtime.file_service import FileService
from penstock.runtime.http_server import bind, listening, url_of
from penstock.types import AdaptersForm, WeightsHandle
from penstock.weights import receiver as receiver_module
from penstock.weights.adapters import MergingReceiver
from penstock.weights.publication import WeightsPublisher
from penstock.weights.receiver import CARRIERS, Carrier, Receiver, linked
from penstock.weights.shared_memory import WeightsMismatch, layout

HERE, THERE = "boot-1", "boot-2"
SECRET = "rule"
PART_BYTES = 5000


def policy(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(64, 33, generator=generator) for name in ("embed", "head", "norm")}


@dataclass
class Sender:
    """The trainer's machine: it publishes, and serves its files."""

    runtime_dir: Path
    url: str = ""
    asked: list[int] = field(default_factory=list)
    """Where each range begins that was asked for."""
    cuts: Iterator[bool] = field(default_factory=lambda: iter(()))
    """Whether the next answer breaks off."""

    def published(self, version: int, *, seed: int | None = None) -> WeightsHandle:
        publisher = WeightsPublisher(self.runtime_dir / "weights")
        handle = publish_next(publisher, policy(version if seed is None else seed), version)
        return linked(handle, service=self.url, secret=SECRET, machine=THERE)

    async def serve(self, scope: Scope, receive: Receive, send: Send) -> None:
        self.asked.append(int(dict(scope["headers"])[b"range"].decode().removeprefix("bytes=").partition("-")[0]))
        if next(self.cuts, False):

            async def send_part(message: Message) -> None:
                if message.get("body"):
                    await send({**message, "body": message["body"][:100], "more_body": True})
                    raise ConnectionError("cut")
                await send(message)

            with suppress(ConnectionError):
                await FileService([self.runtime_dir], SECRET)(scope, receive, send_part)
        else:
            await FileService([self.runtime_dir], SECRET)(scope, receive, send)


@pytest.fixture(autouse=True)
def several_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Send even small files in several parts."""
    monkeypatch.setattr(file_service, "PAUSE_S", 0.01)
    monkeypatch.setattr(file_service, "PART_BYTES", PART_BYTES)


@pytest.fixture
async def sender(tmp_path: Path) -> AsyncIterator[Sender]:
    sender = Sender(tmp_path / "trainer")
    sender.runtime_dir.mkdir()
    with bind("127.0.0.1", 0) as listener:
        sender.url = url_of("127.0.0.1", listener)
        async with listening(sender.serve, listener):
            yield sender


def receiver(
    tmp_path: Path, *, machine: str = HERE, name: str = "0", carriers: Sequence[Carrier] = CARRIERS
) -> Receiver:
    received = tmp_path / "received"
    return Receiver(
        layout(policy(0)),
        machine=machine,
        directory=received / name,
        neighbours=lambda: received.glob("*"),
        carriers=carriers,
    )


def left(tmp_path: Path) -> list[str]:
    """What receivers keep, by their names."""
    return sorted(str(path.relative_to(tmp_path)) for path in tmp_path.glob("received/*/*"))


@pytest.mark.parametrize("machine", [HERE, THERE])
async def test_who_shares_the_machine_maps_and_others_fetch(tmp_path: Path, sender: Sender, machine: str) -> None:
    handle = sender.published(3)
    named = await asyncio.to_thread(receiver(tmp_path, machine=machine), handle)
    assert sender.asked == ([] if machine == THERE else list(range(0, handle.num_bytes, PART_BYTES)))
    for name, tensor in policy(3).items():
        torch.testing.assert_close(named[name], tensor, rtol=0, atol=0)


async def test_what_one_fetches_is_there_for_all_of_its_machine(tmp_path: Path, sender: Sender) -> None:
    receivers = [receiver(tmp_path, name=str(number)) for number in range(4)]
    for version in (3, 4):
        handle = sender.published(version)
        together = await asyncio.gather(*(asyncio.to_thread(each, handle) for each in receivers))
        assert sorted(sender.asked) == list(range(0, handle.num_bytes, PART_BYTES))
        for named in together:
            torch.testing.assert_close(named["head"], policy(version)["head"], rtol=0, atol=0)
        assert left(tmp_path) == [f"received/{n}/{version}-{handle.fingerprint}.safetensors" for n in range(4)]
        sender.asked.clear()


async def test_a_file_that_a_neighbour_gets_just_before_comes_from_the_neighbour(
    tmp_path: Path, sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, other = receiver(tmp_path, name="one"), receiver(tmp_path, name="other")
    handle, turn, first = sender.published(3), receiver_module._turn, iter([True])
    await asyncio.to_thread(one, handle)
    await asyncio.to_thread(other, handle)
    assert (one.transport, other.transport) == ("file", "shared_memory")
    handle = sender.published(4)

    @contextmanager
    def turn_after_the_other(given: WeightsHandle) -> Iterator[bool]:
        if next(first, False):
            other(handle)
        with turn(given) as is_mine:
            yield is_mine

    monkeypatch.setattr(receiver_module, "_turn", turn_after_the_other)
    await asyncio.to_thread(one, handle)
    assert (one.transport, other.transport) == ("shared_memory", "file")


async def test_what_a_neighbour_cannot_fetch_another_does(tmp_path: Path, sender: Sender) -> None:
    (by_http,), fails = [each for each in CARRIERS if each.transport == "file"], iter([True])

    def failing(handle: WeightsHandle, file: BinaryIO) -> None:
        if next(fails, False):
            file.write(b"a part")
            raise MemoryError("its last moment")
        by_http.carry(handle, file)

    handle = sender.published(3)
    carriers = [by_http._replace(carry=failing)]
    both = [asyncio.to_thread(receiver(tmp_path, name=name, carriers=carriers), handle) for name in "ab"]
    one, other = sorted(await asyncio.gather(*both, return_exceptions=True), key=lambda end: isinstance(end, dict))
    assert isinstance(one, MemoryError) and isinstance(other, dict) and len(left(tmp_path)) == 1


async def test_nobody_waits_for_a_neighbour_who_gets_nothing(
    tmp_path: Path, sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receiver_module, "MAX_SILENCE_S", 0.2)
    handle = sender.published(3)
    with receiver_module._turn(handle) as is_mine:
        assert is_mine and not sender.asked
        await asyncio.to_thread(receiver(tmp_path), handle)


async def test_a_container_on_the_same_machine_fetches_what_it_does_not_see(tmp_path: Path, sender: Sender) -> None:
    handle = replace(sender.published(3), path="/not/mounted/here.safetensors")
    assert (await asyncio.to_thread(receiver(tmp_path, machine=THERE), handle)).keys() == policy(3).keys()


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("a link of another run", "HTTP 403"),
        ("no token", "HTTP 403"),
        ("a version that is gone", "HTTP 404"),
        ("nobody listens", "Cannot connect"),
    ],
)
async def test_weights_out_of_reach(
    tmp_path: Path, sender: Sender, monkeypatch: pytest.MonkeyPatch, what: str, message: str
) -> None:
    handle = sender.published(3)
    match what:
        case "a link of another run":
            handle = linked(handle, service=sender.url, secret="another", machine=THERE)
        case "no token":
            handle = replace(handle, url=handle.url.partition("?")[0])
        case "a version that is gone":
            (sender.runtime_dir / "weights" / "3" / "model.safetensors").unlink()
        case "nobody listens":
            monkeypatch.setattr(receiver_module, "MAX_SILENCE_S", 0.2)
            handle = replace(handle, url="http://127.0.0.1:9/weights/3/model.safetensors?token=hidden")
    with pytest.raises(WeightsOutOfReach, match=rf"policy_version 3 cannot be read from http://.*{message}") as raised:
        await asyncio.to_thread(receiver(tmp_path), handle)
    assert "token" not in str(raised.value) and left(tmp_path) == []


async def test_what_comes_changed_is_refused(tmp_path: Path, sender: Sender) -> None:
    handle = sender.published(3)
    sender.published(3, seed=4)
    with pytest.raises(WeightsMismatch, match="its bytes changed"):
        await asyncio.to_thread(receiver(tmp_path), handle)
    assert left(tmp_path) == []


async def test_a_part_that_breaks_off_is_asked_for_from_where_it_broke(tmp_path: Path, sender: Sender) -> None:
    sender.cuts = iter([True, False, True, True, False])
    handle = sender.published(3)
    await asyncio.to_thread(receiver(tmp_path), handle)
    assert {0, 100}.issubset(sender.asked)


async def test_adapters_and_their_base_come_apart(tmp_path: Path, sender: Sender) -> None:
    """The base is fetched once per machine, and again only by a server that finds it nowhere."""
    publisher = WeightsPublisher(sender.runtime_dir / "weights")
    with publisher.open_base(layout(policy(0))) as opened:
        base = opened.write_whole(policy(0).items(), 0)
    form = AdaptersForm(base=base, rank=1, alpha=2, targets=("head",))
    named = dict(zip(names_of("head"), (torch.ones(1, 33), torch.ones(64, 1)), strict=True))
    receivers = [MergingReceiver(receiver(tmp_path, name=str(number)), torch.device("cpu")) for number in range(2)]
    for version in (3, 4):
        with publisher.open(layout(named), version, adapters=True) as opened:
            handle = opened.write_whole(named.items(), version, adapters=form)
        handle = linked(handle, service=sender.url, secret=SECRET, machine=THERE)
        for each in receivers:
            found = await asyncio.to_thread(each, handle)
            assert torch.equal(found["head"], policy(0)["head"] + 2) and torch.equal(found["norm"], policy(0)["norm"])
        parts = [range(0, size, PART_BYTES) for size in (handle.num_bytes, base.num_bytes)[: 2 if version == 3 else 1]]
        assert sorted(sender.asked) == sorted(start for part in parts for start in part)
        sender.asked.clear()
        files = [f"0-{base.fingerprint}.safetensors", f"{version}-{handle.fingerprint}.safetensors"]
        assert left(tmp_path) == [f"received/{number}/{file}" for number in range(2) for file in files]
    restarted = MergingReceiver(receiver(tmp_path, name="0"), torch.device("cpu"))
    assert torch.equal((await asyncio.to_thread(restarted, handle))["head"], policy(0)["head"] + 2)
    assert sender.asked == []
    too_large = replace(handle, num_bytes=2**20)
    with pytest.raises(WeightsMismatch, match="have at most"):
        await asyncio.to_thread(receiver(tmp_path, name="1"), too_large)
