"""Weights that are lent while training may change them."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch
from published import publish

from penstock.ports.training import WeightsNotSent
from penstock.weights import sender as sender_module
from penstock.weights.live_weights import LiveWeights
from penstock.weights.sender import Buckets, Sender

CPU = torch.device("cpu")
NUM_TURNS = 200


def weights_of(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {f"layer-{number}": torch.randn(8, 6, generator=generator) for number in range(6)} | {
        "bias": torch.randn(5, generator=generator).double()
    }


def in_bfloat16(named: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: weight if name == "bias" else weight.bfloat16() for name, weight in named.items()}


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sender_module, "BUCKET_BYTES", 200)


def test_buckets_of_the_device_are_those_of_the_file(tmp_path: Path) -> None:
    """The trainer's weights have another dtype than the file, and the file has a weight under two names."""
    named = weights_of(1)
    published = in_bfloat16(named) | {"head": named["layer-0"].bfloat16()}
    path = Path(publish(published, directory=tmp_path, policy_version=1).path)
    live = LiveWeights()
    live.hold(1, named | {"head": named["layer-0"]})
    held, from_file = Buckets(path, 1, live, CPU), Buckets(path, 1, None, CPU)
    assert len(held.tensors) > 3
    for number, tensors in enumerate(held.tensors):
        assert live.copy(1, tensors, torch.empty(from_file.on_device(number).shape, dtype=torch.uint8))
        assert torch.equal(held.on_device(number), from_file.on_device(number))
    assert not live.copy(2, held.tensors[0], torch.empty(0, dtype=torch.uint8)), "of another version"
    live.withdraw()
    assert not live.copy(1, held.tensors[0], torch.empty(0, dtype=torch.uint8))
    assert torch.equal(held.on_device(0), from_file.on_device(0))


def test_every_bucket_is_of_its_version_while_training_changes_the_weights(tmp_path: Path) -> None:
    live, named, ended = LiveWeights(), weights_of(0), threading.Event()
    paths = {
        version: Path(publish(in_bfloat16(weights_of(version)), directory=tmp_path, policy_version=version).path)
        for version in (1, 2, 3)
    }

    def train() -> None:
        version = 0
        while not ended.is_set():
            version = version % 3 + 1
            live.withdraw()
            for name, weight in weights_of(version).items():
                named[name].copy_(weight)
            live.hold(version, named)

    training = threading.Thread(target=train)
    training.start()
    try:
        for turn in range(NUM_TURNS):
            version = turn % 3 + 1
            held, from_file = (Buckets(paths[version], version, each, CPU) for each in (live, None))
            for number in range(len(held.tensors)):
                assert torch.equal(held.on_device(number), from_file.on_device(number))
    finally:
        ended.set()
        training.join()


def test_a_bucket_of_a_closed_group_is_not_lent(tmp_path: Path) -> None:
    path = Path(publish(in_bfloat16(weights_of(1)), directory=tmp_path, policy_version=1).path)
    sender = Sender("127.0.0.1", device=CPU)
    opened = sender.open("http://server", path, 1, world_size=2, way="vllm_memory")
    sender.close_group(opened.name)
    with pytest.raises(WeightsNotSent, match=f"no group {opened.name}"):
        sender.lend(opened.name, 0)
