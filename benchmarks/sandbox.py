"""What a sandbox costs, and what is left of it when the processes that use it are killed.

`start_ms`: from `open_box` to a box that answers. `exec_overhead_ms`: a run of `true` in an open box, minus the same
started as an ordinary child process. `one_program_ms`: a box for one program and its end. `left_after_*`: processes of
a box, a daemon among them, that live a second after a kill -9 of the worker that opened it, of the worker's parent, or
of both. Medians; the backend that is in force here.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

from report import Benchmark, arguments, publish

from penstock.runtime import frames
from penstock.runtime.child_process import ChildProcess
from penstock.runtime.frames import Frames
from penstock.sandbox import confinement, open_box, python, run

BENCHMARK = Benchmark(
    name="sandbox",
    measures=("sandbox",),
    figures=(
        "start_ms",
        "exec_overhead_ms",
        "one_program_ms",
        "left_after_worker",
        "left_after_supervisor",
        "left_after_both",
    ),
)
BOXES, RUNS = 40, 200
END_S = 1.0
DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        os.execvp("sleep", ["sleep", sys.argv[1]])
    os._exit(0)
time.sleep(600)
"""


class Worker:
    """A worker with a box, in which a program and its daemon run."""

    def answer(self, request: Frames) -> Frames:
        self._box = open_box()
        self._program = self._box.start(python("-S", "-c", DAEMON, bytes(request[0]).decode()))
        return [b"started"]


def supervise(mark: str) -> None:
    """Be the worker's parent: start it, say its pid once its daemon runs, and wait to be killed."""
    worker = ChildProcess("sandbox:Worker")
    frames.send(worker.pipe, [mark.encode()])
    frames.receive(worker.pipe)
    await_count(mark, 1)
    print(worker.pid, flush=True)
    time.sleep(600)


def num_left(mark: str) -> int:
    """Return how many processes carry the mark in their command line, the parent of the worker aside."""
    found = 0
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        found += mark.encode() in words and b"supervise" not in words
    return found


def await_count(mark: str, least: int) -> None:
    limit = time.monotonic() + 30
    while num_left(mark) < least:
        if time.monotonic() > limit:
            sys.exit("the daemon in the box does not start")
        time.sleep(0.01)


def left_after(who: str, *, within_s: float = END_S) -> int:
    """Kill the worker, its parent or both. Return how many processes of the box are left after `within_s` seconds."""
    mark = f"36{time.monotonic_ns()}"
    words = [sys.executable, str(Path(__file__).resolve()), "supervise", mark]
    with subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True) as supervisor:
        assert supervisor.stdout is not None
        worker = int(supervisor.stdout.readline())
        for pid in {"worker": [worker], "supervisor": [supervisor.pid], "both": [supervisor.pid, worker]}[who]:
            os.kill(pid, signal.SIGKILL)
        limit = time.monotonic() + within_s
        while (left := num_left(mark)) and time.monotonic() < limit:
            time.sleep(0.01)
        supervisor.kill()
    return left


def seconds_of_start() -> float:
    started = time.perf_counter()
    with open_box():
        return time.perf_counter() - started


def seconds_of_exec(num_runs: int) -> float:
    """Return the difference, measured in turns, because the machine's speed changes."""
    differences = []
    with open_box() as box:
        for _ in range(num_runs):
            started = time.perf_counter()
            box.run(["true"])
            between = time.perf_counter()
            subprocess.run(["true"], check=True)
            differences.append(between - started - (time.perf_counter() - between))
    return median(differences)


def seconds_of_program() -> float:
    started = time.perf_counter()
    run(["true"])
    return time.perf_counter() - started


def main() -> None:
    if sys.argv[1:2] == ["supervise"]:
        supervise(sys.argv[2])
    options = arguments(__doc__ or "")
    num_boxes, num_runs = (10, 40) if options.quick else (BOXES, RUNS)
    print(f"backend {confinement()}")
    figures: dict[str, float] = {
        "start_ms": 1000 * median(seconds_of_start() for _ in range(num_boxes)),
        "exec_overhead_ms": 1000 * seconds_of_exec(num_runs),
        "one_program_ms": 1000 * median(seconds_of_program() for _ in range(num_boxes)),
    }
    figures |= {f"left_after_{who}": left_after(who) for who in ("worker", "supervisor", "both")}
    publish(BENCHMARK, figures, options.json)


if __name__ == "__main__":
    main()
