"""Every token of a segmented answer names the version that sampled it, whatever is updated between and within segments.

The log-probabilities prove it: they are compared with those of the weights that the spans name.
"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from fake_ports import leased
from tiny_policy import MAX_CONTEXT, make_handle, reference_logprobs

from penstock.config import Config, TinyModelConfig
from penstock.envs.manager import EnvManager
from penstock.model.chat import ChatTokenizer
from penstock.model.tiny import write_tiny_model
from penstock.ports.work import Work
from penstock.rollout.servers import Servers
from penstock.samples import Segment, Trajectory
from penstock.types import Sampling, SegmentGrant, Task

NUM_MEMBERS = 2
SEGMENT = 7
NUM_WEIGHTS = 5
"""Version n has the weights of seed n % NUM_WEIGHTS."""


class TwoTurns:
    """Speaks in capitals, which are all that the test's small vocabulary has."""

    def __init__(self, task: Task) -> None:
        self._turns = 0

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        return "SAY", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._turns += 1
        return "MORE", 1.0, self._turns == 2, False, {}


class Updates:
    """Brings new weights; as `Grants`, several times before each grant."""

    def __init__(self, url: str, per_grant: int) -> None:
        self.servers, self._per_grant = Servers([url]), per_grant
        self.version = 0
        self._lock = asyncio.Lock()

    async def update(self) -> None:
        async with self._lock:
            self.version += 1
            await self.servers.update_weights(make_handle(self.version, path=str(self.version % NUM_WEIGHTS)))

    async def request(self, so_far: Trajectory, *, unfinished: bool, num_tokens: int) -> SegmentGrant:
        for _ in range(self._per_grant):
            await self.update()
        return SegmentGrant(episode=so_far.episode, max_tokens=SEGMENT)


def work() -> Work:
    return leased(range(NUM_MEMBERS), max_tokens=SEGMENT, sampling=Sampling(max_new_tokens=30), deadline_s=120.0)


def check(trajectory: Trajectory) -> set[int]:
    """Compare each segment with the weights its spans name; returns the versions."""
    context: list[int] = []
    versions: set[int] = set()
    for turn in trajectory.turns:
        context += turn.observation_ids
        for segment in turn.segments:
            _check_segment(context, segment)
            context += segment.token_ids
            versions |= {span.policy_version for span in segment.spans}
    return versions


def _check_segment(context: list[int], segment: Segment) -> None:
    assert [span.start for span in segment.spans] == [0, *(span.end for span in segment.spans[:-1])]
    assert segment.spans[-1].end == len(segment.token_ids)
    seeds = [(span.start, span.policy_version % NUM_WEIGHTS) for span in segment.spans]
    expected = reference_logprobs(context, segment.token_ids, seeds=seeds)
    assert segment.logprobs == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("also_within", [False, True], ids=["between segments", "within them too"])
async def test_spans_are_exact_over_any_number_of_updates(url: str, tmp_path: Path, also_within: bool) -> None:
    write_tiny_model(tmp_path, TinyModelConfig(), MAX_CONTEXT)
    updates = Updates(url, per_grant=2)
    config = Config.model_validate(
        {
            "env": {"max_turns": 2, "max_new_tokens": 30},
            "model": {"max_context": MAX_CONTEXT},
            "scheduler": {"segment_length": SEGMENT},
        }
    )
    manager = EnvManager(
        config, make=TwoTurns, policy=updates.servers, grants=updates, chat=ChatTokenizer.load(tmp_path)
    )
    ended: list[Trajectory] = []

    async def update_until_ended() -> None:
        while also_within and len(ended) < NUM_MEMBERS:
            await updates.update()

    async with asyncio.timeout(120), asyncio.TaskGroup() as tasks:
        tasks.create_task(update_until_ended())
        tasks.create_task(manager.play(work(), lambda trajectory, text: ended.append(trajectory)))
    await updates.servers.close()
    assert [trajectory.error for trajectory in ended] == [None] * NUM_MEMBERS
    assert max(len(check(trajectory)) for trajectory in ended) > 3
