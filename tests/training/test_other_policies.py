"""Runs that a policy without tokens plays: real processes, and a real HTTP server as the teacher's endpoint."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from endpoint_stand_in import KEY, Answer, Endpoint, error, said, serving
from test_training_run import EXAMPLES, leftovers, lines, only_run

pytestmark = [pytest.mark.integration, pytest.mark.long]

LIMIT_S = 300


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", KEY)


def penstock(command: str, config: Path, runs: Path, *words: str) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-m", "penstock.cli.main", command, str(config), f"runs_dir={runs}", *words]
    return subprocess.run(
        [*program, "observe.progress=false"], capture_output=True, text=True, timeout=LIMIT_S, check=False
    )


def rows(run_dir: Path) -> list[dict[str, Any]]:
    files = sorted((run_dir / "trajectories" / "rollout").glob("*.jsonl"))
    return [json.loads(line) for path in files for line in path.read_text().splitlines()]


def asks_the_tool(body: dict[str, Any]) -> Answer:
    """Look the word up, and say what the tool has found."""
    messages = body["messages"]
    assert [tool["function"]["name"] for tool in body["tools"]] == ["look"]
    if messages[-1]["role"] == "user":
        return said("I look.", calls=[("look", json.dumps({"key": messages[-1]["content"][:-1]}))])
    return said(messages[-1]["content"])


def teacher(server: Endpoint) -> list[str]:
    return [f"policy.base_url={server.url}", "policy.model=teacher"]


def test_a_teacher_plays_a_dataset_and_its_messages_are_dumped(tmp_path: Path) -> None:
    with serving(asks_the_tool) as server:
        words = [*teacher(server), "synthesis.tasks=10", "scheduler.max_running=5"]
        result = penstock("rollout", EXAMPLES / "teacher" / "run.yaml", tmp_path, *words)
    assert result.returncode == 0, result.stdout + result.stderr
    run_dir = only_run(tmp_path)
    found = rows(run_dir)
    assert len(found) == 40 and {row["reward"] for row in found} == {1.0}
    assert {row["model"] for row in found} == {"teacher"} and {row["num_turns"] for row in found} == {2}
    for name in ("policy_version_min", "policy_version_max", "prompt_tokens", "response_tokens"):
        assert {row[name] for row in found} == {None}, "no number is made up"
    user, call, tool, answer = json.loads(found[0]["messages"])
    assert [each["role"] for each in (user, call, tool, answer)] == ["user", "assistant", "tool", "assistant"]
    (made,) = call["tool_calls"]
    assert call["content"] == "I look." and json.loads(made["function"]["arguments"]) == {"key": user["content"][:-1]}
    assert tool["tool_call_id"] == made["id"] and answer["content"] == tool["content"]
    assert len(server.asked) == 80 and server.most_open <= 5
    last = lines(run_dir / "metrics.jsonl")[-1]
    assert last["tokens_generated_total"] == last["endpoint_completion_tokens_total"] and last["num_servers"] == 0
    totals = [event for event in lines(run_dir / "events.jsonl") if event["event"] == "process_totals"]
    (counted,) = [event["counters"] for event in totals if event["process"] == "env-0"]
    assert counted["endpoint_requests"] <= 80 and counted["endpoint_completion_tokens"] <= 240, (
        "as of the last heartbeat"
    )
    assert json.loads((run_dir / "state.json").read_text())["processes"].keys() == {"controller", "env-0"}
    written = [path.read_text(errors="replace") for path in run_dir.rglob("*") if path.is_file()]
    assert not any(KEY in text for text in written), "no file of a run holds the key"
    assert leftovers(run_dir) == []
    shown = penstock_words("trajectories", run_dir)
    assert "by teacher" in shown and "look {" in shown and "tool" in shown


def penstock_words(*words: object) -> str:
    program = [sys.executable, "-m", "penstock.cli.main", *map(str, words)]
    return subprocess.run(program, capture_output=True, text=True, timeout=LIMIT_S, check=True).stdout


def test_a_teacher_is_scored(tmp_path: Path) -> None:
    results = tmp_path / "results.json"
    with serving(asks_the_tool) as server:
        words = [*teacher(server), "--json", str(results), "data.eval_tasks=12"]
        result = penstock("eval", EXAMPLES / "teacher" / "run.yaml", tmp_path / "runs", *words)
    assert result.returncode == 0, result.stdout + result.stderr
    found = json.loads(results.read_text())
    assert found["model"] == "teacher" and found["reward"] == 1.0
    assert {body["temperature"] for body in server.asked} == {0.0} and len(server.asked) == 24


def test_an_agent_asks_a_teacher_through_its_own_client(tmp_path: Path) -> None:
    def guess(body: dict[str, Any]) -> Answer:
        return said("7") if len(body["messages"]) % 2 else error(400, "not a question")

    with serving(guess) as server:
        words = [*teacher(server), "policy.name=openai", "synthesis.tasks=4", "env.max_new_tokens=5"]
        result = penstock("rollout", EXAMPLES / "agent" / "run.yaml", tmp_path, *words)
    assert result.returncode == 0, result.stdout + result.stderr
    found = rows(only_run(tmp_path))
    assert found and all("7" in row["messages"] for row in found)
    assert all(json.loads(row["messages"])[0]["role"] == "user" for row in found)


@pytest.mark.parametrize("command", ["rollout", "eval"])
def test_a_wrong_key_is_one_error_before_anything_starts(
    tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "another-key")
    with serving(asks_the_tool) as server:
        result = penstock(command, EXAMPLES / "teacher" / "run.yaml", tmp_path / "runs", *teacher(server))
    assert result.returncode == 2 and not (tmp_path / "runs").exists()
    assert "refuses the key in OPENAI_API_KEY" in result.stderr and len(result.stderr.splitlines()) == 1
    assert "another-key" not in result.stderr


def ends_with(reply: Callable[[dict[str, Any]], Answer], tmp_path: Path, *words: str) -> str:
    """Return the output of a rollout that fails."""
    with serving(reply) as server:
        result = penstock("rollout", EXAMPLES / "teacher" / "run.yaml", tmp_path, *teacher(server), *words)
    assert result.returncode in (1, 2), result.stdout + result.stderr
    return result.stdout + result.stderr


def test_a_key_that_is_revoked_ends_the_run_at_once(tmp_path: Path) -> None:
    lock, left = threading.Lock(), iter(range(20))

    def reply(body: dict[str, Any]) -> Answer:
        with lock:
            return asks_the_tool(body) if next(left, None) is not None else error(401, "The key was revoked")

    output = ends_with(reply, tmp_path)
    assert "refuses the key in OPENAI_API_KEY" in output and "The key was revoked" in output


def test_an_endpoint_without_tools_cannot_play_an_environment_with_tools(tmp_path: Path) -> None:
    def reply(body: dict[str, Any]) -> Answer:
        return error(400, "tools are not supported") if "tools" in body else said("?")

    assert "takes no tools, and the environment has some" in ends_with(reply, tmp_path)


def test_random_actions_try_an_environment_at_scale(tmp_path: Path) -> None:
    words = ["policy={name: random}", "synthesis.tasks=250", "scheduler.max_running=256"]
    config = tmp_path / "run.yaml"
    text = (EXAMPLES / "tools" / "run.yaml").read_text().replace("lookup.py", str(EXAMPLES / "tools" / "lookup.py"))
    config.write_text(text)
    result = penstock("rollout", config, tmp_path / "runs", *words)
    assert result.returncode == 0, result.stdout + result.stderr
    found = rows(only_run(tmp_path / "runs"))
    assert len(found) == 2000 and {row["model"] for row in found} == {"random"}
    texts = [row["messages"] for row in found]
    assert any("tool_calls" in text for text in texts) and not all("tool_calls" in text for text in texts)
    again = penstock("rollout", config, tmp_path / "again", *words)
    assert again.returncode == 0
    told = [
        sorted((row["group"], row["episode"], row["messages"]) for row in each)
        for each in (found, rows(only_run(tmp_path / "again")))
    ]
    assert told[0] == told[1], "the same seed plays the same"
