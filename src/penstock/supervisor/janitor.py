"""The janitor: a process that cleans up after a killed supervisor, even after `kill -9` (standard library only).

It reads orders from a pipe that only the supervisor can write to. The order `watch` names the session of a new child;
`forget` says that the child is gone, so that another process may get its pid. The order `release` ends the janitor.
End-of-file without `release` means that the supervisor is gone. Then the janitor kills every process that carries the
run's nonce or lives in a watched session, including stopped processes and `setsid` escapes. It removes the runtime
directory and marks the run failed. It has a session of its own and ignores the signals of a terminal.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

from penstock.own_files import remove_tree
from penstock.supervisor import procfs
from penstock.supervisor.ownership import Owned, owning
from penstock.supervisor.run_journal import close_journal

NONCE = "PENSTOCK_NONCE"
RUNTIME_DIR = "PENSTOCK_RUNTIME_DIR"
OWNING_S = 1.0
"""Wait for the run's lock: a dying supervisor may still hold it for a moment after its pipe is closed."""


class Janitor:
    """The supervisor's end of the pipe."""

    def __init__(self, run_dir: Path, runtime_dir: Path, nonce: str, *, keeps_journal: bool) -> None:
        """`keeps_journal`: the janitor also marks the run failed when its supervisor is gone. Otherwise it only kills
        the processes on this machine and removes the runtime directory."""
        root = Path(__file__).parents[2]
        start = f"import sys; sys.path.insert(0, {str(root)!r}); from penstock.supervisor.janitor import main; main()"
        with (run_dir / "logs" / "janitor.log").open("ab") as log:
            command = [sys.executable, "-I", "-S", "-c", start]
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=log, stderr=log, env={}, start_new_session=True
            )
        recorded = {"run_dir": str(run_dir.absolute())} if keeps_journal else {}
        self.order(**recorded, runtime_dir=str(runtime_dir), nonce=nonce)

    def release(self) -> None:
        """End the janitor, because the run has ended in order."""
        self.order(release=True)
        try:
            self.process.communicate(timeout=2.0)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()

    def order(self, **order: object) -> None:
        """Send an order."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # if the janitor was killed, the run continues without it
            os.write(self.process.stdin.fileno(), json.dumps(order).encode() + b"\n")


def main() -> None:
    """Follow orders until `release` or end-of-file. Clean up after end-of-file."""
    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(signum, signal.SIG_IGN)
    sessions: set[int] = set()
    orders = (json.loads(line) for line in sys.stdin.buffer)
    run = next(orders, None)
    if run is None:
        return
    for order in orders:
        if "release" in order:
            return
        if "watch" in order:
            sessions.add(order["watch"])
        sessions.discard(order.get("forget", 0))
    runtime_dir = Path(run["runtime_dir"])
    leftovers = [f"process {stat.pid}" for stat in kill(runtime_dir, run["nonce"], sessions)]
    if "run_dir" not in run:
        remove_tree(runtime_dir)
        return
    with suppress(Owned), owning(Path(run["run_dir"]), within_s=OWNING_S) as run_dir:  # a resumed run is left alone
        leftovers += [] if remove_tree(runtime_dir) else [str(runtime_dir)]
        close_journal(run_dir, leftovers)


def marks_of(nonce: str, runtime_dir: Path) -> set[bytes]:
    """Return the environment entries of every process that was started for this runtime directory. On a cluster a run
    has several runtime directories, and one machine may hold more than one. So the nonce alone is not enough."""
    return {f"{NONCE}={nonce}".encode(), f"{RUNTIME_DIR}={runtime_dir}".encode()}


def kill(runtime_dir: Path, nonce: str, sessions: set[int]) -> list[procfs.Stat]:
    """Kill the processes with this mark or in these sessions, and their descendants. Returns the survivors."""
    marks = marks_of(nonce, runtime_dir)

    def belongs(stat: procfs.Stat) -> bool:
        return stat.session in sessions or marks <= set(procfs.environment(stat.pid))

    return procfs.kill_family(belongs)
