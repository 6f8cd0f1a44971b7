"""Environments that declare a system message and tools, and give messages instead of text."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from fake_ports import leased
from scripted_policy import ScriptedPolicy

sys.path.insert(0, str(Path(__file__).parent.parent / "compat"))

from test_gateway import Always
from tool_template import chat_with_tools

from penstock.config import Config
from penstock.envs.demonstrations import demonstrations
from penstock.envs.dialogue import EpisodeFailure, Style, checked
from penstock.envs.isolated import making
from penstock.envs.manager import EnvManager
from penstock.model.chat import ChatTokenizer
from penstock.ports.environment import Action
from penstock.ports.episode_manager import ManagedEpisode
from penstock.samples import CalledTool, Trajectory
from penstock.types import Sampling, Task

ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}},
    },
}
CALL = '<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
SYSTEM = "Use the tool."


class Sums:
    """Asks for a sum. It plays the tool, too."""

    system = SYSTEM
    tools = (ADD,)

    def __init__(self, task: Task) -> None:
        self.heard: list[Any] = []

    def reset(self, seed: int) -> tuple[Any, dict[str, Any]]:
        return [{"role": "user", "content": "2 + 3"}], {}

    def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert isinstance(action, Action)
        if action.fault:
            return [{"role": "user", "content": action.fault}], 0.0, False, False, {}
        if not action.calls:
            return "", float(action.content == "5"), True, False, {}
        (call,) = action.calls
        assert call.name == "add"
        result = str(sum(call.arguments.values()))
        return [{"role": "tool", "content": result}], 0.25, False, False, {}

    def demonstrate(self) -> str:
        return CALL


class ApartSums(Sums):
    """The same, in a process of its own."""

    isolated = True


CONFIG = Config.model_validate({"env": {"max_turns": 4, "max_new_tokens": 256}, "model": {"max_context": 2048}})


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> ChatTokenizer:
    return chat_with_tools(tmp_path_factory.mktemp("model"))


async def play(chat: ChatTokenizer, *said: str, make: Any = Sums) -> tuple[Trajectory, ScriptedPolicy]:
    policy = ScriptedPolicy([[*chat.encode_answer(text), chat.eos_ids[0]] for text in said])
    ended: list[Trajectory] = []
    manager = EnvManager(CONFIG, make=make, policy=policy, grants=Always(512), chat=chat)
    job = leased(range(1), max_tokens=256, sampling=Sampling(max_new_tokens=256), deadline_s=20.0, env_seed=7)
    await manager.play(job, lambda trajectory, text: ended.append(trajectory))
    (trajectory,) = ended
    return trajectory, policy


async def test_tools_are_shown_and_their_calls_read(chat: ChatTokenizer) -> None:
    trajectory, policy = await play(chat, f"<think>hm</think>{CALL}", "5")
    assert (trajectory.status, trajectory.error, trajectory.reward) == ("completed", None, 1.25)
    opening = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": "2 + 3"}]
    assert policy.prompts[0] == chat.prompt(opening, tools=[ADD])
    result = chat.continuation([{"role": "tool", "content": "5"}], ended=True, tools=[ADD])
    assert trajectory.turns[1].observation_ids == result


async def test_turns_know_their_times_and_those_of_their_calls(chat: ChatTokenizer) -> None:
    trajectory, _ = await play(chat, CALL, "5")
    first, last = trajectory.turns
    assert first.tools is not None and first.tools.calls == [CalledTool("add")] and first.tools.error is None
    assert first.tools.finished_at is not None and last.tools is None
    times = [trajectory.started_at, first.started_at, first.answered_at, first.tools.started_at]
    times += [first.tools.finished_at, last.started_at, last.answered_at, trajectory.finished_at]
    assert times == sorted(times)
    for turn in trajectory.turns:
        assert 0.0 < turn.generating_s <= turn.answered_at - turn.started_at + 1e-6


async def test_a_step_that_raises_is_an_error_of_its_calls(chat: ChatTokenizer) -> None:
    class Broken(Sums):
        def step(self, action: str) -> tuple[Any, float, bool, bool, dict[str, Any]]:
            raise ZeroDivisionError("a tool")

    trajectory, _ = await play(chat, CALL, make=Broken)
    (turn,) = trajectory.turns
    assert trajectory.status == "failed" and turn.tools is not None and turn.tools.error == "ZeroDivisionError"


async def test_an_own_manager_has_its_steps_timed_too(chat: ChatTokenizer) -> None:
    class Once:
        async def play(self, episode: ManagedEpisode) -> None:
            observation, _ = await episode.reset()
            assert not isinstance(observation, str)
            answer = await episode.answer(observation)
            await episode.step(answer)

    policy = ScriptedPolicy([[*chat.encode_answer(CALL), chat.eos_ids[0]]])
    env = CONFIG.env.model_copy(update={"manager": "m.py:Once"})
    config, ended = CONFIG.model_copy(update={"env": env}), list[Trajectory]()
    managers = {"m.py:Once": Once}
    manager = EnvManager(config, make=Sums, policy=policy, grants=Always(512), chat=chat, managers=managers)
    job = leased(range(1), max_tokens=256, sampling=Sampling(max_new_tokens=256), deadline_s=20.0)
    await manager.play(job, lambda trajectory, text: ended.append(trajectory))
    (turn,) = ended[0].turns
    assert turn.tools is not None and turn.tools.calls == [CalledTool("add")] and turn.tools.finished_at is not None


async def test_a_malformed_call_is_told_to_the_environment(chat: ChatTokenizer) -> None:
    trajectory, _ = await play(chat, '<tool_call>{"name"', CALL, "5")
    assert (trajectory.error, trajectory.reward, len(trajectory.turns)) == (None, 1.25, 3)
    assert "does not end with </tool_call>" in chat.decode(trajectory.turns[1].observation_ids)


async def test_an_isolated_environment_gets_parsed_actions_too(chat: ChatTokenizer) -> None:
    async with making(CONFIG, {CONFIG.env.name: ApartSums}) as make:
        trajectory, _ = await play(chat, CALL, "5", make=make)
    assert (trajectory.error, trajectory.reward) == (None, 1.25)


def test_demonstrations_show_tools_too(chat: ChatTokenizer) -> None:
    tasks = iter([Task(task_id="a", tag="main", index=0)])
    found = demonstrations(lambda: next(tasks, None), make=Sums, max_turns=lambda task: 2, chat=chat, seed=0)
    ((ids, mask),) = found
    assert SYSTEM in chat.decode(ids) and json.dumps(ADD["function"]["name"]) in chat.decode(ids)  # type: ignore[index]
    assert mask.count(1) == 2 * (len(chat.encode_answer(CALL)) + 1)


@pytest.mark.parametrize(
    ("declared", "message"),
    [
        ({"system": 5}, "system is a int, not a text"),
        ({"tools": "add"}, "tools is a str, not a list"),
        ({"tools": [ADD, {"name": "x"}]}, r"tools\[1\] has no function with a name"),
        (
            {"tools": [{"function": {"name": "x", "parameters": [1]}}]},
            r"tools\[0\]: parameters of x are no JSON schema",
        ),
    ],
)
def test_what_an_environment_declares_is_checked(declared: dict[str, Any], message: str) -> None:
    with pytest.raises(EpisodeFailure, match=message):
        Style.of(type("Odd", (), declared))


@pytest.mark.parametrize(
    ("observation", "message"),
    [
        (5, "is a int, not a string or a list of messages"),
        ([], "is a list, not a string or a list of messages"),
        (["a"], "message 0 of the observation is no object"),
        ([{"role": "user"}], "message 0 of the observation has no text as its content"),
        ([{"role": "user", "content": "a"}, {"content": "a"}], "message 1 of the observation has no text as its role"),
    ],
)
def test_what_an_environment_observes_is_checked(observation: Any, message: str) -> None:
    with pytest.raises(EpisodeFailure, match=message):
        checked(observation)


def test_half_a_character_of_a_message_is_replaced() -> None:
    assert checked([{"role": "user", "content": "a\ud800"}]) == [{"role": "user", "content": "a?"}]
