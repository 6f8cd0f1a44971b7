"""`penstock runs`: list the runs. The run directories are the registry; only the ends of their files are read."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

import typer
import yaml
from rich.table import Table
from rich.text import Text

from penstock.cli.refusal import refuse
from penstock.observe import jsonl
from penstock.observe.summary import wall_seconds
from penstock.observe.tables import clock, listing, number, open_console
from penstock.observe.visible_text import visible_json
from penstock.own_files import Foreign, check_own_directory, is_ours, read_document
from penstock.supervisor.procfs import is_suspended
from penstock.supervisor.run_journal import LAST_EVENT_BYTES, holds_run, is_supervised, owner_of, read_state, unreadable
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
NUM_NAMED = 5
"""Number of runs listed if a name is ambiguous."""
STYLES = {"running": "green", "completed": "cyan"} | dict.fromkeys(("starting", "stopping", SUSPENDED), "yellow")
STYLES |= dict.fromkeys(("failed", LOST, UNREADABLE), "red")

_Loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
"""The C loader, ten times as fast, where PyYAML was built with it."""


def find(runs_dir: Path, name: str, *, shared: bool = False) -> Path:
    """Return the directory of a run with a readable state. Exits with an error otherwise, as `find_directory` does."""
    run_dir = find_directory(runs_dir, name, shared=shared)
    return run_dir if read_state(run_dir) is not None else _exit(unreadable(run_dir))


def find_directory(runs_dir: Path, name: str, *, shared: bool = False) -> Path:
    """Return the directory of a run, found by its id, the unique beginning of an id, or its path. Exits with an error
    otherwise. The run must be ours, unless it may be `shared`: then its path may name the run of another user."""
    if not name.strip():
        _exit("the name of the run is empty: `penstock runs` lists them")
    if holds_run(Path(name)):
        run_dir = Path(name).resolve()
        if not shared and not is_ours(run_dir):
            _exit(
                f"{run_dir} is the run of another user: `penstock status` and `penstock logs` show it, if it is shared"
            )
        return run_dir if shared else _closed(run_dir)
    known = [path for path in directories(runs_dir) if path.name.startswith(name)]
    found = [path for path in known if path.name == name] or known
    if not found:
        _exit(f"no run named {name} in {runs_dir}: `penstock runs` lists them")
    if len(found) > 1:
        names = [path.name for path in found[:NUM_NAMED]] + ["..."] * (len(found) > NUM_NAMED)
        _exit(f"{len(found)} runs begin with {name}: {', '.join(names)}")
    run_dir = found[0].resolve() if found[0].is_symlink() else found[0]
    return run_dir if shared else _closed(run_dir)


def _closed(run_dir: Path) -> Path:
    """Return the directory of a run of ours. Exits with an error if other users could have written its files."""
    try:
        check_own_directory(run_dir)
    except Foreign as error:
        _exit(str(error))
    return run_dir


def _exit(reason: str) -> NoReturn:
    raise typer.Exit(refuse(reason, 1))


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
    rewards = [line["reward"] for line in lines if line.get("reward") is not None]
    return {
        "run_id": run_dir.name,
        "status": status,
        "environment": " + ".join(env.get("mixture", {})) or env.get("name"),
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


def show(runs_dir: Path, *, as_json: bool) -> None:
    """Print all runs."""
    runs = known_runs(runs_dir)
    if as_json:
        print(visible_json(jsonl.dumps(runs)))
    elif runs:
        open_console().print(table(runs))
    else:
        print(f"no runs in {runs_dir}: `penstock train CONFIG` starts one")


def table(runs: list[dict[str, Any]]) -> Table:
    """Return the runs as a table."""
    table = listing(("run", "status", "environment", "started"), ("wall time", "step", "reward"))
    for run in runs:
        status = Text(run["status"], STYLES.get(run["status"], ""))
        steps = f"{run['step']}/{run['steps'] or '?'}" if run["step"] else "-"
        times = (moment(run["started"]), clock(run["wall_seconds"]))
        table.add_row(run["run_id"], status, run["environment"] or "-", *times, steps, number(run["reward"]))
    return table


def moment(seconds: float | None) -> str:
    """Return a time since the epoch as local date and time."""
    return "-" if seconds is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
