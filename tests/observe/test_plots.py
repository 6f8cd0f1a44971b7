from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from made_run import evaluate, make_run, mix

from penstock.observe import jsonl, plots
from penstock.observe.plots import busy_shares, smooth, window


@pytest.mark.parametrize("num_steps", [1, 3])
def test_few_steps_make_pictures(tmp_path: Path, num_steps: int) -> None:
    run_dir = make_run(tmp_path, num_steps)
    evaluate(run_dir, "before", 0.4)
    drawn = plots.draw(run_dir)
    assert [path.name for path in drawn] == ["reward.png", "timeline.png"]
    assert all(path.stat().st_size > 5_000 for path in drawn)


def test_a_run_that_adapted_makes_a_picture_of_it(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path, 30)
    lines = jsonl.read(run_dir / "metrics.jsonl")
    (run_dir / "metrics.jsonl").unlink()
    for line in lines:
        adapted = {"trigger_min_samples": 64.0 if line["step"] < 10 else 128.0, "trigger_max_wait_s": 0.25}
        jsonl.append(run_dir / "metrics.jsonl", line | {"entropy": 1 / line["step"]} | adapted)
    bare = plots.draw(run_dir)
    assert [path.name for path in bare] == ["reward.png", "timeline.png", "adaptation.png"]
    size = bare[-1].stat().st_size
    levels = {"reference": 1.0, "normal_below": 0.7, "low_below": 0.35}
    decision = {"kind": "decision", "decider": "feedback", "time": 1.0, "reason": "entropy is low", **levels}
    jsonl.append(run_dir / "timeline.jsonl", decision)
    assert plots.draw(run_dir)[-1].stat().st_size > size, "it shows the levels"


def test_a_mixture_with_validations_makes_a_picture(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path, 30)
    plain = plots.draw(run_dir)[0].stat().st_size
    mix(run_dir)
    for when, step in (("before", 0), ("step 10", 10), ("step 20", 20), ("after", 30)):
        evaluate(run_dir, when, 0.01 * step, step=step, tags=("game", "words"))
    assert plots.draw(run_dir)[0].stat().st_size > plain + 3_000


def test_no_steps_make_no_pictures(tmp_path: Path) -> None:
    assert plots.draw(make_run(tmp_path, 0)) == []


@pytest.mark.filterwarnings("error")
def test_a_run_that_has_not_computed_anything_makes_a_picture(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path, 0, status="failed")
    span = {"process": "trainer-0", "kind": "publish", "start": 1.0, "end": 1.5, "policy_version": 0}
    jsonl.append(run_dir / "timeline.jsonl", span)
    assert [path.name for path in plots.draw(run_dir)] == ["timeline.png"]


def test_smoothing_keeps_a_constant_and_halves_nothing_at_the_ends() -> None:
    assert smooth(np.full(100, 3.0)) == pytest.approx(np.full(100, 3.0))
    assert smooth(np.array([1.0])) == pytest.approx([1.0])


def test_busy_shares_count_what_covers_each_bin() -> None:
    spans = [{"start": 0.5, "end": 1.5}, {"start": 2.0, "end": 3.0}]
    assert busy_shares(spans, np.array([0.0, 1.0, 2.0, 3.0, 4.0])) == pytest.approx([0.5, 0.5, 1.0, 0.0])


def test_the_window_lies_in_the_middle_of_training() -> None:
    metrics = [{"time": 100.0 + 0.5 * step} for step in range(1001)]
    start, end = window(metrics, [{"start": 0.0, "end": 1.0}, {"start": 600.0, "end": 601.0}])
    assert (start + end) / 2 == pytest.approx(350.0) and end - start == pytest.approx(4.0)
