"""The output of `penstock env try` for good and bad environments, with every kind of player."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from made_runs import penstock
from typer.testing import CliRunner, Result

from penstock.cli.main import app
from penstock.config import TinyModelConfig, load_config
from penstock.data.sources import open_tasks
from penstock.model.load_policy import load_policy
from penstock.model.tiny import write_tiny_model
from penstock.scheduler.leases import env_seed

ENVIRONMENTS = '''
import asyncio, time

class Good:
    """Counts to three."""

    def __init__(self, task, *, goal=3):
        self.goal, self.count = goal, 0

    def reset(self, seed):
        return f"seed {seed}: count to {self.goal}, für Ünicode", {}

    def step(self, action):
        self.count += 1
        return f"heard {action}", float(self.count), self.count >= self.goal, False, {"count": self.count}

class Expert(Good):
    def demonstrate(self):
        return str(self.count + 1)

class Async(Expert):
    async def reset(self, seed):
        return Good.reset(self, seed)

    async def step(self, action):
        return Good.step(self, action)

class Blocking(Expert):
    blocking = True

class Both(Async):
    blocking = True

class HangsInAThread(Good):
    blocking = True

    def step(self, action):
        time.sleep(5)

class Raises(Good):
    def step(self, action):
        return self.absent

class Hangs(Good):
    def step(self, action):
        time.sleep(60)

class HangsAsleep(Good):
    async def step(self, action):
        await asyncio.sleep(60)

class NotANumber(Good):
    def step(self, action):
        return "", float("nan"), True, False, {}

class OldGym(Good):
    def step(self, action):
        return "", 1.0, True, {}

class Bytes(Good):
    def step(self, action):
        return b"bytes", 1.0, True, False, {}

class Isolated(Expert):
    isolated = True

class Five(Good):
    def demonstrate(self):
        return 5

class Exits(Isolated):
    def step(self, action):
        import os
        os._exit(7)

class RaisesApart(Raises):
    isolated = True

class Subscripts(Good):
    def __init__(self, task):
        self.question = task["question"]

class Careless:
    def __init__(self, task): pass

    async def play(self, llm, seed):
        return self.absent

class Agent:
    def __init__(self, task): pass

    async def play(self, llm, seed):
        from openai import AsyncOpenAI
        async with AsyncOpenAI(base_url=llm.base_url, api_key=llm.api_key) as client:
            messages = [{"role": "user", "content": "say something"}]
            reply = await client.chat.completions.create(model=llm.model, messages=messages, max_tokens=4)
        return float(reply.choices[0].message.content is not None)
'''


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "my_env.py"
    path.write_text(ENVIRONMENTS)
    return path


def try_it(file: Path, name: str, *words: str) -> Result:
    return penstock("env", "try", f"{file}:{name}", *words)


@pytest.mark.parametrize(
    "name", ["Expert", "Async", "Blocking", "Both", pytest.param("Isolated", marks=pytest.mark.integration)]
)
def test_an_episode_is_shown_turn_by_turn(file: Path, name: str) -> None:
    result = try_it(file, name, "--seed", "5", "env.options.goal=2")
    assert result.exit_code == 0, result.output
    shown = [re.sub(r"\s+", " ", line) for line in result.stdout.splitlines()]
    assert shown[0].endswith(f"my_env.py:{name} task seed/{name}/train/0 seed 5 policy scripted")
    assert shown[1:-1] == [
        "observation │ seed 5: count to 2, für Ünicode",
        "action │ 1",
        "reward │ 1.0",
        "info │ {'count': 1}",
        "observation │ heard 1",
        "action │ 2",
        "reward │ 2.0 terminated",
        "info │ {'count': 2}",
        "observation │ heard 2",
    ]
    assert shown[-1].startswith("trajectory │ completed reward 3 2 turns")


def test_chance_plays_what_knows_no_expert_and_the_same_for_the_same_seed(file: Path) -> None:
    actions = [re.findall(r"action +│ (.*)", try_it(file, "Good", "--seed", seed).stdout) for seed in ("1", "1", "2")]
    assert len(actions[0]) == 3
    assert actions[0] == actions[1] != actions[2]


def test_a_configuration_says_what_is_played(file: Path, tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(
        "data: {source: seeds}\nenv: {name: my_env.py:Expert, options: {goal: 9}, max_turns: 4, max_new_tokens: 2}\n"
    )
    result = penstock("env", "try", tmp_path / "run.yaml")
    assert "count to 9" in result.stdout and "truncated by env.max_turns 4   reward 10   4 turns" in result.stdout


def test_no_row_needs_to_be_held_out(file: Path, tmp_path: Path) -> None:
    (tmp_path / "rows.jsonl").write_text('{"question": "1+1", "answer": "2"}\n' * 3)
    words = [f"data.path={tmp_path / 'rows.jsonl'}", "data.source=jsonl", "env.reward=math"]
    result = penstock("env", "try", "single_turn", "--task", "2", *words)
    assert "reward        │ scored by math   terminated" in result.stdout
    assert "task rows/3 " in result.stdout and "observation   │ 1+1" in result.stdout
    assert "there is no task 3" in penstock("env", "try", "single_turn", "--task", "3", *words).stderr


def test_programs_of_their_own_are_refused_before_their_settings_are() -> None:
    result = penstock("env", "try", "atropos")
    assert (result.exit_code, "programs of their own" in result.stderr) == (2, True)


def test_a_task_is_played_with_the_seed_that_a_run_gives_it(file: Path, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("seed: 7\ndata: {source: seeds}\nenv: {name: my_env.py:Good, max_turns: 4}\n")
    config = load_config(path)
    for number in (0, 3):
        task = open_tasks(config).task(number)
        assert task is not None
        shown = penstock("env", "try", path, "--task", str(number)).stdout
        assert f"seed {env_seed(config, task)}: count" in shown


def test_a_person_plays_and_may_leave(file: Path) -> None:
    words = ["env", "try", f"{file}:Good", "--policy", "human"]
    whole = CliRunner().invoke(app, words, input="ä\nb\nc\n")
    assert (whole.exit_code, "heard ä" in whole.stdout) == (0, True)
    assert "your action> ä\naction        │ ä\n" in whole.stdout
    left = CliRunner().invoke(app, words, input="a\n")
    assert (left.exit_code, "you left" in left.stdout) == (1, True)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Raises", "AttributeError: 'Raises' object has no attribute 'absent'"),
        ("Raises", "my_env.py"),
        (
            "Subscripts",
            "__init__ of seed/Subscripts/train/0: TypeError: 'Task' object is not subscriptable (my_env.py:",
        ),
        ("Five", "Five.demonstrate returned 5, not a string"),
        ("Careless", "AttributeError: 'Careless' object has no attribute 'absent'"),
        ("NotANumber", "nan"),
        ("OldGym", "('', 1.0, True, {})"),
        ("Bytes", "bytes, not a string"),
    ],
)
def test_a_bad_environment_fails_by_name(file: Path, name: str, message: str) -> None:
    result = try_it(file, name)
    assert result.exit_code == 1
    assert message in result.stdout
    assert "trajectory    │ failed" in result.stdout


@pytest.mark.parametrize(
    ("name", "messages"),
    [
        ("Hangs", ["Hangs.step has not returned after 1 s", "time.sleep(60)"]),
        ("HangsAsleep", ["s for its next observation, held by HangsAsleep.step"]),
    ],
)
def test_where_an_environment_hangs_is_shown(file: Path, name: str, messages: list[str]) -> None:
    result = try_it(file, name, "env.episode_timeout_s=1")
    assert result.exit_code == 1
    assert all(message in result.stdout for message in messages), result.stdout


def test_where_a_thread_hangs_is_told_beside(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    result = try_it(file, "HangsInAThread", "env.episode_timeout_s=1")
    assert result.exit_code == 1 and "held by HangsInAThread.step" in result.stdout
    assert re.search(r"my_env\.py:\d+ in step", caplog.text)


@pytest.mark.parametrize(
    ("name", "words", "message"),
    [
        ("Good", ["--policy", "scripted"], "has no demonstrate()"),
        ("Good", ["env.options.gaol=3"], "do not fit"),
        ("Absent", [], "has no class Absent; there are Good,"),
        ("Good", ["env.max_turn=3"], "did you mean env.max_turns?"),
        ("Good", ["--policy", "openai"], "needs --base-url or OPENAI_BASE_URL"),
        ("Good", ["--policy", "openai", "--base-url", "localhost:8000/v1"], "does not begin with http:// or https://"),
    ],
)
def test_what_cannot_be_tried_is_one_message(
    file: Path, name: str, words: list[str], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OPENAI_BASE_URL", raising=False)
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    result = try_it(file, name, *words)
    assert result.exit_code == 2
    assert message in result.stderr
    assert "Traceback" not in result.output


def test_an_endpoint_that_does_not_answer_is_named(file: Path) -> None:
    result = try_it(file, "Good", "--policy", "openai", "--base-url", "http://127.0.0.1:9/v1")
    assert result.exit_code == 1
    assert "http://127.0.0.1:9/v1/ does not answer: APIConnectionError" in result.stdout


@pytest.mark.integration
def test_an_agent_is_told_that_the_endpoint_does_not_answer(file: Path) -> None:
    result = try_it(file, "Agent", "--policy", "openai", "--base-url", "http://127.0.0.1:9/v1")
    assert result.exit_code == 1
    assert "http://127.0.0.1:9/v1/ does not answer: APIConnectionError" in result.stdout.splitlines()[-1]


def test_an_agent_that_fails_against_an_endpoint_is_shown(file: Path) -> None:
    result = try_it(file, "Careless", "--policy", "openai", "--base-url", "http://127.0.0.1:9/v1", "--model", "any")
    assert result.exit_code == 1
    assert "play raised   │ Traceback" in result.stdout
    assert "Careless.play of seed/Careless/train/0: AttributeError: 'Careless' object has no" in result.stdout


@pytest.mark.integration
@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("Exits", "Exits.step of seed/Exits/train/0: ProcessLost: its process ended: exit 7"),
        ("RaisesApart", "AttributeError: 'RaisesApart' object has no attribute 'absent' (my_env.py:"),
        ("RaisesApart", "step raised   │ Traceback"),
    ],
)
def test_an_isolated_one_is_played_in_its_own_process(file: Path, name: str, message: str) -> None:
    result = try_it(file, name)
    assert result.exit_code == 1
    assert message in result.stdout and "trajectory    │ failed" in result.stdout


@pytest.mark.integration
def test_agents_are_asked_and_answered(file: Path) -> None:
    result = CliRunner().invoke(app, ["env", "try", f"{file}:Agent", "--policy", "human"], input="hello\n")
    assert result.exit_code == 0, result.output
    assert "observation   │ say something" in result.stdout and "action        │ hello" in result.stdout
    assert "completed   reward 1   1 turns" in result.stdout


@pytest.mark.long
@pytest.mark.integration
def test_a_served_policy_plays(file: Path, tmp_path: Path) -> None:
    model = tmp_path / "model"
    write_tiny_model(model, TinyModelConfig(num_layers=1, hidden_size=32), max_context=4096)
    load_policy(model, weights=False, seed=0).save_pretrained(model)
    words = ["serve", "--model", str(model), "--port", "0", "model.max_context=4096"]
    command = [sys.executable, "-m", "penstock.cli.main", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        assert server.stdout is not None
        try:
            url = server.stdout.readline().split(" at ")[1].split()[0]
            for name, end in (("Good", "completed   reward 6   3 turns"), ("Agent", "completed   reward 1   1 turns")):
                result = try_it(file, name, "--policy", "openai", "--base-url", f"{url}/v1")
                assert result.exit_code == 0, result.output
                assert end in result.stdout
                assert "observation   │" in result.stdout and "action        │" in result.stdout
        finally:
            server.kill()
