"""Rewards that take seconds: generation goes on meanwhile. Real scheduler and manager, virtual clock."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
from fake_ports import NumberedTasks
from scripted_policy import ScriptedPolicy
from test_manager import Always, Echo, work

from penstock.config import Config
from penstock.envs.manager import EnvManager
from penstock.envs.rewards.scorer import Scorers
from penstock.model.chat import ChatTokenizer
from penstock.ports.work import Work
from penstock.samples import Segment, Trajectory
from penstock.scheduler.scheduler import Scheduler
from penstock.simulator.clock import run_virtual
from penstock.types import EpisodeId, PayloadRef, Sampling, SegmentGrant, Task

ANSWER_S, REWARD_S, TOOL_S = 1.0, 30.0, 7.0
GROUP_SIZE, NUM_GROUPS, MAX_RUNNING = 2, 6, 4
REF = PayloadRef(file="none", offset=0, length=0, checksum=0)


async def slow(answer: str, payload: Mapping[str, Any]) -> float:
    """Takes longer than to generate all there is."""
    await asyncio.sleep(REWARD_S)
    return float(answer == "ok")


class TimedPolicy(ScriptedPolicy):
    """Answers take a second; remembers when they were given."""

    def __init__(self, chat: ChatTokenizer) -> None:
        super().__init__(lambda prompt, seed: [*chat.encode("ok"), chat.eos_ids[0]])
        self.answered_at: list[float] = []
        self.most = self._running = 0

    async def generate(
        self, prompt_ids: Sequence[int], grants: Sequence[SegmentGrant], sampling: Sampling, seeds: Sequence[int]
    ) -> list[Segment]:
        self._running += len(grants)
        self.most = max(self.most, self._running)
        await asyncio.sleep(ANSWER_S)
        self._running -= len(grants)
        self.answered_at += [asyncio.get_running_loop().time()] * len(grants)
        return await super().generate(prompt_ids, grants, sampling, seeds)


class Played:
    """A scheduler and a manager, wired as a worker and the bus do it."""

    def __init__(self, chat: ChatTokenizer, config: Config) -> None:
        self.scheduler = Scheduler(config, now=asyncio.get_running_loop().time, log_decision=lambda *decision: None)
        self.scheduler.add_worker("env-0", 100)
        self.policy = TimedPolicy(chat)
        self._scorers = Scorers(config)
        self._manager = EnvManager(config, make=Echo, policy=self.policy, grants=self, chat=chat, scorers=self._scorers)
        self._ended: dict[int, list[Trajectory]] = {}

    async def request(self, so_far: Trajectory, *, unfinished: bool, num_tokens: int) -> SegmentGrant:
        raise AssertionError("one turn, one grant")

    def generated(self, episode: EpisodeId, *, num_tokens: int) -> None:
        self.scheduler.members.finish_generation(episode.group_attempt, [episode.episode], num_tokens)

    def _end(self, trajectory: Trajectory, text: str) -> None:
        ended = self._ended.setdefault(trajectory.episode.group, [])
        ended.append(trajectory)
        if len(ended) == GROUP_SIZE:
            summaries = sorted((each.summary() for each in ended), key=lambda summary: summary.episode)
            self.scheduler.finish_group(trajectory.episode.group_attempt, REF, summaries)

    async def run(self) -> None:
        source = NumberedTasks("train")
        self.scheduler.admit_tasks([task for index in range(NUM_GROUPS) if (task := source.task(index))])
        async with asyncio.TaskGroup() as tasks:
            num_started = 0
            while num_started < NUM_GROUPS:
                for assignment in await self.scheduler.next_assignments():
                    assert isinstance(assignment.item, Work)
                    tasks.create_task(self._manager.play(assignment.item, self._end))
                    num_started += 1


@pytest.mark.parametrize("reward", [f"{__name__}:slow", None])
def test_a_slow_reward_holds_no_generation(chat: ChatTokenizer, reward: str | None) -> None:
    config = Config.model_validate(
        {
            "env": {"group_size": GROUP_SIZE, "reward": reward, "reward_timeout_s": 60.0},
            "scheduler": {"max_running": MAX_RUNNING, "group_filter": [], "trigger": {"min_samples": 2}},
            "trainer": {"groups_per_step": NUM_GROUPS},
        }
    )

    async def main() -> tuple[Played, float]:
        played = Played(chat, config)
        await played.run()
        return played, asyncio.get_running_loop().time()

    played, seconds = run_virtual(main())
    generation_s = NUM_GROUPS * GROUP_SIZE / MAX_RUNNING * ANSWER_S
    assert played.policy.most == MAX_RUNNING
    assert max(played.policy.answered_at) == pytest.approx(generation_s)
    assert seconds == pytest.approx(generation_s + (REWARD_S if reward else 0.0))
    assert played.scheduler.ledger.counts()["ready"] == NUM_GROUPS * GROUP_SIZE
    played.scheduler.ledger.check()


class SlowTools:
    """A tool takes its time after the first of two answers."""

    def __init__(self, task: Task) -> None:
        self._num_answers = 0

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        return "say ok", {}

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._num_answers += 1
        await asyncio.sleep(TOOL_S)
        return "again", 0.0, self._num_answers == 2, False, {}


def test_an_episode_tells_how_long_its_environment_and_its_reward_took(chat: ChatTokenizer) -> None:
    settings = {"env": {"reward": f"{__name__}:slow", "max_turns": 2, "reward_timeout_s": 2 * REWARD_S}}
    config, ended = Config.model_validate(settings), []

    async def main() -> None:
        scorers = Scorers(config)
        manager = EnvManager(
            config, make=SlowTools, policy=TimedPolicy(chat), grants=Always(), chat=chat, scorers=scorers
        )
        await manager.play(work(1, deadline_s=100.0), lambda trajectory, text: ended.append(trajectory.summary()))

    run_virtual(main())
    (summary,) = ended
    assert summary.status == "completed", summary.error
    assert (summary.env_s, summary.reward_s) == pytest.approx((2 * TOOL_S, REWARD_S))
    assert summary.seconds == pytest.approx(2 * ANSWER_S + 2 * TOOL_S + REWARD_S)
