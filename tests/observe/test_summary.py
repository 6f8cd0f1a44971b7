from __future__ import annotations

import json
from pathlib import Path

import pytest
from made_run import evaluate, make_run

from penstock.observe import jsonl, summary


def test_a_whole_run_is_summed_up(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "r", 40)
    evaluate(run_dir, "before", 0.4)
    evaluate(run_dir, "after", 0.9)
    found = summary.write(run_dir)
    assert json.loads((run_dir / "summary.json").read_text()) == found
    assert found["run_id"] == "r" and found["status"] == "completed"
    assert found["steps"] == found["policy_version"] == 40
    assert found["eval_before"] == 0.4 and found["eval_after"] == 0.9
    assert found["trajectories"] == 320 and found["tokens_generated"] == 4000 and found["tokens_trained"] == 3600
    assert found["wall_seconds"] == 50.0
    assert found["staleness_mean"] == 0.5 and found["staleness_max"] == 2
    assert found["kl_engine_trainer"] == pytest.approx(1e-6)
    assert found["ledger"] == {"admitted": 320, "trained": 320}


def test_rewards_are_means_over_the_first_and_last_tenth(tmp_path: Path) -> None:
    found = summary.summarize(make_run(tmp_path, 40))
    assert found["reward_first"] == pytest.approx((0.01 + 0.03 + 0.04) / 3), "the second step has no reward"
    assert found["reward_last"] == pytest.approx((0.38 + 0.39 + 0.40) / 3)


def test_rewards_are_those_of_all_completed_episodes_however_many_a_step_saw(tmp_path: Path) -> None:
    jsonl.append(tmp_path / "metrics.jsonl", {"step": 1, "reward": 1.0, "episodes": 10})
    for step in range(2, 21):
        jsonl.append(tmp_path / "metrics.jsonl", {"step": step, "reward": 0.0, "episodes": 30})
    assert summary.summarize(tmp_path)["reward_first"] == pytest.approx(0.25)


def test_busy_is_what_was_used_between_first_and_last_step_per_process(tmp_path: Path) -> None:
    found = summary.summarize(make_run(tmp_path, 40))
    assert found["trainer_busy_fraction"] == pytest.approx(0.5)
    assert found["generator_busy_fraction"] == pytest.approx(0.75)


@pytest.mark.parametrize("num_steps", [0, 1])
def test_a_run_that_hardly_began_has_the_same_keys(tmp_path: Path, num_steps: int) -> None:
    whole = summary.summarize(make_run(tmp_path / "whole", 5))
    found = summary.summarize(make_run(tmp_path / "short", num_steps, status="failed"))
    assert found.keys() == whole.keys()
    assert found["steps"] == num_steps and found["trainer_busy_fraction"] is None


def test_even_an_empty_directory_has_a_summary(tmp_path: Path) -> None:
    assert summary.summarize(tmp_path)["status"] == "pending"


def test_the_time_between_two_lives_does_not_count(tmp_path: Path) -> None:
    state = {"started": 0.0, "lived_s": 10.0, "born": 86_401.0, "ended": 86_421.0}
    jsonl.write_json(tmp_path / "state.json", state)
    for step, seconds in enumerate((1.0, 9.0, 11.0), start=1):
        jsonl.append(tmp_path / "metrics.jsonl", {"step": step, "wall_s": seconds, "trainer_busy_s": seconds / 2})
    found = summary.summarize(tmp_path)
    assert (found["wall_seconds"], found["trainer_busy_fraction"]) == (30.0, 0.5)


def test_a_run_that_only_plays(tmp_path: Path) -> None:
    jsonl.append(tmp_path / "events.jsonl", {"event": "tasks", "total": 30})
    for number in (1, 2, 3):
        totals = {"episodes_total": 40 * number, "reward_total": 10.0 * number, "cpu_s": 5.0 * number}
        line = {"step": 10 * number, "time": number, "wall_s": 4.0 * number, **totals, "num_servers": 1}
        jsonl.append(tmp_path / "metrics.jsonl", line)
    dumped = {"event": "dumped", "url": "there", "rows": 120, "cpu_s": 0.1, "waited_s": 0.2}
    for totals in ({"rows": 80, "cpu_s": 0.05}, {}):
        jsonl.append(tmp_path / "events.jsonl", dumped | totals)
    found = summary.summarize(tmp_path)
    assert (found["steps"], found["tasks"], found["tasks_played"]) == (0, 30, 30)
    assert (found["dump"], found["dump_rows"], found["reward_mean"]) == ("there", 120, 0.25)
    assert found["dump_share"] == pytest.approx(0.1 / 10.0 + 0.4 / 8.0)
    assert found["trajectories_per_second"] == 10.0
