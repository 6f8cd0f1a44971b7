"""`penstock runs`."""

from __future__ import annotations

import json
import time
from pathlib import Path

from made_runs import make_run, penstock, take_step


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
        "started": 1000.0,
        "step": 2,
        "steps": 9,
        "reward": 0.25,
        "run_dir": str(run_dir),
    }


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
    assert {row["run_id"]: row["status"] for row in rows} == {"a": "running", "c": "unknown", "d": "stopped"}


def test_hundreds_of_long_runs_are_listed_at_once(tmp_path: Path) -> None:
    for number in range(300):
        make_run(tmp_path / f"r{number:03}", "completed")
    with (tmp_path / "r000" / "metrics.jsonl").open("w") as file:
        file.write(f'{{"step": 1, "padding": "{"x" * 1000}"}}\n' * 100_000)
    started = time.process_time()
    assert len(json.loads(penstock("runs", "--json", "--runs-dir", tmp_path).stdout)) == 300
    assert time.process_time() - started < 1.5
