"""`penstock stop`: ask a run's supervisor to end it, from any shell, and wait until it has."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

from penstock.cli.console import open_console
from penstock.cli.refusal import refuse
from penstock.cli.runs import LOST, SUSPENDED, UNKNOWN, UNREADABLE, config_of, has_ended, name_of, status_of
from penstock.config import SupervisorConfig
from penstock.supervisor import orphans
from penstock.supervisor.procfs import Identity, send
from penstock.supervisor.record import owner_of, read_state, unreadable

MARGIN_S = 60.0
"""Beyond the grace of its processes: what is left of an optimizer step and a checkpoint, the summary, the pictures."""
NOW_S = 10.0
"""For a supervisor to kill everything, and again for it to die."""
LOOK_EVERY_S = 0.05


def stop(run_dir: Path, *, now: bool) -> int:
    """Returns the exit code: 1 if the run could not be ended."""
    state = read_state(run_dir) or {}
    status = status_of(run_dir, state)
    if status in (UNKNOWN, UNREADABLE):
        return refuse(unreadable(run_dir), 1)
    if status == LOST:
        return clean_up(run_dir, state)
    if has_ended(status):
        print(f"run {run_dir.name} has ended already: {status}")
        return 0
    owner = owner_of(state)
    if owner is None:
        return refuse(f"run {run_dir.name} does not say who supervises it: press Ctrl-C where it was started", 1)
    if not owner.is_here:
        host = state["supervisor"].get("host")
        return refuse(f"run {run_dir.name} is supervised by process {owner.pid} on {host}: stop it there", 1)
    if now:
        kill(run_dir, owner)
        return conclude(run_dir)
    if status == SUSPENDED:
        return refuse(
            f"run {run_dir.name} cannot be stopped cleanly: its supervisor (process {owner.pid}) is suspended: "
            f"`kill -CONT {owner.pid}`, or `penstock stop {name_of(run_dir)} --now`",
            1,
        )
    if send(owner, signal.SIGTERM):
        limit_s = config_of(run_dir).get("supervisor", {}).get("grace_s", SupervisorConfig().grace_s) + MARGIN_S
        if not wait(run_dir, limit_s):
            return refuse(f"run {run_dir.name} has not ended after {limit_s:g} s; `--now` kills it", 1)
    return conclude(run_dir)


def kill(run_dir: Path, supervisor: Identity) -> None:
    """Have the supervisor kill everything, even if it is suspended; if it does not, kill it, and its janitor does."""
    if not send(supervisor, signal.SIGQUIT):
        return
    send(supervisor, signal.SIGCONT)
    if not wait(run_dir, NOW_S):
        send(supervisor, signal.SIGKILL)
        wait(run_dir, NOW_S)


def wait(run_dir: Path, limit_s: float) -> bool:
    """Until it has ended, telling who it waits for. False if that takes too long."""
    console, limit, told = open_console(stderr=True), time.monotonic() + limit_s, ""
    with console.status("stopping") as spinner:
        while (state := read_state(run_dir)) and not has_ended(status_of(run_dir, state)):
            if time.monotonic() > limit:
                return False
            if (doing := progress(state)) != told:
                told = doing
                spinner.update(doing)
                if not console.is_terminal:
                    console.print(doing)
            time.sleep(LOOK_EVERY_S)
    return True


def progress(state: dict[str, Any]) -> str:
    """Who is waited for."""
    waiting = [name for name, process in state["processes"].items() if process["state"] not in ("exited", "fatal")]
    return f"stopping: waiting for {', '.join(waiting) or 'its supervisor'}"


def conclude(run_dir: Path) -> int:
    """Say how it ended, and how it goes on."""
    state = read_state(run_dir) or {}
    status = status_of(run_dir, state)
    if status == LOST:
        return clean_up(run_dir, state)
    error = str(state.get("error") or "").partition("\n")[0]
    print(f"run {run_dir.name} is {status}" + (f": {error}" if error else ""))
    if left := state.get("leftovers"):
        print(f"left behind: {', '.join(left)}; `penstock doctor` knows more")
    if status != "completed":
        print(f"go on with: penstock resume {name_of(run_dir)}")
    return 0


def clean_up(run_dir: Path, state: dict[str, Any]) -> int:
    """The supervisor is dead: end what is left of the run, and say so in its record."""
    owner = owner_of(state)
    assert owner is not None, "a run without an owner is not known to be lost"
    left = orphans.remove_of_run(run_dir)
    orphans.close_record(run_dir, owner, left)
    if left:
        return refuse(f"the supervisor of run {run_dir.name} is dead, and this resisted: {', '.join(left)}", 1)
    print(f"the supervisor of run {run_dir.name} had died; what was left of the run is gone, and it is marked failed")
    print(f"go on with: penstock resume {name_of(run_dir)}")
    return 0
