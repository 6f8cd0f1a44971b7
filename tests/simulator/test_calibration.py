"""Known parameters, a run recorded with them, and the parameters back."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from recording import ENGINE, TRAINER, config, record

from penstock.config import Config, ConfigError
from penstock.observe import jsonl
from penstock.rollout.costs import StepCosts
from penstock.simulator.calibration import Comparison, calibrate, compare, fit_engine, non_negative, read
from penstock.simulator.prediction import predict


@pytest.fixture(scope="module")
def comparison(run_dir: Path) -> Comparison:
    return compare(run_dir)


def test_parameters_come_back(comparison: Comparison) -> None:
    found = comparison.config.simulator
    for name, value in ENGINE.items():
        tolerance = 0.25 if name == "latency_s" else 0.01
        assert getattr(found.engine, name) == pytest.approx(value, rel=tolerance), name
    assert (found.engine.admit_share, found.engine.admit_tokens) == (0.125, 4096)
    for name, value in TRAINER.items():
        assert getattr(found.trainer, name) == pytest.approx(value, rel=0.02), name
    assert found.strategies == ["configured"]


def test_the_prediction_is_near_what_was_measured(comparison: Comparison) -> None:
    found = comparison
    assert abs(found.error("samples_per_s")) < 0.05
    assert abs(found.error("trainer_busy")) < 0.05
    assert abs(found.error("episode_s")) < 0.05
    assert Config.model_validate(found.config.model_dump()) == found.config


def test_latency_that_shows_nowhere_is_not_assumed(tmp_path: Path) -> None:
    record(tmp_path / "saturated", config(max_running=200, max_staleness=6))
    assert calibrate(tmp_path / "saturated").engine.latency_s == 0


def test_a_run_with_always_full_servers_says_what_it_does_not_show(comparison: Comparison, tmp_path: Path) -> None:
    record(tmp_path / "saturated", config(max_running=200, max_staleness=6))
    found = compare(tmp_path / "saturated")
    assert found.caveat is not None and "what emptier servers take is a guess" in found.caveat
    assert found.caveat == found.plain()["caveat"]
    assert comparison.caveat is None


def test_the_fit_predicts_another_configuration(comparison: Comparison, tmp_path: Path) -> None:
    """Lengths, times and rewards from one run; mode and trigger from another."""
    other = config(mode="synchronous", max_staleness=0)
    record(tmp_path / "other", other, seed=1)
    lines = jsonl.read(tmp_path / "other" / "metrics.jsonl")
    trained = lines[-1]["ledger"]["trained"] - lines[2]["ledger"]["trained"]
    expected = trained / (lines[-1]["time"] - lines[2]["time"])
    (result,) = predict(other.model_copy(update={"simulator": comparison.config.simulator})).results
    assert result.mean("samples_per_s") == pytest.approx(expected, rel=0.1)


@pytest.mark.long
def test_latency_is_paid_per_grant(tmp_path: Path) -> None:
    record(tmp_path / "segments", config(segment_length=25))
    found = compare(tmp_path / "segments")
    assert found.config.simulator.engine.latency_s == pytest.approx(ENGINE["latency_s"], rel=0.4)
    assert abs(found.error("samples_per_s")) < 0.1


def test_what_contexts_cost_is_found(run_dir: Path) -> None:
    costs, draw = StepCosts(), np.random.default_rng(0)
    for decoded in draw.integers(1, 64, 500).tolist():
        context = int(decoded * draw.integers(10, 200))
        seconds = 5e-3 + 8e-5 * decoded + 3e-7 * context
        costs.add(decoded=decoded, context=context, prefilled=0, seconds=seconds)
    sums = {name.removeprefix("cost_"): value for name, value in costs.counters().items()}
    engine = fit_engine(replace(read(run_dir), sums=sums, busy_s=0.0))
    assert (engine.step_s, engine.sequence_s, engine.context_token_s) == pytest.approx((5e-3, 8e-5, 3e-7), rel=1e-3)


def test_runs_that_do_not_tell_enough(tmp_path: Path, run_dir: Path) -> None:
    with pytest.raises(ConfigError, match="it has no config"):
        calibrate(tmp_path)
    (tmp_path / "config.yaml").write_text("{}")
    with pytest.raises(ConfigError, match="0 optimizer steps"):
        calibrate(tmp_path)
    (tmp_path / "metrics.jsonl").write_bytes((run_dir / "metrics.jsonl").read_bytes())
    with pytest.raises(ConfigError, match="no decode costs"):
        calibrate(tmp_path)


@pytest.mark.parametrize(
    ("file", "key", "value"),
    [
        ("metrics.jsonl", "time", 5),
        ("metrics.jsonl", "ledger", []),
        ("events.jsonl", "counters", [1]),
        ("events.jsonl", "counters", {"cost_nn": "x"}),
        ("timeline.jsonl", "start", "x"),
    ],
)
def test_damaged_files_are_one_error(tmp_path: Path, run_dir: Path, file: str, key: str, value: Any) -> None:
    damaged = Path(shutil.copytree(run_dir, tmp_path / "damaged"))
    lines = [json.loads(line) for line in (damaged / file).read_text().splitlines()]
    changed = [line | {key: value} if key in line else line for line in lines]
    (damaged / file).write_text("".join(json.dumps(line) + "\n" for line in changed))
    with pytest.raises(ConfigError, match=f"the files of run {damaged} are damaged"):
        compare(damaged)


def test_least_squares_stay_non_negative() -> None:
    rng = np.random.default_rng(0)
    x = rng.random((200, 3)) * [1.0, 50.0, 1000.0]
    assert non_negative(x.T @ x, x.T @ (x @ [0.5, 0.02, 1e-4])) == pytest.approx([0.5, 0.02, 1e-4])
    y = x @ np.array([0.5, 0.02, -1e-4])
    found = non_negative(x.T @ x, x.T @ y)
    assert found[2] == 0.0 and min(found) >= 0
    assert non_negative(np.zeros((2, 2)), np.zeros(2)) == [0.0, 0.0]
