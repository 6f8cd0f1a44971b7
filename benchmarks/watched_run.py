"""A run seen from outside: its processes, its journal, what it is at right now, and what it left behind."""

from __future__ import annotations

import itertools
import json
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from types import TracebackType
from typing import Any, Self

import psutil
from faulty_process import WITNESS
from report import environment

from penstock.observe import jsonl
from penstock.supervisor import procfs
from penstock.supervisor.procfs import Identity
from penstock.supervisor.run_journal import owner_of, read_state
from penstock.supervisor.runtime import runtime_dirs

HERE = Path(__file__).parent
SUPERVISOR = "supervisor"
POLL_S = 0.005
DATAGRAM_BYTES = 1 << 18
GONE_S = 5.0
"""What a run that has ended has until nothing of it is left."""

FINAL = {"completed", "stopped", "failed"}
"""States of a run that has ended in order."""

Word = dict[str, Any]


class TimedOut(RuntimeError):
    """What was waited for did not happen."""


def wait_for(what: str, condition: Callable[[], Any], *, seconds: float) -> Any:
    """The first result of `condition` that is true. Raises `TimedOut`."""
    limit = time.monotonic() + seconds
    while not (result := condition()):
        if time.monotonic() > limit:
            raise TimedOut(f"{what}: not within {seconds:g} s")
        time.sleep(POLL_S)
    return result


def end_earlier(run_dir: Path) -> None:
    """End and remove a run that an interrupted benchmark has left."""
    supervisor = owner_of(read_state(run_dir) or {})
    if supervisor is not None and procfs.is_alive(supervisor):
        procfs.send(supervisor, signal.SIGCONT)
        procfs.send(supervisor, signal.SIGQUIT)
        wait_for(f"{run_dir.name} ends", lambda: not procfs.is_alive(supervisor), seconds=GONE_S)
    shutil.rmtree(run_dir, ignore_errors=True)


class Witness:
    """Hears what the processes of one run are at, as it happens."""

    def __init__(self) -> None:
        self.words: list[Word] = []
        self._directory = TemporaryDirectory(prefix="witness-")
        self.path = str(Path(self._directory.name) / "socket")
        self._channel = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._channel.bind(self.path)
        self._heard = threading.Condition()
        threading.Thread(target=self._listen, daemon=True).start()

    def await_begin(self, what: Sequence[str], *, seconds: float) -> None:
        """Until the next time that one of `what` begins. Raises `TimedOut`."""
        limit = time.monotonic() + seconds
        with self._heard:
            num_known = len(self.words)
            while not any(word["begins"] and word["what"] in what for word in self.words[num_known:]):
                if not self._heard.wait(timeout=max(limit - time.monotonic(), 0.0)):
                    raise TimedOut(f"{' or '.join(what)} does not begin within {seconds:g} s")

    def is_at(self, what: Sequence[str], when: float, pids: Collection[int]) -> bool:
        """Whether one of the processes `pids` had begun one of `what` by `when` (seconds since the epoch), and not
        ended it."""
        latest = {word["what"]: word for word in self.words if word["time"] <= when and word["pid"] in pids}
        return any(latest[each]["begins"] for each in what if each in latest)

    def close(self) -> None:
        self._directory.cleanup()

    def _listen(self) -> None:
        while True:
            word = json.loads(self._channel.recv(DATAGRAM_BYTES))
            with self._heard:
                self.words.append(word)
                self._heard.notify_all()


class WatchedRun:
    """One run, through all its lives; leaving it ends it."""

    def __init__(self, config: Path, runs: Path, run_id: str, settings: Sequence[str]) -> None:
        self.run_dir = runs / run_id
        self.witness = Witness()
        self._words = [str(config), f"runs_dir={runs}", f"run_id={run_id}", *settings]
        self._log = runs / f"{run_id}.log"
        self._events = jsonl.Follower(self.run_dir / "events.jsonl")
        self._metrics = jsonl.Follower(self.run_dir / "metrics.jsonl")
        self._known_events: list[Word] = []
        self._known_steps: list[Word] = []
        self._timeline = jsonl.Follower(self.run_dir / "timeline.jsonl")
        self._known_timeline: list[Word] = []
        self._command: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self._start("train", *self._words)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()
        self.witness.close()

    def end(self) -> None:
        """Kill whatever still runs."""
        if self._command is not None and self._command.poll() is None:
            self._command.send_signal(signal.SIGCONT)
            self._command.send_signal(signal.SIGQUIT)
            self._command.wait()

    def resume(self) -> None:
        """Begin another life."""
        self._start("resume", str(self.run_dir))

    def await_end(self, *, seconds: float) -> str:
        """Of this life; returns the run's state then. Raises `TimedOut`."""
        assert self._command is not None
        wait_for("the command ends", lambda: self._command is None or self._command.poll() is not None, seconds=seconds)
        with suppress(TimedOut):
            wait_for("a final state", lambda: self.status in FINAL, seconds=GONE_S)
        return self.status

    @property
    def has_ended(self) -> bool:
        return self._command is not None and self._command.poll() is not None

    @property
    def has_completed(self) -> bool:
        """Whether the run has taken all its steps and ended in order."""
        return self.has_ended and self.status == "completed"

    @property
    def state(self) -> Word:
        return read_state(self.run_dir) or {}

    @property
    def status(self) -> str:
        return str(self.state.get("status", ""))

    def process(self, name: str) -> Word:
        """What is known of the latest process of that name."""
        return dict(self.state.get("processes", {}).get(name, {}))

    def identity(self, name: str) -> Identity | None:
        """None before it is started."""
        known = self.process(name)
        return owner_of(self.state if name == SUPERVISOR else {"supervisor": known})

    @property
    def events(self) -> list[Word]:
        self._known_events += self._events.read_new()
        return self._known_events

    @property
    def steps(self) -> list[Word]:
        self._known_steps += self._metrics.read_new()
        return self._known_steps

    @property
    def timeline(self) -> list[Word]:
        self._known_timeline += self._timeline.read_new()
        return self._known_timeline

    def decision_after(self, when: float, decider: str) -> Word | None:
        """The first one that it made after `when`."""
        made = (line for line in reversed(self.timeline) if line.get("decider") == decider)
        return next(reversed([*itertools.takewhile(lambda line: line["time"] > when, made)]), None)

    @property
    def step(self) -> int:
        """The furthest optimizer step of any lineage."""
        return max((line["step"] for line in self.steps), default=0)

    def event_after(self, when: float, **facts: Any) -> Word | None:
        """The first event after `when` with these facts."""
        found = (event for event in self.events if event["time"] > when and facts.items() <= event.items())
        return next(found, None)

    @property
    def is_whole(self) -> bool:
        """Every process is ready."""
        state = self.state
        processes = state.get("processes", {}).values()
        return state.get("status") == "running" and all(known["state"] == "ready" for known in processes)

    def leftovers(self) -> list[str]:
        """Processes and files in memory that are there though the run has ended."""
        limit = time.monotonic() + GONE_S
        while (left := self._living()) and time.monotonic() < limit:
            time.sleep(POLL_S)
        return left

    def cpu_s(self) -> float:
        """Processor time of the supervisor and its janitor so far."""
        supervisor = psutil.Process(self.state["supervisor"]["pid"])
        family = [supervisor, *(child for child in supervisor.children() if "janitor" in " ".join(child.cmdline()))]
        return float(sum(sum(process.cpu_times()[:2]) for process in family))

    def _living(self) -> list[str]:
        found = list(map(str, runtime_dirs(self.run_dir.name)))
        for process in psutil.process_iter():
            try:
                if process.environ().get("PENSTOCK_RUN_ID") == self.run_dir.name or str(self.run_dir) in (
                    process.cmdline()
                ):
                    found.append(f"{process.pid} {' '.join(process.cmdline())}")
            except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                continue
        return found

    def _start(self, *words: str) -> None:
        with self._log.open("ab") as log:
            self._command = subprocess.Popen(
                [sys.executable, str(HERE / "faulty_command.py"), *words],
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment(**{WITNESS: self.witness.path}),
            )
