"""Environments in processes of their own. One that hangs or crashes is replaced, and the others are not disturbed."""

from __future__ import annotations

import asyncio
import os
import re
import time
from typing import Any

import pytest
from scripted_policy import ScriptedPolicy
from test_manager import Always, work

from penstock.config import Config, ConfigError, EnvConfig
from penstock.envs.isolated import importable_name, making
from penstock.envs.manager import EnvManager
from penstock.envs.registry import resolve
from penstock.model.chat import ChatTokenizer
from penstock.samples import Trajectory
from penstock.types import Task


class Heavy:
    """Ends after two steps; if the first action is no, it does its mischief."""

    isolated = True
    max_concurrent = 2

    def __init__(self, task: Task, *, mischief: str = "none") -> None:
        self._mischief, self._steps = mischief, 0

    async def reset(self, seed: int) -> Any:
        return f"pid {os.getpid()}", {"anything": object(), "level": [1, 2], "unwanted": 3}

    def step(self, action: str) -> Any:
        self._steps += 1
        if action == "no" and self._steps == 1:
            match self._mischief:
                case "hangs":
                    time.sleep(60)
                case "crashes":
                    os._exit(7)
                case "raises":
                    raise KeyError("answer")
                case "nan":
                    return "", float("nan"), True, False, {}
                case "shows nothing":
                    return None, 1.0, True, False, {}
        print("this goes to the log, not into the answers")
        return f"step {self._steps}", 0.5, self._steps == 2, False, {"anything": object()}

    def close(self) -> None:
        if self._mischief == "hangs in close":
            time.sleep(60)


class Surrogates(Heavy):
    """Observes half an escape, as `json.loads` reads it."""

    async def reset(self, seed: int) -> Any:
        return "a\ud800", {}


class Refuses(Heavy):
    """Does not know its options."""

    def __init__(self, task: Task) -> None:
        raise ConfigError("env.options are wrong")


class IsolatedAgent:
    isolated = True

    async def play(self, llm: object, seed: int) -> float:
        return 0.0


async def play(chat: ChatTokenizer, kind: type, mischief: str = "none", *, size: int = 4) -> list[Trajectory]:
    """Every member says ok, but for the second one, which says no."""
    env = {"options": {"mischief": mischief} if kind is Heavy else {}, "max_turns": 2, "turn_timeout_s": 3.0}
    config = Config.model_validate({"env": env})
    job = work(size, deadline_s=120.0)

    def answer(prompt: list[int], seed: int) -> list[int]:
        word = "no" if seed == job.leases[1].sampling_seed else "ok"
        return [*chat.encode(word), chat.eos_ids[0]]

    ended: list[Trajectory] = []
    async with making(config, {config.env.name: kind}) as make:
        manager = EnvManager(config, make=make, policy=ScriptedPolicy(answer), grants=Always(), chat=chat)
        await manager.play(job, lambda trajectory, text: ended.append(trajectory))
    return sorted(ended, key=lambda trajectory: trajectory.episode)


pytestmark = pytest.mark.integration


async def test_they_share_processes_that_are_not_ours(chat: ChatTokenizer) -> None:
    trajectories = await play(chat, Heavy)
    assert [(t.status, t.reward) for t in trajectories] == [("completed", 1.0)] * 4
    pids = {chat.decode(t.turns[0].observation_ids) for t in trajectories}
    assert len(pids) <= Heavy.max_concurrent and not any(re.search(rf"\bpid {os.getpid()}\b", pid) for pid in pids)


@pytest.mark.parametrize(
    ("mischief", "reason"),
    [
        pytest.param("hangs", "s for its next observation, held by Heavy.step", marks=pytest.mark.long),
        ("crashes", "Heavy.step of t: ProcessLost: its process ended: exit 7"),
        pytest.param("raises", "Heavy.step of t: KeyError: 'answer' (test_isolated.py:", marks=pytest.mark.long),
        pytest.param("nan", "Heavy.step of t: the reward is nan, not a finite number", marks=pytest.mark.long),
        pytest.param(
            "shows nothing", "Heavy.step of t: the observation is a NoneType, not a string", marks=pytest.mark.long
        ),
    ],
)
async def test_one_that_fails_is_named_and_others_end_well(chat: ChatTokenizer, mischief: str, reason: str) -> None:
    trajectories = await play(chat, Heavy, mischief)
    (failed,) = [trajectory for trajectory in trajectories if trajectory.status == "failed"]
    assert reason in str(failed.error)
    assert [t.reward for t in trajectories if t is not failed] == [1.0] * 3


@pytest.mark.long
async def test_one_that_hangs_when_it_is_closed_harms_nobody(
    chat: ChatTokenizer, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("penstock.envs.calls.CLOSE_S", 0.3)
    trajectories = await play(chat, Heavy, "hangs in close")
    assert [trajectory.status for trajectory in trajectories] == ["completed"] * 4
    assert "held by Heavy.close" in caplog.text


class Single(Heavy):
    """One process for all callers."""

    max_concurrent = 1

    async def reset(self, seed: int) -> Any:
        return f"{os.getpid()} {self._mischief}", {}


async def test_all_tags_of_a_class_share_its_processes() -> None:
    entry = {"name": "heavy", "data": {"source": "seeds"}}
    mixture = {"calm": entry, "wild": entry | {"options": {"mischief": "hangs"}}}
    seen = []
    async with making(Config.model_validate({"env": {"mixture": mixture}}), {"heavy": Single}) as make:
        for tag in mixture:
            environment: Any = make(Task(task_id="t", tag=tag, index=0))
            await environment.enter()
            seen.append((await environment.reset(1))[0].split())
            await environment.close()
    (one, calm), (another, wild) = seen
    assert (one, calm, wild) == (another, "none", "hangs")


async def test_a_wrong_configuration_ends_it_all(chat: ChatTokenizer) -> None:
    with pytest.raises(BaseExceptionGroup) as errors:
        await play(chat, Refuses)
    assert errors.group_contains(ConfigError, match="env.options are wrong")


@pytest.mark.long
async def test_whoever_gives_up_takes_the_process_with_him(chat: ChatTokenizer) -> None:
    playing = asyncio.create_task(play(chat, Heavy, "hangs"))
    await asyncio.sleep(3.0)
    playing.cancel()
    started = time.monotonic()
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert time.monotonic() - started < 5


def test_another_process_finds_the_class(tmp_path: Any) -> None:
    file = tmp_path / "my_world.py"
    file.write_text("class World:\n    def reset(self, seed): ...\n    def step(self, action): ...\n")
    kind = resolve(f"{file}:World")
    assert importable_name(kind) == f"{file}:World"
    assert importable_name(EnvConfig) == "penstock.config.environments:EnvConfig"


def test_files_of_one_name_are_two_modules(tmp_path: Any) -> None:
    files = [tmp_path / folder / "my_world.py" for folder in ("one", "two")]
    for file in files:
        file.parent.mkdir()
        file.write_text("class World:\n    def reset(self, seed): ...\n    def step(self, action): ...\n")
    names = [f"{file}:World" for file in files]
    kinds = [resolve(name) for name in names]
    assert [importable_name(kind) for kind in kinds] == names


def test_an_isolated_agent_is_refused() -> None:
    with pytest.raises(ConfigError, match="an agent cannot be `isolated`"):
        resolve(f"{__name__}:IsolatedAgent")


async def test_an_observation_that_no_message_can_carry_is_replaced() -> None:
    config = Config()
    async with making(config, {config.env.name: Surrogates}) as make:
        environment: Any = make(work(1).task)
        await environment.enter()
        observation, _ = await environment.reset(1)
        await environment.close()
    assert observation == "a?"


async def test_what_is_wanted_of_what_is_told_beside_comes_along_as_json_has_it() -> None:
    config = Config.model_validate({"dump": {"columns": [["level", "json"], ["anything", "string"]]}})
    async with making(config, {config.env.name: Heavy}) as make:
        environment: Any = make(work(1).task)
        await environment.enter()
        observation, info = await environment.reset(1)
        await environment.close()
    assert observation.startswith("pid")
    assert info.keys() == {"level", "anything"}
    assert info["level"] == [1, 2] and info["anything"].startswith("<object object")
