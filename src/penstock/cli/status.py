"""`penstock status`: print the status of a run, once or until the run has ended."""

from __future__ import annotations

import fcntl
import time
from pathlib import Path

import typer
from rich.console import Console
from rich.live import Live

from penstock.cli.refusal import refuse
from penstock.cli.status_view import render
from penstock.observe import jsonl
from penstock.observe.tables import open_console
from penstock.observe.visible_text import visible_json
from penstock.own_files import is_ours
from penstock.supervisor.known_runs import config_of, has_ended
from penstock.supervisor.run_status import StatusReader, status

WATCH_EVERY_S = 1.0
STAMP = ".status_answered"
"""File in the run directory with the time of the last answer to a program (seconds since the epoch)."""


def answer(run_dir: Path, *, as_json: bool, watch: bool, force: bool) -> None:
    """Print the status, once or until the run has ended. People always get an answer; programs get one as often as
    `supervisor.status_interval_s` allows. Exits with one error if a file of the run is no plain file, or holds what
    penstock does not write and belongs to another user."""
    try:
        _answer(run_dir, as_json=as_json, watch=watch, force=force)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise typer.Exit(refuse(f"the files of run {run_dir.name} cannot be read: {error}", 1)) from error
    except Exception as error:
        if is_ours(run_dir):
            raise
        reason = f"the files of {run_dir}, the run of another user, are damaged ({type(error).__name__})"
        raise typer.Exit(refuse(f"{reason}: ask its user", 1)) from error


def _answer(run_dir: Path, *, as_json: bool, watch: bool, force: bool) -> None:
    console = open_console()
    is_program = as_json or not console.is_terminal
    interval_s = config_of(run_dir).get("supervisor", {}).get("status_interval_s", 0.0)
    if is_program and is_ours(run_dir) and interval_s > 0:
        wait_s = claim_answer(run_dir, now=time.time(), interval_s=interval_s, force=force)
        if wait_s > 0:
            every = f"once every {interval_s:g} s (supervisor.status_interval_s)"
            message = f"run {run_dir.name} answers programs {every}: ask again in {wait_s:.0f} s, or use --force"
            facts = {"run_id": run_dir.name, "message": message, "next_check_in_seconds": round(wait_s, 1)}
            print(visible_json(jsonl.dumps({"rate_limited": True, **facts})))
            return
    if watch:
        follow(run_dir, console, quiet=as_json)
    document = status(run_dir)
    if as_json:
        print(visible_json(jsonl.dumps(document)))
    else:
        console.print(render(document))


def claim_answer(run_dir: Path, *, now: float, interval_s: float, force: bool = False) -> float:
    """Return 0 if this caller gets an answer, and record its time; otherwise return the seconds until the next answer
    is due. A last answer in the future came from a wrong clock and is ignored."""
    with (run_dir / STAMP).open("a+") as stamp:
        try:
            fcntl.flock(stamp, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:  # another caller is being answered, or a reader of a shared run holds the lock
            return 0.0 if force else interval_s
        stamp.seek(0)
        answered = float(stamp.read() or "-inf")
        if not force and answered <= now < answered + interval_s:
            return answered + interval_s - now
        stamp.truncate(0)
        stamp.write(f"{now}\n")
    return 0.0


def follow(run_dir: Path, console: Console, *, quiet: bool) -> None:
    """Show the status until the run has ended. A terminal is redrawn; other output gets a line when the phase or step
    changes."""
    shown: tuple[str, int] | None = None
    reader = StatusReader(run_dir)
    with Live(console=console, auto_refresh=False, transient=True) as live:
        while not has_ended((document := reader.read())["status"]):
            seen = document["progress"]["phase"], document["progress"]["step"]
            if console.is_terminal:
                live.update(render(document), refresh=True)
            elif not quiet and seen != shown:
                unit, total = document["progress"]["unit"], document["progress"]["steps"]
                console.print(f"{seen[0]}  {unit} {seen[1]}/{total or '?'}")
            shown = seen
            time.sleep(WATCH_EVERY_S)
