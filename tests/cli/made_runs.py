"""Run directories as the supervisor and the controller would have left them, and the command that looks at them."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path
from typing import Any

import yaml
from typer.testing import CliRunner, Result

from penstock.cli.main import app
from penstock.observe import jsonl
from penstock.supervisor.procfs import Identity, identify


def penstock(*words: object) -> Result:
    return CliRunner().invoke(app, [str(word) for word in words])


def owner(*, alive: bool) -> Identity:
    """This very process, or one that had its pid before."""
    found = identify(os.getpid())
    assert found
    return found if alive else dataclasses.replace(found, start_ticks=found.start_ticks - 5)


def make_run(
    run_dir: Path,
    status: str,
    *,
    alive: bool = True,
    error: str | None = None,
    started: float | None = None,
    processes: dict[str, Any] | None = None,
    settings: dict[str, Any] | None = None,
) -> Path:
    """A run whose supervisor lives, or does not."""
    (run_dir / "logs").mkdir(parents=True)
    state = {
        "run_id": run_dir.name,
        "status": status,
        "error": error,
        "supervisor": dataclasses.asdict(owner(alive=alive)),
        "runtime_dir": str(run_dir / "runtime"),
        "started": started or time.time() - 60.0,
        "ended": time.time() if status in ("completed", "failed", "stopped") else None,
        "processes": processes or {},
        "leftovers": [],
    }
    jsonl.write_json(run_dir / "state.json", state)
    (run_dir / "config.yaml").write_text(yaml.safe_dump({"trainer": {"steps": 9}, **(settings or {})}))
    note(run_dir, "state", **{"from": "pending"}, to=status, actor="supervisor", reason=error or "")
    return run_dir


def note(run_dir: Path, event: str, **facts: Any) -> None:
    jsonl.append(run_dir / "events.jsonl", {"time": time.time(), "event": event, **facts})


def take_step(run_dir: Path, step: int, **facts: Any) -> None:
    line = {
        "step": step,
        "time": time.time() - 10.0 + step,
        "wall_s": float(step),
        "policy_version": step,
        "reward": 0.5,
        **facts,
    }
    jsonl.append(run_dir / "metrics.jsonl", line)


def decide(run_dir: Path, decider: str, reason: str, moment: float, **inputs: Any) -> None:
    line = {"kind": "decision", "decider": decider, "time": moment, "reason": reason, **inputs}
    jsonl.append(run_dir / "timeline.jsonl", line)
