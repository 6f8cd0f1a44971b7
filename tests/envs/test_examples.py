"""The environments of the examples, played by hand: programs in a sandbox, and what becomes of bad ones."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from penstock.config import load_config
from penstock.envs.registry import environment_maker, resolve
from penstock.sandbox import Limits
from penstock.types import Task

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
TASK = Task(task_id="seed/train/0", tag="train", index=0)

pytestmark = pytest.mark.integration


def make(example: str) -> Any:
    return environment_maker(load_config(EXAMPLES / example / "run.yaml").env)(TASK)


@pytest.mark.parametrize("example", ["python_tool", "shell_sandbox", "guess_number"])
@pytest.mark.parametrize("seed", range(3))
def test_its_own_expert_solves_it(example: str, seed: int) -> None:
    env, ended, reward = make(example), False, 0.0
    env.reset(seed)
    while not ended:
        _, reward, terminated, truncated, _ = env.step(env.demonstrate())
        ended = terminated or truncated
    if hasattr(env, "close"):
        env.close()
    assert reward == 1.0


@pytest.mark.parametrize(
    ("action", "reply"),
    [
        (">6*7", "42"),
        (">print('a'); print('b')", "a\nb"),
        (">1/0", "ZeroDivisionError: division by zero"),
        (">'x'*100", "'" + "x" * 39),
        (">x=", "SyntaxError: invalid syntax"),
        (">None", "nothing"),
    ],
)
def test_the_tool_replies_as_a_prompt_does(action: str, reply: str) -> None:
    env = make("python_tool")
    env.reset(0)
    assert env.step(action)[:4] == (reply, 0.0, False, False)


def test_a_tool_call_without_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    env = make("python_tool")
    env.reset(0)
    monkeypatch.setattr(inspect.getmodule(type(env)), "LIMITS", Limits(wall_s=0.2))
    assert env.step(">while True: pass")[0] == "killed: too slow"


def test_a_wrong_answer_ends_it() -> None:
    env = make("python_tool")
    env.reset(0)
    assert env.step("1")[1:3] == (0.0, True)


@pytest.mark.parametrize(
    "command",
    [
        "echo 'import os; os._exit(0)' > ops.py",
        "rm ops.py",
        "echo 'import sys; print(open(0).read())' > ops.py",
        "sed -i s/a/b/g ops.py",
        "while true; do sleep 1 & done",
        "echo 'print([18, 3, 9])' > ops.py",
        "mkdir json; echo 'def load(f): return []' > json.py",
    ],
)
def test_what_is_no_repair_earns_nothing(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module = inspect.getmodule(resolve(load_config(EXAMPLES / "shell_sandbox" / "run.yaml").env.name))
    monkeypatch.setattr(module, "LIMITS", Limits(wall_s=1.0, max_processes=8))
    env = make("shell_sandbox")
    env.reset(1)
    for number in range(3):
        observation, reward, terminated, _, _ = env.step(command)
        assert (reward, terminated) == (0.0, number == 2)
        assert observation
    env.close()


def test_a_second_command_may_repair_what_the_first_did_not() -> None:
    env = make("shell_sandbox")
    env.reset(1)
    observation, _, terminated, _, _ = env.step("cat ops.py | head -c 9")
    assert observation.startswith("def add(a\n") and " is " in observation
    assert not terminated
    assert env.step(env.demonstrate())[:3] == ("ok", 1.0, True)
    env.close()
