"""A run keeps what was predicted of the configuration that it begins from."""

from __future__ import annotations

from pathlib import Path

from penstock.cli.train import keep_prediction
from penstock.observe.jsonl import read_json, write_json

PLAN = {"by": "penstock plan", "figures": {"step_s": 2.0}}
NEED = {"who": "trainer", "count": 1, "total": 100, "parts": {"weights": 60}}


def test_a_plan_beside_the_configuration_is_kept(tmp_path: Path) -> None:
    run_dir, plan = tmp_path / "run", tmp_path / "plan"
    run_dir.mkdir()
    plan.mkdir()
    write_json(plan / "prediction.json", PLAN)
    keep_prediction(run_dir, config_file=plan / "config.yaml", memory={"needs": [NEED]})
    memory = [{"who": "trainer", "count": 1, "total": 100}]
    assert read_json(run_dir / "prediction.json") == {**PLAN, "memory": memory}
    assert read_json(plan / "prediction.json") == PLAN


def test_the_memory_of_a_large_model_is_kept_without_a_plan(tmp_path: Path) -> None:
    keep_prediction(tmp_path, config_file=tmp_path / "elsewhere" / "config.yaml", memory={"needs": [NEED]})
    assert read_json(tmp_path / "prediction.json").keys() == {"memory"}


def test_without_a_prediction_nothing_is_written(tmp_path: Path) -> None:
    keep_prediction(tmp_path, config_file=tmp_path / "elsewhere" / "config.yaml", memory=None)
    assert not list(tmp_path.iterdir())
