"""Updates that bring adapters: the engine copies only the weights that they change, and serves them with the base."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from published import publish
from tiny_policy import CPU, Held, make_request, serve, until, weights

from penstock.model.low_rank import names_of
from penstock.rollout.client import RolloutClient
from penstock.rollout.request import SamplingParams
from penstock.rollout.runner import EngineRunner
from penstock.rollout.session import HttpSession, RolloutError
from penstock.rollout.update import WeightsUpdate
from penstock.types import AdaptersForm, WeightsHandle
from penstock.weights.adapters import MergingReceiver
from penstock.weights.publication import WeightsPublisher
from penstock.weights.receiver import Receiver
from penstock.weights.shared_memory import fingerprint, layout

TARGETS = tuple(name for name in weights(1) if "q_proj" in name or "down_proj" in name)
RANK, ALPHA = 2, 6


class Trainer:
    """Publishes the weights of seed 1 as base, and adapters for them."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.publisher = WeightsPublisher(directory)
        with self.publisher.open_base(layout(weights(1))) as opened:
            self.base = opened.write_whole(weights(1).items(), 0)

    def lose_base(self) -> None:
        Path(self.base.path).unlink()

    def publish(self, version: int, *, targets: tuple[str, ...] = TARGETS) -> WeightsHandle:
        torch.manual_seed(version)
        named = {}
        for target in targets:
            rows, columns = weights(1)[target].shape
            named |= zip(names_of(target), (torch.randn(RANK, columns), torch.randn(rows, RANK)), strict=True)
        form = AdaptersForm(base=self.base, rank=RANK, alpha=ALPHA, targets=targets)
        with self.publisher.open(layout(named), version, adapters=True) as opened:
            return opened.write_whole(named.items(), version, adapters=form)


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    return Trainer(tmp_path / "weights")


@pytest.fixture
def receive(tmp_path: Path) -> MergingReceiver:
    return MergingReceiver(Receiver(layout(weights(1)), machine="", directory=tmp_path / "received"), CPU)


@pytest.fixture
def update(runner: EngineRunner, receive: MergingReceiver) -> WeightsUpdate:
    return WeightsUpdate(runner, receive, fingerprint)


@pytest.fixture
def loaded(runner: EngineRunner, monkeypatch: pytest.MonkeyPatch) -> list[set[str]]:
    """Names of the weights that each update has copied."""
    found, load = [], runner.load_weights

    async def noted(tensors: Mapping[str, torch.Tensor], policy_version: int, **mode: Any) -> float:
        own = runner.engine.parameters()
        found.append({name for name, tensor in tensors.items() if tensor is not own[name]})
        return await load(tensors, policy_version, **mode)

    monkeypatch.setattr(runner, "load_weights", noted)
    return found


async def test_only_weights_with_adapters_are_copied_once_the_base_is_there(
    trainer: Trainer, update: WeightsUpdate, runner: EngineRunner, receive: MergingReceiver, loaded: list[set[str]]
) -> None:
    for version in (1, 2, 3):
        handle = await update.begin(trainer.publish(version))
        served = await update.commit(version, fingerprint=handle.fingerprint)
        assert served == (version, handle.fingerprint)
        expected = receive(handle)
        assert all(torch.equal(each, expected[name]) for name, each in runner.engine.parameters().items())
        assert all(torch.equal(weights(1)[name], expected[name]) == (name not in TARGETS) for name in expected)
    assert loaded == [set(weights(1)), set(TARGETS), set(TARGETS)]


async def test_what_another_update_changed_is_loaded_again(
    trainer: Trainer, update: WeightsUpdate, runner: EngineRunner, receive: MergingReceiver, loaded: list[set[str]]
) -> None:
    every, fewer = set(weights(1)), TARGETS[:1]
    whole = publish(weights(2), directory=trainer.directory / "whole", policy_version=3)
    steps: list[tuple[WeightsHandle | tuple[str, ...], set[str]]] = [
        (TARGETS, every),
        (TARGETS, set(TARGETS)),
        (whole, every),
        (TARGETS, every),
        (fewer, every),
        (fewer, set(fewer)),
    ]
    for version, (given, copied) in enumerate(steps, start=1):
        handle = trainer.publish(version, targets=given) if isinstance(given, tuple) else given
        await update.begin(handle)
        assert await update.commit(handle.policy_version) == (handle.policy_version, handle.fingerprint)
        expected = receive(handle)
        assert all(torch.equal(each, expected[name]) for name, each in runner.engine.parameters().items())
        assert loaded[-1] == copied


async def test_the_fingerprint_tells_of_weights_that_are_not_base_and_adapters(
    trainer: Trainer, update: WeightsUpdate, runner: EngineRunner, loaded: list[set[str]]
) -> None:
    await update.begin(trainer.publish(1))
    await update.commit(1)
    with torch.no_grad():
        runner.engine.parameters()["model.norm.weight"].zero_()
    handle = await update.begin(trainer.publish(2))
    served = await update.commit(2)
    assert served.fingerprint == fingerprint(runner.engine.parameters()) != handle.fingerprint
    handle = await update.begin(trainer.publish(3))
    assert await update.commit(3) == (3, handle.fingerprint)
    assert loaded[1:] == [set(TARGETS), set(weights(1))], "the base is loaded again"


async def test_each_token_has_the_version_of_its_adapters(
    trainer: Trainer, update: WeightsUpdate, runner: EngineRunner, held: Held
) -> None:
    await update.begin(trainer.publish(1))
    await update.commit(1)
    request = make_request("r", [5, 6, 7], max_new_tokens=80, params=SamplingParams(ignore_eos=True))
    task = asyncio.ensure_future(runner.generate(request))
    await until(lambda: runner.engine.num_generated_tokens > 3)
    await update.begin(trainer.publish(2))
    assert runner.policy_version == 1, "it is only staged"
    await update.commit(2)
    held.let_go.set()
    (segment,) = await task
    assert [span.policy_version for span in segment.spans] == [1, 2]
    assert segment.spans[-1].end == 80


async def test_a_server_refuses_adapters_of_a_base_that_it_cannot_get(
    trainer: Trainer, update: WeightsUpdate, runner: EngineRunner
) -> None:
    handle = trainer.publish(7)
    trainer.lose_base()
    session = HttpSession(timeout_s=30.0)
    message = f"the adapters of policy_version 7 belong to base {trainer.base.fingerprint}, and this server has none"
    async with serve(runner, update=update) as url:
        client = RolloutClient(url, session)
        with pytest.raises(RolloutError, match=message) as raised:
            await client.begin_weights(handle)
        assert raised.value.status == 400 and runner.policy_version == 0
        again = Trainer(trainer.directory).publish(8)
        await client.begin_weights(again)
        await client.commit_weights(again)
        assert runner.policy_version == 8
    await session.close()
