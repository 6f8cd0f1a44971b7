"""`penstock dashboard`: show runs in the browser. Exit codes: 0 ended by a signal, 1 cannot serve."""

from __future__ import annotations

import asyncio
import os
import selectors
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from penstock.cli.refusal import Refused, refusing
from penstock.cli.runs import find_directory
from penstock.dashboard.demo import demo_run
from penstock.dashboard.served_runs import ServedRuns
from penstock.dashboard.serving import listener_of, serve

VARIABLE = "PENSTOCK_DASHBOARD_KEY"
"""Environment variable with the key."""
MIN_KEY_LENGTH = 16
"""Characters of a key that a user chose."""
START_S = 30.0
"""Seconds for a dashboard beside a run to start."""
END_S = 5.0
"""Seconds for it to end."""


@refusing
def dashboard(
    names: Sequence[str], *, host: str, port: int | None, demo: bool, runs_dir: Path, with_stdin: bool
) -> int:
    """Serve the dashboard until a signal, and return the exit code."""
    if demo:
        with demo_run() as recorded:
            return show([recorded], host=host, port=port, runs_dir=recorded.parent, with_stdin=with_stdin)
    named = [find_directory(runs_dir, name, shared=True) for name in names]
    return show(named, host=host, port=port, runs_dir=runs_dir, with_stdin=with_stdin)


def show(named: Sequence[Path], *, host: str, port: int | None, runs_dir: Path, with_stdin: bool) -> int:
    """Serve the runs of a directory, and those that were named, until a signal; return the exit code. Raises
    `Refused`."""
    key = os.environ.get(VARIABLE) or None
    if key is not None and len(key) < MIN_KEY_LENGTH:
        raise Refused(f"{VARIABLE} has {len(key)} characters: give it {MIN_KEY_LENGTH} at least")
    if len({run_dir.name for run_dir in named}) < len(named):
        raise Refused("two of the runs have directories of the same name: show them one after the other")
    runs = ServedRuns(runs_dir.absolute(), named)
    page = f"#/{quote(named[0].name)}/overview" if len(named) == 1 else ""
    listener = listener_of(host, port)

    def announce(url: str) -> None:
        print(f"dashboard: {url}{page}", flush=True)

    asyncio.run(serve(runs, host, listener, key=key, announce=announce, with_stdin=with_stdin))
    return 0


@contextmanager
def beside_run(runs_dir: Path) -> Iterator[None]:
    """Show the runs of a directory in the browser during the body, from a process of its own. It also ends if this
    process is killed. Raises `Refused` if it does not start."""
    words = [sys.executable, "-P", "-m", "penstock.cli.main", "dashboard", "--with-stdin", "--runs-dir", str(runs_dir)]
    with subprocess.Popen(
        words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
    ) as child:
        assert child.stdin is not None and child.stdout is not None
        try:
            with selectors.DefaultSelector() as ready:
                ready.register(child.stdout, selectors.EVENT_READ)
                line = child.stdout.readline() if ready.select(START_S) else ""
            if not line:
                raise Refused("the dashboard does not start: leave out --dashboard, or see `penstock dashboard`")
            print(line, end="", flush=True)
            yield
        finally:
            child.stdin.close()
            try:
                child.wait(END_S)
            except subprocess.TimeoutExpired:
                child.kill()
