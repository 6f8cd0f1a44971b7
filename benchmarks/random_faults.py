"""Faults, put into a process of a real run at a chosen moment."""

from __future__ import annotations

import itertools
import random
import resource
import signal
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from faulty_process import LOSE_S
from watched_run import SUPERVISOR, TimedOut, WatchedRun, Word, wait_for

from penstock.supervisor import procfs
from penstock.supervisor.procfs import Identity

PROCESSES = ("controller", "rollout-0", "trainer-0", "env-0")
WORDS_BYTES = 4096
"""The largest file there is room for on a full disk."""
MOMENT_S = 60.0
"""Within which what a run does again and again begins again."""
STARTING_S = 1.5
"""Within which a process that starts is hit."""
AT_ONCE_S = 0.02
"""Within which a process is hit that has begun something short."""
ENDED_S = 45.0
"""What a stop may take, with processes in it that do not answer."""
RECOVERED_S = 150.0
STEPS_AFTER = 2
"""That a run must take to be known to have recovered."""


class Fault(StrEnum):
    """What goes wrong."""

    KILL = "SIGKILL"
    STOP = "SIGSTOP"
    TERM = "SIGTERM"
    EXIT = "exit 0"
    DISK = "full disk"
    MESSAGES = "lost messages"


class Phase(StrEnum):
    """What the process, or the run, is at."""

    STARTING = "starting"
    RUNNING = "running"
    PUBLISHING = "publishing"
    CHECKPOINTING = "checkpointing"
    STOPPING = "stopping"


CHEAP = ("controller", "env-0")
VICTIMS = (*PROCESSES, SUPERVISOR)
WORDS = {Phase.PUBLISHING: ("Publish", "UpdateWeights"), Phase.CHECKPOINTING: ("SaveCheckpoint",)}
"""Of the witness."""
SIGNALS = {
    Fault.KILL: signal.SIGKILL,
    Fault.STOP: signal.SIGSTOP,
    Fault.TERM: signal.SIGTERM,
    Fault.EXIT: signal.SIGUSR2,
    Fault.MESSAGES: signal.SIGRTMIN,
}
LASTS_S = {Fault.STOP: 2.0, Fault.DISK: 3.0, Fault.MESSAGES: LOSE_S}
"""Seconds until a fault ends. A stopped supervisor is continued, because no process restarts it; other processes
are not."""
DEADLY = {Fault.KILL, Fault.STOP, Fault.TERM, Fault.EXIT}


@dataclass(slots=True, kw_only=True)
class Injection:
    """One fault, as planned, and once it was put in also when and where it really hit."""

    victim: str
    fault: Fault
    aimed: Phase
    hit: Phase | None = None
    time: float = 0.0
    """Seconds since the epoch."""
    pid: int = 0
    recover_s: float | None = None
    """Until the run has every process again and has taken further steps; None if it was at its end."""
    wrong: list[str] = field(default_factory=list)
    """What followed and should not have."""

    @classmethod
    def loads(cls, tree: Mapping[str, Any]) -> Injection:
        """Return it as it was written by `dataclasses.asdict`."""
        hit = Phase(tree["hit"]) if tree["hit"] else None
        return cls(**{**tree, "fault": Fault(tree["fault"]), "aimed": Phase(tree["aimed"]), "hit": hit})

    @property
    def num_faults(self) -> int:
        """How many `inject` puts in: a process is killed before it is hit while it starts."""
        return 2 if self.aimed is Phase.STARTING else 1

    @property
    def is_cheap(self) -> bool:
        """At most a process is restarted that is back within seconds."""
        return self.victim in CHEAP and not self.ends_run

    @property
    def ends_run(self) -> bool:
        """And so another life begins."""
        of_supervisor = self.victim == SUPERVISOR and self.fault in (Fault.KILL, Fault.TERM)
        return of_supervisor or self.aimed is Phase.STOPPING

    @property
    def ends_as(self) -> set[str]:
        """What a run that ends may be then. A supervisor without room cannot write down that it has ended."""
        unwritten = {Fault.KILL: {"failed"}, Fault.DISK: {"stopping"}} if self.victim == SUPERVISOR else {}
        return {"completed", "stopped"} | unwritten.get(self.fault, set())

    @property
    def is_deadly(self) -> bool:
        """A process of the run ends, at the latest when it is known to hang."""
        return self.victim != SUPERVISOR and self.fault in DEADLY

    @property
    def lasts_s(self) -> float:
        """Until it is withdrawn; 0 if it never is."""
        return 0.0 if self.is_deadly else LASTS_S.get(self.fault, 0.0)

    def __str__(self) -> str:
        return f"{self.victim} {self.fault} while {self.hit or self.aimed}"


def matrix() -> list[Injection]:
    """Return all combinations of victim, fault and phase. A supervisor is in its run's phase and sends no messages."""
    processes = itertools.product(PROCESSES, Fault, Phase)
    supervisor = itertools.product((SUPERVISOR,), (Fault.KILL, Fault.STOP, Fault.TERM, Fault.DISK), Phase)
    cells = (Injection(victim=victim, fault=fault, aimed=phase) for victim, fault, phase in (*processes, *supervisor))
    return [cell for cell in cells if not (cell.victim == SUPERVISOR and cell.aimed is Phase.STARTING)]


class RunIsOver(RuntimeError):
    """The run completed before a fault could be put in."""


def inject(run: WatchedRun, injection: Injection, chance: random.Random, done: list[Injection]) -> None:
    """Put `injection` in, and see the run recover. All that were put in are added to `done`: a process that is to be
    hit while it starts is killed before. Raises `TimedOut` if the run does not recover, and `RunIsOver` if it completed
    before the moment for the injection came."""
    try:
        _aim(run, injection, chance, done)
    except TimedOut as error:
        if run.has_completed:
            raise RunIsOver(str(error)) from None
        raise
    done.append(injection)
    _fire(run, injection)
    _see_recovery(run, injection)


def _aim(run: WatchedRun, injection: Injection, chance: random.Random, done: list[Injection]) -> None:
    """Wait until the run is at what `injection` is aimed at."""
    if injection.aimed is Phase.STARTING:
        first = Injection(victim=injection.victim, fault=Fault.KILL, aimed=Phase.RUNNING)
        done.append(first)
        _fire(run, first)
        wait_for(f"{injection.victim} starts again", _is_starting(run, injection.victim, first.pid), seconds=MOMENT_S)
        time.sleep(chance.uniform(0, STARTING_S))
    elif injection.aimed is Phase.STOPPING:
        _signal(run, SUPERVISOR, signal.SIGTERM)
        wait_for("the run is stopping", lambda: run.status != "running", seconds=MOMENT_S)
        time.sleep(chance.uniform(0, AT_ONCE_S))
    elif words := WORDS.get(injection.aimed):
        run.witness.await_begin(words, seconds=MOMENT_S)
        time.sleep(chance.uniform(0, AT_ONCE_S) if injection.aimed is Phase.CHECKPOINTING else 0.0)


def _fire(run: WatchedRun, injection: Injection) -> None:
    """Whatever the victim is at."""
    victim = run.identity(injection.victim)
    if victim is None:
        raise TimedOut(f"{injection.victim} is not there")
    processes = run.state["processes"]
    injection.pid, injection.time = victim.pid, time.time()
    if injection.fault is Fault.DISK:
        _fill_disk(victim)
    else:
        procfs.send(victim, SIGNALS[injection.fault])
        if injection.victim == SUPERVISOR and injection.fault is Fault.STOP:
            threading.Timer(injection.lasts_s, procfs.send, (victim, signal.SIGCONT)).start()
    injection.hit = _phase(run, injection, processes)


def _phase(run: WatchedRun, injection: Injection, processes: Mapping[str, Mapping[str, Any]]) -> Phase:
    """What the victim or the run was really at; `processes` as they were just before. It may publish and save at the
    same time."""
    if processes.get(injection.victim, {}).get("state") == Phase.STARTING:
        return Phase.STARTING
    if injection.aimed is Phase.STOPPING:
        return Phase.STOPPING
    pids = {known["pid"] for known in processes.values() if "pid" in known}
    at = [phase for phase, words in WORDS.items() if run.witness.is_at(words, injection.time, pids)]
    return injection.aimed if injection.aimed in at else next(iter(at), Phase.RUNNING)


def _fill_disk(victim: Identity) -> None:
    """No file grows any more, for a while. There is room for heartbeats and last words: they are kept in memory."""
    _limit_files(victim, WORDS_BYTES)
    threading.Timer(LASTS_S[Fault.DISK], _limit_files, (victim, resource.RLIM_INFINITY)).start()


def _limit_files(victim: Identity, num_bytes: int) -> None:
    try:
        if procfs.is_alive(victim):
            resource.prlimit(victim.pid, resource.RLIMIT_FSIZE, (num_bytes, resource.RLIM_INFINITY))
    except ProcessLookupError:
        """It has just ended."""


def _see_recovery(run: WatchedRun, injection: Injection) -> None:
    """Wait until the run takes further steps or completes. Resume it first if the fault ended it. Raises `TimedOut`."""
    if injection.ends_run:
        status = run.await_end(seconds=ENDED_S)
        injection.wrong += [f"left behind: {left}" for left in run.leftovers()]
        if status not in injection.ends_as:
            injection.wrong.append(f"the run has {status}: {run.state.get('error')}")
        if status == "completed":
            return
        run.resume()
    else:
        time.sleep(injection.lasts_s)
    since = time.time()
    if injection.is_deadly and not injection.ends_run:
        wait_for(f"{injection.victim} ends", lambda: _exit_of(run, injection.pid), seconds=RECOVERED_S)
    wait_for("the run gets on", _gets_on(run, since), seconds=RECOVERED_S)
    if not run.has_completed:
        injection.recover_s = time.time() - injection.time


def _exit_of(run: WatchedRun, pid: int) -> bool:
    return any(exited["pid"] == pid for exited in exits(run))


def exits(run: WatchedRun) -> list[Word]:
    """Ends of processes as the journal has them, with pid, and the state of the run then, or `completed` once its work
    is done."""
    pids: dict[str, int] = {}
    found, status = [], ""
    for event in run.events:
        if event["event"] == "state":
            status = event["to"]
        elif event["event"] == "completed":
            status = event["event"]
        elif event["event"] == "process" and event["state"] == "starting":
            pids[event["name"]] = event["pid"]
        elif event["event"] == "process" and event["state"] == "exited" and "kind" in event:
            found.append({**event, "pid": pids.get(event["name"], 0), "run": status})
    return found


def _gets_on(run: WatchedRun, since: float) -> Callable[[], bool]:
    def gets_on() -> bool:
        if run.has_completed:
            return True
        if run.has_ended:
            raise TimedOut(f"the run has ended, {run.status}: {run.state.get('error')}")
        return run.is_whole and sum(line["time"] > since for line in run.steps[-STEPS_AFTER:]) == STEPS_AFTER

    return gets_on


def _is_starting(run: WatchedRun, name: str, before: int) -> Callable[[], bool]:
    def is_starting() -> bool:
        known = run.process(name)
        return known.get("pid") != before and known.get("state") == "starting"

    return is_starting


def _signal(run: WatchedRun, name: str, signum: int) -> None:
    identity = run.identity(name)
    if identity is not None:
        procfs.send(identity, signum)
