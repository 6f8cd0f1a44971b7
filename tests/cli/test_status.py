"""`penstock status`, on made runs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from made_runs import decide, make_run, note, owner, penstock, take_step

from penstock.cli.status import claim_answer
from penstock.observe import jsonl
from penstock.supervisor.child import CONFIG_ERROR, GAVE_UP


def ask(run_dir: Path, *words: str) -> dict[str, Any]:
    result = penstock("status", run_dir, "--json", *words)
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_a_running_run_is_shown_with_all_that_counts(tmp_path: Path) -> None:
    controller = {"state": "ready", "role": "controller", "restarts": 1, **dataclasses.asdict(owner(alive=True))}
    run_dir = make_run(tmp_path / "a", "running", processes={"controller": controller})
    for step in (1, 2, 3):
        totals = {"episodes_total": 8 * step, "trainer_busy_s": 0.5 * step, "num_trainers": 1}
        dropped = {"zero_variance: all rewards are 0": 4 * step, "mine: too odd": step}
        take_step(
            run_dir,
            step,
            ledger={"trained": 8 * step, "discarded_surplus": 2 * step},
            staleness_mean=0.5,
            groups_dropped=dropped,
            **totals,
        )
    for number in range(3):
        decide(run_dir, "dispatch", f"number {number}", moment=float(number))
    decide(run_dir, "trigger", "count: 7 groups ready", moment=1.5, groups=7)
    note(run_dir, "alarm", reason="starvation: group 3 waits")
    note(run_dir, "checkpoint", step=2, path="checkpoints/step_2")
    document = ask(run_dir)
    controller = document["processes"][1]
    assert (controller["state"], controller["alive"], controller["restarts"]) == ("ready", True, 1)
    assert controller["rss_bytes"] > 1e6 and controller["age_seconds"] > 0 and controller["cpu_cores"] is not None
    progress = document["progress"]
    assert (progress["phase"], progress["step"], progress["steps"], progress["samples"]) == ("training", 3, 9, 24)
    assert progress["episodes_per_second"] == pytest.approx(8.0, rel=0.01)
    assert progress["trainer_busy_fraction"] == pytest.approx(0.5, rel=0.01)
    assert [(line["decider"], line["reason"]) for line in document["decisions"]] == [
        ("trigger", "count: 7 groups ready"),
        ("dispatch", "number 2"),
    ]
    assert document["alarms"][0]["reason"] == "starvation: group 3 waits"
    assert document["groups_dropped"] == {"zero_variance: all rewards are 0": 12, "mine: too odd": 3}
    text = penstock("status", run_dir).stdout
    for words in (
        "running",
        "3/9",
        "count: 7 groups ready",
        "starvation",
        "checkpoints/step_2",
        "12 groups  zero_variance: all rewards are 0",
        "6 trajectories more than their groups needed",
        "penstock stop",
    ):
        assert words in text


def test_the_latest_changes_of_settings_are_shown_with_their_reasons(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "a", "running")
    for number in range(5):
        changes = {"min_samples": [16 * number, 16 * (number + 1)], "max_wait_s": [0.25, 0.5]}
        note(run_dir, "adapted", policy_version=number, changes=changes, reason=f"entropy is normal, {number}")
    for odd in ({"changes": 3}, {"changes": {"min_samples": [1]}}, {"changes": {"min_samples": [[1], 2]}}, {}):
        note(run_dir, "adapted", **{"policy_version": 9, "reason": "odd", **odd})
    assert [line["policy_version"] for line in ask(run_dir)["adapted"]] == [2, 3, 4]
    text = penstock("status", run_dir).stdout
    assert "min_samples 64 → 80, max_wait_s 0.25 → 0.5" in text and "entropy is normal, 4" in text
    assert not ask(run_dir)["tuned"] and "settings in force" not in text


def test_settings_that_the_run_has_changed_are_shown_with_the_reason(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "a", "running")
    changes = {"scheduler.max_running": [16, 48], "scheduler.dispatch.policy": ["fifo", "ljf"]}
    note(run_dir, "adapted", policy_version=9, changes=changes, reason="1.5 times the speed predicted")
    undone = {"scheduler.dispatch.policy": ["ljf", "fifo"], "scheduler.segment_length": [None, 64]}
    note(run_dir, "adapted", policy_version=20, changes=undone, reason="undone: 0.9 times the speed")
    tuned = ask(run_dir)["tuned"]
    assert {name: each["value"] for name, each in tuned.items()} == {
        "scheduler.max_running": 48,
        "scheduler.dispatch.policy": "fifo",
        "scheduler.segment_length": 64,
    }
    assert tuned["scheduler.max_running"]["policy_version"] == 9
    text = " ".join(penstock("status", run_dir).stdout.split())
    assert "scheduler.segment_length unset → 64" in text
    assert "scheduler.max_running 48 since version 9, " in text and "1.5 times the speed predicted" in text


def test_groups_that_failed_are_counted_before_any_step(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "a", "running")
    assert ask(run_dir)["groups_failed"] == 0 and "groups failed" not in penstock("status", run_dir).stdout
    found = {"groups_failed": 2, "latest_failure": "given up", "groups_dropped": {"mine: too odd": 7}}
    found["episodes_total"] = 28
    jsonl.write_json(run_dir / "played.json", found)
    document = ask(run_dir)
    assert document["progress"]["held_out"] is None
    assert (document["groups_failed"], document["latest_failure"]) == (2, "given up")
    assert document["groups_dropped"] == {"mine: too odd": 7}
    shown = penstock("status", run_dir).stdout
    assert "2 groups failed, the latest: given up" in shown and "28 trajectories" in shown
    jsonl.write_json(run_dir / "played.json", {"held_out": {"ended": 3, "tasks": 8}})
    assert ask(run_dir)["progress"]["held_out"] == {"ended": 3, "tasks": 8}
    assert "3 of 8 tasks played" in penstock("status", run_dir).stdout


def test_an_evaluation_counts_its_tasks_and_says_where_its_results_are(tmp_path: Path) -> None:
    settings = {"pipeline": "eval", "validation": {"tasks": 12}, "model": {"warm_start": {"steps": 5}}}
    run_dir = make_run(tmp_path / "a", "running", settings=settings)
    document = ask(run_dir)
    progress = document["progress"]
    assert (progress["phase"], progress["unit"], progress["step"]) == ("evaluating the policy", "task", 0)
    assert (document["pipeline"], progress["steps"]) == ("eval", 12)
    note(run_dir, "evaluation", when="given", step=0, reward=0.5, tasks=10, tags={})
    note(run_dir, "state", **{"from": "running"}, to="completed", actor="supervisor", reason="")
    jsonl.write_json(run_dir / "state.json", json.loads((run_dir / "state.json").read_text()) | {"status": "completed"})
    document = ask(run_dir)
    assert (document["progress"]["step"], document["progress"]["steps"]) == (10, 10)
    assert [row["command"] for row in document["next"]] == [f"cat {run_dir / 'evaluation.json'}"]
    text = penstock("status", run_dir).stdout
    assert "10/10" in text and "given 0.50" in text and "trajectories" not in text and "samples" not in text


@pytest.mark.parametrize(
    ("pipeline", "purpose"),
    [("train", "start it again"), ("eval", "start it again"), ("rollout", "play the remaining tasks")],
)
def test_what_a_resume_would_do(tmp_path: Path, pipeline: str, purpose: str) -> None:
    run_dir = make_run(tmp_path / "a", "stopped", settings={"pipeline": pipeline})
    assert [row["purpose"] for row in ask(run_dir)["next"]] == [purpose]


def test_a_run_that_has_trained_says_how_to_read_serve_and_evaluate_it(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "a", "completed")
    read = f"penstock trajectories {run_dir} --best"
    assert [row["command"] for row in ask(run_dir)["next"]] == [read]
    note(run_dir, "checkpoint", step=4, path="checkpoints/step_4")
    assert [row["command"] for row in ask(run_dir)["next"]] == [read], "the checkpoint is not there"
    (run_dir / "checkpoints" / "step_4").mkdir(parents=True)
    assert [row["command"] for row in ask(run_dir)["next"]] == [
        read,
        f"penstock serve --model {run_dir}/checkpoints/step_4",
        f"penstock eval {run_dir}/config.yaml --checkpoint {run_dir}",
    ]


def test_settings_of_another_version_hide_nothing_else(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "a", "running", settings={"trainer": {"steps": 9, "forgotten": 1}})
    take_step(run_dir, 4)
    progress = ask(run_dir)["progress"]
    assert (progress["phase"], progress["step"], progress["steps"]) == ("training", 4, 9)


def test_the_newest_stall_says_where_to_read_on(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "a", "running")
    stall = {"process": "controller", "waiter": "swap", "resource": "new weights", "seconds": 12.0}
    for holder in ("rollout-0", "rollout-1"):
        note(run_dir, "stall", **stall, holder=holder, stacks=["Task swap\n  File loop.py", "Task admit"])
    (run_dir / "logs" / "controller.log").touch()
    assert [stall["holder"] for stall in ask(run_dir)["stalls"]] == ["rollout-0", "rollout-1"]
    text = penstock("status", run_dir).stdout
    assert "swap waited 12 s for new weights, held by rollout-1" in text
    assert "Task swap" in text and "Task admit" not in text and "events.jsonl" in text and "logs/controller.log" in text


def test_a_stall_that_is_over_is_not_shown(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "a", "running")
    note(
        run_dir, "stall", process="controller", waiter="swap", resource="new weights", seconds=12.0, holder="rollout-0"
    )
    take_step(run_dir, 1)
    assert len(ask(run_dir)["stalls"]) == 1, "the step came before"
    take_step(run_dir, 11)
    assert ask(run_dir)["stalls"] == []


def test_a_run_that_waits_for_a_process_does_not_train(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "a", "running")
    for step in (1, 2, 3):
        take_step(run_dir, step)
    for state in ("ready", "exited", "backoff"):
        note(run_dir, "process", name="trainer-0", state=state)
    assert (seen := ask(run_dir)["progress"])["phase"] == "waiting for trainer-0 (restart 1)"
    assert seen["eta_seconds"] is None
    note(run_dir, "process", name="trainer-0", state="ready")
    assert (seen := ask(run_dir)["progress"])["phase"] == "training" and seen["eta_seconds"] is not None


def test_what_was_lost_and_recovered_is_told(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "a", "running")
    note(run_dir, "process", name="trainer-0", state="exited", kind="ok", returncode=0, reason="exit code 0")
    note(
        run_dir, "process", name="trainer-0", state="exited", kind="crashed", returncode=-9, reason="killed by SIGKILL"
    )
    note(run_dir, "process", name="trainer-0", state="backoff", after_s=0.2, decision="restart 1 of 5")
    note(run_dir, "process", name="trainer-0", state="starting", pid=7)
    note(run_dir, "rewound", step=100, lost_steps=3)
    incidents = ask(run_dir)["incidents"]
    assert [each.get("state", each["event"]) for each in incidents] == ["exited", "backoff", "rewound"]
    text = penstock("status", run_dir).stdout
    assert "trainer-0 ended: killed by SIGKILL (crashed)" in text
    assert "the trainer went back to step 100: 3 steps are taken again" in text


def test_a_failed_run_names_its_root_cause_and_the_way_on(tmp_path: Path) -> None:
    processes = {"trainer-0": {"state": "exited", "pid": 7, "returncode": -9, "reason": "killed by SIGKILL"}}
    error = "trainer-0 failed in mid-run (killed by SIGKILL)\n  last lines of its log"
    run_dir = make_run(tmp_path / "a", "failed", error=error, processes=processes)
    note(run_dir, "state", to="failed", actor="trainer-0", reason=error)
    document = ask(run_dir)
    assert document["root_cause"] == {
        "process": "trainer-0",
        "message": "trainer-0 failed in mid-run (killed by SIGKILL)",
        "returncode": -9,
        "log": "logs/trainer-0.log",
    }
    assert [line["command"] for line in document["next"]] == [
        f"penstock logs {run_dir} trainer-0 -n 100",
        f"penstock resume {run_dir}",
    ]
    assert "killed by SIGKILL" in penstock("status", run_dir).stdout


@pytest.mark.parametrize("returncode", [CONFIG_ERROR, GAVE_UP])
def test_what_would_fail_again_in_the_same_way_is_not_resumed(tmp_path: Path, returncode: int) -> None:
    processes = {"trainer-0": {"state": "exited", "pid": 7, "returncode": returncode}}
    run_dir = make_run(tmp_path / "a", "failed", error="bad", processes=processes)
    note(run_dir, "state", to="failed", actor="trainer-0", reason="bad")
    assert not any("resume" in line["command"] for line in ask(run_dir)["next"])


@pytest.mark.parametrize("event", ["resumed", "rewound"])
def test_a_checkpoint_that_was_given_up_is_not_named(tmp_path: Path, event: str) -> None:
    run_dir = make_run(tmp_path / "a", "stopped")
    for step in (2, 4, 6):
        note(run_dir, "checkpoint", step=step, path=f"checkpoints/step_{step}")
    note(run_dir, event, step=4, revived=0, lost_steps=2)
    document = ask(run_dir)
    assert document["checkpoint"] == "checkpoints/step_4"
    assert document["next"][0]["purpose"] == "continue from checkpoints/step_4"
    note(run_dir, "rewound", step=0, lost_steps=4)
    assert ask(run_dir)["checkpoint"] is None
    note(run_dir, "checkpoint", step=2, path="checkpoints/step_2")
    assert ask(run_dir)["checkpoint"] == "checkpoints/step_2"


def test_a_run_without_its_supervisor_is_lost(tmp_path: Path) -> None:
    processes = {"controller": {"state": "ready", **dataclasses.asdict(owner(alive=False))}}
    run_dir = make_run(tmp_path / "a", "running", alive=False, processes=processes)
    document = ask(run_dir)
    assert document["status"] == "lost" and document["progress"]["phase"] == "lost"
    assert document["wall_seconds"] == pytest.approx(60.0, abs=5.0), "until its last event"
    take_step(run_dir, 20)
    assert ask(run_dir)["wall_seconds"] == pytest.approx(70.0, abs=5.0), "or step"
    assert document["next"][0]["command"] == f"penstock stop {run_dir}"
    assert "ready (gone)" in penstock("status", run_dir).stdout


@pytest.mark.parametrize("status", ["pending", "starting", "running", "stopping", "stopped", "completed", "failed"])
def test_a_run_that_has_written_nothing_has_a_status(tmp_path: Path, status: str) -> None:
    run_dir = make_run(tmp_path / "a", status)
    document = ask(run_dir)
    assert document["status"] == status and document["progress"]["step"] == 0
    assert status in penstock("status", run_dir).stdout


def test_the_keys_of_the_document_are_the_same_in_every_state(tmp_path: Path) -> None:
    running, failed = make_run(tmp_path / "a", "running"), make_run(tmp_path / "b", "failed", error="x")
    take_step(running, 1)
    assert ask(running).keys() == ask(failed).keys()
    assert ask(running)["progress"].keys() == ask(failed)["progress"].keys()


@pytest.mark.parametrize(("status", "is_shown"), [("running", True), ("completed", False)])
def test_the_address_for_prometheus_is_shown_while_it_answers(tmp_path: Path, status: str, is_shown: bool) -> None:
    run_dir = make_run(tmp_path / "a", status)
    for port in (1, 2):  # of a controller that died, and of the next one
        note(run_dir, "metrics", url=f"http://127.0.0.1:{port}/metrics")
    assert ask(run_dir)["metrics_url"] == ("http://127.0.0.1:2/metrics" if is_shown else None)
    assert ("http://127.0.0.1:2/metrics" in penstock("status", run_dir).stdout) == is_shown


def test_watching_ends_with_the_run(tmp_path: Path) -> None:
    assert "completed" in penstock("status", make_run(tmp_path / "a", "completed"), "--watch").stdout


def test_a_run_is_found_by_the_beginning_of_its_name(tmp_path: Path) -> None:
    make_run(tmp_path / "2026-a", "failed")
    make_run(tmp_path / "2026-b", "failed")
    assert "2026-a" in penstock("status", "2026-a", "--runs-dir", tmp_path).stdout
    ambiguous = penstock("status", "2026", "--runs-dir", tmp_path)
    assert ambiguous.exit_code == 1 and "2 runs begin with 2026: 2026-a, 2026-b" in ambiguous.stderr
    assert penstock("status", "2027", "--runs-dir", tmp_path).exit_code == 1


def limited(tmp_path: Path, interval_s: float) -> Path:
    return make_run(tmp_path / "a", "running", settings={"supervisor": {"status_interval_s": interval_s}})


def test_programs_are_answered_once_per_interval(tmp_path: Path) -> None:
    run_dir = limited(tmp_path, 1800.0)
    assert ask(run_dir)["status"] == "running"
    refused = ask(run_dir)
    assert (refused["rate_limited"], refused["run_id"]) == (True, "a")
    assert 1790 < refused["next_check_in_seconds"] <= 1800
    assert json.loads(penstock("status", run_dir).stdout)["rate_limited"], "no terminal is a program too"
    assert ask(run_dir, "--force")["status"] == "running"


def test_without_an_interval_everybody_is_answered(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "a", "running")
    assert ask(run_dir)["status"] == ask(run_dir)["status"] == "running"


def test_an_unknown_run_costs_nothing(tmp_path: Path) -> None:
    run_dir = limited(tmp_path, 1800.0)
    assert penstock("status", "b", "--json", "--runs-dir", tmp_path).exit_code == 1
    assert ask(run_dir)["status"] == "running"


def test_refusals_do_not_put_the_next_answer_off(tmp_path: Path) -> None:
    assert claim_answer(tmp_path, now=100.0, interval_s=60.0) == 0.0
    assert claim_answer(tmp_path, now=130.0, interval_s=60.0) == 30.0
    assert claim_answer(tmp_path, now=160.0, interval_s=60.0) == 0.0
    assert claim_answer(tmp_path, now=100.0, interval_s=60.0) == 0.0, "the clock was set back"
