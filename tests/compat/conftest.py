"""A rollout server with every surface, around a tiny random policy whose tokens are letters."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parent.parent / "rollout"))
sys.path.insert(0, str(Path(__file__).parent.parent / "security"))
sys.path.insert(0, str(Path(__file__).parent.parent / "weights"))

from letters import Letters
from tiny_policy import Held, make_engine, serve

from penstock.compat.dialects import dialects
from penstock.compat.openai import OpenAI
from penstock.compat.sglang import SGLang
from penstock.rollout.runner import EngineRunner
from penstock.rollout.update import WeightsUpdate
from penstock.weights.collective import Groups
from penstock.weights.shared_memory import describe, fingerprint, layout, receive
from penstock.weights.tensor_payload import read_tensors


@pytest.fixture
async def runner() -> AsyncIterator[EngineRunner]:
    runner = EngineRunner(make_engine(), process="rollout-0")
    runner.start()
    yield runner
    await runner.stop()


@pytest.fixture
def held(runner: EngineRunner, monkeypatch: pytest.MonkeyPatch) -> Held:
    """Holds the engine after a few tokens, until the test lets it go."""
    held = Held(runner.engine)
    monkeypatch.setattr(runner.engine, "step", held)
    return held


@pytest.fixture
async def url(runner: EngineRunner) -> AsyncIterator[str]:
    expected = layout(runner.engine.parameters())
    groups = Groups(device=torch.device("cpu"), max_bytes=2**20)
    update = WeightsUpdate(runner, lambda handle: receive(handle, expected), fingerprint)
    sglang = SGLang(
        runner,
        update,
        groups,
        describe=lambda path, version: describe(path, expected, policy_version=version),
        read_payload=partial(read_tensors, max_bytes=2**20, device=torch.device("cpu")),
        model_path="tiny",
        model_name="tiny",
    )
    chats = OpenAI(runner, Letters(), model_name="tiny")
    surfaces = [chats, *dialects(chats, model_name="tiny"), sglang]
    async with serve(runner, update=update, tokenizer=Letters(), foreign=surfaces) as url:
        yield url
    sglang.close()
