"""What is written down outlives the controller that writes, and what was lost is passed over by readers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from fake_ports import played

from penstock.observe import jsonl
from penstock.observe.recorder import MAX_REASONS, OTHER_REASONS, Recorder
from penstock.observe.summary import read_steps, surviving
from penstock.observe.view import Plan, RunView
from penstock.ports.training import LAGS
from penstock.types import EpisodeId, LearnerState, Task


def beat(recorder: Recorder, name: str, *, busy_s: float, tokens: float) -> None:
    recorder.heartbeat(name, cpu_s=busy_s, busy_s=busy_s, counters={"tokens": tokens}, spans=())


def step(recorder: Recorder, number: int) -> None:
    recorder.accumulated({"tokens": 10.0})
    recorder.stepped(number, LearnerState(policy_version=number, entropy=1.0), {}, {})


def line(number: int, **facts: Any) -> dict[str, Any]:
    return {"step": number, "time": float(number), **facts}


def test_totals_go_on_with_another_controller_and_another_server(tmp_path: Path) -> None:
    for life in range(2):
        recorder = Recorder(tmp_path)
        for _ in range(2):  # a server that dies and comes back
            recorder.joined("rollout-0", "rollout")
            beat(recorder, "rollout-0", busy_s=1.5, tokens=100.0)
        step(recorder, life + 1)
        recorder.close()
    first, second = read_steps(tmp_path)
    assert (first["tokens_generated_total"], second["tokens_generated_total"]) == (200.0, 400.0)
    assert (first["generator_busy_s"], second["generator_busy_s"]) == (3.0, 6.0)
    assert (first["tokens_trained_total"], second["tokens_trained_total"]) == (10.0, 20.0)
    assert second["cpu_s"] > 6.0 and second["num_servers"] == 1


def test_drops_are_counted_by_filter_and_reason(tmp_path: Path) -> None:
    for life in range(2):
        recorder = Recorder(tmp_path)
        recorder.decision("filter", "kept", {"group": 1})
        for number in range(MAX_REASONS + 5):
            recorder.decision("filter", f"reason {number}", {"group": number, "dropped_by": "mine"})
        step(recorder, life + 1)
        recorder.close()
    dropped = read_steps(tmp_path)[-1]["groups_dropped"]
    assert dropped["mine: reason 0"] == 2
    assert dropped[OTHER_REASONS] == 2 * 5
    assert len(dropped) == MAX_REASONS + 1


def test_groups_that_were_given_up_are_counted_between_steps_and_over_lives(tmp_path: Path) -> None:
    for life in range(2):
        recorder = Recorder(tmp_path)
        recorder.decision("retry", "KeyError: 1", {"group": life, "attempt": 1})
        recorder.decision("retry", f"given up after 2 attempts: KeyError: {life}", {"group": life, "given_up": "t"})
        recorder.group_completed("game", [played(EpisodeId("game", 0, 0, 0), reward=1.0)])
        beat(recorder, "rollout-0", busy_s=1.0, tokens=1.0)
        found = jsonl.read_json(tmp_path / "played.json")
        assert (found["groups_failed"], found["episodes_total"]) == (life + 1, life + 1)
        assert found["latest_failure"] == f"given up after 2 attempts: KeyError: {life}"
        recorder.close()


def test_a_validation_that_is_being_played_is_told(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    recorder.decision("evaluation", "2 of 9", {"group": 3, "held_out_ended": 2, "held_out": 9})
    recorder.close()
    assert jsonl.read_json(tmp_path / "played.json")["held_out"] == {"ended": 2, "tasks": 9}
    recorder = Recorder(tmp_path)
    recorder.decision("evaluation", "9 of 9", {"group": 3, "held_out_ended": 9, "held_out": 9})
    recorder.evaluated("step 2", 2, [], [], shown=0, solved_at=1.0)
    assert jsonl.read_json(tmp_path / "played.json")["held_out"] is None
    recorder.close()


def test_changes_of_settings_are_recorded_with_prediction_and_verdict(tmp_path: Path) -> None:
    changes, undone = {"env.redundancy": [0, 2]}, {"env.redundancy": [2, 0]}
    recorder = Recorder(tmp_path)
    recorder.decision("tuning", "1.3 times", {"gain": 1.3, "policy_version": 4, "adapted": changes})
    verdict = {"promised": 1.3, "measured": 0.9, "noise": 0.01}
    recorder.decision("tuning", "undone", {**verdict, "policy_version": 9, "adapted": undone})
    recorder.decision("tuning", "kept", {"promised": 1.2, "measured": 1.1, "noise": 0.01})
    recorder.close()
    told = [{**event, "time": 0.0} for event in jsonl.read(tmp_path / "events.jsonl")]
    changed = {"time": 0.0, "event": "adapted"}
    assert told == [
        {**changed, "policy_version": 4, "changes": changes, "reason": "1.3 times", "prediction": {"gain": 1.3}},
        {"time": 0.0, "event": "judged", "promised": 1.3, "measured": 0.9, "reason": "undone"},
        {**changed, "policy_version": 9, "changes": undone, "reason": "undone", "prediction": {}},
        {"time": 0.0, "event": "judged", "promised": 1.2, "measured": 1.1, "reason": "kept"},
    ]


def test_tokens_by_lag_are_one_value_with_the_lags_that_occur(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    lags = dict.fromkeys(LAGS, 0.0) | {LAGS[0]: 30.0, LAGS[2]: 10.0}
    recorder.stepped(1, LearnerState(policy_version=1, entropy=1.0, metrics={**lags, "staleness_mean": 0.5}), {}, {})
    recorder.close()
    (line,) = read_steps(tmp_path)
    assert line["staleness_tokens"] == {"0": 30.0, "2": 10.0} and line["staleness_mean"] == 0.5
    assert not set(LAGS) & line.keys()


def test_records_have_the_times_of_the_given_clocks(tmp_path: Path) -> None:
    at = 100.0
    recorder = Recorder(tmp_path, now=lambda: 1e9 + at, steady=lambda: at)
    at = 107.0
    recorder.event("tasks", total=4)
    step(recorder, 1)
    recorder.close()
    (line,), (event,) = read_steps(tmp_path), jsonl.read(tmp_path / "events.jsonl")
    assert (line["time"], line["wall_s"], event["time"]) == (1e9 + 107.0, 7.0, 1e9 + 107.0)


def test_what_environment_workers_count_goes_on_too(tmp_path: Path) -> None:
    for _ in range(2):
        recorder = Recorder(tmp_path)
        recorder.joined("env-0", "env")
        recorder.heartbeat("env-0", cpu_s=0.0, busy_s=0.0, counters={"drifts": 2.0, "scored": 5.0}, spans=())
        step(recorder, 1)
        recorder.close()
    (last,) = read_steps(tmp_path)
    assert (last["drifts_total"], last["scored_total"], last["score_timeouts_total"]) == (4.0, 10.0, 0.0)


def test_steps_taken_again_replace_those_lost() -> None:
    lines = [line(1), line(2), line(3), line(4), line(3, again=True), line(4, again=True), line(5)]
    assert surviving(lines) == [line(1), line(2), line(3, again=True), line(4, again=True), line(5)]


def test_the_display_goes_back_with_the_trainer() -> None:
    view = RunView(plan=Plan(num_steps=9), status="running")
    for number in (1, 2, 3, 4):
        view.see_step(line(number, reward=number / 10))
    view.see_step(line(3, reward=0.9))
    assert (view.step, list(view.rewards.values())) == (3, [0.1, 0.2, 0.9])


def test_a_moment_at_which_nothing_more_has_ended_is_not_written(tmp_path: Path) -> None:
    for groups in ((0, 0, 2), (2, 2, 3)):
        recorder = Recorder(tmp_path)
        for number in groups:
            recorder.progressed(number, {}, {})
        recorder.close()
    assert [line["step"] for line in jsonl.read(tmp_path / "metrics.jsonl")] == [0, 2, 3]


def test_rewards_are_kept_by_tag_and_so_is_what_a_validation_found(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    recorder.group_completed(
        "game",
        [played(EpisodeId("game", 0, n, 0), reward=float(n), metrics={"calls": float(n)}) for n in range(2)],
    )
    recorder.group_completed("words", [played(EpisodeId("words", 1, 0, 0), reward=0.0, response_tokens=4)])
    task = Task(task_id="t", tag="words", index=0, purpose="eval")
    found = [[played(EpisodeId("words", 2, 0, 0), reward=0.7, metrics={"calls": 3.0})]]
    recorder.evaluated("step 20", 20, [task], found, shown=1, solved_at=1.0)
    step(recorder, 21)
    step(recorder, 22)
    recorder.close()
    first, second = read_steps(tmp_path)
    assert (first["reward/game"], first["reward/words"], first["episodes/game"]) == (0.5, 0.0, 2)
    assert first["response_length_mean/words"] == 4.0 and first["reward"] == pytest.approx(1 / 3)
    assert (first["env/calls"], first["env/calls/game"], first["reward_std/game"]) == (0.5, 0.5, 0.5)
    assert "env/calls/words" not in first and (first["truncated_share"], first["turns_mean"]) == (0.0, 1.0)
    assert jsonl.read(tmp_path / "events.jsonl")[-1]["metrics"] == {"calls": 3.0}
    assert (first["eval_step"], first["eval_reward"], first["eval_reward/words"]) == (20, 0.7, 0.7)
    assert not any(key.startswith(("reward/", "eval_")) for key in second)


def test_the_lines_of_a_rollout_say_how_many_tasks_there_are(tmp_path: Path) -> None:
    recorder = Recorder(tmp_path)
    recorder.set_num_tasks(40)
    recorder.progressed(3, {}, {})
    recorder.close()
    assert [(line["step"], line["tasks"]) for line in read_steps(tmp_path)] == [(3, 40)]
    view = RunView(plan=Plan(num_steps=0, pipeline="rollout"))
    view.see_event(jsonl.read(tmp_path / "events.jsonl")[0])
    assert view.plan.num_steps == 40
