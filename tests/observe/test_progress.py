from __future__ import annotations

import asyncio
import io
import os
from pathlib import Path

import pytest
from made_run import STARTED, evaluate, make_run, mix
from rich.console import Console

from penstock.config import Config
from penstock.observe import closing_report, jsonl, progress, summary
from penstock.observe.progress import RunFollower, held_out, render_line, render_panel, sparkline
from penstock.observe.tables import clock, count
from penstock.observe.view import Plan, RunView

URL = "http://127.0.0.1:34567"


def text_of(*renderables: object) -> str:
    console = Console(file=io.StringIO(), width=120)
    console.print(*renderables)
    return console.file.getvalue()  # type: ignore[attr-defined]


def state(status: str) -> dict[str, object]:
    return {"time": STARTED, "event": "state", "to": status}


def process(name: str, status: str) -> dict[str, object]:
    return {"time": STARTED, "event": "process", "name": name, "state": status}


@pytest.mark.parametrize(
    ("states", "missing"),
    [
        ({"controller": "backoff"}, "controller (restart 1)"),
        ({"trainer-0": "ready", "trainer-1": "starting"}, "trainer-1"),
        ({"rank-1": "ready", "rank-2": "starting"}, "rank-2"),
        ({"rollout-0": "ready", "rollout-1": "backoff"}, None),
        ({"rollout-0": "starting", "rollout-1": "backoff"}, "rollout-0, rollout-1 (restart 1)"),
        ({"env-0": "degraded", "env-1": "exited"}, None),
        ({"env-0": "exited"}, "env-0"),
    ],
)
def test_a_run_waits_for_what_it_cannot_go_on_without(states: dict[str, str], missing: str | None) -> None:
    view = RunView(plan=Plan(num_steps=3))
    view.see_event(state("starting"))
    for name, found in states.items():
        view.see_event(process(name, "ready"))
        view.see_event(process(name, found))
    view.see_event(state("running"))
    assert view.phase == (f"waiting for {missing}" if missing else "waiting for the first step")


def test_phases_follow_from_what_was_recorded(tmp_path: Path) -> None:
    view = RunView(plan=Plan(num_steps=3, num_warm_start_steps=10, num_eval_tasks=4))
    seen = [view.phase]
    events = [
        state("starting"),
        process("controller", "ready"),
        process("trainer-0", "starting"),
        process("trainer-0", "ready"),
        state("running"),
        {"event": "warm_start", "time": STARTED + 5},
        {"event": "evaluation", "when": "before", "reward": 0.4, "time": STARTED + 7},
    ]
    for event in events:
        view.see_event(event)
        seen.append(view.phase)
    for line in jsonl.read(make_run(tmp_path, 3) / "metrics.jsonl"):
        view.see_step(line)
        seen.append(view.phase)
    view.see_event(state("completed"))
    assert [phase for phase, before in zip(seen, ["", *seen], strict=False) if phase != before] == [
        "pending",
        "starting",
        "starting trainer-0",
        "starting",
        "warm start",
        "evaluating the untrained policy",
        "waiting for the first step",
        "training",
        "evaluating the trained policy",
    ]
    assert view.phase == "completed"


def test_there_is_one_plan_of_each_pipeline() -> None:
    tree = {"trainer": {"steps": 7}, "validation": {"tasks": 12}, "model": {"warm_start": {"steps": 5}}}
    plans = {name: Plan.of(Config.model_validate({"pipeline": name, **tree})) for name in ("train", "eval", "rollout")}
    assert {name: plan.num_steps for name, plan in plans.items()} == {"train": 7, "eval": 12, "rollout": 0}
    assert {plan.num_eval_tasks for plan in plans.values()} == {12}
    view = RunView(plan=plans["eval"], status="running")
    assert (view.phase, view.unit, render_line(view)) == ("evaluating the policy", "task", "evaluating the policy")
    view.see_event({"event": "evaluation", "when": "given", "reward": 0.5, "tasks": 10, "time": STARTED})
    assert (view.step, view.plan.num_steps) == (10, 10)
    assert RunView(plan=plans["rollout"], status="running").phase == "playing"
    assert RunView(plan=plans["train"], status="running").phase == "warm start"


def test_rates_come_from_the_latest_steps(tmp_path: Path) -> None:
    followed = RunFollower(make_run(tmp_path, 100), Plan(num_steps=200))
    jsonl.append(tmp_path / "events.jsonl", state("running"))
    view = followed.update()
    assert view.rate("tokens_generated_total") == 100.0
    assert view.progress["eta_seconds"] == 100.0
    assert len(view.recent) < 20
    line = render_line(view)
    assert "step 100/200" in line and "busy trainer 50 % generator 75 %" in line and "ETA 1:40" in line


def test_the_panel_shows_processes_then_figures(tmp_path: Path) -> None:
    followed = RunFollower(tmp_path, Plan(num_steps=200, max_staleness=2))
    for event in (state("starting"), process("controller", "ready"), process("env-0", "starting")):
        followed.view.see_event(event)
    early = text_of(render_panel(followed.view, tmp_path, now=STARTED + 3))
    assert "starting env-0" in early and "3 s" in early and "controller" in early
    make_run(tmp_path, 20)
    followed.view.see_event(process("env-0", "ready"))
    followed.view.see_event(state("running"))
    late = text_of(render_panel(followed.update(), tmp_path, now=STARTED))
    assert "step 20/200" in late and "(at most 2)" in late and "▁" in late


class BrokenPipe(io.StringIO):
    was_written_to = False

    def write(self, text: str, /) -> int:
        self.was_written_to = True
        raise BrokenPipeError


async def test_a_reader_that_goes_away_ends_the_display_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "dup2", lambda *_: None)  # rich would point this process's own output nowhere
    plan = Plan(num_steps=3, num_warm_start_steps=10, num_eval_tasks=4)
    pipe = BrokenPipe()
    async with asyncio.timeout(5):
        await progress.follow(make_run(tmp_path, 3), plan, Console(file=pipe))
    assert pipe.was_written_to


async def test_lines_are_printed_where_there_is_no_terminal(tmp_path: Path) -> None:
    make_run(tmp_path, 3)
    jsonl.append(tmp_path / "events.jsonl", state("running"))
    jsonl.append(tmp_path / "events.jsonl", {"event": "joined", "name": "rollout-0", "role": "rollout", "url": URL})
    console = Console(file=io.StringIO(), width=200)
    display = asyncio.create_task(progress.follow(tmp_path, Plan(num_steps=9), console))
    await asyncio.sleep(0)
    display.cancel()
    await asyncio.wait([display])
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert lines[0].startswith("run ") and lines[2].startswith("step 3/9")
    assert lines[1] == f"rollout-0 serves at {URL}"
    assert URL in text_of(render_panel(RunFollower(tmp_path, Plan(num_steps=9)).update(), tmp_path, now=STARTED))


TROUBLE = [
    {"event": "alarm", "reason": "effective sample size: 4%"},
    {"event": "server_lost", "url": "http://a", "why": "rollout server http://a: no answer"},
    {"event": "server_back", "url": "http://a"},
    {"event": "process", "name": "env-0", "state": "backoff", "decision": "restart 1 of 5", "after_s": 0.2},
    {"event": "stall", "waiter": "g1", "resource": "an answer", "holder": "http://a", "seconds": 61.2, "stacks": []},
    {"event": "rewound", "step": 4, "lost_steps": 2, "policy_version": 7, "groups": 8},
]
TOLD = [
    "! alarm: effective sample size: 4%",
    "! server lost: rollout server http://a: no answer",
    "! server back: http://a",
    "! env-0 is started again: restart 1 of 5",
    "! stall: g1 has waited 61 s for an answer, held by http://a",
    "! the trainer went back to step 4: 2 steps are taken again",
]


async def test_trouble_is_told_in_lines_in_the_panel_and_in_the_report(tmp_path: Path) -> None:
    make_run(tmp_path, 3)
    for event in (state("running"), *TROUBLE, {"event": "joined", "name": "env-0", "role": "env"}):
        jsonl.append(tmp_path / "events.jsonl", event)
    console = Console(file=io.StringIO(), width=200)
    display = asyncio.create_task(progress.follow(tmp_path, Plan(num_steps=9), console))
    await asyncio.sleep(0)
    display.cancel()
    await asyncio.wait([display])
    summary.write(tmp_path)
    closing_report.show(tmp_path, console, config=Config(), commands=[])
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert [line for line in lines if line.startswith("!")] == TOLD * 2
    panel = text_of(render_panel(RunFollower(tmp_path, Plan(num_steps=9)).update(), tmp_path, now=STARTED))
    assert [told in panel for told in TOLD] == [False, False, True, True, True, True]


def test_failed_groups_are_told_in_lines_in_the_panel_and_in_the_report(tmp_path: Path) -> None:
    make_run(tmp_path, 3)
    jsonl.append(tmp_path / "events.jsonl", state("running"))
    found = {"groups_failed": 12, "latest_failure": "given up after 3 attempts: Pig.reset of seed/3: KeyError: 'b'"}
    jsonl.write_json(tmp_path / "played.json", found)
    summary.write(tmp_path)
    console = Console(file=io.StringIO(), width=200)
    closing_report.show(tmp_path, console, config=Config(), commands=[])
    told = "12 groups failed, the latest: given up after 3 attempts: Pig.reset of seed/3: KeyError: 'b'"
    assert told in console.file.getvalue()  # type: ignore[attr-defined]
    view = RunFollower(tmp_path, Plan(num_steps=9)).update()
    assert render_line(view).endswith(told)
    assert "12 groups failed" in text_of(render_panel(view, tmp_path, now=STARTED))


def test_what_is_played_without_a_step_is_told(tmp_path: Path) -> None:
    jsonl.append(tmp_path / "events.jsonl", state("running"))
    followed = RunFollower(tmp_path, Plan(num_steps=9))
    assert render_line(followed.update()) == "waiting for the first step"
    dropped = {"zero_variance: all rewards are 0": 80, "mine: too odd": 1, "zero_variance: all rewards are 1": 3}
    jsonl.write_json(tmp_path / "played.json", {"episodes_total": 344, "groups_dropped": dropped})
    told = "344 played, 84 groups filtered (zero_variance: all rewards are 0, zero_variance: all rewards are 1)"
    assert render_line(followed.update()) == f"waiting for the first step  {told}"
    assert "344 played, 84 groups filtered" in text_of(render_panel(followed.view, tmp_path, now=STARTED))
    jsonl.append(tmp_path / "events.jsonl", state("failed"))
    assert render_line(followed.update()) == "failed"


def test_a_validation_says_how_far_it_is(tmp_path: Path) -> None:
    jsonl.append(tmp_path / "events.jsonl", state("running"))
    jsonl.write_json(tmp_path / "played.json", {"held_out": {"ended": 5, "tasks": 64}})
    given = RunFollower(tmp_path, Plan(num_steps=0, pipeline="eval")).update()
    assert render_line(given) == "evaluating the policy  5 of 64 held-out tasks played" and given.step == 5
    make_run(tmp_path, 3)
    assert "5 of 64 held-out tasks played" in render_line(RunFollower(tmp_path, Plan(num_steps=9)).update())


async def test_lines_go_on_while_no_step_is_taken_and_tell_of_validations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("PANEL_EVERY_S", "LINE_EVERY_S", "QUIET_LINE_EVERY_S"):
        monkeypatch.setattr(progress, name, 0.0)
    make_run(tmp_path, 3)
    jsonl.append(tmp_path / "events.jsonl", state("running"))
    evaluate(tmp_path, "before", 0.25)
    console = Console(file=io.StringIO(), width=200)
    display = asyncio.create_task(progress.follow(tmp_path, Plan(num_steps=9), console))
    await asyncio.sleep(0)
    for number in (8, 8, 16):
        jsonl.write_json(tmp_path / "played.json", {"episodes_total": number})
        for _ in range(3):
            await asyncio.sleep(0)
    evaluate(tmp_path, "step 2", 0.5, step=2)
    for _ in range(3):
        await asyncio.sleep(0)
    display.cancel()
    await asyncio.wait([display])
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert lines[2:] == ["training  8 played", "training  16 played", "held out, step 2: reward 0.50"]


def test_surplus_is_told_if_there_is_some(tmp_path: Path) -> None:
    found = summary.write(make_run(tmp_path, 3))
    assert "more than their groups needed" not in text_of(closing_report.key_figures(found, tmp_path, [], [], Config()))
    found["ledger"]["discarded_surplus"] = 16
    assert "16 trajectories more than their groups needed" in text_of(
        closing_report.key_figures(found, tmp_path, [], [], Config())
    )


def test_the_best_checkpoint_is_named_unless_it_is_the_newest(tmp_path: Path) -> None:
    for step, reward in ((0, 0.2), (20, 0.8), (40, 0.9), (60, 0.7)):
        evaluate(tmp_path, f"step {step}", reward, step=step)
        path = f"checkpoints/step_{step}"
        jsonl.append(tmp_path / "events.jsonl", {"time": 1.0, "event": "checkpoint", "step": step, "path": path})
    events = jsonl.read(tmp_path / "events.jsonl")
    assert closing_report.best_checkpoint(events, tmp_path) == []
    for kept in (20, 60):  # the one of step 40 was removed
        (tmp_path / "checkpoints" / f"step_{kept}").mkdir(parents=True)
    (line,) = closing_report.best_checkpoint(events, tmp_path)
    assert line.startswith("checkpoints/step_20  the highest held-out reward, 0.80")
    (tmp_path / "checkpoints" / "step_20").rmdir()
    assert closing_report.best_checkpoint(events, tmp_path) == []


NEXT = [
    {"command": "penstock serve --model " + "runs/20261123-101112-abcd/checkpoints/step_30", "purpose": "talk to it"},
    {"command": "penstock trajectories 20261123-101112-abcd", "purpose": "read its answers"},
]


def test_the_report_shows_answers_figures_and_what_to_type_next(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path, 30)
    evaluate(run_dir, "before", 0.2)
    evaluate(run_dir, "after", 1.0)
    jsonl.append(run_dir / "events.jsonl", {"event": "checkpoint", "step": 30, "path": "checkpoints/step_30"})
    summary.write(run_dir)
    config = Config.model_validate({"env": {"temperature": 0.9, "eval_temperature": 0.5}, "data": {"eval_tasks": 7}})
    console = Console(file=io.StringIO(), width=80)
    closing_report.show(run_dir, console, config=config, commands=NEXT)
    lines = [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]
    rows = [line.split() for line in lines]
    assert ["spell", "[bold]ab", "ba", "ba", "0.20", "ba", "1.00"] in rows
    assert "held out  0.20 → 1.00  mean of 7 tasks, sampled at temperature 0.5" in lines
    assert "reward    0.02 → 0.29  all completed, first and last tenth, at temperature 0.9" in lines
    assert ["checkpoints/step_30"] in rows and any("completed after 0:40" in line for line in lines)
    assert lines[-5:] == ["next", "# talk to it", NEXT[0]["command"], "# read its answers", NEXT[1]["command"]]


@pytest.mark.parametrize(
    ("temperatures", "told"),
    [
        ((0.0, 0.0), "greedy answers"),
        ((1.0, 1.0), "sampled at temperature 1"),
        ((0.0, 1.0), "each environment with its own eval_temperature"),
    ],
)
def test_the_report_says_how_held_out_answers_are_chosen(temperatures: tuple[float, float], told: str) -> None:
    mixture = {f"tag{number}": {"eval_temperature": each} for number, each in enumerate(temperatures)}
    assert closing_report.answers_of(Config.model_validate({"env": {"mixture": mixture}})) == told


def test_a_long_command_is_not_broken(tmp_path: Path) -> None:
    make_run(tmp_path, 3)
    summary.write(tmp_path)
    command = "penstock serve --model " + "x" * 200
    console = Console(file=io.StringIO(), width=80)
    closing_report.show(tmp_path, console, config=Config(), commands=[{"command": command, "purpose": "talk to it"}])
    assert command in console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def test_a_mixture_is_shown_by_tag(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path, 30)
    mix(run_dir)
    evaluate(run_dir, "before", 0.2, tags=("game", "words"))
    evaluate(run_dir, "step 20", 0.4, step=20, tags=("game", "words"))
    summary.write(run_dir)
    view = RunFollower(run_dir, Plan(num_steps=30)).update()
    assert view.tags["game"]["reward"] == 0.5 and view.tags["game"]["response_tokens"] == 7.0
    assert view.tags["never"]["reward"] is None and view.tags["words"]["held_out"]["reward"] == 0.4
    panel = text_of(render_panel(view, run_dir, now=STARTED))
    assert "game 0.50   never -   words 0.10" in panel and "before 0.20   step 20 0.40" in panel
    console = Console(file=io.StringIO(), width=80)
    closing_report.show(run_dir, console, config=Config(), commands=[])
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "held-out tasks, step 20" in text and "pass@1" in text and "all" in text


def test_of_many_validations_the_first_and_the_latest_are_shown() -> None:
    evaluations = {"before": 0.1} | {f"step {step}": step / 100 for step in range(10, 60, 10)}
    assert held_out(evaluations) == "before 0.10   step 30 0.30   step 40 0.40   step 50 0.50"


def test_numbers_are_short() -> None:
    assert [count(value) for value in (None, 950, 18_240, 1_300_000)] == ["-", "950", "18.2k", "1.3M"]
    assert [clock(value) for value in (None, 65, 7389)] == ["-", "1:05", "2:03:09"]
    assert sparkline([0, 1, 2, 3], 2) == "▁█"
    assert sparkline([1.0, 1.0], 5) == "▁▁" and sparkline([], 5) == ""
