"""A run keeps what was predicted of the configuration that it begins from."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.cli.train import keep_prediction
from penstock.observe.jsonl import read_json, write_json
from penstock.observe.summary import predicted_config

PLAN = {"by": "penstock plan", "figures": {"step_s": 2.0}}
NEED = {"who": "trainer", "count": 1, "total": 100, "parts": {"weights": 60}}


def test_a_plan_beside_the_configuration_is_kept(tmp_path: Path) -> None:
    run_dir, plan = tmp_path / "run", tmp_path / "plan"
    run_dir.mkdir()
    plan.mkdir()
    config_file = plan / "config.yaml"
    config_file.write_text("seed: 1\n")
    predicted = PLAN | predicted_config(config_file)
    write_json(plan / "prediction.json", predicted)
    keep_prediction(run_dir, config_file=config_file, overrides=["trainer.steps=9"], memory={"needs": [NEED]})
    memory = [{"who": "trainer", "count": 1, "total": 100}]
    assert read_json(run_dir / "prediction.json") == {**predicted, "memory": memory}
    assert read_json(plan / "prediction.json") == predicted


@pytest.mark.parametrize(("text", "overrides"), [("seed: 2\n", []), ("seed: 1\n", ["rollout.slots=4"])])
def test_the_plan_of_another_configuration_is_not_kept(tmp_path: Path, text: str, overrides: list[str]) -> None:
    run_dir, config_file = tmp_path / "run", tmp_path / "config.yaml"
    run_dir.mkdir()
    config_file.write_text("seed: 1\n")
    write_json(tmp_path / "prediction.json", PLAN | {"memory": []} | predicted_config(config_file))
    config_file.write_text(text)
    keep_prediction(run_dir, config_file=config_file, overrides=overrides, memory=None)
    assert not list(run_dir.iterdir())


def test_the_memory_of_a_large_model_is_kept_without_a_plan(tmp_path: Path) -> None:
    keep_prediction(
        tmp_path, config_file=tmp_path / "elsewhere" / "config.yaml", overrides=[], memory={"needs": [NEED]}
    )
    assert read_json(tmp_path / "prediction.json").keys() == {"memory"}


def test_without_a_prediction_nothing_is_written(tmp_path: Path) -> None:
    keep_prediction(tmp_path, config_file=tmp_path / "elsewhere" / "config.yaml", overrides=[], memory=None)
    assert not list(tmp_path.iterdir())
