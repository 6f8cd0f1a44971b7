"""Rewards by name or path, and the processes that compute them."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import psutil
import pytest

from penstock.config import Config, ConfigError, EnvConfig
from penstock.envs.rewards.reward import RewardResult, locate_reward, make_reward
from penstock.envs.rewards.scorer import RewardFailure, Scorer, Scorers
from penstock.simulator.clock import run_virtual

LIMIT_S = 60.0

BORN = time.monotonic()
"""Tells one process from another, whatever its process id in a sandbox is."""


class Letters:
    """As many as there are; some answers do harm."""

    def __init__(self, *, letter: str = "a") -> None:
        self._letter = letter

    def score(self, answer: str, payload: Mapping[str, Any]) -> Any:
        match answer:
            case "hangs":
                time.sleep(60)
            case "crashes":
                os._exit(9)
            case "raises":
                raise KeyError(payload["name"])
            case "nan":
                return float("nan")
            case "numpy":
                return np.float32(0.5)
            case "born":
                return BORN
            case "parts":
                return RewardResult(reward=1.0, parts={"style": 0.25})
        return float(answer.count(self._letter))


class Forgiving(Letters):
    """An answer that takes too long is the policy's own fault."""

    timeout_reward = 0.0


def length(answer: str, payload: Mapping[str, Any], *, best: int = 10) -> float:
    return len(answer) / best


async def asks_others(answer: str, payload: Mapping[str, Any]) -> float:
    if answer == "hangs":
        await asyncio.Event().wait()
    return 0.5


@asynccontextmanager
async def scorer_of(reward: str, **settings: Any) -> AsyncIterator[Scorer]:
    config = Config(env=EnvConfig(reward=f"{__name__}:{reward}", **settings))
    async with aclosing(Scorers(config)) as scorers:
        scorer = scorers.of(config.env, {})
        assert scorer is not None
        yield scorer
        assert scorers.counts() == scorer.counts


async def score(scorer: Scorer, answer: str) -> float:
    return await scorer.score(answer, {"name": "x"}, waiter="train/1/0/0 of t")


@pytest.mark.integration
@pytest.mark.usefixtures("sandboxed")
async def test_a_reward_worker_that_fails_is_replaced() -> None:
    async with scorer_of("Letters", reward_timeout_s=LIMIT_S, reward_options={"letter": "b"}) as scorer:
        assert await score(scorer, "abba") == 2.0
        assert await score(scorer, "numpy") == 0.5
        assert await score(scorer, "parts") == 1.0
        first = await score(scorer, "born")
        assert first != BORN
        for answer, reason in {
            "hangs": "no score within env.reward_timeout_s (1 s)",
            "crashes": "ProcessLost: its process ended: exit 9",
            "raises": "KeyError: 'x' (test_scorer.py:",
            "nan": "the reward is nan, not a finite number",
        }.items():
            scorer._timeout_s = 1.0 if answer == "hangs" else LIMIT_S
            with pytest.raises(RewardFailure) as failure:
                await score(scorer, answer)
            assert reason in str(failure.value)
        assert await score(scorer, "bob") == 2.0
        assert await score(scorer, "born") != first
        assert scorer.counts["score_timeouts"] == 1 and scorer.counts["reward_style"] == 0.25


@pytest.mark.integration
@pytest.mark.usefixtures("sandboxed")
async def test_one_that_hangs_holds_nobody_else_up() -> None:
    async with scorer_of("Forgiving", reward_timeout_s=5.0, reward_workers=2) as scorer:
        await asyncio.gather(score(scorer, "a"), score(scorer, "a"))  # both are there
        hanging = asyncio.create_task(score(scorer, "hangs"))
        assert await asyncio.gather(*(score(scorer, "a") for _ in range(20))) == [1.0] * 20
        assert not hanging.done()
        assert await hanging == 0.0, "that is what it is worth"


@pytest.mark.integration
@pytest.mark.usefixtures("sandboxed")
async def test_no_reward_worker_outlives_its_scorer() -> None:
    others = set(psutil.Process().children(recursive=True))  # of tests before this one
    async with scorer_of("Letters", reward_workers=1) as scorer:
        await score(scorer, "a")
        started = set(psutil.Process().children(recursive=True)) - others
        assert started
    assert not psutil.wait_procs(started, timeout=60)[1]


@pytest.mark.integration
@pytest.mark.usefixtures("sandboxed")
async def test_a_function_will_do() -> None:
    async with scorer_of("length", reward_options={"best": 4}) as scorer:
        assert await score(scorer, "abc") == 0.75


async def test_a_reward_that_asks_others_stays_on_the_loop() -> None:
    async with scorer_of("asks_others", reward_timeout_s=0.02) as scorer:
        assert await score(scorer, "a") == 0.5
        with pytest.raises(RewardFailure, match="no score within"):
            await score(scorer, "hangs")


@dataclass
class Queued:
    """One at a time, each of them well in time. It has no hash."""

    max_concurrent = 1

    async def score(self, answer: str, payload: Mapping[str, Any]) -> float:
        await asyncio.sleep(0.6)
        return 0.5


def test_waiting_for_a_place_costs_a_score_none_of_its_time() -> None:
    async def main() -> None:
        async with scorer_of("Queued", reward_timeout_s=1.0) as scorer:
            assert await asyncio.gather(*(score(scorer, "a") for _ in range(5))) == [0.5] * 5
            assert asyncio.get_running_loop().time() == pytest.approx(5 * 0.6)

    run_virtual(main())


@pytest.mark.integration
@pytest.mark.usefixtures("sandboxed")
async def test_a_power_tower_is_worth_nothing() -> None:
    """Nothing interrupts it but the end of its process."""
    config = Config(env=EnvConfig(reward="math", reward_timeout_s=3.0))
    async with aclosing(Scorers(config)) as scorers:
        scorer = scorers.of(config.env, {})
        assert scorer is not None
        assert await scorer.score("$9^{9^{9^{9}}}$", {"answer": "3"}, waiter="t") == 0.0
        scorer._timeout_s = LIMIT_S
        assert await scorer.score("\\boxed{3}", {"answer": "3"}, waiter="t") == 1.0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("maths", "did you mean math?"),
        ("nothing_like_it", "known are math, format, code, judge"),
        ("nowhere_at_all:Reward", "there is no module nowhere_at_all"),
        ("missing.py:Reward", "there is no file .*missing.py"),
    ],
)
def test_a_name_that_means_nothing_is_refused(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        locate_reward(name)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (f"{__name__}:Letters", {"colour": 1}, r"env\.reward_options .* do not fit"),
        (f"{__name__}:Nothing", {}, "has no Nothing; there are Letters, Forgiving, length"),
        (f"{__name__}:Mapping", {}, r"do not fit|neither a function nor a class with score"),
    ],
)
def test_what_is_no_reward_is_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make_reward(name, options)
