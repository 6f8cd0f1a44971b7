"""`penstock runs | status | stop`: the run directories are the registry, their `state.json` is asked."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

import typer

from penstock.observe import jsonl
from penstock.supervisor.procfs import is_alive, send
from penstock.supervisor.record import owner_of, read_state
from penstock.supervisor.states import RunState

STOP_S = 30.0


def find(runs_dir: Path, name: str) -> Path:
    """The directory of a run."""
    known = sorted(path for path in runs_dir.glob("*/") if path.name.startswith(name))
    candidates = [Path(name)] if (Path(name) / "state.json").exists() else known
    exact = [path for path in candidates if path.name == name]
    found = exact or candidates
    if len(found) != 1:
        what = "no run" if not found else f"{len(found)} runs"
        typer.echo(f"error: {what} named {name} in {runs_dir}: `penstock runs` lists them", err=True)
        raise typer.Exit(1)
    return found[0]


def status_of(run_dir: Path) -> str:
    """The recorded state, unless whoever kept it has vanished without a word."""
    state = read_state(run_dir)
    if state is None:
        return "unknown"
    owner = owner_of(state)
    if not RunState(state["status"]).is_final and owner and not is_alive(owner):
        return f"lost (was {state['status']})"
    return str(state["status"])


def listing(runs_dir: Path) -> list[str]:
    """A line per run, the newest last."""
    found = sorted(path.parent for path in runs_dir.glob("*/state.json"))
    return [f"{run_dir.name}  {status_of(run_dir):<10} {_last_step(run_dir)}".rstrip() for run_dir in found]


def describe(run_dir: Path) -> list[str]:
    """A run and its processes, for people."""
    state: dict[str, Any] = read_state(run_dir) or {}
    lines = [f"run      {run_dir.name}", f"status   {status_of(run_dir)}", f"files    {run_dir}"]
    if step := _last_step(run_dir):
        lines.append(f"training {step}")
    for name, process in state.get("processes", {}).items():
        reason = f" ({process['reason']})" if process.get("reason") else ""
        lines.append(f"  {name:<14} pid {process.get('pid', '-'):<8} {process['state']}{reason}")
    if state.get("error"):
        lines.append(f"error: {state['error']}")
    return lines


def stop(run_dir: Path, *, now: bool) -> str:
    """Ask the run's supervisor to end it, and wait until it has."""
    state = read_state(run_dir) or {}
    owner = owner_of(state)
    if owner is None or not send(owner, signal.SIGQUIT if now else signal.SIGTERM):
        return f"run {run_dir.name} is not running: {status_of(run_dir)}"
    limit = time.monotonic() + STOP_S
    while is_alive(owner) and not RunState((read_state(run_dir) or state)["status"]).is_final:
        if time.monotonic() > limit:
            return f"run {run_dir.name} is still {status_of(run_dir)} after {STOP_S:g} s; `--now` kills it"
        time.sleep(0.05)
    return f"run {run_dir.name} is {status_of(run_dir)}"


def _last_step(run_dir: Path) -> str:
    lines = jsonl.read(run_dir / "metrics.jsonl")
    if not lines:
        return ""
    reward = lines[-1].get("reward")
    return f"step {lines[-1]['step']}" + (f"  reward {reward:.3f}" if reward is not None else "")
