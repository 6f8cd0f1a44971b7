"""The live stream: what is new in a run, for one viewer and for many."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from shown_run import BEGUN, RUN, Client, dashboard_of, decision, make_run, step_line, write_lines

from penstock.dashboard import live
from penstock.dashboard.opened_run import OpenedRun, OpenedRuns, Requests
from penstock.observe.jsonl import write_json
from penstock.supervisor.run_status import StatusReader

LIMIT_S = 30.0
Events = AsyncIterator[tuple[str, dict[str, Any]]]


async def events_of(answer: aiohttp.ClientResponse) -> Events:
    kind = ""
    async for line in answer.content:
        text = line.decode().rstrip("\n")
        if text.startswith("event: "):
            kind = text.removeprefix("event: ")
        elif text.startswith("data: "):
            yield kind, json.loads(text.removeprefix("data: "))


@asynccontextmanager
async def viewer(dashboard: Client, run_id: str = RUN) -> AsyncIterator[Events]:
    url = f"{dashboard.url}/api/runs/{run_id}/live"
    async with asyncio.timeout(LIMIT_S), dashboard.session.get(url) as answer:
        assert answer.status == 200 and answer.headers["Content-Type"].startswith("text/event-stream")
        yield events_of(answer)


async def next_of(events: Events, kind: str) -> dict[str, Any]:
    """Return the next event of a kind."""
    async for found, content in events:
        if found == kind:
            return content
    raise AssertionError(f"the stream ended without {kind}")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live, "EVERY_S", 0.05)
    monkeypatch.setattr(live, "ENDED_EVERY_S", 0.05)
    monkeypatch.setattr("penstock.dashboard.opened_run.STATUS_AGE_S", 0.0)


async def test_a_viewer_sees_the_run_and_then_what_is_added(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path, status="running")
    async with dashboard_of(tmp_path) as dashboard, viewer(dashboard) as events:
        assert (await next_of(events, "status"))["progress"]["step"] == 20
        assert {line["decider"] for line in (await next_of(events, "decisions"))["decisions"]} >= {"tuning"}
        assert [line["step"] for line in (await next_of(events, "step"))["steps"]] == [20]
        write_lines(run_dir / "metrics.jsonl", [step_line(21), step_line(22)])
        steps: list[float] = []
        while len(steps) < 2:
            steps += [line["step"] for line in (await next_of(events, "step"))["steps"]]
        assert steps == [21, 22]
        write_lines(run_dir / "timeline.jsonl", [decision("trigger", BEGUN + 99, "count")])
        while "trigger" not in {each["decider"] for each in (await next_of(events, "decisions"))["decisions"]}:
            pass


async def test_the_end_of_a_run_is_told_once(tmp_path: Path) -> None:
    run_dir = make_run(tmp_path, status="running")
    async with dashboard_of(tmp_path) as dashboard, viewer(dashboard) as events:
        await next_of(events, "status")
        state = json.loads((run_dir / "state.json").read_text())
        write_json(run_dir / "state.json", state | {"status": "completed", "ended": BEGUN + 40})
        assert await next_of(events, "ended") == {"status": "completed"}
        write_json(run_dir / "state.json", state | {"status": "running"})
        while (await next_of(events, "status"))["status"] != "running":
            pass
        run_dir.rename(tmp_path.parent / f"{tmp_path.name}-gone")  # at once, and not file by file
        assert await next_of(events, "ended") == {"status": "gone"}
        with pytest.raises(AssertionError, match="the stream ended"):
            await next_of(events, "status")


async def test_many_viewers_share_one_look_at_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    num_reads = 0
    read = OpenedRun.status

    def counted(run: OpenedRun) -> dict[str, Any]:
        nonlocal num_reads
        num_reads += 1
        return read(run)

    monkeypatch.setattr(OpenedRun, "status", counted)
    monkeypatch.setattr(live, "EVERY_S", 3600.0)
    make_run(tmp_path, status="running")
    async with dashboard_of(tmp_path) as dashboard:
        async with viewer(dashboard) as one:
            await next_of(one, "status")
            async with viewer(dashboard) as two, viewer(dashboard) as three:
                await asyncio.gather(next_of(two, "status"), next_of(three, "status"))
        assert num_reads <= 6


async def test_a_run_without_viewers_is_released(tmp_path: Path) -> None:
    run_dir, opened = make_run(tmp_path, status="running"), OpenedRuns()
    hubs = live.Hubs(opened)
    async with asyncio.timeout(LIMIT_S):
        async with aclosing(hubs.stream(run_dir)) as one, aclosing(hubs.stream(run_dir)) as other:
            assert [await anext(one), await anext(other)] == 2 * [live.OPENING]
            assert hubs.num_runs == 1
        assert hubs.num_runs == 0
    opened.close()


async def test_a_viewer_that_does_not_read_is_dropped(tmp_path: Path) -> None:
    run = OpenedRun(make_run(tmp_path, status="running"), Requests())
    hub = live.Hub(run)
    slow, quick = hub.stream(), hub.stream()
    async with asyncio.timeout(LIMIT_S):
        for stream in (slow, quick):
            assert await anext(stream) == live.OPENING
        while not hub.num_dropped:
            await anext(quick)
        left = [part async for part in slow]
    assert len(left) <= live.MOST_WAITING + 4 and hub.num_dropped == 1  # with the four about the run as it is
    hub.end()
    async with asyncio.timeout(LIMIT_S):
        async for _ in quick:
            pass
    assert run.num_viewers == 0
    run.close()


async def test_a_damaged_status_ends_no_stream(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def damaged(_: StatusReader) -> dict[str, Any]:
        raise ValueError("a file is damaged")

    run_dir = make_run(tmp_path, status="running")
    async with dashboard_of(tmp_path) as dashboard, viewer(dashboard) as events:
        await next_of(events, "status")
        (run_dir / "played.json").write_text('{"held_out": 3, "groups_dropped": 1}')
        (run_dir / "config.yaml").write_text("env: {mixture: 3}\n")
        assert (await dashboard.get(f"runs/{RUN}/status"))["environment"] is None
        with monkeypatch.context() as patched:
            patched.setattr(StatusReader, "read", damaged)
            await dashboard.get(f"runs/{RUN}/status", status=500)
        (run_dir / "config.yaml").write_text("trainer: {steps: 55}\n")
        while (await next_of(events, "status"))["progress"]["steps"] != 55:
            pass
