"""`penstock resume`: what it refuses, and what it begins."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from test_commands import penstock

from penstock.config import Config
from penstock.data import identity
from penstock.observe import jsonl
from penstock.supervisor import procfs
from penstock.supervisor.run_directory import open_run, plan_resumption
from penstock.supervisor.run_journal import FORMAT
from penstock.supervisor.states import RunState


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    """Of a run that has failed; its supervisor is gone."""
    return begun(tmp_path, RunState.FAILED, trainer={"steps": 40})


def state_of(run_dir: Path) -> dict[str, object]:
    return json.loads((run_dir / "state.json").read_text())


def change_state(run_dir: Path, **facts: object) -> None:
    jsonl.write_json(run_dir / "state.json", state_of(run_dir) | facts)


def assert_untouched(run_dir: Path, status: str = "failed") -> None:
    assert state_of(run_dir)["lives"] == 1 and state_of(run_dir)["status"] == status
    assert "steps: 40" in (run_dir / "config.yaml").read_text()


def test_a_setting_that_must_not_change_is_refused_by_name(run_dir: Path) -> None:
    result = penstock("resume", run_dir, "seed=1", "trainer.steps=50")
    assert result.exit_code == 2
    assert "seed was 0 and cannot become 1" in result.stderr and "trainer.steps" not in result.stderr
    assert_untouched(run_dir)


def test_so_is_one_that_was_changed_in_the_file(run_dir: Path) -> None:
    text = (run_dir / "config.yaml").read_text()
    (run_dir / "config.yaml").write_text(text.replace("seed: 0", "seed: 3"))
    result = penstock("resume", run_dir)
    assert result.exit_code == 2 and "seed was 0 and cannot become 3" in result.stderr


def test_a_wrong_key_exits_2(run_dir: Path) -> None:
    result = penstock("resume", run_dir, "trainer.stepz=50")
    assert result.exit_code == 2 and "did you mean trainer.steps?" in result.stderr
    assert_untouched(run_dir)


@pytest.mark.parametrize("format", [None, FORMAT - 1, FORMAT + 1])
def test_a_directory_of_another_version_is_refused(run_dir: Path, format: int | None) -> None:
    change_state(run_dir, format=format)
    result = penstock("resume", run_dir)
    assert result.exit_code == 1
    assert f"this version of penstock reads only format {FORMAT}" in result.stderr


def test_an_unreadable_state_or_lineage_is_named(run_dir: Path) -> None:
    (run_dir / "lineage.json").write_text("{")
    result = penstock("resume", run_dir)
    assert result.exit_code == 1 and "lineage.json" in result.stderr
    (run_dir / "state.json").write_text("{")
    result = penstock("resume", run_dir)
    assert result.exit_code == 1 and "state.json" in result.stderr


def test_a_complete_run_says_so(run_dir: Path) -> None:
    change_state(run_dir, status="completed")
    result = penstock("resume", run_dir)
    assert result.exit_code == 0
    assert "run mine is complete, so there is nothing to resume: raise trainer.steps" in result.stdout
    assert_untouched(run_dir, "completed")


@pytest.mark.parametrize("status", ["completed", "stopped"])
def test_fewer_steps_than_were_saved_are_refused(run_dir: Path, status: str) -> None:
    change_state(run_dir, status=status)
    for step in (20, 30):
        saved = {"event": "checkpoint", "step": step, "path": f"checkpoints/step_{step}"}
        jsonl.append(run_dir / "events.jsonl", saved)
    result = penstock("resume", run_dir, "trainer.steps=29")
    assert result.exit_code == 1
    assert "trainer.steps is 29, and run mine has a checkpoint of step 30: give it 30 at least" in result.stderr
    assert_untouched(run_dir, status)


def test_a_running_run_is_refused_and_its_supervisor_named(run_dir: Path) -> None:
    owner = procfs.identify(os.getppid())
    change_state(run_dir, status="running", supervisor=dataclasses.asdict(owner))
    result = penstock("resume", run_dir)
    assert result.exit_code == 1
    assert f"run mine is running, supervised by process {owner.pid}: `penstock stop mine` ends it" in result.stderr
    assert_untouched(run_dir, "running")


@pytest.mark.parametrize("status", ["failed", "stopped", "running", "stopping", "completed"])
def test_what_ended_or_was_abandoned_begins_another_life(run_dir: Path, status: str) -> None:
    change_state(run_dir, status=status)
    (run_dir / "pool").write_text("a file where a folder belongs")
    result = penstock("resume", run_dir, "trainer.steps=50")
    assert result.exit_code == 1 and "pool" in result.stderr
    state = state_of(run_dir)
    assert (state["lives"], state["status"]) == (2, "failed")
    assert "steps: 50" in (run_dir / "config.yaml").read_text()
    reasons = [e["reason"] for e in jsonl.read(run_dir / "events.jsonl") if e.get("to") == "pending"]
    assert reasons == ["resumed with trainer.steps from 40 to 50"]


def begun(runs_dir: Path, status: RunState, **settings: object) -> Path:
    """A run that has ended so; its supervisor is gone."""
    tree = {"runs_dir": str(runs_dir), "run_id": "mine", "observe": {"progress": False}, **settings}
    with open_run(Config.model_validate(tree)) as run:
        run.journal.move(RunState.FAILED, actor="test", reason="it broke")
    gone = state_of(run.run_dir)["supervisor"] | {"start_ticks": 1}
    change_state(run.run_dir, supervisor=gone, status=status.value)
    return run.run_dir


FOUND = {"tasks": 3, "episodes": 3, "reward": 0.5, "response_tokens": 2.0, "turns": 1.0, "truncated": 0, "failed": 0}
FOUND |= {"pass_at": {"1": 0.5}, "policy_versions": [1, 1], "samples": []}


def test_an_evaluation_that_is_resumed_keeps_its_results(tmp_path: Path) -> None:
    run_dir = begun(tmp_path, RunState.FAILED, pipeline="eval")
    found = {"event": "evaluation", "when": "given", "step": 0, **FOUND, "tags": {"words": FOUND}}
    jsonl.append(run_dir / "events.jsonl", found)
    (run_dir / "pool").write_text("a file where a folder belongs")
    result = penstock("resume", run_dir)
    assert result.exit_code == 1 and "pool" in result.stderr
    assert "words" in result.stdout and "results in" in result.stdout
    written = json.loads((run_dir / "evaluation.json").read_text())
    assert (written["run_id"], written["model"], written["reward"]) == ("mine", "tiny", 0.5)
    assert json.loads((run_dir / "summary.json").read_text())["eval_given"] == 0.5


def test_a_complete_evaluation_is_not_played_again(tmp_path: Path) -> None:
    run_dir = begun(tmp_path, RunState.COMPLETED, pipeline="eval", trainer={"steps": 40})
    result = penstock("resume", run_dir, "trainer.steps=50")
    assert result.exit_code == 0 and "its results are in its evaluation.json" in result.stdout
    assert_untouched(run_dir, "completed")


@pytest.mark.parametrize(("had", "asked", "refused"), [(150, 100, True), (-1, 100, True), (150, 150, False)])
def test_fewer_tasks_than_were_to_be_played_are_refused(tmp_path: Path, had: int, asked: int, refused: bool) -> None:
    run_dir = begun(tmp_path, RunState.COMPLETED, pipeline="rollout", synthesis={"tasks": had})
    result = penstock("resume", run_dir, f"synthesis.tasks={asked}")
    assert result.exit_code == refused
    said = f"synthesis.tasks is {asked}, and run mine began with {had} (-1: all): set at least as many"
    assert said in result.stderr if refused else "raise synthesis.tasks to play further" in result.stdout
    assert state_of(run_dir)["lives"] == 1


def test_a_complete_run_over_all_of_its_data_is_not_told_to_raise_what_it_cannot(tmp_path: Path) -> None:
    run_dir = begun(tmp_path, RunState.COMPLETED, pipeline="rollout", synthesis={"tasks": -1})
    result = penstock("resume", run_dir)
    assert result.exit_code == 0 and "raise" not in result.stdout
    assert "it has played every task of its data; `penstock rollout` plays them again" in result.stdout


@pytest.mark.parametrize("asked", [151, -1])
def test_more_tasks_go_further(tmp_path: Path, asked: int) -> None:
    run_dir = begun(tmp_path, RunState.COMPLETED, pipeline="rollout", synthesis={"tasks": 150})
    resumption = plan_resumption(run_dir, [f"synthesis.tasks={asked}"])
    assert not resumption.is_complete


@pytest.mark.integration
def test_a_detached_resume_outlives_the_session_it_was_given_in(run_dir: Path) -> None:
    (run_dir / "pool").write_text("a file where a folder belongs")
    words = [sys.executable, "-m", "penstock.cli.main", "resume", str(run_dir), "--detach"]
    result = subprocess.run(words, capture_output=True, text=True, timeout=120, start_new_session=True)
    assert result.returncode == 0, result.stderr
    assert "run mine started in" in result.stdout
    log = run_dir / "logs" / "supervisor.log"
    give_up = time.monotonic() + 120
    while "pool" not in log.read_text():
        assert time.monotonic() < give_up, log.read_text()
        time.sleep(0.02)
    assert state_of(run_dir)["lives"] == 2


def test_a_run_is_not_resumed_on_changed_data(tmp_path: Path) -> None:
    file = tmp_path / "words.jsonl"
    file.write_text('{"question": "a"}\n')
    run_dir = begun(tmp_path, RunState.FAILED, data={"source": "jsonl", "path": str(file), "eval_path": str(file)})
    file.write_text('{"question": "b"}\n')
    result = penstock("resume", run_dir)
    assert result.exit_code == 2 and result.stderr.count("error") == 1
    assert f"{file} has changed since the run was begun" in result.stderr
    assert state_of(run_dir)["lives"] == 1


def test_data_are_read_once_before_a_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "words.jsonl"
    file.write_text('{"question": "a"}\n')
    run_dir = begun(tmp_path, RunState.FAILED, data={"source": "jsonl", "path": str(file), "eval_path": str(file)})
    (run_dir / "pool").write_text("a file where a folder belongs")
    read: list[Path] = []
    fingerprint = identity.fingerprint
    monkeypatch.setattr(identity, "fingerprint", lambda path: (read.append(path), fingerprint(path))[1])
    assert penstock("resume", run_dir).exit_code == 1 and state_of(run_dir)["lives"] == 2
    assert read == [file], "which is trained on and held out"
