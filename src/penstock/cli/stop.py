"""`penstock stop`: ask a run's supervisor to end the run, from any shell, and wait until it has ended."""

from __future__ import annotations

import signal
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.cli.refusal import Refused, refusing
from penstock.config import SupervisorConfig
from penstock.observe.tables import open_console
from penstock.observe.visible_text import visible
from penstock.supervisor.known_runs import (
    LOST,
    SUSPENDED,
    UNKNOWN,
    UNREADABLE,
    config_of,
    has_ended,
    name_of,
    status_of,
)
from penstock.supervisor.procfs import Identity, is_alive, send
from penstock.supervisor.run_journal import owner_of, read_state, unreadable
from penstock.supervisor.runtime import close_abandoned, remove_orphans_of

MARGIN_S = 60.0
"""Seconds to wait beyond the grace period of the processes, for the rest of an optimizer step and a checkpoint, the
summary and the pictures."""
NOW_S = 10.0
"""Seconds for a supervisor to kill all processes, and again for the supervisor to die."""
LOOK_EVERY_S = 0.05


@refusing
def stop(run_dir: Path, *, now: bool) -> int:
    """Stop a run and return the exit code: 1 if the run could not be ended."""
    state = read_state(run_dir) or {}
    status, run = status_of(run_dir, state), f"run {run_dir.name}"
    if status in (UNKNOWN, UNREADABLE):
        raise Refused(unreadable(run_dir))
    if status == LOST:
        return clean_up(run_dir, state)
    if has_ended(status):
        print(f"{run} has ended already: {status}")
        return 0
    owner = owner_of(state)
    if owner is None:
        raise Refused(f"the supervisor of {run} is not recorded: press Ctrl-C in the terminal that started the run")
    if not owner.is_here:
        host = state["supervisor"].get("host")
        raise Refused(f"{run} is supervised by process {owner.pid} on {host}: stop it on that machine")
    if now:
        kill(run_dir, owner)
        return conclude(run_dir)
    if status == SUSPENDED:
        remedies = f"`kill -CONT {owner.pid}`, or `penstock stop {name_of(run_dir)} --now`"
        raise Refused(f"{run} cannot stop: its supervisor (process {owner.pid}) is suspended: {remedies}")
    if send(owner, signal.SIGTERM):
        limit_s = config_of(run_dir).get("supervisor", {}).get("grace_s", SupervisorConfig().grace_s) + MARGIN_S
        if not wait(run_dir, owner, limit_s):
            raise Refused(f"{run} has not ended after {limit_s:g} s: `penstock stop {name_of(run_dir)} --now` kills it")
    return conclude(run_dir)


def kill(run_dir: Path, supervisor: Identity) -> None:
    """Make the supervisor kill all processes, even if it is suspended. If it does not, kill the supervisor; its janitor
    then kills the processes."""
    if not send(supervisor, signal.SIGQUIT):
        return
    send(supervisor, signal.SIGCONT)
    if not wait(run_dir, supervisor, NOW_S):
        send(supervisor, signal.SIGKILL)
        wait(run_dir, supervisor, NOW_S)


def wait(run_dir: Path, supervisor: Identity, limit_s: float) -> bool:
    """Wait until the run and its supervisor have ended, so that the run can be resumed at once. Print the processes
    that are still running. Return False if the run has not ended after `limit_s`."""
    console, limit, printed = open_console(stderr=True), time.monotonic() + limit_s, ""
    with console.status("stopping") as spinner:
        while state := read_state(run_dir):
            is_over = has_ended(status_of(run_dir, state))
            if is_over and not is_alive(supervisor):
                break
            if time.monotonic() > limit:
                return is_over
            running = [name for name, each in state["processes"].items() if each["state"] not in ("exited", "fatal")]
            if (line := f"stopping: waiting for {', '.join(running) or 'its supervisor'}") != printed:
                printed = line
                spinner.update(line)
                if not console.is_terminal:
                    console.print(line)
            time.sleep(LOOK_EVERY_S)
    return True


def conclude(run_dir: Path) -> int:
    """Print how the run ended and how to resume it; return the exit code."""
    state = read_state(run_dir) or {}
    status = status_of(run_dir, state)
    if status == LOST:
        return clean_up(run_dir, state)
    error = str(state.get("error") or "").partition("\n")[0]
    print(visible(f"run {run_dir.name} is {status}" + (f": {error}" if error else "")))
    if left := state.get("leftovers"):
        print(visible(f"left behind: {', '.join(left)}; `penstock doctor` shows more"))
    if status != "completed":
        tell_how_to_go_on(run_dir, state)
    return 0


def clean_up(run_dir: Path, state: dict[str, Any]) -> int:
    """End the remaining processes of a run with a dead supervisor, record its end, and return the exit code."""
    owner = owner_of(state)
    assert owner is not None, "a run without an owner is not known to be lost"
    left = remove_orphans_of(run_dir)
    close_abandoned(run_dir, owner, left)
    if left:
        raise Refused(f"the supervisor of run {run_dir.name} is dead, and this cannot be removed: {', '.join(left)}")
    print(f"the supervisor of run {run_dir.name} had died; its leftovers are removed, and the run is marked failed")
    tell_how_to_go_on(run_dir, state)
    return 0


def tell_how_to_go_on(run_dir: Path, state: Mapping[str, Any]) -> None:
    if state.get("simulated"):
        print("it was simulated: run `penstock simulate` again")
    else:
        print(f"continue it with: penstock resume {name_of(run_dir)}")
