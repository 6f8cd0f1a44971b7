"""`penstock dashboard`: show runs in the browser. Exit codes: 0 ended by a signal, 1 cannot serve."""

from __future__ import annotations

import asyncio
import os
import selectors
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import quote

from penstock.cli.refusal import REFUSAL, Refused, refusing
from penstock.cli.runs import find_directory
from penstock.dashboard.demo import demo_run
from penstock.dashboard.served_runs import ServedRuns
from penstock.dashboard.serving import listener_of, serve
from penstock.observe.visible_text import visible

VARIABLE = "PENSTOCK_DASHBOARD_KEY"
"""Environment variable with the key."""
MIN_KEY_LENGTH = 16
"""Characters of a key that a user chose."""
START_S = 30.0
"""Seconds for a dashboard beside a run to start, while the run goes on."""
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
    page = page_of(named[0].name) if len(named) == 1 else ""
    listener = listener_of(host, port)

    def announce(url: str) -> None:
        print(f"dashboard: {url}{page}", flush=True)

    asyncio.run(serve(runs, host, listener, key=key, announce=announce, with_stdin=with_stdin))
    return 0


@contextmanager
def beside_run(run_dir: Path) -> Iterator[None]:
    """Show a run, and the others of its directory, in the browser during the body, from a process of its own. It also
    ends if this process is killed. The body does not wait for it: its address is printed once it serves, and a warning
    if it does not start."""
    words = [sys.executable, "-P", "-m", "penstock.cli.main", "dashboard", "--with-stdin"]
    with subprocess.Popen(
        [*words, "--runs-dir", str(run_dir.parent)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as child:
        assert child.stdin is not None
        has_ended = threading.Event()
        teller = threading.Thread(target=tell, args=[child, run_dir.name, has_ended], name="dashboard", daemon=True)
        teller.start()
        try:
            yield
        finally:
            has_ended.set()
            child.stdin.close()
            try:
                child.wait(END_S)
            except subprocess.TimeoutExpired:
                child.kill()
            teller.join(END_S)


def tell(child: subprocess.Popen[str], run_id: str, has_ended: threading.Event) -> None:
    """Print the address of a run once the dashboard serves it, or why it does not start; then what it reports until its
    end. After `has_ended`, neither matters any more."""
    assert child.stdout is not None and child.stderr is not None
    with selectors.DefaultSelector() as ready:
        ready.register(child.stdout, selectors.EVENT_READ)
        line = child.stdout.readline() if ready.select(START_S) else None
    if line and not has_ended.is_set():
        print(f"{line.rstrip()}{page_of(run_id)}", flush=True)
    elif not line and not has_ended.is_set():
        if line is None:
            child.kill()
            reason = f"it has not started within {START_S:g} s"
        else:
            reason = child.stderr.read().strip().rpartition("\n")[2].removeprefix(REFUSAL) or "it ended at once"
        print(visible(f"warning: the run goes on without its dashboard: {reason}"), file=sys.stderr, flush=True)
    for report in child.stderr:
        print(visible(report.rstrip()), file=sys.stderr, flush=True)


def page_of(run_id: str) -> str:
    """Return the part of an address that shows a run."""
    return f"#/{quote(run_id)}/overview"
