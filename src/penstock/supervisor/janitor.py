"""The sidecar that outlives the supervisor, so that even `kill -9` of it leaves nothing behind (standard library only).

It reads its orders from a pipe that only the supervisor can write to. `release` sends it home; end-of-file without
that means that the supervisor is gone, however it went: then every process that carries the run's nonce or lives in a
session of one of its children is killed (stopped ones and `setsid` escapes too), the runtime directory removed, and the
run marked failed. It sits in a session of its own, deaf to the signals of a terminal.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from penstock.observe import summary
from penstock.supervisor import procfs
from penstock.supervisor.failure import ExitKind
from penstock.supervisor.ownership import Owned, owning
from penstock.supervisor.record import SUPERVISOR_KILLED, Record
from penstock.supervisor.states import RunState

NONCE = "PENSTOCK_NONCE"
RUNTIME_DIR = "PENSTOCK_RUNTIME_DIR"
ROUNDS = 40
OWNING_S = 1.0
"""The lock of a supervisor that is just dying may be free a moment after its pipe is closed."""


class Janitor:
    """The supervisor's end of the pipe."""

    def __init__(self, *, run_dir: Path, runtime_dir: Path, nonce: str, keeps_record: bool) -> None:
        """`keeps_record`: of the run, which fails when its supervisor is gone. Else only what runs here is ended."""
        root = Path(__file__).parents[2]
        start = f"import sys; sys.path.insert(0, {str(root)!r}); from penstock.supervisor.janitor import main; main()"
        with (run_dir / "logs" / "janitor.log").open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", start],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env={},
                start_new_session=True,
            )
        recorded = {"run_dir": str(run_dir.absolute())} if keeps_record else {}
        self._send({**recorded, "runtime_dir": str(runtime_dir), "nonce": nonce})

    @property
    def pid(self) -> int:
        return self._process.pid

    def watch(self, session: int) -> None:
        """Remember the session of a child that was started."""
        self._send({"watch": session})

    def forget(self, session: int) -> None:
        """The child is gone and its pid may come to mean somebody else."""
        self._send({"forget": session})

    def release(self) -> None:
        """The run has ended in order: nothing is left to do."""
        self._send({"release": True})
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=2.0)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _send(self, order: dict[str, object]) -> None:
        assert self._process.stdin is not None
        try:
            os.write(self._process.stdin.fileno(), json.dumps(order).encode() + b"\n")
        except BrokenPipeError:
            """Somebody killed the janitor; the run itself does not need it."""


def main() -> None:
    """Follow orders until released or abandoned."""
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
    remaining = kill(runtime_dir, run["nonce"], sessions)
    if "run_dir" in run:
        clean(Path(run["run_dir"]), runtime_dir, remaining)
    else:
        shutil.rmtree(runtime_dir, ignore_errors=True)


def marks_of(nonce: str, runtime_dir: Path) -> set[bytes]:
    """What every process has in its environment that was started there; on a cluster a run has several such places, and
    those of one machine are not each other's."""
    return {f"{NONCE}={nonce}".encode(), f"{RUNTIME_DIR}={runtime_dir}".encode()}


def kill(runtime_dir: Path, nonce: str, sessions: set[int]) -> list[procfs.Stat]:
    """End what is marked, and what lives in these sessions. Returns who resisted."""
    marks = marks_of(nonce, runtime_dir)

    def belongs(stat: procfs.Stat) -> bool:
        return stat.session in sessions or marks <= set(procfs.environment(stat.pid))

    return procfs.kill_family(belongs, spare={os.getpid()}, rounds=ROUNDS)


def clean(run_dir: Path, runtime_dir: Path, remaining: Sequence[procfs.Stat]) -> None:
    """Leave nothing of the run but its files, and those in order, unless somebody has resumed it already."""
    with suppress(Owned), owning(run_dir, within_s=OWNING_S):
        shutil.rmtree(runtime_dir, ignore_errors=True)
        left = [f"process {stat.pid}" for stat in remaining] + ([str(runtime_dir)] if runtime_dir.exists() else [])
        close_record(run_dir, left)


def close_record(run_dir: Path, leftovers: list[str]) -> None:
    """Nobody keeps the record of this run any more: bring it to its end. To be called by whoever owns the run."""
    record = Record.load(run_dir)
    record.close_processes(kind=ExitKind.LOST, reason=SUPERVISOR_KILLED)
    if leftovers:
        record.add_leftovers(leftovers)
    if not record.status.is_final:
        record.move(RunState.FAILED, actor="janitor", reason=SUPERVISOR_KILLED)
    summary.write(run_dir)
