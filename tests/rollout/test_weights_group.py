"""Broadcasts of weights to servers that are other processes, which speak SGLang's protocol."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from published import publish_next
from transformers import PreTrainedModel

from penstock.config import TinyModelConfig
from penstock.model.load_policy import load_policy
from penstock.model.tiny import write_tiny_model
from penstock.ports.training import SendingGroup
from penstock.rollout.servers import Servers
from penstock.samples import Segment
from penstock.trainer.checkpoint import STATE
from penstock.types import EpisodeId, Sampling, SegmentGrant, UpdateMode, WeightsHandle
from penstock.weights import sender as sender_module
from penstock.weights.publication import WeightsPublisher
from penstock.weights.sender import Sender

pytestmark = [pytest.mark.integration, pytest.mark.long]

CONTEXT, NUM_UPDATES, LIMIT_S = 96, 30, 120
HOST, ELSEWHERE = "127.0.0.3", "http://127.0.0.3:9/weights"
"""The trainer's address; the servers are at 127.0.0.1."""
PROMPT = [5, 6, 7]


class Trainer:
    """It publishes versions, and sends them as the trainer's process does."""

    def __init__(self, model: Path, directory: Path) -> None:
        self._model, self._publisher = model, WeightsPublisher(directory)
        self._paths: dict[int, Path] = {}
        self.sender = Sender(HOST, device=torch.device("cpu"))
        self.on_send: Callable[[], object] = lambda: None
        """Called before a broadcast begins."""

    def policy(self, version: int) -> PreTrainedModel:
        return load_policy(self._model, weights=False, seed=version)

    def publish(self, version: int) -> WeightsHandle:
        handle = publish_next(self._publisher, dict(self.policy(version).named_parameters()), version)
        self._paths[version] = Path(handle.path)
        return replace(handle, url=ELSEWHERE)

    def publish_wrong(self, version: int) -> WeightsHandle:
        """Publish weights that do not fit the model."""
        named = {name: weight[..., :1] for name, weight in self.policy(version).named_parameters()}
        handle = publish_next(self._publisher, named, version)
        self._paths[version] = Path(handle.path)
        return replace(handle, url=ELSEWHERE)

    async def open_group(self, server: str, policy_version: int, *, world_size: int) -> SendingGroup:
        path = self._paths[policy_version]
        return await asyncio.to_thread(self.sender.open, server, path, world_size=world_size)

    async def send_weights(self, group: str) -> None:
        self.on_send()
        await asyncio.wrap_future(self.sender.send(group))

    async def close_group(self, group: str) -> None:
        await asyncio.to_thread(self.sender.close_group, group)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with weights of policy_version 0."""
    model = tmp_path_factory.mktemp("model")
    write_tiny_model(model, TinyModelConfig(num_layers=2, hidden_size=32), max_context=CONTEXT)
    load_policy(model, weights=False, seed=0).save_pretrained(model)
    (model / STATE).write_text(json.dumps({"policy_version": 0}))
    return model


@contextmanager
def served(model: Path) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    words = ["serve", "--model", str(model), "--port", "0", "--name", "m", f"model.max_context={CONTEXT}"]
    command = [sys.executable, "-m", "penstock.cli.main", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            yield server.stdout.readline().split(" at ")[1].split()[0], server
        finally:
            server.kill()


@pytest.fixture
def trainer(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Trainer]:
    monkeypatch.setattr(sender_module, "BUCKET_BYTES", 16 * 1024)  # several buckets
    trainer = Trainer(model, tmp_path)
    yield trainer
    trainer.sender.close()


async def answers(servers: Servers, number: int, found: list[Segment]) -> None:
    """Generate without end, and keep the answers."""
    count = 0
    while True:
        count += 1
        grant = SegmentGrant(episode=EpisodeId("tag", number, 0, count), max_tokens=24)
        found += await servers.generate(PROMPT, [grant], Sampling(temperature=1.0), [number * 1000 + count])


def check_versions(trainer: Trainer, found: list[Segment]) -> None:
    """Compute each token with the weights that its label names."""
    models: dict[int, PreTrainedModel] = {}
    for segment in found:
        start, ids = len(PROMPT) - 1, torch.tensor([PROMPT + segment.token_ids])
        for span in segment.spans[:1]:  # later ones continue with keys and values of other weights
            policy = models.setdefault(span.policy_version, trainer.policy(span.policy_version))
            with torch.inference_mode():
                logprobs = policy(ids).logits[0, start:-1].log_softmax(-1)
            expected = logprobs.gather(1, ids[0, start + 1 :, None])[: span.end, 0]
            assert expected.tolist() == pytest.approx(segment.logprobs[: span.end], abs=1e-3)


@pytest.mark.parametrize("update_mode", ["retract", "in_place"])
async def test_updates_in_a_row_under_generation(model: Path, trainer: Trainer, update_mode: UpdateMode) -> None:
    found: list[Segment] = []
    with served(model) as (url, _):
        servers = Servers([url], engine="sglang", update_mode=update_mode, sender=trainer)
        async with asyncio.timeout(LIMIT_S):
            players = [asyncio.create_task(answers(servers, number, found)) for number in range(3)]
            for version in range(1, NUM_UPDATES + 1):
                assert await servers.update_weights(trainer.publish(version)) == {"collective": 1}
                before = len(found)
                while len(found) == before:
                    await asyncio.wait(players, timeout=0.001, return_when=asyncio.FIRST_EXCEPTION)
                    assert not any(player.done() for player in players), "a request was lost"
            for player in players:
                player.cancel()
            await asyncio.wait(players)
            (last,) = await servers.generate(
                PROMPT,
                [SegmentGrant(episode=EpisodeId("tag", 99, 0, 0), max_tokens=8)],
                Sampling(temperature=1.0),
                [1],
            )
        await servers.close()
    assert [span.policy_version for span in last.spans] == [NUM_UPDATES]
    assert len({span.policy_version for segment in found for span in segment.spans}) > NUM_UPDATES // 2
    check_versions(trainer, [*found, last])
