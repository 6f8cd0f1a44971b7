"""The real thing: `penstock rollout` with all its processes, killed, and resumed with more to play."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from test_training_run import leftovers, lines, only_run

pytestmark = [pytest.mark.integration, pytest.mark.long]

LIMIT_S = 600
GROUP_SIZE, NUM_TASKS = 4, 150
CONFIG = f"""
model: {{max_context: 64}}
data: {{source: seeds}}
env: {{name: "slow_letters.py:SlowLetters", group_size: {GROUP_SIZE}, max_new_tokens: 8, max_turns: 2}}
rollout: {{slots: 8}}
synthesis: {{tasks: {NUM_TASKS}}}
dump: {{rows_per_shard: 40, columns: [[trajectory, string], [reward, double], [seen, bigint], [messages, string]]}}
observe: {{progress: false}}
"""
ENVIRONMENT = '''
import asyncio


class SlowLetters:
    """Two turns, the second after a while."""

    def __init__(self, task):
        self.turn = 0

    async def reset(self, seed):
        return f"say {seed % 100}", {}

    async def step(self, action):
        self.turn += 1
        await asyncio.sleep(0.2)
        return "more", float(len(action)), self.turn == 2, False, {"seen": self.turn}
'''


@pytest.fixture
def config(tmp_path: Path) -> Path:
    (tmp_path / "slow_letters.py").write_text(ENVIRONMENT)
    (tmp_path / "run.yaml").write_text(CONFIG)
    return tmp_path / "run.yaml"


def penstock(*words: object) -> list[str]:
    return [sys.executable, "-m", "penstock.cli.main", *map(str, words)]


def rollout(config: Path, *overrides: str) -> subprocess.Popen[str]:
    words = penstock("rollout", config, f"runs_dir={config.parent / 'runs'}", *overrides)
    return subprocess.Popen(words, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def wait_until(run: subprocess.Popen[str], happened: Callable[[], bool]) -> None:
    give_up = time.monotonic() + LIMIT_S
    while not happened():
        assert run.poll() is None and time.monotonic() < give_up, run.communicate(timeout=10)[0]
        time.sleep(0.02)


def shards(config: Path) -> list[Path]:
    return sorted((config.parent / "runs").glob("*/trajectories/rollout/*.jsonl"))


def wait_for_shards(run: subprocess.Popen[str], config: Path, number: int) -> None:
    wait_until(run, lambda: len(shards(config)) >= number)


def rows(paths: Sequence[Path]) -> list[dict[str, Any]]:
    return [json.loads(line) for path in paths for line in path.read_text().splitlines()]


def kill(run_dir: Path, name: str) -> None:
    state = json.loads((run_dir / "state.json").read_text())
    os.kill(state["processes"][name]["pid"], signal.SIGKILL)


def each_once(config: Path) -> None:
    """Every trajectory of the dataset is in the dump, and none of them twice."""
    names = [row["trajectory"].split("/") for row in rows(shards(config))]
    found = sorted((tag, int(group), int(member)) for _, tag, group, member, _ in names)
    assert found == [("SlowLetters", group, member) for group in range(NUM_TASKS) for member in range(GROUP_SIZE)]


@pytest.mark.longest
def test_whoever_dies_each_trajectory_is_dumped_once(config: Path) -> None:
    with rollout(config, f"synthesis.tasks={NUM_TASKS - 10}") as run:
        for number, victim in enumerate(("env-0", "controller", "rollout-0"), start=1):
            wait_for_shards(run, config, number)
            kill(only_run(config.parent / "runs"), victim)
        wait_for_shards(run, config, 4)
        run.kill()
        run.communicate()
    run_dir = only_run(config.parent / "runs")
    assert 0 < len(rows(shards(config))) < NUM_TASKS * GROUP_SIZE, "it was killed in the middle"
    give_up = time.monotonic() + 60
    while leftovers(run_dir) and time.monotonic() < give_up:
        time.sleep(0.1)
    words = penstock("resume", run_dir, f"synthesis.tasks={NUM_TASKS}")
    resumed = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    each_once(config)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["status"], summary["tasks"], summary["tasks_played"]) == ("completed", NUM_TASKS, NUM_TASKS)
    ledger = summary["ledger"]
    assert ledger.pop("admitted") == ledger.pop("collected") == NUM_TASKS * GROUP_SIZE and not any(ledger.values())
    assert leftovers(run_dir) == []
    first = rows(shards(config))[0]
    assert list(first) == ["trajectory", "reward", "seen", "messages"] and first["seen"] == 2
    assert [message["role"] for message in json.loads(first["messages"])] == ["user", "assistant", "user", "assistant"]
    shown = subprocess.run(penstock("trajectories", run_dir, "--best"), capture_output=True, text=True, timeout=120)
    assert shown.returncode == 0 and shown.stdout.count("reward") == 3, shown.stdout + shown.stderr


def test_training_is_dumped_by_step_and_its_checkpoint_is_played_as_it_is(config: Path, tmp_path: Path) -> None:
    steps = ["trainer.steps=2", "trainer.groups_per_step=4", "scheduler.trigger.min_samples=16", "data.eval_tasks=0"]
    dump = [f"dump.url={tmp_path / 'table'}", "dump.format=parquet"]
    words = penstock("train", config, *steps, *dump, f"runs_dir={tmp_path / 'trained'}", "run_id=mine")
    training = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S)
    assert training.returncode == 0, training.stdout + training.stderr
    files = {path.name.partition(".")[0] for path in (tmp_path / "table" / "mine" / "train").iterdir()}
    assert files == {"step_1", "step_2"}
    trained = tmp_path / "trained" / "mine"
    assert list((trained / "trajectories").glob("step_*.jsonl")), "a few are kept to be read"
    assert not [event for event in lines(trained / "events.jsonl") if event["event"] == "alarm"]

    columns = "dump.columns=[[trajectory, string], [policy_version_min, bigint], [policy_version_max, bigint]]"
    options = ["--checkpoint", "mine", "--runs-dir", trained.parent, "synthesis.tasks=5", columns]
    words = penstock("rollout", config, f"runs_dir={tmp_path / 'runs'}", *options)
    played = subprocess.run(words, capture_output=True, text=True, timeout=LIMIT_S)
    assert played.returncode == 0, played.stdout + played.stderr
    found = rows(shards(config))
    assert {(row["policy_version_min"], row["policy_version_max"]) for row in found} == {(2, 2)}
    assert len(found) == 5 * GROUP_SIZE
    state = json.loads((only_run(tmp_path / "runs") / "state.json").read_text())
    assert state["processes"].keys() == {"controller", "rollout-0", "env-0"}
