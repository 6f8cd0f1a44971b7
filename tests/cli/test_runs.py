"""`penstock runs`."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from made_runs import make_run, penstock, take_step

from penstock.observe import jsonl


def test_runs_are_listed_with_the_newest_first(tmp_path: Path) -> None:
    make_run(tmp_path / "a", "running", started=time.time() - 30, settings={"env": {"name": "guess_number"}})
    make_run(tmp_path / "b", "running", started=time.time() - 3600, alive=False)
    take_step(make_run(tmp_path / "c", "completed", started=time.time() - 90), 9)
    lines = penstock("runs", "--runs-dir", tmp_path).stdout.splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [["a", "running"], ["c", "completed"], ["b", "lost"]]
    assert lines[1].split()[2] == "guess_number"
    assert lines[2].split()[-3:] == ["1:30", "9/9", "0.50"]


def test_programs_get_the_same_as_json(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "a", "failed", started=1000.0)
    take_step(run_dir, 1, reward=0.25)
    take_step(run_dir, 2, reward=None)
    (row,) = json.loads(penstock("runs", "--json", "--runs-dir", tmp_path).stdout)
    assert row.pop("wall_seconds") > 0
    assert row == {
        "run_id": "a",
        "status": "failed",
        "environment": None,
        "pipeline": "train",
        "simulated": None,
        "started": 1000.0,
        "step": 2,
        "steps": 9,
        "reward": 0.25,
        "run_dir": str(run_dir),
    }


@pytest.mark.parametrize(("pipeline", "shown"), [("train", "5/9"), ("rollout", "5/40")])
def test_only_the_ends_of_files_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pipeline: str, shown: str
) -> None:
    take_step(make_run(tmp_path / "a", "running", settings={"pipeline": pipeline}), 5, tasks=40)
    monkeypatch.delattr(jsonl, "read")
    assert penstock("runs", "--runs-dir", tmp_path).stdout.splitlines()[1].split()[-2] == shown


def test_no_runs_is_no_error(tmp_path: Path) -> None:
    assert "penstock train" in penstock("runs", "--runs-dir", tmp_path / "none").stdout
    assert json.loads(penstock("runs", "--json", "--runs-dir", tmp_path / "none").stdout) == []


def test_a_damaged_run_hides_no_other(tmp_path: Path) -> None:
    make_run(tmp_path / "a", "running")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "state.json").write_text("{torn")
    (tmp_path / "c").mkdir()
    (tmp_path / "c" / "state.json").write_text('{"status": "dancing"}')
    (make_run(tmp_path / "d", "stopped") / "config.yaml").write_text("{")
    rows = json.loads(penstock("runs", "--json", "--runs-dir", tmp_path).stdout)
    assert {row["run_id"]: row["status"] for row in rows} == {
        "a": "running",
        "b": "unreadable",
        "c": "unknown",
        "d": "stopped",
    }


def test_hundreds_of_long_runs_are_listed_at_once(tmp_path: Path) -> None:
    for number in range(300):
        make_run(tmp_path / f"r{number:03}", "completed")
    with (tmp_path / "r000" / "metrics.jsonl").open("w") as file:
        file.write(f'{{"step": 1, "padding": "{"x" * 1000}"}}\n' * 100_000)
    started = time.process_time()
    assert len(json.loads(penstock("runs", "--json", "--runs-dir", tmp_path).stdout)) == 300
    assert time.process_time() - started < 1.5


@pytest.mark.parametrize("command", ["status", "stop", "resume", "trajectories"])
@pytest.mark.parametrize("state", ["{torn", "[]", None])
def test_a_run_without_a_state_to_read_is_refused_with_one_sentence(
    tmp_path: Path, command: str, state: str | None
) -> None:
    path = make_run(tmp_path / "alpha", "running") / "state.json"
    path.unlink() if state is None else path.write_text(state)
    result = penstock(command, "al", "--runs-dir", tmp_path)
    assert result.exit_code == 1
    what = f"{tmp_path / 'alpha'} holds a run without its state.json" if state is None else f"{path} cannot be read"
    assert result.stderr.splitlines() == [
        f"error: {what}: restore it from a copy, or move the directory away (its checkpoints and logs remain usable)"
    ]


def test_the_logs_of_a_damaged_run_can_be_read(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "a", "running")
    (run_dir / "state.json").unlink()
    (run_dir / "logs" / "env-0.log").write_text("hello\n")
    assert penstock("logs", run_dir, "env-0", "--follow").stdout == "hello\n"


@pytest.mark.parametrize("name", ["", " "])
def test_an_empty_name_means_no_run(tmp_path: Path, name: str) -> None:
    make_run(tmp_path / "only", "running")
    result = penstock("stop", name, "--runs-dir", tmp_path)
    assert result.exit_code == 1 and "the name of the run is empty" in result.stderr
