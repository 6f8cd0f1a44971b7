"""SGLang's weight updates: a trainer's group, brackets, labels."""

from __future__ import annotations

import asyncio
import base64
import os
import pickle
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "weights"))

from sglang_sender import Sender
from sglang_sender import numbers as sent_numbers
from tiny_policy import Held, reference_model, until, weights
from trainer_end import TrainerProcess, numbers

from penstock.rollout.runner import EngineRunner

SHAPES = {name: list(tensor.shape) for name, tensor in weights(0).items()}
BUCKETS = [dict(list(SHAPES.items())[start::2]) for start in (0, 1)]


@pytest.fixture
async def session(url: str) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(total=60)) as session:
        yield session


@pytest.fixture
def trainer() -> Iterator[TrainerProcess]:
    trainer = TrainerProcess()
    yield trainer
    trainer.kill()


async def post(session: aiohttp.ClientSession, path: str, given: object = None) -> tuple[int, Any]:
    async with session.post(path, json={} if given is None else given) as response:
        return response.status, await response.json(content_type=None)


async def join(session: aiohttp.ClientSession, trainer: TrainerProcess) -> None:
    joining = asyncio.create_task(trainer.join())
    given = {
        "master_address": "127.0.0.1",
        "master_port": trainer.port,
        "rank_offset": 1,
        "world_size": 2,
        "group_name": "g",
        "backend": "gloo",
    }
    status, reply = await post(session, "/init_weights_update_group", given)
    assert (status, reply["success"], await joining) == (200, True, None), reply


async def send(
    session: aiohttp.ClientSession, trainer: TrainerProcess, shapes: dict[str, list[int]], value: float, **more: Any
) -> tuple[int, str]:
    sending = asyncio.create_task(trainer.asked("send", shapes=shapes, value=value))
    given = {
        "names": list(shapes),
        "dtypes": ["float32"] * len(shapes),
        "shapes": list(shapes.values()),
        "group_name": "g",
        "load_format": "flattened_bucket",
        **more,
    }
    status, reply = await post(session, "/update_weights_from_distributed", given)
    assert await sending is None
    assert reply["success"] == (status == 200)
    return status, reply["message"]


def holds(runner: EngineRunner, value: float) -> bool:
    return equals(runner, numbers(SHAPES, value))


def equals(runner: EngineRunner, expected: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(parameter, expected[name]) for name, parameter in runner.engine.parameters().items())


@pytest.mark.long
@pytest.mark.integration
async def test_buckets_without_a_bracket_are_served_when_all_are_there(
    session: aiohttp.ClientSession, runner: EngineRunner, trainer: TrainerProcess
) -> None:
    await join(session, trainer)
    labels: list[tuple[list[dict[str, Any]], int]] = [
        ([{}, {}], 1),
        ([{}, {"weight_version": "5"}], 5),
        ([{"weight_version": 7}, {"weight_version": 7, "abort_all_requests": True}], 7),
    ]
    before = 0
    for value, (more, version) in enumerate(labels):
        message = f"staged; {len(BUCKETS[1])} weights have not arrived yet"
        assert await send(session, trainer, BUCKETS[0], value, **more[0]) == (200, message)
        assert runner.policy_version == before
        assert await send(session, trainer, BUCKETS[1], value, **more[1]) == (200, f"serving weight_version {version}")
        assert runner.policy_version == version and holds(runner, value)
        before = version
    await leave(session, trainer)


async def leave(session: aiohttp.ClientSession, trainer: TrainerProcess) -> None:
    await trainer.asked("close")
    assert (await post(session, "/destroy_weights_update_group", {"group_name": "g"}))[0] == 200
    status, reply = await post(session, "/destroy_weights_update_group", {"group_name": "g"})
    assert (status, reply["message"]) == (400, "there is no group 'g'")


@pytest.mark.integration
async def test_a_bracket_is_served_at_its_end_and_a_refused_bucket_keeps_the_ranks_in_step(
    session: aiohttp.ClientSession, runner: EngineRunner, trainer: TrainerProcess
) -> None:
    await join(session, trainer)
    assert (await post(session, "/begin_weight_update"))[0] == 200
    assert (await send(session, trainer, BUCKETS[0], 1.0))[0] == 200
    status, message = await send(session, trainer, {"model.norm.weight": [3]}, 9.0)
    assert (status, "has shape (3,) instead of (32,)" in message) == (400, True)
    assert (await send(session, trainer, BUCKETS[1], 1.0, weight_version="3"))[0] == 200
    assert runner.policy_version == 0
    status, reply = await post(session, "/end_weight_update")
    assert (status, reply["message"]) == (200, "serving weight_version 3")
    assert holds(runner, 1.0)
    assert (await post(session, "/begin_weight_update"))[0] == 200
    assert (await send(session, trainer, BUCKETS[0], 2.0))[0] == 200
    assert (await send(session, trainer, BUCKETS[1], 2.0, weight_version="3"))[0] == 400
    status, reply = await post(session, "/end_weight_update")
    assert (status, "part of it was refused: policy_version 3 is not newer" in reply["message"]) == (400, True)
    assert (await send(session, trainer, SHAPES, 2.0, weight_version="3"))[0] == 400
    assert holds(runner, 1.0) and runner.policy_version == 3
    await leave(session, trainer)


@pytest.mark.long
@pytest.mark.integration
async def test_frozen_layers_need_not_be_sent_inside_a_bracket(
    session: aiohttp.ClientSession, runner: EngineRunner, trainer: TrainerProcess
) -> None:
    await join(session, trainer)
    assert (await send(session, trainer, SHAPES, 1.0))[0] == 200
    assert (await post(session, "/begin_weight_update"))[0] == 200
    assert (await send(session, trainer, BUCKETS[0], 2.0))[0] == 200
    status, reply = await post(session, "/end_weight_update")
    message = f"serving weight_version 2; {len(BUCKETS[1])} weights did not arrive and stay unchanged"
    assert (status, reply["message"]) == (200, message)
    assert equals(runner, numbers(SHAPES, 1.0) | numbers(BUCKETS[0], 2.0))
    assert (await send(session, trainer, BUCKETS[0], 3.0))[0] == 200
    status, message = await send(session, trainer, BUCKETS[0], 4.0)
    assert (status, f"because {len(BUCKETS[1])} weights did not arrive" in message) == (400, True)
    assert await send(session, trainer, BUCKETS[1], 4.0) == (200, "serving weight_version 3")
    assert holds(runner, 4.0)
    await leave(session, trainer)


@pytest.mark.long
@pytest.mark.integration
@pytest.mark.parametrize("number", [0, 1])
async def test_a_dead_trainers_bracket_goes_when_another_comes(
    session: aiohttp.ClientSession, runner: EngineRunner, trainer: TrainerProcess, number: int
) -> None:
    await join(session, trainer)
    assert (await post(session, "/pause_generation", {"mode": "in_place"}))[0] == 200
    assert (await post(session, "/begin_weight_update"))[0] == 200
    for bucket in BUCKETS[:number]:
        assert (await send(session, trainer, bucket, 1.0))[0] == 200
    trainer.kill()
    assert (await post(session, "/destroy_weights_update_group", {"group_name": "g"}))[0] == 200
    await until(lambda: not runner.engine.paused)
    another = TrainerProcess()
    try:
        await join(session, another)
        assert await send(session, another, SHAPES, 2.0) == (200, "serving weight_version 1")
        assert holds(runner, 2.0)
        await leave(session, another)
    finally:
        another.kill()


@pytest.mark.long
@pytest.mark.integration
async def test_a_group_that_failed_is_made_anew_under_its_name(
    session: aiohttp.ClientSession, runner: EngineRunner, trainer: TrainerProcess
) -> None:
    await join(session, trainer)
    given = {"names": ["a"], "dtypes": ["qint8"], "shapes": [[1]], "group_name": "g"}
    status, reply = await post(session, "/update_weights_from_distributed", given)
    assert (status, "dtype 'qint8': send" in reply["message"]) == (400, True)
    another = TrainerProcess()
    try:
        await join(session, another)
        assert (await send(session, another, SHAPES, 2.0))[0] == 200
        assert holds(runner, 2.0)
        await leave(session, another)
    finally:
        another.kill()


async def test_a_group_that_cannot_be_is_refused(session: aiohttp.ClientSession) -> None:
    given = {"master_address": "127.0.0.1", "master_port": 1, "rank_offset": 1, "world_size": 2}
    status, reply = await post(session, "/init_weights_update_group", given)
    assert (status, "this server computes on the CPU: use gloo" in reply["message"]) == (400, True)
    given = {"names": [], "dtypes": [], "shapes": [], "group_name": "g"}
    status, reply = await post(session, "/update_weights_from_distributed", given)
    assert (status, reply["message"]) == (400, "there is no group 'g': it must be joined first")


async def test_a_label_moves_forward_only_and_ends_what_runs_unless_told_not_to(
    session: aiohttp.ClientSession, runner: EngineRunner, held: Held
) -> None:
    body = {"input_ids": [5], "sampling_params": {"max_new_tokens": 80, "temperature": 0, "ignore_eos": True}}
    running = asyncio.create_task(post(session, "/generate", body))
    await until(lambda: runner.engine.num_generated_tokens > 2)
    status, reply = await post(session, "/update_weight_version", {"new_version": "4", "abort_all_requests": False})
    assert (status, reply["success"], reply["new_version"]) == (200, True, "4")
    held.let_go.set()
    _, answered = await running
    assert [span["version"] for span in answered["meta_info"]["weight_versions"]] == ["0", "4"]
    held.let_go.clear()
    running = asyncio.create_task(post(session, "/generate", body))
    await until(lambda: runner.engine.num_active)
    assert (await post(session, "/update_weight_version", {"new_version": 5}))[0] == 200
    assert (await running)[1]["meta_info"]["finish_reason"]["type"] == "abort"
    running = asyncio.create_task(post(session, "/generate", body))
    await until(lambda: runner.engine.num_active)
    for label, message in [("3", "older than 5"), ("new", "whole number"), (2**31, "at most 2147483647")]:
        status, reply = await post(session, "/update_weight_version", {"new_version": label})
        assert (status, message in reply["message"]) == (400, True)
    held.let_go.set()
    assert (await running)[1]["meta_info"]["finish_reason"]["type"] == "length", "a refused label ends nothing"
    assert runner.policy_version == 5


async def test_a_directory_that_cannot_be_read_leaves_the_old_weights(
    session: aiohttp.ClientSession, runner: EngineRunner, tmp_path: Path
) -> None:
    reference_model(3).save_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "model.safetensors").mkdir()
    status, reply = await post(session, "/update_weights_from_disk", {"model_path": str(tmp_path)})
    assert (status, reply["success"], runner.policy_version) == (400, False, 0), reply
    assert (await post(session, "/begin_weight_update"))[0] == 200
    status, reply = await post(session, "/update_weights_from_disk", {"model_path": str(tmp_path)})
    assert (status, "end it before" in reply["message"]) == (400, True)
    assert (await post(session, "/end_weight_update"))[1] == {"success": True, "message": "ended"}


@pytest.fixture(scope="module")
def sender() -> Iterator[Sender]:
    sender = Sender()
    yield sender
    sender.close()


async def send_payload(session: aiohttp.ClientSession, payload: str, **more: Any) -> tuple[int, str]:
    """Post a payload as SGLang's trainers do."""
    given = {"serialized_named_tensors": [payload], "load_format": None, "flush_cache": False, **more}
    status, reply = await post(session, "/update_weights_from_tensor", given)
    assert reply["success"] == (status == 200)
    return status, reply["message"]


@pytest.mark.integration
async def test_serialized_tensors_are_served_when_all_are_there(
    session: aiohttp.ClientSession, runner: EngineRunner, sender: Sender
) -> None:
    bucket = {"load_format": "flattened_bucket"}
    payload = sender.serialize("bucket", BUCKETS[0], 1.0)
    message = f"staged; {len(BUCKETS[1])} weights have not arrived yet"
    assert await send_payload(session, payload, weight_version="3", **bucket) == (200, message)
    assert runner.policy_version == 0
    payload = sender.serialize("ranks", BUCKETS[1], 1.0)
    assert await send_payload(session, payload, weight_version="3") == (200, "serving weight_version 3")
    assert runner.policy_version == 3 and equals(runner, sent_numbers(SHAPES, 1.0, "float32"))
    sender.drop()
    assert sender.segments() == []


@pytest.mark.integration
async def test_a_bracket_of_serialized_tensors_is_served_at_its_end_or_not_at_all(
    session: aiohttp.ClientSession, runner: EngineRunner, sender: Sender
) -> None:
    assert (await post(session, "/begin_weight_update"))[0] == 200
    for shapes in BUCKETS:
        assert (await send_payload(session, sender.serialize("pairs", shapes, 2.0)))[0] == 200
        assert runner.policy_version == 0
    assert (await post(session, "/end_weight_update"))[0] == 200
    assert runner.policy_version == 1 and equals(runner, sent_numbers(SHAPES, 2.0, "float32"))
    assert (await post(session, "/begin_weight_update"))[0] == 200
    assert (await send_payload(session, sender.serialize("pairs", BUCKETS[0], 9.0)))[0] == 200
    status, message = await send_payload(session, base64.b64encode(pickle.dumps(os.system)).decode())
    assert (status, message.startswith("the payload names posix.system, which")) == (400, True)
    status, reply = await post(session, "/end_weight_update")
    assert (status, "part of it was refused: the payload names posix.system" in reply["message"]) == (400, True)
    assert runner.policy_version == 1 and equals(runner, sent_numbers(SHAPES, 2.0, "float32"))
