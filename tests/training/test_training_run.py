"""The real thing: `penstock train` with all its processes, short."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest

from penstock.observe import jsonl

pytestmark = pytest.mark.integration

EXAMPLES = Path(__file__).parent.parent.parent / "examples"
RECIPE = str(Path(__file__).parent / "recipes" / "spell_backward.yaml")
SHORT = ["data.eval_tasks=64", "model.warm_start.steps=10", "trainer.groups_per_step=16", "observe.progress=false"]


def command(recipe: str, runs: Path, *overrides: str) -> list[str]:
    """`recipe`: a configuration file, or the name of an example."""
    config = recipe if recipe.endswith(".yaml") else str(EXAMPLES / recipe / "run.yaml")
    return [sys.executable, "-m", "penstock.cli.main", "train", config, f"runs_dir={runs}", *overrides]


def train(recipe: str, runs: Path, *overrides: str, timeout_s: float = 600) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command(recipe, runs, *overrides), capture_output=True, text=True, timeout=timeout_s)


def only_run(runs: Path) -> Path:
    (run_dir,) = [path for path in runs.iterdir() if path.is_dir()]
    return run_dir


def lines(path: Path) -> list[dict[str, Any]]:
    """What is written so far; a line that is just being written is left out."""
    return jsonl.read(path)


def had_their_groups(steps: int, ledger: dict[str, int]) -> bool:
    """Each of so many optimizer steps trained 16 groups of 8, less members that the bound of staleness dropped: on a
    slow machine a group may grow too old while it is played."""
    wanted = steps * 16 * 8
    return ledger["trained"] <= wanted <= ledger["trained"] + ledger["discarded_stale"]


def leftovers(run_dir: Path) -> list[str]:
    """Processes and shared-memory files that carry the run's id."""
    run_id = run_dir.name
    found = [str(path) for path in Path("/dev/shm").glob(f"*{run_id}*")]
    for process in psutil.process_iter():
        try:
            if process.environ().get("PENSTOCK_RUN_ID") == run_id or str(run_dir) in process.cmdline():
                found.append(f"{process.pid} {process.cmdline()}")
        except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
            continue
    return found


@pytest.fixture
def running(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A run that has taken a few steps."""
    overrides = [*SHORT, "trainer.steps=100000", "data.eval_tasks=8", "supervisor.max_restarts=0"]
    process = subprocess.Popen(
        command(RECIPE, tmp_path, *overrides), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    give_up = time.monotonic() + 400
    while not any(len(lines(path)) >= 3 for path in tmp_path.glob("*/metrics.jsonl")):
        assert process.poll() is None and time.monotonic() < give_up, process.communicate(timeout=10)[0]
        time.sleep(0.1)
    yield process
    process.kill()
    process.communicate()


STORIES = [
    [
        ("supervisor", r"starts run \S+ \(penstock \d.*python"),
        ("controller", r"starts \(penstock .*mode=asynchronous"),
        ("rollout-0", r"is ready at http://127\.0\.0\.1:\d+"),
        ("controller", r"evaluation: when=before step=0 .*reward="),
        ("trainer-0", r"step 1: policy_version=1 loss=.*staleness_mean=.*tokens_per_busy_s="),
        ("trainer-0", r"saved the checkpoint \S+/step_60 in \S+ s"),
        ("controller", r"evaluation: when=after step=60"),
        ("controller", r"ends because its work is done: .*step=60 episodes="),
        ("supervisor", r"ends: the run is completed"),
    ],
    [
        ("trainer-0", r"starts \(penstock .*torch .*transformers .*objective=ppo"),
        ("trainer-0", r"step 1: policy_version=1 loss="),
        ("controller", r"step 1: policy_version=1 reward=.*tokens_per_s="),
    ],
    [
        ("rollout-0", r"serves the weights of policy_version [1-9]\d*: [\d,]+ bytes, .*generation paused for"),
        ("env-0", r"ends because it received SIGTERM: .*episodes="),
    ],
]
"""Log lines of a run that goes well: one event of a list causes the next."""


def check_logs(run_dir: Path, story: Sequence[tuple[str, str]]) -> list[str]:
    """Check that `penstock logs` tells the story in order of time; return its lines."""
    words = [sys.executable, "-m", "penstock.cli.main", "logs", str(run_dir), "-n", "10000"]
    shown = subprocess.run(words, capture_output=True, text=True, timeout=60, check=True).stdout.splitlines()
    rest = iter(shown)
    for process, pattern in story:
        line = re.compile(rf"{process} +\| \S+Z [A-Z]+ {pattern}")
        assert any(line.match(each) for each in rest), f"{process}: {pattern} is not there, or too early"
    return shown


@pytest.mark.long
def test_the_reward_rises_and_everything_is_written_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_API_KEY", "hunter2")
    monkeypatch.setenv("PENSTOCK_ADMIN_API_KEY", "correct-horse")
    result = train(RECIPE, tmp_path, *SHORT, "model.warm_start.steps=40", "trainer.steps=60")
    assert result.returncode == 0, result.stdout + result.stderr
    run_dir = only_run(tmp_path)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["status"] == "completed" and summary["steps"] == summary["policy_version"] == 60
    assert summary["reward_last"] > summary["reward_first"] + 0.05
    assert summary["eval_after"] > summary["eval_before"] + 0.05
    assert summary["kl_engine_trainer"] < 1e-4
    assert summary["staleness_max"] <= 1
    ledger = summary["ledger"]
    assert ledger.pop("admitted") == sum(ledger.values())
    assert had_their_groups(60, ledger)
    for name in ("config.yaml", "state.json", "timeline.jsonl", "plots/reward.png", "plots/timeline.png"):
        assert (run_dir / name).stat().st_size > 0, name
    assert (run_dir / "checkpoints" / "step_60" / "model.safetensors").exists()
    for story in STORIES:
        shown = check_logs(run_dir, story)
    assert [line for line in shown if "hunter2" in line or "correct-horse" in line] == []
    others = [line for line in shown if not re.match(r"\S+ +\| \d{4}-\d\d-\d\dT", line)]
    assert others == [], "libraries write into the logs"
    assert leftovers(run_dir) == []


VARIANTS = {
    "segments": [
        "scheduler.segment_length=3",
        "scheduler.max_staleness=2",
        "scheduler.dispatch.policy=sjf",
        "scheduler.trigger.use=step",
        "scheduler.trigger.feedback.signal=entropy",
    ],
    "probe, one step off": [
        "scheduler.mode=one_step_off",
        "scheduler.dispatch.policy=probe",
        "scheduler.trigger.feedback.signal=noise_scale",
    ],
    "colocated": ["scheduler.mode=colocated", "scheduler.over_sampling=1.5"],
    "restarts": ["scheduler={mode: colocated, max_staleness: 0, over_sampling: 1.5, leftovers: restart}"],
}


@pytest.mark.long
@pytest.mark.parametrize("variant", VARIANTS)
def test_every_way_to_schedule_trains(tmp_path: Path, variant: str) -> None:
    result = train(RECIPE, tmp_path, *SHORT, "trainer.steps=6", "data.eval_tasks=8", *VARIANTS[variant])
    assert result.returncode == 0, result.stdout + result.stderr
    run_dir = only_run(tmp_path)
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["status"] == "completed" and summary["steps"] == 6
    assert summary["kl_engine_trainer"] is None or summary["kl_engine_trainer"] < 1e-4
    ledger = summary["ledger"]
    assert ledger.pop("admitted") == sum(ledger.values())
    allowed = {"restarts": 0, "segments": 2}.get(variant, 1)
    assert summary["staleness_max"] <= allowed
    deciders = {line["decider"] for line in lines(run_dir / "timeline.jsonl") if line["kind"] == "decision"}
    assert deciders >= {"admission", "dispatch", "trigger", "feedback"}


GAME = ["model.warm_start={steps: 40, batch_size: 32}", "trainer.groups_per_step=4"]


@pytest.mark.long
def test_the_multi_turn_game_runs_through_the_same_loop(tmp_path: Path) -> None:
    result = train("guess_number", tmp_path, *GAME, "trainer.steps=3", "data.eval_tasks=8", "observe.progress=false")
    assert result.returncode == 0, result.stdout + result.stderr
    summary = json.loads((only_run(tmp_path) / "summary.json").read_text())
    assert summary["status"] == "completed" and summary["steps"] == 3


def test_an_unknown_key_starts_nothing(tmp_path: Path) -> None:
    result = train(RECIPE, tmp_path, "trainer.lerning_rate=1")
    assert result.returncode == 2
    assert "trainer.lerning_rate" in result.stderr and "trainer.learning_rate" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_bad_environment_option_is_one_message(tmp_path: Path) -> None:
    result = train(RECIPE, tmp_path, *SHORT, "env.options.promt=x")
    assert result.returncode in (1, 2)
    assert "promt" in result.stderr and "Traceback" not in result.stderr
    for run_dir in tmp_path.iterdir():
        assert leftovers(run_dir) == []


@pytest.mark.long
def test_control_c_stops_with_a_checkpoint(tmp_path: Path, running: subprocess.Popen[str]) -> None:
    run_dir = only_run(tmp_path)
    running.send_signal(signal.SIGINT)
    output, _ = running.communicate(timeout=120)
    assert running.returncode == 130, output
    assert json.loads((run_dir / "state.json").read_text())["status"] == "stopped"
    checkpoints = [event for event in lines(run_dir / "events.jsonl") if event["event"] == "checkpoint"]
    assert checkpoints and (run_dir / checkpoints[-1]["path"] / "model.safetensors").exists()
    assert leftovers(run_dir) == []


@pytest.mark.long
def test_a_trainer_that_keeps_dying_fails_the_run_and_is_named(tmp_path: Path, running: subprocess.Popen[str]) -> None:
    run_dir = only_run(tmp_path)
    state = json.loads((run_dir / "state.json").read_text())
    os.kill(state["processes"]["trainer-0"]["pid"], signal.SIGKILL)
    output, _ = running.communicate(timeout=120)
    assert running.returncode == 1
    assert "trainer-0" in output and "SIGKILL" in output
    assert leftovers(run_dir) == []
