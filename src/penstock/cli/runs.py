"""`penstock runs`: list the runs, and find the run that a command names."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, NoReturn

import typer
from rich.table import Table
from rich.text import Text

from penstock.cli.refusal import refuse
from penstock.observe import jsonl
from penstock.observe.tables import clock, listing, number, open_console
from penstock.observe.visible_text import visible_json
from penstock.own_files import Foreign, check_own_directory, is_ours
from penstock.supervisor.known_runs import LOST, SUSPENDED, UNREADABLE, directories, known_runs
from penstock.supervisor.run_journal import holds_run, read_state, unreadable

NUM_NAMED = 5
"""Number of runs listed if a name is ambiguous."""
STYLES = {"running": "green", "completed": "cyan"} | dict.fromkeys(("starting", "stopping", SUSPENDED), "yellow")
STYLES |= dict.fromkeys(("failed", LOST, UNREADABLE), "red")


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
        environment = f"{run['environment'] or '-'}{' (simulated)' if run['simulated'] else ''}"
        table.add_row(run["run_id"], status, environment, *times, steps, number(run["reward"]))
    return table


def moment(seconds: float | None) -> str:
    """Return a time since the epoch as local date and time."""
    return "-" if seconds is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))
