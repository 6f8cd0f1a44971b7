"""Broadcasts of published weights to processes that take themselves to be on other machines."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
from published import publish_next
from torch._C._distributed_c10d import TCPStore

sys.path.insert(0, str(Path(__file__).parent))

from machine import BUCKET_BYTES, Machine, digest

from penstock.runtime.file_service import serving_files
from penstock.types import WeightsHandle
from penstock.weights import broadcast
from penstock.weights.broadcast import KEPT_OFFERS, Offer, Offers
from penstock.weights.publication import WeightsPublisher
from penstock.weights.receiver import linked

SHAPES = {"embed": [300, 70], "head": [513], "norm": [7, 1]}
SECRET, HOST = "rule", "127.0.0.1"


def policy(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


class Trainer:
    """It publishes versions, serves their files, and broadcasts them."""

    def __init__(self, directory: Path, service: str) -> None:
        self._publisher, self._service = WeightsPublisher(directory / "weights"), service
        self.offers = Offers(HOST)

    def published(self, version: int) -> WeightsHandle:
        handle = publish_next(self._publisher, policy(version), version)
        return self.offers.add(linked(handle, service=self._service, secret=SECRET, machine="trainer"))


@pytest.fixture
async def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Trainer]:
    monkeypatch.setattr(broadcast, "BUCKET_BYTES", BUCKET_BYTES)
    async with serving_files([tmp_path], address=HOST, secret=SECRET) as service:
        trainer = Trainer(tmp_path, service)
        yield trainer
        trainer.offers.close()


@pytest.fixture
def three(tmp_path: Path) -> Iterator[list[Machine]]:
    with ExitStack() as stack:
        yield [stack.enter_context(Machine(f"machine-{number}", tmp_path, SHAPES)) for number in range(3)]


async def ask(machines: list[Machine], handle: WeightsHandle, *, join_s: float = 20.0) -> list[str]:
    """Return how the weights came to each machine, if they are the right ones."""
    for machine in machines:
        machine.tell(handle, join_s=join_s)
    received = await asyncio.gather(*(asyncio.to_thread(machine.received) for machine in machines))
    wanted = digest(policy(handle.policy_version))
    return [each.transport if each.digest == wanted else f"wrong: {each}" for each in received]


@pytest.mark.integration
async def test_machines_that_ask_together_get_the_file_together(
    trainer: Trainer, three: list[Machine], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin = Offer._broadcast

    def begin_when_all_have_asked(offer: Offer, store: TCPStore) -> None:
        while store.add(f"{offer.num_waves}/members", 0) < 3 and not offer._withdrawn.wait(0.01):
            pass
        begin(offer, store)

    with monkeypatch.context() as patched:
        patched.setattr(Offer, "_broadcast", begin_when_all_have_asked)
        for version in range(1, 9):
            assert await ask(three, trainer.published(version)) == ["collective"] * 3
            assert trainer.offers._newest[-1].num_waves == 1
    handle = trainer.published(9)
    assert await ask(three[:1], handle) == ["collective"]
    assert await ask(three[1:], handle) == ["collective"] * 2, "a later broadcast of the same version"


@pytest.mark.integration
async def test_a_machine_that_does_not_come_costs_the_others_only_time(tmp_path: Path, trainer: Trainer) -> None:
    """It asks, and is then lost before the broadcast."""
    handle = trainer.published(1)
    port = int(handle.meeting.rpartition(":")[2])
    with Machine("machine-0", tmp_path, SHAPES) as machine:
        assert await ask([machine], trainer.published(2)) == ["collective"], "it has started"
        store = TCPStore(HOST, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=10))
        store.add("0/members", 1)
        assert await ask([machine], handle, join_s=1.0) == ["file"]
        assert await ask([machine], trainer.published(3)) == ["collective"]


@pytest.mark.integration
async def test_without_a_broadcast_the_file_is_fetched(tmp_path: Path, trainer: Trainer) -> None:
    first = trainer.published(1)
    with Machine("machine-0", tmp_path, SHAPES) as machine:
        without_sender = replace(first, meeting=f"{HOST}:9")
        assert await ask([machine], without_sender) == ["file"]
        assert await ask([machine], replace(trainer.published(2), meeting="")) == ["file"]
        machine.tell(replace(first, meeting="somewhere"))
        assert "`meeting` of a weights handle does not have the form" in machine.received().transport


async def test_only_the_newest_versions_are_offered(trainer: Trainer) -> None:
    handles = [trainer.published(version) for version in range(1, KEPT_OFFERS + 3)]
    assert len({handle.meeting for handle in handles}) == len(handles)
    assert [offer.handle.policy_version for offer in trainer.offers._newest] == [3, 4]
    again = trainer.offers.add(replace(handles[-1], meeting=""))
    assert again == handles[-1], "an offer that is asked for twice is the same"
