"""Every route of the contract, over a real socket, on whole, damaged, empty, crashed and vanishing runs."""

from __future__ import annotations

import csv
import io
import json
import os
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
from shown_run import BEGUN, RUN, dashboard_of, decision, make_run, span, step_line, write_lines

from penstock.supervisor.run_status import StatusReader

ROUTES = (
    *("status", "settings", "names", "series?names=reward", "evaluations", "timeline", "decisions", "adaptations"),
    *("export/metrics.csv", "export/trace.json"),
)


async def test_the_runs_are_listed_the_newest_first(tmp_path: Path) -> None:
    make_run(tmp_path, "20260101-000000-old", started=BEGUN - 100)
    make_run(tmp_path)
    (tmp_path / "no-run").mkdir()
    async with dashboard_of(tmp_path) as dashboard:
        found = await dashboard.get("runs")
    assert [row["id"] for row in found["runs"]] == [RUN, "20260101-000000-old"]
    row = found["runs"][0]
    assert row["status"] == "completed" and row["step"] == row["steps"] == 20 and row["pipeline"] == "train"
    assert row["held_out"] == 0.25 and row["environment"] == "guess_number" and row["reward"] == 0.2


async def test_the_status_is_that_of_the_command_with_the_balance(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path)
    async with dashboard_of(tmp_path) as dashboard:
        found = await dashboard.get(f"runs/{RUN}/status")
    assert found["run_id"] == RUN and found["run_dir"] == str(run_dir) and found["warnings"] == []
    assert (
        found["balance"] == "The trainer waits for the servers: the trainer is busy 25% of the time, the servers 75%."
    )
    assert found["bound"]["share"] == pytest.approx(0.75)
    assert found["bound"]["bound"] == pytest.approx(250 / 0.75)
    assert {line["decider"] for line in found["decisions"]} == {"admission", "dispatch", "tuning"}
    assert found["next"][0]["command"].startswith("penstock trajectories")
    assert [(alarm["reason"], alarm["step"]) for alarm in found["alarms"]] == [("answers are cut", 2)]


async def test_settings_that_differ_come_first(tmp_path: Path) -> None:
    make_run(tmp_path)
    async with dashboard_of(tmp_path) as dashboard:
        rows = (await dashboard.get(f"runs/{RUN}/settings"))["settings"]
    first = {row["name"]: row for row in rows}
    assert not rows[0]["is_default"] and first["scheduler.max_staleness"]["value"] == 3
    assert first["scheduler.max_staleness"]["about"]


async def test_series_have_names_and_at_most_the_points_that_were_asked_for(tmp_path: Path) -> None:
    make_run(tmp_path, num_steps=1000)
    async with dashboard_of(tmp_path) as dashboard:
        names = (await dashboard.get(f"runs/{RUN}/names"))["names"]
        asked = "names=reward,ledger/trained,rate:tokens_generated_total&points=50"
        found = await dashboard.get(f"runs/{RUN}/series?{asked}")
        part = await dashboard.get(f"runs/{RUN}/series?names=reward&x=step&from=10&to=19")
        wrong = await dashboard.get(f"runs/{RUN}/series?names=reward&points=many", status=400)
        await dashboard.get(f"runs/{RUN}/series?names=reward&x=reward_of_nobody", status=400)
        await dashboard.get(f"runs/{RUN}/series", status=400)
        unknown = await dashboard.get(f"runs/{RUN}/series?names=no_such_series,nor_this", status=400)
        partly_known = await dashboard.get(f"runs/{RUN}/series?names=reward,no_such_series&points=3")
    assert {"reward", "ledger/trained", "rate:tokens_generated_total"} <= set(names) and "length_tau" not in names
    assert len(found["x"]) == len(found["times"]) == 50 and found["x"][-1] == 1000 and found["num_steps"] == 1000
    assert found["series"]["rate:tokens_generated_total"]["mean"] == [pytest.approx(500)] * 50
    assert found["series"]["ledger/trained"]["max"][-1] == 8000 and "indexed" not in found
    assert part["x"] == list(range(10, 20))
    assert "points" in wrong["error"]["message"]
    assert "this run has no series no_such_series, nor_this" in unknown["error"]["message"]
    assert partly_known["series"]["no_such_series"]["mean"] == [None] * 3
    assert partly_known["unknown"] == ["no_such_series"] and found["unknown"] == []


async def test_a_name_with_a_comma_is_one_name(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path, num_steps=1)
    write_lines(run_dir / "metrics.jsonl", [step_line(2, groups_dropped={"equal, all": 3})])
    async with dashboard_of(tmp_path) as dashboard:
        found = await dashboard.get(f"runs/{RUN}/series?names=groups_dropped/equal,%20all&names=reward,episodes")
    assert list(found["series"]) == ["groups_dropped/equal, all", "reward", "episodes"]
    assert found["series"]["groups_dropped/equal, all"]["max"] == [None, 3]


async def test_evaluations_and_adaptations_come_from_the_events(tmp_path: Path) -> None:
    make_run(tmp_path)
    async with dashboard_of(tmp_path) as dashboard:
        (evaluation,) = (await dashboard.get(f"runs/{RUN}/evaluations"))["evaluations"]
        (adaptation,) = (await dashboard.get(f"runs/{RUN}/adaptations"))["adaptations"]
    assert evaluation["when"] == "before" and evaluation["pass_at"] == {"1": 0.25}
    assert adaptation["changes"] == {"scheduler.max_staleness": [1, 2]} and adaptation["policy_version"] == 2
    assert adaptation["prediction"] == {"gain": 1.2}
    assert adaptation["outcome"] == {"promised": 1.2, "measured": 1.1, "reason": "kept: 1.1 times the speed"}


@pytest.mark.parametrize(
    "damage",
    [
        {"events.jsonl": f'{{"time": 1.0, "event": "evaluation", "when": "x", "step": 1, "reward": 1{"0" * 400}}}'},
        {"metrics.jsonl": '{"time": 1.0, "step": 21, "reward": "\\ud800"}'},
        {"config.yaml": "env: {mixture: null}"},
    ],
)
async def test_a_damaged_run_takes_no_other_run_away(tmp_path: Path, damage: dict[str, str]) -> None:
    make_run(tmp_path)
    shutil.copytree(tmp_path / RUN, tmp_path / "damaged")
    for name, text in damage.items():
        with (tmp_path / "damaged" / name).open("a") as file:
            file.write(f"{text}\n")
    async with dashboard_of(tmp_path) as dashboard:
        rows = {row["id"]: row for row in (await dashboard.get("runs"))["runs"]}
        await dashboard.get("runs/damaged/status")
        await dashboard.get("runs/damaged/timeline")
    assert rows[RUN]["status"] == "completed" and "damaged" in rows


async def test_the_timeline_shows_the_last_minute_or_a_window(tmp_path: Path) -> None:
    make_run(tmp_path, num_steps=100)
    async with dashboard_of(tmp_path) as dashboard:
        last = await dashboard.get(f"runs/{RUN}/timeline")
        window = await dashboard.get(f"runs/{RUN}/timeline?from={BEGUN}&to={BEGUN + 10}&width=1000")
        wide = await dashboard.get(f"runs/{RUN}/timeline?from={BEGUN}&to={BEGUN + 200}&width=20")
        await dashboard.get(f"runs/{RUN}/timeline?from=9&to=1", status=400)
        await dashboard.get(f"runs/{RUN}/timeline?from=nan", status=400)
    assert last["to"] - last["from"] == 60 and last["end"] == BEGUN + 200 and last["begin"] == BEGUN
    assert window["processes"] == ["rollout-0", "trainer-0"] and window["kinds"] == ["generate", "train"]
    assert window["spans"][0] == ["rollout-0", "generate", BEGUN + 0.2, BEGUN + 1.7, 0, 1, 1.0]
    assert [mark["kind"] for mark in window["marks"]] == ["evaluation", "restart", "alarm", "adapted"]
    assert sum(row[5] for row in wide["spans"]) == 200
    assert all(0.2 < row[6] < 0.35 for row in wide["spans"] if row[0] == "trainer-0")


async def test_decisions_come_in_pages_and_by_filter(tmp_path: Path) -> None:
    make_run(tmp_path, num_steps=50)
    async with dashboard_of(tmp_path) as dashboard:
        page = await dashboard.get(f"runs/{RUN}/decisions?limit=40")
        found, before = page["decisions"], page["before"]
        while before is not None:
            more = await dashboard.get(f"runs/{RUN}/decisions?limit=40&before={before}")
            found, before = found + more["decisions"], more["before"]
        rare = (await dashboard.get(f"runs/{RUN}/decisions?decider=tuning"))["decisions"]
        of_group = (await dashboard.get(f"runs/{RUN}/decisions?group=4"))["decisions"]
        by_text = (await dashboard.get(f"runs/{RUN}/decisions?text=LETTERS/7"))["decisions"]
        await dashboard.get(f"runs/{RUN}/decisions?group=x", status=400)
    assert len(found) == 105 and page["deciders"] == {"admission": 50, "dispatch": 50, "tuning": 5}
    assert [line["time"] for line in found] == sorted((line["time"] for line in found), reverse=True)
    assert len(rare) == 5 and {line["decider"] for line in of_group} == {"admission", "dispatch"}
    assert [line["group"] for line in of_group] == [4, 4]
    assert [line["inputs"] for line in by_text] == [{"task": "letters/7"}]


async def test_logs_come_in_pages(tmp_path: Path) -> None:
    make_run(tmp_path)
    async with dashboard_of(tmp_path) as dashboard:
        page = await dashboard.get(f"runs/{RUN}/logs/trainer-0?lines=100")
        older = await dashboard.get(f"runs/{RUN}/logs/trainer-0?lines=1000&before={page['before']}")
        for name in ("nobody", "..%2F..%2Fstate", "..", "%2e%2e%2fconfig"):
            await dashboard.get(f"runs/{RUN}/logs/{name}", status=404)
    assert page["lines"] == [f"line {number}" for number in range(400, 500)]
    assert older["lines"] == [f"line {number}" for number in range(400)] and older["before"] is None


async def test_exports_hold_the_steps_that_count(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path, num_steps=600)
    write_lines(run_dir / "metrics.jsonl", [step_line(590, extra=1.5)])
    async with dashboard_of(tmp_path) as dashboard:
        rows = list(csv.DictReader(io.StringIO(await dashboard.text(f"runs/{RUN}/export/metrics.csv"))))
        trace = json.loads(await dashboard.text(f"runs/{RUN}/export/trace.json"))
        async with dashboard.session.get(f"{dashboard.url}/api/runs/{RUN}/export/metrics.parquet") as answer:
            table = pyarrow.parquet.read_table(io.BytesIO(await answer.read()))
            assert answer.headers["Content-Disposition"] == f'attachment; filename="{RUN}-metrics.parquet"'
    assert [int(row["step"]) for row in rows] == list(range(1, 591)) and rows[-1]["extra"] == "1.5"
    assert rows[0]["extra"] == "" and float(rows[9]["reward"]) == 0.1
    assert table.column("step").to_pylist() == list(range(1, 591)) and table.column("extra")[0].as_py() is None
    bars = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert len(bars) == 1200 and bars[0]["name"] == "generate" and bars[0]["dur"] == pytest.approx(1.5e6)
    assert {event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "thread_name"} == {
        "rollout-0",
        "trainer-0",
    }


@pytest.mark.parametrize("route", ROUTES)
async def test_a_run_without_files_is_shown_as_far_as_there_is_something(tmp_path: Path, route: str) -> None:
    run_dir = tmp_path / RUN
    run_dir.mkdir()
    (run_dir / "events.jsonl").touch()
    async with dashboard_of(tmp_path) as dashboard:
        answer = await dashboard.text(f"runs/{RUN}/{route}")
    if route == "status":
        assert json.loads(answer)["status"] == "unreadable" and json.loads(answer)["balance"] is None


@pytest.mark.parametrize("route", ROUTES)
async def test_damaged_and_half_written_lines_are_left_out_and_counted(tmp_path: Path, route: str) -> None:
    run_dir = make_run(tmp_path)
    damage = '{"step": 3, "ti\n[1]\n"x"\n\xff\xfe\n{"step": "x", "time": []}\n' + "[" * 10_000 + "\n"
    for name in ("metrics.jsonl", "events.jsonl", "timeline.jsonl"):
        with (run_dir / name).open("a", encoding="latin-1") as file:
            file.write(damage)
    write_lines(run_dir / "metrics.jsonl", [step_line(21)])
    write_lines(run_dir / "events.jsonl", [{"time": "x", "event": "stall"}, {"event": "evaluation", "when": {}}])
    write_lines(run_dir / "timeline.jsonl", [span("a", "train", 2.0, 1.0), decision("", BEGUN, "", group="x")])
    for name in ("metrics.jsonl", "events.jsonl", "timeline.jsonl"):
        with (run_dir / name).open("a") as file:
            file.write('{"step": 22, "time"')
    async with dashboard_of(tmp_path) as dashboard:
        answer = await dashboard.text(f"runs/{RUN}/{route}")
        if route == "status":
            found = await dashboard.get(f"runs/{RUN}/series?names=reward")
            assert found["x"] == list(range(1, 22))
            await dashboard.get(f"runs/{RUN}/timeline")
    if route == "status":
        assert json.loads(answer)["progress"]["step"] == 21
        assert json.loads(answer)["warnings"][0] == "events.jsonl: 5 damaged lines"
    async with dashboard_of(tmp_path) as dashboard:
        await dashboard.get(f"runs/{RUN}/decisions")
        found = await dashboard.get(f"runs/{RUN}/status")
        assert any(each.startswith("metrics.jsonl") for each in found["warnings"]), "the last lines are damaged"
    async with dashboard_of(tmp_path) as dashboard:
        await dashboard.get(f"runs/{RUN}/decisions")
        await dashboard.get(f"runs/{RUN}/names")
        found = await dashboard.get(f"runs/{RUN}/status")
    assert "metrics.jsonl: 6 damaged lines" in found["warnings"]
    assert "timeline.jsonl: 7 damaged lines" in found["warnings"]


async def test_documents_that_no_run_writes_are_an_error_and_no_defect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damaged(_: StatusReader) -> dict[str, Any]:
        raise ValueError("a file is damaged")

    make_run(tmp_path)
    monkeypatch.setattr(StatusReader, "read", damaged)
    async with dashboard_of(tmp_path) as dashboard:
        found = await dashboard.get(f"runs/{RUN}/status", status=500)
        assert "documents of run" in found["error"]["message"]
        await dashboard.get(f"runs/{RUN}/series?names=reward")


async def test_a_crashed_run_is_lost_and_keeps_its_files(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path, status="running")
    state = json.loads((run_dir / "state.json").read_text())
    state["supervisor"]["start_ticks"] += 1  # another process has its pid
    (run_dir / "state.json").write_text(json.dumps(state))
    async with dashboard_of(tmp_path) as dashboard:
        found = await dashboard.get(f"runs/{RUN}/status")
        assert found["status"] == "lost" and found["progress"]["step"] == 20
        assert len((await dashboard.get(f"runs/{RUN}/series?names=reward"))["x"]) == 20


async def test_a_run_that_is_deleted_is_gone_and_may_come_again(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path)
    async with dashboard_of(tmp_path) as dashboard:
        await dashboard.get(f"runs/{RUN}/series?names=reward")
        (run_dir / "metrics.jsonl").unlink()
        assert (await dashboard.get(f"runs/{RUN}/series?names=reward"))["x"] == []
        shutil.rmtree(run_dir)
        for route in ROUTES:
            await dashboard.get(f"runs/{RUN}/{route}", status=404)
        assert (await dashboard.get("runs"))["runs"] == []
        make_run(tmp_path, num_steps=7)
        assert len((await dashboard.get(f"runs/{RUN}/series?names=reward"))["x"]) == 7
        assert (await dashboard.get(f"runs/{RUN}/status"))["progress"]["step"] == 7


@pytest.mark.parametrize("name", ["metrics.jsonl", "timeline.jsonl", "events.jsonl"])
@pytest.mark.parametrize("kind", ["link", "pipe", "directory"])
async def test_what_is_no_plain_file_is_never_read(tmp_path: Path, name: str, kind: str) -> None:
    path = make_run(tmp_path) / name
    path.unlink()
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero")
    async with dashboard_of(tmp_path) as dashboard:
        for route in ROUTES:
            async with dashboard.session.get(f"{dashboard.url}/api/runs/{RUN}/{route}") as answer:
                assert answer.status in (200, 403), (route, await answer.text())


@pytest.mark.parametrize("kind", ["link", "directory"])
async def test_a_file_that_cannot_be_read_takes_no_other_file_away(tmp_path: Path, kind: str) -> None:
    of_metrics = ("names", "series?names=reward", "export/metrics.csv", "export/metrics.parquet")
    of_timeline = ("timeline", "decisions", "export/trace.json")
    for run_id, name in (("a", "metrics.jsonl"), ("b", "timeline.jsonl"), ("c", "events.jsonl")):
        path = make_run(tmp_path, run_id) / name
        path.rename(tmp_path / name)
        path.mkdir() if kind == "directory" else path.symlink_to(tmp_path / name)
    async with dashboard_of(tmp_path) as dashboard:
        for run_id, bad, good in (
            ("a", of_metrics, of_timeline),
            ("b", of_timeline, of_metrics),
            ("c", ("evaluations", "export/trace.json"), (*of_metrics, "decisions")),
        ):
            for route in bad:
                found = await dashboard.get(f"runs/{run_id}/{route}", status=403)
                assert "no plain file" in found["error"]["message"] or "is a link" in found["error"]["message"]
            for route in good:
                async with dashboard.session.get(f"{dashboard.url}/api/runs/{run_id}/{route}") as answer:
                    assert answer.status == 200 and len(await answer.read()) > 100, route


async def test_a_run_that_was_named_is_shown_wherever_it_lies(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path / "elsewhere")
    async with dashboard_of(tmp_path / "runs", run_dir) as dashboard:
        assert [row["id"] for row in (await dashboard.get("runs"))["runs"]] == [RUN]
        assert (await dashboard.get(f"runs/{RUN}/status"))["status"] == "completed"


async def test_no_file_of_a_run_is_changed_and_only_its_index_is_added(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path, num_steps=600)
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    async with dashboard_of(tmp_path) as dashboard:
        for route in ROUTES:
            await dashboard.text(f"runs/{RUN}/{route}")
    after = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    assert {path: content for path, content in after.items() if path.parent.name != ".dashboard"} == before
    assert {path.name for path in after.keys() - before.keys()} == {"metrics.blocks", "timeline.blocks"}


async def test_unknown_routes_and_runs_are_errors_in_json(tmp_path: Path) -> None:
    make_run(tmp_path)
    async with dashboard_of(tmp_path) as dashboard:
        for path in (
            "runs/nobody/status",
            f"runs/{RUN}/nothing",
            "nothing",
            "runs/../status",
            "runs/.dashboard/status",
        ):
            found = await dashboard.get(path, status=404)
            assert found["error"]["message"]
        async with dashboard.session.get(dashboard.url) as answer:
            assert answer.status == 200 and "text/html" in answer.headers["Content-Type"]
            assert answer.headers["Content-Security-Policy"].startswith("default-src 'self'")
