"""Run directories for the dashboard, and a client of it."""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import aiohttp

from penstock.dashboard.served_runs import ServedRuns
from penstock.dashboard.serving import listener_of, serving
from penstock.supervisor.procfs import identify

BEGUN = 1_790_000_000.0
RUN = "20260921-120000-aaaa"
KEY = "a-key-that-is-long-enough"


def step_line(step: int, **figures: Any) -> dict[str, Any]:
    """Return a line of metrics.jsonl, as a run with one environment writes it."""
    line = {"step": step, "time": BEGUN + 2.0 * step, "policy_version": step, "reward": step / 100, "episodes": 8}
    totals = {"tokens_generated_total": 1000.0 * step, "trainer_busy_s": 0.5 * step, "generator_busy_s": 1.5 * step}
    wall = {"wall_s": 2.0 * step, "num_trainers": 1, "num_servers": 1, "tokens_trained_total": 500.0 * step}
    return line | totals | wall | {"ledger": {"trained": 8 * step, "ready": 2}, "length_tau": None} | figures


def span(process: str, kind: str, start: float, end: float, version: int = 0) -> dict[str, Any]:
    """Return a span of timeline.jsonl."""
    return {"process": process, "kind": kind, "start": start, "end": end, "policy_version": version}


def decision(decider: str, at: float, reason: str, **inputs: Any) -> dict[str, Any]:
    """Return a decision of timeline.jsonl."""
    return {"kind": "decision", "decider": decider, "time": at, "reason": reason, **inputs}


def write_lines(path: Path, records: Iterable[dict[str, Any]]) -> None:
    """Append records."""
    with path.open("a") as file:
        file.writelines(json.dumps(record) + "\n" for record in records)


def make_run(
    runs_dir: Path, run_id: str = RUN, *, num_steps: int = 20, status: str = "completed", **facts: Any
) -> Path:
    """Write the files of a run, and return its directory."""
    run_dir = runs_dir / run_id
    (run_dir / "logs").mkdir(parents=True)
    owner = identify(os.getpid())
    assert owner is not None
    state = {"format": 3, "run_id": run_id, "lives": 1, "lived_s": 0.0, "status": status, "error": None}
    state |= {"born": BEGUN, "started": BEGUN, "ended": None, "processes": {}, "leftovers": []}
    state |= {"supervisor": {"host": "here", **asdict(owner)}, "runtime_dir": str(runs_dir / "runtime")}
    if status in ("completed", "failed", "stopped"):
        state["ended"] = BEGUN + 2.0 * num_steps
    (run_dir / "state.json").write_text(json.dumps(state | facts))
    (run_dir / "config.yaml").write_text(
        f"pipeline: train\ntrainer:\n  steps: {num_steps}\nenv:\n  name: guess_number\nscheduler:\n  max_staleness: 3\n"
    )
    write_lines(run_dir / "metrics.jsonl", (step_line(step) for step in range(1, num_steps + 1)))
    write_lines(run_dir / "events.jsonl", events(num_steps))
    write_lines(run_dir / "timeline.jsonl", timeline(num_steps))
    (run_dir / "logs" / "trainer-0.log").write_text("".join(f"line {number}\n" for number in range(500)))
    return run_dir


def events(num_steps: int) -> list[dict[str, Any]]:
    """Return the events of a run."""
    end = BEGUN + 2.0 * num_steps
    found = {"tasks": 4, "reward": 0.25, "pass_at": {"1": 0.25}, "tags": {"single_turn": {"reward": 0.25}}}
    return [
        {"time": BEGUN, "event": "state", "from": "pending", "to": "starting", "actor": "supervisor", "reason": ""},
        {"time": BEGUN + 1, "event": "evaluation", "when": "before", "step": 0, **found},
        {"time": BEGUN + 3, "event": "process", "name": "env-0", "state": "backoff", "decision": "after 1 s"},
        {"time": BEGUN + 4, "event": "alarm", "reason": "answers are cut"},
        {
            "time": BEGUN + 5,
            "event": "adapted",
            "policy_version": 2,
            "reason": "a shorter queue is faster",
            "changes": {"scheduler.max_staleness": [1, 2]},
            "prediction": {"gain": 1.2},
        },
        {"time": BEGUN + 6, "event": "judged", "promised": 1.2, "measured": 1.1, "reason": "kept: 1.1 times the speed"},
        {"time": end - 1, "event": "checkpoint", "step": num_steps, "path": f"checkpoints/step_{num_steps}"},
        {"time": end, "event": "state", "from": "running", "to": "completed", "actor": "supervisor", "reason": ""},
    ]


def timeline(num_steps: int) -> Iterable[dict[str, Any]]:
    """Yield spans and decisions of each step."""
    for step in range(num_steps):
        at = BEGUN + 2.0 * step
        yield decision("admission", at, "1 of 4 wait", group=step, task=f"letters/{step}")
        yield decision("dispatch", at + 0.1, "fifo: waited 0.1 s", group=step)
        yield span("rollout-0", "generate", at + 0.2, at + 1.7, step)
        yield span("trainer-0", "train", at + 1.0, at + 1.5, step)
        if step % 10 == 9:
            yield decision("tuning", at + 1.8, "nothing better found")


class Client:
    """Asks a dashboard."""

    def __init__(self, session: aiohttp.ClientSession, url: str, key: str) -> None:
        self.session, self.url, self.key = session, url, key
        self.origin = url

    async def get(self, path: str, *, status: int = 200, **headers: str) -> Any:
        """Return the answer of a route below /api, in JSON."""
        async with self.session.get(f"{self.url}/api/{path}", headers=headers) as answer:
            assert answer.status == status, await answer.text()
            return await answer.json()

    async def text(self, path: str) -> str:
        """Return the answer of a route below /api, as text."""
        async with self.session.get(f"{self.url}/api/{path}") as answer:
            assert answer.status == 200, await answer.text()
            return await answer.text()


@asynccontextmanager
async def dashboard_of(runs_dir: Path, *named: Path, host: str = "127.0.0.1") -> AsyncIterator[Client]:
    """Serve the runs of a directory, over a real socket, and yield a client."""
    listener = listener_of(host, 0)
    async with serving(ServedRuns(runs_dir, named), host, listener, KEY):
        address = f"http://127.0.0.1:{listener.getsockname()[1]}"
        jar = aiohttp.CookieJar(unsafe=True)  # cookies of an address instead of a name
        async with aiohttp.ClientSession(cookie_jar=jar, timeout=aiohttp.ClientTimeout(total=60)) as session:
            yield Client(session, address, KEY)
