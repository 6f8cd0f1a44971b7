"""What an answer that executes can do to its own reward, to its worker and to the rewards of others."""

from __future__ import annotations

import os
import signal
from collections.abc import Mapping
from contextlib import aclosing
from typing import Any

import pytest

from penstock.config import Config
from penstock.envs.rewards.reward import RewardResult
from penstock.envs.rewards.scorer import RewardFailure, Scorers

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("sandboxed")]

FORGE = "os.write(3, msgspec.msgpack.encode({})); os._exit(0)"
PARENT = "os.getppid()"
SIGNALS_BY_FILE = """
import fcntl
ours, theirs = os.pipe()
fcntl.fcntl(ours, fcntl.F_SETFL, os.O_ASYNC)
fcntl.fcntl(ours, 10, 9)
fcntl.fcntl(ours, fcntl.F_SETOWN, os.getppid())
os.write(theirs, b"x")
"""
ATTACKS = {
    "parts": FORGE.format("dict(reward=1.0, parts=dict.fromkeys([f'a{n}' for n in range(64)], 0.0))"),
    "huge": FORGE.format("dict(reward=1.7e308)"),
    "above": FORGE.format("dict(reward=1.5)"),
    "below": FORGE.format("dict(reward=-1.0)"),
    "nan": FORGE.format("dict(reward=float('nan'))"),
    "failure": FORGE.format("'the task cannot be scored'"),
    "type": FORGE.format("[1, 2]"),
    "bytes": "os.write(3, b'\\xc1'); os._exit(0)",
    "realtime": f"os.kill({PARENT}, 35)",
    "kill": f"os.kill({PARENT}, 9)",
    "stop": f"os.kill({PARENT}, 19)",
    "all": "os.kill(-1, 9)",
    "thread": f"import signal; signal.pidfd_send_signal(os.pidfd_open({PARENT}), 9)",
    "file": SIGNALS_BY_FILE,
}
PRIORITY = f"os.setpriority(0, {PARENT}, 19)"
IDLE = f"os.sched_setscheduler({PARENT}, os.SCHED_IDLE, os.sched_param(0))"
AFFINITY = f"os.sched_setaffinity({PARENT}, [0])"


class Executes:
    """Executes the answer, which may set `reward`. Fails if the answer fails."""

    timeout_reward = -1.0
    executes_answers = True

    def __init__(self, *, dies_outside: int | None = None) -> None:
        """`dies_outside`: id of the process in which this stays alive. Others end with the first answer."""
        if dies_outside is not None and dies_outside != os.getpid():
            signal.signal(signal.SIGCHLD, lambda *_: os._exit(3))

    def score(self, answer: str, payload: Mapping[str, Any]) -> RewardResult:
        names: dict[str, Any] = {"os": os, "reward": 0.0}
        exec(answer, names)
        return RewardResult(reward=float(names["reward"]))


def config_of(reward: str, **options: Any) -> Config:
    return Config.model_validate(
        {"env": {"reward": reward, "reward_options": options, "reward_workers": 1, "reward_timeout_s": 20.0}}
    )


def spiral() -> dict[str, Any]:
    task: dict[str, Any] = pytest.importorskip("reasoning_gym").create_dataset("spiral_matrix", seed=1, size=1)[0]
    return task


async def test_an_executed_answer_cannot_leave_the_rules_of_its_reward(caplog: pytest.LogCaptureFixture) -> None:
    config, task = config_of("reasoning_gym"), spiral()
    async with aclosing(Scorers(config)) as scorers:
        scorer = scorers.of(config.env, task)
        assert scorer is not None
        for attack in ATTACKS.values():
            assert await scorer.score(f"exec({'import os, msgspec' + chr(10) + attack!r})", task, waiter="t") <= 0.01
            assert await scorer.score(str(task["answer"]), task, waiter="t") == 1.0
        assert scorer.counts == {"scored": 2 * len(ATTACKS)}
    assert len([record for record in caplog.records if "may have forged it" in record.message]) == 1


async def test_a_task_that_cannot_be_scored_is_no_answers_fault() -> None:
    config = config_of("reasoning_gym")
    async with aclosing(Scorers(config)) as scorers:
        scorer = scorers.of(config.env, {})
        assert scorer is not None
        with pytest.raises(RewardFailure, match="it has no metadata"):
            await scorer.score("1", {}, waiter="t")


async def test_an_executed_answer_cannot_slow_its_worker_down() -> None:
    config = config_of(f"{__name__}:Executes")
    async with aclosing(Scorers(config)) as scorers:
        scorer = scorers.of(config.env, {})
        assert scorer is not None
        for attack in (PRIORITY, IDLE, AFFINITY):
            with pytest.raises(RewardFailure, match="PermissionError"):
                await scorer.score(attack, {}, waiter="t")
        seen = f"reward = os.getpriority(0, {PARENT}) + os.sched_getscheduler({PARENT})"
        assert await scorer.score(seen, {}, waiter="t") == 0.0


async def test_an_executed_answer_that_ends_its_worker_has_failed() -> None:
    config = config_of(f"{__name__}:Executes", dies_outside=os.getpid())
    async with aclosing(Scorers(config)) as scorers:
        scorer = scorers.of(config.env, {})
        assert scorer is not None
        assert [await scorer.score("reward = 1", {}, waiter="t") for _ in range(2)] == [-1.0, -1.0]


class ImportsLate(Executes):
    """Imports a module of the standard library when it scores, and not before."""

    def score(self, answer: str, payload: Mapping[str, Any]) -> RewardResult:
        import colorsys

        assert colorsys.rgb_to_hls(1, 1, 1)
        return super().score(answer, payload)


async def test_an_executed_answer_leaves_no_module_for_later_ones() -> None:
    forged = FORGE.format("dict(reward=1.0)")
    attack = f"open('/work/colorsys.py', 'w').write({f'import msgspec, os; {forged}'!r})"
    config = config_of(f"{__file__}:ImportsLate")
    async with aclosing(Scorers(config)) as scorers:
        scorer = scorers.of(config.env, {})
        for answer in (attack, "reward = 0.25", "reward = 0.25"):
            assert await scorer.score(answer, {}, waiter="x") == (0.25 if answer != attack else 0.0)
