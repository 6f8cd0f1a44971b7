"""Makes the tiny policy, its server, the real runs of other folders, and the benchmarks' kills available here.

The benchmarks' modules are found last, as in the tests of the benchmarks."""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from penstock.rollout.runner import EngineRunner

for folder in ("rollout", "compat", "training"):
    sys.path.insert(0, str(Path(__file__).parent.parent / folder))
sys.path.append(str(Path(__file__).parents[2] / "benchmarks"))


@pytest.fixture
async def runner() -> AsyncIterator[EngineRunner]:
    """The engine of a server that serves policy_version 0."""
    import torch  # most tests here need none
    from tiny_policy import make_engine

    from penstock.rollout.runner import EngineRunner

    torch.set_num_threads(1)
    runner = EngineRunner(make_engine(), process="rollout-0")
    runner.start()
    yield runner
    await runner.stop()
