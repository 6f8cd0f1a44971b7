"""Plans for a number of accelerators."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from penstock.config import Config, ConfigError, load_config
from penstock.simulator.planning import APART, TOGETHER, plan

TREE: dict[str, Any] = {
    "env": {"group_size": 4, "max_new_tokens": 400},
    "model": {"max_context": 512},
    "rollout": {"slots": 16},
    "trainer": {"groups_per_step": 16},
    "scheduler": {"group_filter": [], "tuning": {"may": ["redundancy"]}},
    "simulator": {
        "engine": {"step_s": 0.01, "sequence_s": 0.0005, "update_s": 0.2},
        "trainer": {"token_s": 4e-4, "step_s": 0.2},
        "trainer_devices": 1,
        "workload": {"median_tokens": 60.0, "max_tokens": 400, "prompt_tokens": 20},
    },
}


@pytest.mark.integration
@pytest.mark.long
def test_the_learner_gets_as_many_devices_as_it_needs() -> None:
    """A device of the learner trains 2,500 tokens per second, and one server generates 900."""
    seen: list[tuple[str, int, int]] = []
    options = plan(Config.model_validate(TREE), 8, watch=lambda *progress: seen.append(progress))
    best = options[0]
    assert best.strategy in ("asynchronous", "segments") and best.servers > best.trainer_devices > 1, best
    assert best.servers + best.trainer_devices == 8 and len(best.runs) == 3
    assert {option.strategy for option in options} == {*APART, *TOGETHER}
    speeds = [option.samples_per_s for option in options]
    assert speeds == sorted(speeds, reverse=True)
    unbalanced = [option for option in options if option.strategy == "asynchronous" and option.servers == 1]
    assert unbalanced[0].limited_by == "generation" and unbalanced[0].samples_per_s < 0.5 * best.samples_per_s
    assert best.cost(3.6) == pytest.approx(1000 * 8 * 0.001 / best.samples_per_s)
    assert {(name, total) for name, _, total in seen} == {("splits and strategies", 24), ("settings", 3)}


def test_what_cannot_be_planned_is_said() -> None:
    with pytest.raises(ConfigError, match="at least 2 accelerators"):
        plan(Config.model_validate(TREE), 1)


@pytest.mark.integration
@pytest.mark.long
def test_the_command_writes_a_configuration_to_start_from(tmp_path: Path) -> None:
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(TREE))
    command = [sys.executable, "-m", "penstock.cli.main", "plan", str(tmp_path / "run.yaml"), "--accelerators", "4"]
    words = ["--price", "2", f"runs_dir={tmp_path}", "run_id=mine"]
    done = subprocess.run([*command, *words], capture_output=True, text=True, env={**os.environ, "COLUMNS": "160"})
    assert done.returncode == 0, done.stderr
    assert "Plans for 4 accelerators" in done.stdout and "price of 1,000" in done.stdout
    config = load_config(tmp_path / "mine-plan" / "config.yaml")
    found = json.loads((tmp_path / "mine-plan" / "plan.json").read_text())["options"][0]
    if found["strategy"] in APART:
        assert config.rollout.num_servers == found["servers"]
        assert config.rollout.num_servers + config.simulator.trainer_devices == 4
    predicted = json.loads((tmp_path / "mine-plan" / "prediction.json").read_text())
    assert predicted["by"] == "penstock plan" and predicted["about"] == found["name"]
    assert predicted["bound"]["share"] == pytest.approx(
        predicted["figures"]["samples_per_s"] / predicted["bound"]["samples_per_s"], rel=0.1
    )
    assert all(value is not None and value >= 0 for value in predicted["figures"].values())
    assert (tmp_path / "mine-plan" / "plan.png").stat().st_size > 10_000
    for wrong in (["--accelerators", "1"], ["--accelerators", "4", "--price", "-1"]):
        refused = subprocess.run([*command[:-2], *wrong], capture_output=True, text=True)
        assert refused.returncode == 2 and "Traceback" not in refused.stderr, refused
