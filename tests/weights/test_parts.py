"""Weights on another machine come in parts; on the same one they are mapped where they lie."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from penstock.ports import WeightsOutOfReach
from penstock.processes import publishing
from penstock.processes.publishing import Publications
from penstock.types import WeightsHandle
from penstock.weights import parts
from penstock.weights.parts import Receiver
from penstock.weights.shared_memory import WeightsMismatch, WeightsPublisher, layout

HERE, THERE = "boot-1", "boot-2"
KEY = "rule"


def policy(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(64, 33, generator=generator) for name in ("embed", "head", "norm")}


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several parts even of little, and no patience."""
    monkeypatch.setattr(publishing, "boot_id", lambda: THERE)
    for name, value in (("PART_BYTES", 5000), ("PATIENCE_S", 0.2), ("PAUSE_S", 0.01)):
        monkeypatch.setattr(parts, name, value)


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Where each part begins that somebody has asked for."""
    starts: list[int] = []
    whole = Receiver._part

    def part(self: Receiver, url: str, start: int, end: int) -> bytes:
        starts.append(start)
        return whole(self, url, start, end)

    monkeypatch.setattr(Receiver, "_part", part)
    return starts


def receiver(tmp_path: Path, *, machine: str, name: str = "0", key: str | None = KEY) -> Receiver:
    received = tmp_path / "received"
    return Receiver(
        layout(policy(0)), machine=machine, directory=received / name, neighbours=lambda: received.glob("*"), key=key
    )


def left(tmp_path: Path) -> list[str]:
    """What receivers keep, by their names."""
    return sorted(str(path.relative_to(tmp_path)) for path in tmp_path.glob("received/*/*"))


def published(served: Publications, directory: Path, version: int) -> WeightsHandle:
    return served.tell(WeightsPublisher(directory).publish(policy(version), version))


@pytest.mark.parametrize("machine", [HERE, THERE])
async def test_who_shares_the_machine_maps_and_others_fetch(tmp_path: Path, fetched: list[int], machine: str) -> None:
    async with publishing.publishing(tmp_path / "weights", "127.0.0.1", KEY) as served:
        assert served is not None
        handle = published(served, tmp_path / "weights", 3)
        named = await asyncio.to_thread(receiver(tmp_path, machine=machine), handle)
    assert fetched == ([] if machine == THERE else list(range(0, handle.num_bytes, parts.PART_BYTES)))
    for name, tensor in policy(3).items():
        torch.testing.assert_close(named[name], tensor, rtol=0, atol=0)


async def test_what_one_fetches_is_there_for_all_of_its_machine(tmp_path: Path, fetched: list[int]) -> None:
    receivers = [receiver(tmp_path, machine=HERE, name=str(number)) for number in range(4)]
    async with publishing.publishing(tmp_path / "weights", "127.0.0.1", KEY) as served:
        assert served is not None
        for version in (3, 4):
            handle = published(served, tmp_path / "weights", version)
            together = await asyncio.gather(*(asyncio.to_thread(each, handle) for each in receivers))
            assert sorted(fetched) == list(range(0, handle.num_bytes, parts.PART_BYTES))
            for named in together:
                torch.testing.assert_close(named["head"], policy(version)["head"], rtol=0, atol=0)
            assert left(tmp_path) == [f"received/{n}/{version}-{handle.fingerprint}.safetensors" for n in range(4)]
            fetched.clear()


async def test_what_a_neighbour_cannot_fetch_another_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, fails = Receiver._part, iter([False, True])

    def part(self: Receiver, url: str, start: int, end: int) -> bytes:
        if next(fails, False):
            raise MemoryError("its last moment")
        return whole(self, url, start, end)

    monkeypatch.setattr(Receiver, "_part", part)
    async with publishing.publishing(tmp_path / "weights", "127.0.0.1", KEY) as served:
        assert served is not None
        handle = published(served, tmp_path / "weights", 3)
        both = [asyncio.to_thread(receiver(tmp_path, machine=HERE, name=name), handle) for name in "ab"]
        one, other = sorted(await asyncio.gather(*both, return_exceptions=True), key=lambda end: isinstance(end, dict))
    assert isinstance(one, MemoryError) and isinstance(other, dict) and len(left(tmp_path)) == 1


async def test_nobody_waits_for_a_neighbour_who_gets_nothing(tmp_path: Path, fetched: list[int]) -> None:
    async with publishing.publishing(tmp_path / "weights", "127.0.0.1", KEY) as served:
        assert served is not None
        handle = published(served, tmp_path / "weights", 3)
        with parts._turn(handle) as is_mine:
            assert is_mine and not fetched
            await asyncio.to_thread(receiver(tmp_path, machine=HERE), handle)


async def test_a_container_on_the_same_machine_fetches_what_it_does_not_see(tmp_path: Path) -> None:
    async with publishing.publishing(tmp_path / "weights", "127.0.0.1", KEY) as served:
        assert served is not None
        handle = replace(published(served, tmp_path / "weights", 3), path="/not/mounted/here.safetensors")
        assert (await asyncio.to_thread(receiver(tmp_path, machine=THERE), handle)).keys() == policy(3).keys()


@pytest.mark.parametrize(
    ("what", "message"),
    [
        ("a wrong key", "HTTP Error 401"),
        ("no key", "HTTP Error 401"),
        ("a version that is gone", "HTTP Error 404"),
        ("nobody listens", "refused"),
    ],
)
async def test_weights_out_of_reach(tmp_path: Path, what: str, message: str) -> None:
    async with publishing.publishing(tmp_path / "weights", "127.0.0.1", KEY) as served:
        assert served is not None
        handle, key = published(served, tmp_path / "weights", 3), KEY
        if what == "a version that is gone":
            handle = replace(handle, url=served.url + "/weights/2")
        if what == "nobody listens":
            handle = replace(handle, url="http://127.0.0.1:9/weights/3")
        given = {"a wrong key": "play", "no key": None}.get(what, key)
        with pytest.raises(WeightsOutOfReach, match=rf"policy_version 3 cannot be had from http://.*{message}"):
            await asyncio.to_thread(receiver(tmp_path, machine=HERE, key=given), handle)
    assert left(tmp_path) == []


async def test_what_comes_changed_is_refused(tmp_path: Path) -> None:
    async with publishing.publishing(tmp_path / "weights", "127.0.0.1", KEY) as served:
        assert served is not None
        publisher = WeightsPublisher(tmp_path / "weights")
        handle = served.tell(publisher.publish(policy(3), 3))
        publisher.publish(policy(4), 3)
        with pytest.raises(WeightsMismatch, match="its bytes changed"):
            await asyncio.to_thread(receiver(tmp_path, machine=HERE), handle)
    assert left(tmp_path) == []


async def test_a_part_that_breaks_off_is_asked_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, broken = Receiver._part, iter([True, False, True, True, False])

    def part(self: Receiver, url: str, start: int, end: int) -> bytes:
        if next(broken, False):
            raise ConnectionResetError("cut")
        return whole(self, url, start, end)

    monkeypatch.setattr(Receiver, "_part", part)
    async with publishing.publishing(tmp_path / "weights", "127.0.0.1", KEY) as served:
        assert served is not None
        handle = published(served, tmp_path / "weights", 3)
        await asyncio.to_thread(receiver(tmp_path, machine=HERE), handle)


@pytest.mark.parametrize("path", ["", "x", "../3", "3/../../secret", "3"])
async def test_nothing_but_published_weights_is_given_out(tmp_path: Path, path: str) -> None:
    (tmp_path / "secret").write_text("no")
    async with publishing.publishing(tmp_path / "weights", "127.0.0.1", KEY) as served:
        assert served is not None
        handle = replace(published(served, tmp_path / "weights", 2), url=f"{served.url}/weights/{path}")
        with pytest.raises(WeightsOutOfReach, match="404"):
            await asyncio.to_thread(receiver(tmp_path, machine=HERE), handle)
