"""Weights that are lent while training may change them."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from published import publish

from penstock.ports.training import SendingWay, WeightsNotSent
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


on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
READER = """
import base64, json, pickle, sys
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor
from penstock.weights.tensor_payload import read_tensors

device = torch.device("cuda", 0)
torch.zeros(1, device=device)
opened = {}
for line in sys.stdin:
    way, payload = json.loads(line)
    if way == "sglang_memory":
        named = read_tensors([payload], None, max_bytes=2**20, device=device)
        parts = [each.contiguous().view(-1).view(torch.uint8) for each in named.values()]
        found = torch.cat(parts)
    else:
        ((uuid, arguments),) = pickle.loads(base64.b64decode(payload)).items()
        assert uuid == str(torch.cuda.get_device_properties(device).uuid)
        if payload not in opened:
            opened[payload] = rebuild_cuda_tensor(*arguments)
        found = opened[payload]
    print(found.cpu().numpy().tobytes().hex(), flush=True)
"""


@pytest.mark.cuda
@on_cuda
@pytest.mark.parametrize("way", ["vllm_memory", "sglang_memory"])
def test_another_process_copies_the_memory_of_the_device(tmp_path: Path, way: SendingWay) -> None:
    device, named = torch.device("cuda", 0), weights_of(1)
    path = Path(publish(in_bfloat16(named), directory=tmp_path, policy_version=1).path)
    live = LiveWeights()
    live.hold(1, {name: weight.to(device) for name, weight in named.items()})
    sender, from_file = Sender("127.0.0.1", device=device, live=live), Buckets(path, 1, None, CPU)
    opened = sender.open("http://server", path, 1, world_size=2, way=way)
    command = [sys.executable, "-c", READER]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as reader:
        assert reader.stdin is not None and reader.stdout is not None
        for number in range(len(opened.buckets)):
            if number == 2:
                live.withdraw()
            print(json.dumps([way, sender.lend(opened.name, number)]), file=reader.stdin, flush=True)
            expected = from_file.on_device(number).numpy().tobytes()
            assert bytes.fromhex(reader.stdout.readline()).startswith(expected)
        reader.stdin.close()
    sender.close()


@pytest.mark.cuda
@on_cuda
def test_a_communicator_has_an_id_with_which_servers_join(tmp_path: Path) -> None:
    path = Path(publish(in_bfloat16(weights_of(1)), directory=tmp_path, policy_version=1).path)
    sender = Sender("127.0.0.1", device=torch.device("cuda", 0))
    opened = sender.open("http://server", path, 1, world_size=1, way="communicator")
    assert len(opened.communicator) == 128 and any(opened.communicator)
    sender.send(opened.name).result(60)
    sender.close()
