"""Simulated runs, and predictions beside what runs measure, over a real socket."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from shown_run import BEGUN, RUN, dashboard_of, make_run, step_line, write_lines

from penstock.config import Config
from penstock.observe.jsonl import write_json
from penstock.simulator.prediction import Records, predict

SIMULATED = f"{RUN}-simulated"
PREDICTION = {
    "time": BEGUN,
    "by": "penstock plan",
    "about": "asynchronous, 1 + 1",
    "figures": {"step_s": 1.6, "samples_per_s": 5.0, "trainer_busy": 0.25, "servers_busy": 0.75},
    "bound": {"samples_per_s": 6.0, "tokens_per_s": 300.0, "share": 0.83},
    "memory": [{"who": "trainer", "count": 1, "total": 2**30}],
}


@pytest.fixture
def runs_dir(tmp_path: Path) -> Path:
    """A directory with a simulated run that was fitted to the run `RUN`."""
    tree = {
        "env": {"group_size": 4},
        "rollout": {"slots": 16},
        "trainer": {"groups_per_step": 8},
        "scheduler": {"trigger": {"min_samples": 8}},
        "simulator": {
            "strategies": ["configured"],
            "steps": 8,
            "warmup_steps": 1,
            "workload": {"median_tokens": 50.0, "max_tokens": 300},
        },
    }
    records = Records(runs_dir=tmp_path, run_id=RUN, fitted_to=RUN)
    with ThreadPoolExecutor(max_workers=1) as apart:  # a simulation has an event loop of its own
        apart.submit(predict, Config.model_validate(tree), records=records).result()
    return tmp_path


async def test_a_simulated_run_opens_on_all_pages(runs_dir: Path) -> None:
    make_run(runs_dir)
    async with dashboard_of(runs_dir) as dashboard:
        rows = {row["id"]: row for row in (await dashboard.get("runs"))["runs"]}
        status = await dashboard.get(f"runs/{SIMULATED}/status")
        names = (await dashboard.get(f"runs/{SIMULATED}/names"))["names"]
        asked = "names=rate:tokens_trained_total,staleness_tokens/0,staleness_mean"
        series = (await dashboard.get(f"runs/{SIMULATED}/series?{asked}"))["series"]
        timeline = await dashboard.get(f"runs/{SIMULATED}/timeline?from={status['started']}&to={status['ended']}")
        decisions = await dashboard.get(f"runs/{SIMULATED}/decisions")
        settings = (await dashboard.get(f"runs/{SIMULATED}/settings"))["settings"]
        groups = await dashboard.get(f"runs/{SIMULATED}/groups")
        evaluations = await dashboard.get(f"runs/{SIMULATED}/evaluations")
        trace = await dashboard.text(f"runs/{SIMULATED}/export/trace.json")
        await dashboard.get(f"runs/{SIMULATED}/logs/trainer-0", status=404)
    assert rows[SIMULATED]["simulated"] == {"strategy": "configured", "fitted_to": RUN}
    assert rows[RUN]["simulated"] is None and rows[SIMULATED]["status"] == "completed"
    assert status["simulated"]["fitted_to"] == RUN and status["warnings"] == [] and status["progress"]["step"] == 8
    assert status["bound"]["share"] <= 1 and status["balance"]
    assert {"reward", "groups_in_flight", "staleness_tokens/0"} <= set(names)
    assert all(any(value is not None for value in curve["mean"]) for curve in series.values())
    assert timeline["processes"] == ["rollout-0", "trainer-0"] and timeline["spans"]
    assert {"admission", "dispatch", "trigger"} <= decisions["deciders"].keys()
    assert {each["name"]: each["value"] for each in settings}["trainer.steps"] == 8
    assert groups["groups"] == [] and evaluations["evaluations"] == []
    assert len(json.loads(trace)["traceEvents"]) > 10


async def test_what_was_predicted_stands_beside_what_is_measured(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path)
    write_json(run_dir / "prediction.json", PREDICTION)
    async with dashboard_of(tmp_path) as dashboard:
        found = await dashboard.get(f"runs/{RUN}/prediction")
    predicted, measured = found["prediction"], found["measured"]
    assert (predicted["by"], predicted["about"]) == ("penstock plan", "asynchronous, 1 + 1")
    assert predicted["figures"]["step_s"] == 1.6 and predicted["figures"]["staleness_mean"] is None
    assert predicted["bound"]["tokens_per_s"] == 300.0
    assert predicted["memory"] == [{"who": "trainer", "count": 1, "bytes": 2**30}]
    assert (measured["step_s"], measured["samples_per_s"]) == (2.0, 4.0)
    assert (measured["trainer_busy"], measured["servers_busy"]) == (0.25, 0.75)
    assert measured["staleness_mean"] is None


async def test_a_simulated_run_measures_what_it_predicts(runs_dir: Path) -> None:
    async with dashboard_of(runs_dir) as dashboard:
        found = await dashboard.get(f"runs/{SIMULATED}/prediction")
    predicted, measured = found["prediction"]["figures"], found["measured"]
    for name in ("step_s", "samples_per_s", "trainer_busy", "servers_busy"):
        assert measured[name] == pytest.approx(predicted[name], rel=0.1), name


@pytest.mark.parametrize(
    "damaged",
    [
        None,
        "[]",
        '{"figures": 3, "bound": [1], "memory": "much", "by": 7}',
        f'{{"figures": {{"step_s": 1{"0" * 400}}}, "memory": [3, {{"who": null}}]}}',
    ],
)
async def test_a_missing_or_damaged_prediction_is_none_of_its_figures(tmp_path: Path, damaged: str | None) -> None:
    run_dir = make_run(tmp_path, num_steps=2)
    if damaged is not None:
        (run_dir / "prediction.json").write_text(damaged)
    async with dashboard_of(tmp_path) as dashboard:
        found = await dashboard.get(f"runs/{RUN}/prediction")
    assert found["measured"] is None, "two steps are too few"
    if found["prediction"] is not None:
        assert set(found["prediction"]["figures"].values()) == {None}


async def test_steps_that_were_taken_again_are_measured_once(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path)
    lost: list[dict[str, Any]] = [step_line(step, time=BEGUN + 100.0 + 2.0 * step) for step in range(11, 21)]
    write_lines(run_dir / "metrics.jsonl", lost)
    async with dashboard_of(tmp_path) as dashboard:
        measured = (await dashboard.get(f"runs/{RUN}/prediction"))["measured"]
    assert measured["step_s"] == pytest.approx((100.0 + 2.0 * 18) / 18)


async def test_where_both_sides_take_turns_the_bound_is_that_of_both(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path)
    config = (run_dir / "config.yaml").read_text().replace("scheduler:\n", "scheduler:\n  mode: colocated\n")
    (run_dir / "config.yaml").write_text(config.replace("max_staleness: 3", "max_staleness: 0"))
    write_lines(run_dir / "metrics.jsonl", [step_line(step, generator_busy_s=0.5 * step) for step in range(21, 60)])
    async with dashboard_of(tmp_path) as dashboard:
        status = await dashboard.get(f"runs/{RUN}/status")
    assert status["progress"]["takes_turns"] is True
    assert status["bound"]["share"] == pytest.approx(0.5) and status["bound"]["bound"] == pytest.approx(500.0)
