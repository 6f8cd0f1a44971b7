"""The run directory of a simulated run."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest
from recording import config

from penstock.observe import jsonl
from penstock.observe.summary import PREDICTION, read_steps
from penstock.simulator.prediction import Records, predict
from penstock.simulator.simulated_run import Recorded, simulate
from penstock.simulator.trace import open_workload
from penstock.supervisor.run_status import status

BEGUN = 1_790_000_000.0


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a run on two servers."""
    directory = tmp_path_factory.mktemp("simulated")
    settings = config(max_staleness=2)
    settings = settings.model_copy(update={"rollout": settings.rollout.model_copy(update={"servers": 2})})
    (result,) = predict(settings, records=Records(runs_dir=directory, run_id="mine", fitted_to="real")).results
    unrecorded = predict(settings).results[0].runs[0]
    found = result.runs[0]
    assert found.token_staleness_mean is not None and unrecorded.token_staleness_mean is None
    assert found.samples_per_s == unrecorded.samples_per_s and found.simulated_s == unrecorded.simulated_s
    return directory / "mine-simulated"


def test_it_is_a_run_that_has_ended(recorded: Path) -> None:
    found = status(recorded)
    assert found["status"] == "completed" and found["simulated"] == {"strategy": "configured", "fitted_to": "real"}
    assert found["progress"]["step"] == found["progress"]["steps"] == 20
    assert found["next"] == [] and found["warnings"] == [] and found["checkpoint"] is None
    assert found["decisions"] and not list(recorded.glob("checkpoints/*"))
    assert found["wall_seconds"] == pytest.approx(read_steps(recorded)[-1]["wall_s"], rel=0.2)


def test_its_metrics_agree_with_its_prediction(recorded: Path) -> None:
    lines, predicted = read_steps(recorded), jsonl.read_json(recorded / PREDICTION)
    first, last = lines[1], lines[-1]  # the warm-up takes two steps
    seconds = last["time"] - first["time"]
    figures = predicted["figures"]
    assert seconds / (len(lines) - 2) == pytest.approx(figures["step_s"])
    assert (last["ledger"]["trained"] - first["ledger"]["trained"]) / seconds == pytest.approx(figures["samples_per_s"])
    assert (last["trainer_busy_s"] - first["trainer_busy_s"]) / seconds == pytest.approx(
        figures["trainer_busy"], abs=0.05
    )
    busy = (last["generator_busy_s"] - first["generator_busy_s"]) / seconds / last["num_servers"]
    assert busy == pytest.approx(figures["servers_busy"], abs=0.05)
    assert 0 < predicted["bound"]["share"] <= 1.05


def test_every_trained_token_has_a_lag(recorded: Path) -> None:
    lines = read_steps(recorded)
    lags: Counter[int] = Counter()
    for line in lines:
        found = {int(lag): number for lag, number in line["staleness_tokens"].items()}
        assert line["staleness_mean"] == pytest.approx(
            sum(lag * number for lag, number in found.items()) / sum(found.values())
        )
        lags.update(found)
    assert lags.total() == lines[-1]["tokens_trained_total"] and 1 <= max(lags) <= 2
    assert lines[-1]["tokens_generated_total"] >= lines[-1]["tokens_trained_total"]


def test_spans_of_a_server_follow_each_other_and_cover_its_busy_time(recorded: Path) -> None:
    spans = [line for line in jsonl.read(recorded / "timeline.jsonl") if "start" in line]
    assert {span["process"] for span in spans} == {"rollout-0", "rollout-1", "trainer-0"}
    assert {span["kind"] for span in spans} == {"generate", "update_weights", "train", "step", "publish"}
    for process in ("rollout-0", "rollout-1", "trainer-0"):
        own = sorted((s["start"], s["end"]) for s in spans if s["process"] == process and s["kind"] != "publish")
        assert all(start < end for start, end in own)
        assert all(earlier[1] <= later[0] + 1e-6 for earlier, later in pairwise(own))
    busy_s = sum(span["end"] - span["start"] for span in spans if span["kind"] == "generate")
    (first, second) = (e for e in jsonl.read(recorded / "events.jsonl") if e.get("role") == "rollout" and "busy_s" in e)
    assert first["busy_s"] + second["busy_s"] == pytest.approx(busy_s)


@pytest.mark.parametrize(
    "scheduler", [{"mode": "synchronous", "max_staleness": 0}, {"mode": "colocated", "max_staleness": 0}]
)
def test_servers_rest_while_a_round_is_trained(tmp_path: Path, scheduler: dict[str, object]) -> None:
    settings = config(**scheduler)
    workload = open_workload(settings.simulator.workload, group_size=4, seed=0)
    run = simulate(settings, workload, seed=0, counts_lags=True, recorded=Recorded(tmp_path, BEGUN))
    spans = [line for line in jsonl.read(tmp_path / "timeline.jsonl") if "start" in line]
    steps = [span for span in spans if span["kind"] == "step"]
    rounds = [span for span in spans if span["kind"] == "generate"]
    assert len(steps) == 20 and min(span["start"] for span in spans) == pytest.approx(BEGUN, abs=1.0)
    assert not any(r["start"] < s["start"] - 1e-6 < r["end"] - 1e-6 for r in rounds for s in steps)
    assert run.experience.lags.keys() <= {0, 1}
