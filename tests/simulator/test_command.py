"""`penstock simulate` from the command line."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from penstock.cli.main import app
from penstock.config import Config
from penstock.observe import jsonl

SMALL = {
    "env": {"group_size": 4},
    "rollout": {"slots": 16},
    "trainer": {"groups_per_step": 8},
    "scheduler": {"trigger": {"min_samples": 8}},
    "simulator": {"steps": 4, "warmup_steps": 1, "workload": {"median_tokens": 50.0, "max_tokens": 300}},
}


def penstock(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({"runs_dir": str(tmp_path / "runs"), **SMALL}))
    return path


def test_a_table_json_and_a_picture(path: Path, tmp_path: Path) -> None:
    result = penstock("simulate", path, "run_id=first")
    assert result.exit_code == 0, result.output
    directory = tmp_path / "runs" / "first-simulation"
    results = json.loads((directory / "results.json").read_text())["results"]
    assert [each["name"] for each in results] == ["synchronous", "one_step_off", "asynchronous"]
    assert all(0 < each["mean"]["efficiency"] < 1.1 for each in results)
    assert (directory / "simulation.png").stat().st_size > 5_000
    assert [line.split()[:2] for line in result.stderr.splitlines()] == [
        ["simulated", f"{name}:"] for name in ("synchronous", "one_step_off", "asynchronous")
    ]
    for text in ("asynchronous", "one_step_off", str(directory / "results.json")):
        assert text in result.stdout
    listed = penstock("runs", "--runs-dir", tmp_path / "runs").stdout
    assert listed.count("(simulated)") == 3 and "first-simulated-one_step_off" in listed


def test_a_simulated_run_can_be_made_again_and_never_replaces_a_real_one(path: Path, tmp_path: Path) -> None:
    words = ["run_id=mine", "simulator.strategies=[configured]"]
    run_dir = tmp_path / "runs" / "mine-simulated"
    for _ in range(2):
        result = penstock("simulate", path, *words)
        assert result.exit_code == 0 and str(run_dir) in result.stdout, result.output
    assert len(jsonl.read(run_dir / "metrics.jsonl")) == 4
    refused = penstock("resume", "mine-simulated", "--runs-dir", tmp_path / "runs")
    assert refused.exit_code == 1 and "was simulated and cannot be resumed" in refused.stderr
    shown = penstock("status", "mine-simulated", "--runs-dir", tmp_path / "runs")
    assert shown.exit_code == 0 and "configured" in shown.stdout and "penstock resume" not in shown.stdout
    (run_dir / "state.json").write_text("{}")
    real = penstock("simulate", path, *words)
    assert real.exit_code == 2 and "holds a run that was not simulated" in real.stderr


def test_files_go_where_they_are_told(path: Path, tmp_path: Path) -> None:
    words = ["simulator.strategies=[asynchronous]", "simulator.seeds=2", "simulator.makespan_groups=20"]
    result = penstock("simulate", path, *words, "--json", tmp_path / "a.json", "--plot", tmp_path / "b.png")
    assert result.exit_code == 0, result.output
    found = json.loads((tmp_path / "a.json").read_text())
    assert len(found["results"][0]["runs"]) == 2 and len(found["makespans"][0]["seconds"]) == 2
    assert (tmp_path / "b.png").exists() and not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["simulator.strategies=[lockstep]"], "simulator.strategies"),
        (["simulator.workload.source=trace"], "needs workload.path"),
        (["simulator.workload={source: trace, path: nowhere.csv}"], "nowhere.csv does not exist"),
        (["rollout.slots=0"], "rollout.slots"),
        (["env.mixture={a: {name: guess_number}, b: {name: single_turn}}"], "configuration without a mixture"),
        (["simulator.engine.kv_tokens=100"], "does not hold the longest sequence"),
    ],
)
def test_what_cannot_be_simulated_is_refused_before_it_starts(
    path: Path, tmp_path: Path, words: list[str], said: str
) -> None:
    result = penstock("simulate", path, *words)
    assert result.exit_code == 2 and said in result.stderr
    assert not (tmp_path / "runs").exists()


def test_nothing_to_learn_is_said_not_traced(path: Path) -> None:
    words = ["simulator.workload.reward_probability=0.0", "scheduler.max_filtered_in_a_row=50"]
    result = penstock("simulate", path, *words)
    assert result.exit_code == 1 and "groups in a row were filtered" in result.stderr
    (state,) = (json.loads(found.read_text()) for found in path.parent.glob("runs/*-simulated-synchronous/state.json"))
    assert state["status"] == "failed" and "groups in a row were filtered" in state["error"]


def test_either_a_configuration_or_a_run(path: Path) -> None:
    assert penstock("simulate").exit_code == 2
    assert penstock("simulate", path, "--calibrate", path).exit_code == 2


def test_calibration_prints_what_to_paste(run_dir: Path, tmp_path: Path) -> None:
    result = penstock("simulate", "--calibrate", run_dir, "--json", tmp_path / "fit.json")
    assert result.exit_code == 0, result.output
    table, _, pasted = result.stdout.partition("simulator:")
    assert "samples per s" in table and "measured" in table
    settings = yaml.safe_load("simulator:" + pasted)
    assert Config.model_validate(settings).simulator.engine.step_s == pytest.approx(0.02, rel=0.01)
    assert set(json.loads((tmp_path / "fit.json").read_text())) == {
        *("measured", "predicted", "error", "caveat", "simulator"),
    }
    simulated = run_dir.parent / f"{run_dir.name}-simulated"
    assert str(simulated) in result.stderr
    assert json.loads((simulated / "state.json").read_text())["simulated"]["fitted_to"] == run_dir.name
    missing = penstock("simulate", "--calibrate", tmp_path / "nowhere")
    assert missing.exit_code == 1 and "no run named" in missing.stderr
    (tmp_path / "empty").mkdir()
    empty = penstock("simulate", "--calibrate", tmp_path / "empty")
    assert empty.exit_code == 1 and "no run named" in empty.stderr
