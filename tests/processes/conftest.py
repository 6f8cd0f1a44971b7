"""The tiny policy of the rollout tests is served here too."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from penstock.rollout.runner import EngineRunner

sys.path.insert(0, str(Path(__file__).parent.parent / "rollout"))
from tiny_policy import make_engine


@pytest.fixture
async def runner() -> AsyncIterator[EngineRunner]:
    runner = EngineRunner(make_engine(), process="rollout-0")
    runner.start()
    yield runner
    await runner.stop()
