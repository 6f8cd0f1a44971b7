"""The runs of a directory, and the status of each. The run directories are the registry; only the ends of their files
are read."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from penstock.observe import jsonl
from penstock.observe.summary import wall_seconds
from penstock.own_files import is_ours, read_document
from penstock.supervisor.procfs import is_suspended
from penstock.supervisor.run_journal import LAST_EVENT_BYTES, holds_run, is_supervised, owner_of, read_state
from penstock.supervisor.states import RunState

RUNS_DIR = Path("runs")
"""Default directory of runs."""
LOST = "lost"
"""Status shown for a run that has not ended although its supervisor has."""
SUSPENDED = "suspended"
"""Status shown for a run with a living supervisor that was suspended like a shell job (SIGSTOP)."""
UNKNOWN = "unknown"
"""Status shown for a run with a state that this version does not know."""
UNREADABLE = "unreadable"
"""Status shown for a run with a damaged or missing state."""
ENDED = {LOST, UNKNOWN, UNREADABLE} | {state.value for state in RunState if state.is_final}
TAIL_BYTES = 32_768
SECTIONS = ("env", "trainer", "supervisor")
"""Sections of the settings that the commands read."""
LONG_NUMBER = re.compile(r"[-+0-9a-fA-FxX_:.]{100,}")
MAX_DEPTH = 100
"""Most levels of the settings of a run."""

_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The C loader, ten times as fast, where PyYAML was built with it."""


def directories(runs_dir: Path) -> list[Path]:
    """Return the directories that hold runs of ours, in the order of their names."""
    return sorted(path for path in runs_dir.glob("*") if is_ours(path) and is_ours(path.resolve()) and holds_run(path))


def known_runs(runs_dir: Path) -> list[dict[str, Any]]:
    """Return a summary of each run, the newest first."""
    found = [describe(run_dir) for run_dir in directories(runs_dir)]
    return sorted(found, key=lambda row: (row["started"] or 0.0, row["run_id"]), reverse=True)


def describe(run_dir: Path) -> dict[str, Any]:
    """Return the summary of a run; its keys are stable."""
    lines = jsonl.tail(run_dir / "metrics.jsonl", TAIL_BYTES)
    return short_status(run_dir, read_state(run_dir) or {}, config_of(run_dir), lines)


def short_status(
    run_dir: Path, state: Mapping[str, Any], config: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """Return the summary of a run from its state, its settings and the last lines of its metrics."""
    status, env = status_of(run_dir, state), config.get("env", {})
    rewards = [line["reward"] for line in lines if isinstance(line.get("reward"), int | float)]
    mixture = env.get("mixture")
    return {
        "run_id": run_dir.name,
        "status": status,
        "environment": " + ".join(mixture if isinstance(mixture, dict) else ()) or env.get("name"),
        "pipeline": config.get("pipeline", "train"),
        "simulated": state.get("simulated"),
        "started": state.get("started"),
        "wall_seconds": wall_seconds(state, now=_last_sign(run_dir, lines) if status == LOST else time.time()),
        "step": lines[-1].get("step", 0) if lines else 0,
        "steps": _num_steps(config, lines),
        "reward": rewards[-1] if rewards else None,
        "run_dir": str(run_dir.absolute()),
    }


def _last_sign(run_dir: Path, lines: Sequence[Mapping[str, Any]]) -> float | None:
    """Return when the run last wrote an event or a metrics line (seconds since the epoch); None if it never did."""
    latest = [*lines[-1:], *jsonl.tail(run_dir / "events.jsonl", LAST_EVENT_BYTES)[-1:]]
    return max((line["time"] for line in latest), default=None)


def _num_steps(config: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> int | None:
    """Return the number of optimizer steps. For a run that does not train, return the number of tasks, or None until it
    is recorded."""
    if config.get("pipeline", "train") != "train":
        return lines[-1].get("tasks") if lines else None
    steps: int | None = config.get("trainer", {}).get("steps")
    return steps


def status_of(run_dir: Path, state: Mapping[str, Any]) -> str:
    """Return the status of a run: the recorded state, unless the state is unreadable or the supervisor is dead or
    suspended."""
    if not state:
        return UNREADABLE
    try:
        status = RunState(state.get("status", ""))
    except ValueError:
        return UNKNOWN
    owner = owner_of(state)
    if status.is_final or owner is None:
        return status.value
    if not is_supervised(run_dir, owner):
        return LOST
    return SUSPENDED if is_suspended(owner) else status.value


def name_of(run_dir: Path) -> str:
    """Return the name that a command needs for the run, in the working directory."""
    return run_dir.name if run_dir.parent == RUNS_DIR.absolute() else str(run_dir)


def has_ended(status: str) -> bool:
    """Return whether a run with this status stays as it is until a user acts."""
    return status in ENDED


def config_of(run_dir: Path) -> dict[str, Any]:
    """Return the settings of a run as they were written; empty if they cannot be read, or no run wrote them."""
    try:
        text = read_document(run_dir / "config.yaml")
        document = yaml.load(text, Loader=_Loader) if _is_flat(text) else None
    except (OSError, yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, ArithmeticError):
        return {}
    if not isinstance(document, dict) or not all(isinstance(document.get(name, {}), dict) for name in SECTIONS):
        return {}
    return document


def _is_flat(text: bytes) -> bool:
    """Return whether a YAML text has few levels, no aliases, no tags and no long numbers. Many levels crash the C
    loader, aliases make large values of short texts, a tag makes a number of any text, and long numbers take long. A
    run writes none of them."""
    depth = 0
    for event in yaml.parse(text, Loader=_Loader):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH or isinstance(event, yaml.AliasEvent):
            return False
        if isinstance(event, yaml.ScalarEvent) and (event.tag or LONG_NUMBER.fullmatch(event.value)):
            return False
    return True
