"""`penstock runs`: the run directories are the registry; of each, only the ends of its files are read."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer
import yaml
from rich.table import Table
from rich.text import Text

from penstock.cli.console import open_console
from penstock.cli.refusal import refuse
from penstock.observe import jsonl
from penstock.observe.progress import clock, number
from penstock.observe.summary import wall_seconds
from penstock.supervisor.procfs import is_suspended
from penstock.supervisor.record import LAST_EVENT_BYTES, holds_run, is_supervised, owner_of, read_state, unreadable
from penstock.supervisor.states import RunState

RUNS_DIR = Path("runs")
"""Where commands look, unless told otherwise."""
LOST = "lost"
"""Shown of a run that has not ended, and whose supervisor has."""
SUSPENDED = "suspended"
"""Shown of a run whose supervisor lives, and was stopped as a job is (SIGSTOP)."""
UNKNOWN = "unknown"
"""Shown of a run whose state is none of ours."""
UNREADABLE = "unreadable"
"""Shown of a run whose state is damaged or gone."""
ENDED = {LOST, UNKNOWN, UNREADABLE} | {state.value for state in RunState if state.is_final}
TAIL_BYTES = 32_768
NUM_NAMED = 5
"""Of the runs that a name may mean."""
STYLES = {
    "running": "green",
    "starting": "yellow",
    "stopping": "yellow",
    "completed": "cyan",
    "failed": "red",
    LOST: "red",
    SUSPENDED: "yellow",
    UNREADABLE: "red",
}

_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""Ten times as fast, where PyYAML was built with it."""


def find(runs_dir: Path, name: str) -> Path:
    """The directory of a run whose state can be read. Exits with an error otherwise, as `find_directory` does."""
    run_dir = find_directory(runs_dir, name)
    if read_state(run_dir) is None:
        raise typer.Exit(refuse(unreadable(run_dir), 1))
    return run_dir


def find_directory(runs_dir: Path, name: str) -> Path:
    """The directory of a run, by its id, the unique beginning of one, or its path. Exits with an error otherwise."""
    if not name.strip():
        raise typer.Exit(refuse("the name of the run is empty: `penstock runs` lists them", 1))
    if holds_run(Path(name)):
        return Path(name).resolve()
    known = [path for path in directories(runs_dir) if path.name.startswith(name)]
    found = [path for path in known if path.name == name] or known
    if not found:
        raise typer.Exit(refuse(f"no run named {name} in {runs_dir}: `penstock runs` lists them", 1))
    if len(found) > 1:
        names = [path.name for path in found[:NUM_NAMED]] + ["..."] * (len(found) > NUM_NAMED)
        raise typer.Exit(refuse(f"{len(found)} runs begin with {name}: {', '.join(names)}", 1))
    return found[0]


def directories(runs_dir: Path) -> list[Path]:
    """Those that hold runs, in the order of their names."""
    return sorted(path for path in runs_dir.glob("*") if holds_run(path))


def known_runs(runs_dir: Path) -> list[dict[str, Any]]:
    """What is known of each run, the newest first."""
    found = [describe(run_dir) for run_dir in directories(runs_dir)]
    return sorted(found, key=lambda row: (row["started"] or 0.0, row["run_id"]), reverse=True)


def describe(run_dir: Path) -> dict[str, Any]:
    """A run in short, with keys that stay."""
    lines = jsonl.tail(run_dir / "metrics.jsonl", TAIL_BYTES)
    return in_short(run_dir, read_state(run_dir) or {}, config_of(run_dir), lines)


def in_short(
    run_dir: Path, state: Mapping[str, Any], config: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]
) -> dict[str, Any]:
    """A run in short, from its state, its settings and the last lines of its metrics."""
    status = status_of(run_dir, state)
    rewards = [line["reward"] for line in lines if line.get("reward") is not None]
    return {
        "run_id": run_dir.name,
        "status": status,
        "environment": " + ".join(config.get("env", {}).get("mixture", {})) or config.get("env", {}).get("name"),
        "started": state.get("started"),
        "wall_seconds": wall_seconds(state, now=_last_sign(run_dir, lines) if status == LOST else time.time()),
        "step": lines[-1].get("step", 0) if lines else 0,
        "steps": _num_steps(config, lines),
        "reward": rewards[-1] if rewards else None,
        "run_dir": str(run_dir.absolute()),
    }


def _last_sign(run_dir: Path, lines: Sequence[Mapping[str, Any]]) -> float | None:
    """When the run last wrote an event or a line of its metrics (seconds since the epoch)."""
    latest = [*lines[-1:], *jsonl.tail(run_dir / "events.jsonl", LAST_EVENT_BYTES)[-1:]]
    return max((line["time"] for line in latest), default=None)


def _num_steps(config: Mapping[str, Any], lines: Sequence[Mapping[str, Any]]) -> int | None:
    """Optimizer steps, or tasks of a run that only plays, as soon as it has told of them."""
    if config.get("pipeline", "train") == "train":
        steps: int | None = config.get("trainer", {}).get("steps")
        return steps
    return lines[-1].get("tasks") if lines else None


def status_of(run_dir: Path, state: Mapping[str, Any]) -> str:
    """The recorded state, unless there is none to read, or whoever keeps it is gone or cannot act."""
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
    """What to type for it, from here."""
    return run_dir.name if run_dir.parent == RUNS_DIR.absolute() else str(run_dir)


def has_ended(status: str) -> bool:
    """Whether nothing will change any more, unless somebody does something about it."""
    return status in ENDED


def config_of(run_dir: Path) -> dict[str, Any]:
    """The settings of a run as they were written down; none if they cannot be read."""
    try:
        document = yaml.load((run_dir / "config.yaml").read_text(), Loader=_Loader)
    except (OSError, UnicodeDecodeError, yaml.YAMLError):
        return {}
    return document if isinstance(document, dict) else {}


def show(runs_dir: Path, *, as_json: bool) -> None:
    """Print them all."""
    runs = known_runs(runs_dir)
    if as_json:
        print(jsonl.dumps(runs))
    elif runs:
        open_console().print(table(runs))
    else:
        print(f"no runs in {runs_dir}: `penstock train CONFIG` starts one")


def table(runs: list[dict[str, Any]]) -> Table:
    """For people."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in ("run", "status", "environment", "started"):
        table.add_column(name, no_wrap=True)
    for name in ("wall time", "step", "reward"):
        table.add_column(name, no_wrap=True, justify="right")
    for run in runs:
        steps = f"{run['step']}/{run['steps'] or '?'}" if run["step"] else "-"
        table.add_row(
            run["run_id"],
            Text(run["status"], STYLES.get(run["status"], "")),
            run["environment"] or "-",
            moment(run["started"]),
            clock(run["wall_seconds"]),
            steps,
            number(run["reward"]),
        )
    return table


def moment(seconds: float | None) -> str:
    """A time since the epoch, as the clock on the wall shows it."""
    return "-" if seconds is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
