"""Both ends of a group: the trainer's in a process of its own, over Gloo."""

from __future__ import annotations

import asyncio
import gc
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch._C._distributed_c10d import TCPStore

sys.path.insert(0, str(Path(__file__).parent))

from trainer_end import TrainerProcess, numbers

from penstock.weights.collective import GroupFailed, Groups, GroupTensors, Rendezvous

SHAPES = {"a.weight": [300, 200], "b.bias": [7]}


def announced(shapes: dict[str, list[int]], *, flat: bool = True, name: str = "g") -> GroupTensors:
    return GroupTensors(
        group_name=name,
        names=list(shapes),
        dtypes=["float32"] * len(shapes),
        shapes=list(shapes.values()),
        load_format="flattened_bucket" if flat else None,
    )


def make_groups(*, join_timeout_s: float = 60.0, timeout_s: float = 60.0, max_bytes: int = 2**30) -> Groups:
    return Groups(
        device=torch.device("cpu"), max_bytes=max_bytes, join_timeout_s=join_timeout_s, transfer_timeout_s=timeout_s
    )


@pytest.fixture
def trainer() -> Iterator[TrainerProcess]:
    trainer = TrainerProcess()
    yield trainer
    trainer.kill()


async def joined(trainer: TrainerProcess, groups: Groups, *, timeout_s: float = 60.0) -> None:
    joining = asyncio.create_task(trainer.join(timeout_s=timeout_s))
    await asyncio.to_thread(groups.join, Rendezvous(**trainer.place()), 1)
    assert await joining is None


@pytest.mark.parametrize(
    ("change", "rank", "message"),
    [
        ({"backend": "mpi"}, 1, "backend must be one of gloo, nccl, hccl"),
        ({"backend": "nccl"}, 1, "nccl needs a device, and this server computes on the CPU"),
        ({"world_size": 1}, 1, "rank 0 is the trainer's"),
        ({}, 0, "rank 0 is the trainer's"),
        ({"master_port": 0}, 1, "not a port"),
    ],
)
def test_a_group_that_cannot_be_is_refused_at_once(change: dict[str, object], rank: int, message: str) -> None:
    place = {
        "group_name": "g",
        "master_address": "127.0.0.1",
        "master_port": 1,
        "world_size": 2,
        "backend": "gloo",
        **change,
    }
    with pytest.raises(GroupFailed, match=message):
        make_groups().join(Rendezvous(**place), rank)  # type: ignore[arg-type]


@pytest.mark.parametrize("backend", ["nccl", "hccl"])
def test_a_backend_that_is_not_there_is_named(backend: str) -> None:
    meeting = TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
    groups = Groups(device=torch.device("cuda"), max_bytes=1, join_timeout_s=5.0)
    place = Rendezvous(
        group_name="g", master_address="127.0.0.1", master_port=meeting.port, world_size=2, backend=backend
    )
    for _ in range(2):
        with pytest.raises(GroupFailed, match=r"rank 1 waited up to 5 s for rank 0 .* to join group g: \S"):
            groups.join(place, 1)


def test_a_group_that_nobody_joined_is_named() -> None:
    with pytest.raises(GroupFailed, match="no group 'g'"):
        make_groups().receive(announced(SHAPES))
    with pytest.raises(GroupFailed, match="no group 'g'"):
        make_groups().leave("g")


@pytest.mark.integration
async def test_buckets_arrive_and_a_group_can_be_joined_again(trainer: TrainerProcess) -> None:
    groups = make_groups()
    for value in (1.0, 2.0):
        await joined(trainer, groups)
        with pytest.raises(GroupFailed, match="exists already"):
            groups.join(Rendezvous(**trainer.place()), 1)
        for more in (0.0, 0.5):
            sending = asyncio.create_task(trainer.asked("send", shapes=SHAPES, value=value + more))
            received = await asyncio.to_thread(groups.receive, announced(SHAPES))
            assert await sending is None
            expected = numbers(SHAPES, value + more)
            assert received.keys() == expected.keys()
            assert all(torch.equal(received[name], tensor) for name, tensor in expected.items())
        assert await trainer.asked("close") is None
        groups.leave("g")
    assert not torch.distributed.is_initialized()


@pytest.mark.long
@pytest.mark.integration
async def test_a_trainer_that_dies_is_named_and_the_group_is_of_no_more_use(trainer: TrainerProcess) -> None:
    groups = make_groups()
    await joined(trainer, groups)
    receiving = asyncio.create_task(asyncio.to_thread(groups.receive, announced(SHAPES)))
    trainer.kill()
    with pytest.raises(GroupFailed, match=r"rank 1 waited .* s for 2 tensors of group g, held by rank 0"):
        await receiving
    with pytest.raises(GroupFailed, match=r"group g is closed: rank 1 waited .*; join it again"):
        groups.receive(announced(SHAPES))
    another = TrainerProcess()
    await joined(another, groups)
    groups.close()
    another.kill()


@pytest.mark.integration
@pytest.mark.long
async def test_a_bucket_for_which_there_is_no_room_closes_the_group(trainer: TrainerProcess) -> None:
    groups = make_groups(max_bytes=2**60)
    await joined(trainer, groups)
    with pytest.raises(GroupFailed, match=r"1 tensors cannot be kept: .*; join the group again, and send smaller"):
        groups.receive(announced({"huge": [2**48]}))
    with pytest.raises(GroupFailed, match="group g is closed: 1 tensors cannot be kept"):
        groups.receive(announced(SHAPES))
    groups.close()


@pytest.mark.integration
@pytest.mark.long
async def test_a_group_that_is_joined_after_the_end_is_left_at_once(trainer: TrainerProcess) -> None:
    """The receiver may leave before the trainer has joined. Then the trainer's error says who was missing."""
    groups = make_groups()
    groups.close()
    joining = asyncio.create_task(trainer.join(timeout_s=60.0))
    await asyncio.to_thread(groups.join, Rendezvous(**trainer.place()), 1)
    assert (error := await joining) is None or "for 1 receivers to join group g" in error
    with pytest.raises(GroupFailed, match="no group 'g'"):
        groups.receive(announced(SHAPES))


@pytest.mark.integration
@pytest.mark.long
async def test_a_server_that_does_not_take_a_bucket_is_named(trainer: TrainerProcess) -> None:
    groups = make_groups()
    await joined(trainer, groups, timeout_s=5.0)
    error = await trainer.asked("send", shapes={"large": [4000, 4000]}, value=0.0)
    assert error is not None and "rank 0 waited" in error and "for 1 tensors to be taken, held by 1 receivers" in error
    groups.close()


@pytest.mark.integration
@pytest.mark.long
async def test_a_bucket_that_is_refused_unheard_ends_the_trainers_wait(trainer: TrainerProcess) -> None:
    groups = make_groups()
    await joined(trainer, groups)
    sending = asyncio.create_task(trainer.asked("send", shapes={"large": [4000, 4000]}, value=0.0))
    with pytest.raises(ValueError, match="no tensors are announced"):
        groups.receive(announced({}))
    error = await sending
    assert error is not None and "held by 1 receivers" in error
    groups.close()


@pytest.mark.integration
@pytest.mark.long
async def test_a_group_that_is_left_ends_what_is_being_received(trainer: TrainerProcess) -> None:
    groups = make_groups()
    await joined(trainer, groups)
    receiving = asyncio.create_task(asyncio.to_thread(groups.receive, announced(SHAPES)))
    await asyncio.to_thread(groups.leave, "g")
    with pytest.raises(GroupFailed, match=r"this rank has left the group|no group|is closed"):
        await receiving
    start = time.monotonic()
    del receiving
    gc.collect()
    assert time.monotonic() - start < 20, "leaving the group does not wait for missing ranks"


@pytest.mark.integration
@pytest.mark.long
async def test_whoever_comes_alone_gives_up(trainer: TrainerProcess) -> None:
    error = await trainer.asked("join", join_timeout_s=0.2, timeout_s=1.0, **trainer.place())
    assert error is not None and "rank 0 waited up to 0.2 s for 1 receivers to join group g" in error
    groups = make_groups(join_timeout_s=0.2)
    with pytest.raises(GroupFailed, match=r"rank 1 waited up to 0.2 s for rank 0 at 127.0.0.1:\d+ to join group g"):
        groups.join(Rendezvous(**trainer.place(master_port=trainer.port)), 1)
