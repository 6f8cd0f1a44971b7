"""Fixtures around the tiny policy."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import torch
from tiny_policy import Held, make_engine, serve

from penstock.rollout.runner import EngineRunner
from penstock.rollout.slot_engine import SlotEngine


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def engine() -> SlotEngine:
    """Four slots, weights of seed 0 served as policy_version 0."""
    return make_engine()


@pytest.fixture
def held(engine: SlotEngine, monkeypatch: pytest.MonkeyPatch) -> Held:
    """Holds the engine after a few tokens, until the test lets it go."""
    held = Held(engine)
    monkeypatch.setattr(engine, "step", held)
    return held


@pytest.fixture
async def runner(engine: SlotEngine) -> AsyncIterator[EngineRunner]:
    runner = EngineRunner(engine, process="rollout-0")
    runner.start()
    yield runner
    await runner.stop()


@pytest.fixture
async def url(runner: EngineRunner) -> AsyncIterator[str]:
    async with serve(runner) as url:
        yield url
