"""Faults, injected at moments of a run.

One run meets one fault at one victim, in one phase after the other. A phase is recognised by the process in which it
shows (`WITNESS`), which then strikes the victim: itself, or another one by its pid. That a phase was struck is a file
in the run directory. So each phase is struck once, however often processes restart and the run is resumed.
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from penstock.control import bus
from penstock.observe import jsonl

PLAN = "PENSTOCK_TEST_FAULT"
"""Environment variable: victim and fault."""
STOP_ASKED = "stop-asked"
BACK_S = 120.0
"""Until a victim is expected to be there again."""
AWAY_S = 1.0
"""Seconds until a stopped supervisor is continued, or its disk is freed."""
DISK_BYTES = 1024
"""What a file may hold on a full disk: a heartbeat or an error's message, and no data."""
NUM_LOST = 6
"""Frames that a victim loses; as many after them are sent twice."""
RESEND_S = 0.2


class Fault(StrEnum):
    KILL = "SIGKILL"
    HANG = "SIGSTOP"
    TERMINATE = "SIGTERM"
    LEAVE = "exit 0"
    FULL_DISK = "full disk"
    LOST_MESSAGES = "lost messages"


class Phase(StrEnum):
    """In the order in which a run meets them."""

    STARTING = "starting"
    RUNNING = "running"
    PUBLISHING = "publishing"
    CHECKPOINTING = "checkpointing"
    STOPPING = "stopping"


SIGNALS = {
    Fault.KILL: signal.SIGKILL,
    Fault.HANG: signal.SIGSTOP,
    Fault.TERMINATE: signal.SIGTERM,
    Fault.LEAVE: signal.SIGUSR2,
}
ENDING = frozenset({Fault.KILL, Fault.TERMINATE, Fault.LEAVE})
"""Of a supervisor: with it ends this life of the run."""
CONTROLLER, ROLLOUT, TRAINER, ENV, SUPERVISOR = "controller", "rollout-0", "trainer-0", "env-0", "supervisor"
VICTIMS = (CONTROLLER, ROLLOUT, TRAINER, ENV, SUPERVISOR)
ITSELF: Mapping[str, str] = {victim: victim for victim in VICTIMS}
WITNESS: Mapping[Phase, Mapping[str, str]] = {
    Phase.STARTING: ITSELF | {SUPERVISOR: ENV},
    Phase.RUNNING: ITSELF | {SUPERVISOR: ENV},
    Phase.PUBLISHING: dict.fromkeys(VICTIMS, TRAINER) | {CONTROLLER: ROLLOUT, ROLLOUT: ROLLOUT},
    Phase.CHECKPOINTING: dict.fromkeys(VICTIMS, TRAINER),
    Phase.STOPPING: ITSELF | {SUPERVISOR: CONTROLLER},
}
"""Who sees that it is time to strike a victim. The trainer does in the middle of writing a file, the rollout server
between two versions, the others between two messages."""


@dataclass(frozen=True, slots=True)
class Plan:
    """Which fault whom."""

    victim: str
    fault: Fault

    @classmethod
    def of_this_process(cls) -> Plan:
        """Of the run that it belongs to."""
        victim, _, fault = os.environ[PLAN].partition(":")
        return cls(victim, Fault(fault))

    @property
    def environment(self) -> dict[str, str]:
        return {PLAN: f"{self.victim}:{self.fault}"}


class Injector:
    """What a process of the run knows of the plan."""

    def __init__(self, name: str, run_dir: Path, plan: Plan) -> None:
        self._name, self._run_dir = name, run_dir
        self._victim, self._fault = plan.victim, plan.fault
        self._supervisor = os.getppid()
        self._lock, self._num_calls = threading.Lock(), itertools.count(1)
        self._frames_left, self._num_struck = 0, len(self._struck)

    @classmethod
    def of_this_process(cls) -> Injector:
        """Of the words it was started with. It can be asked to leave from now on."""
        options = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
        signal.signal(signal.SIGUSR2, lambda *_: os._exit(0))
        return cls(options["--name"], Path(options["--run-dir"]), Plan.of_this_process())

    @property
    def _struck(self) -> list[Phase]:
        return struck_phases(self._run_dir)

    @property
    def _next_phase(self) -> Phase | None:
        left = [phase for phase in Phase if phase not in self._struck]
        return left[0] if left else None

    def _is_due(self, phase: Phase) -> bool:
        """Whether this process is to strike now, if this is a moment of `phase`."""
        if phase is Phase.STOPPING and not (self._run_dir / STOP_ASKED).exists():
            return False
        is_next = self._next_phase is phase and WITNESS[phase][self._victim] == self._name
        is_struck = self._victim == self._name and self._is_doomed(os.getpid())
        return is_next and not is_struck and not self._is_supervisor_doomed()

    def moment(self, phase: Phase, *, nth: int = 1) -> None:
        """This is a moment of `phase`. `nth`: strike no earlier than at this call of all in this process. It may wait
        for the victim: not to be called where an event loop turns that others need."""
        with self._lock:
            if self._is_due(phase) and next(self._num_calls) >= nth and not self._is_busy():
                pid = self._await_victim(phase)
                jsonl.write_json(self._run_dir / f"struck-{phase}", {"pid": pid})
                self._strike(pid, phase)

    def ask_for_stop(self) -> None:
        """Once everything else was met, as people do: by a signal to the supervisor, if it is not ending already."""
        mark = self._run_dir / STOP_ASKED
        is_due = self._next_phase is Phase.STOPPING and not self._is_supervisor_doomed()
        if is_due and not mark.exists() and not self._is_busy():
            self._await_victim(Phase.STOPPING)
            jsonl.write_json(mark, {"pid": self._supervisor})
            os.kill(self._supervisor, signal.SIGTERM)

    def await_end(self) -> None:
        """If this life of the run is to end: until it does. Else it might be complete before the supervisor reacts."""
        while self._is_to_end() and self._state()["status"] in ("starting", "running"):
            time.sleep(0.01)

    def _is_to_end(self) -> bool:
        mark = self._run_dir / STOP_ASKED
        was_asked = mark.exists() and json.loads(mark.read_text()) == {"pid": self._supervisor}
        return was_asked or self._is_supervisor_doomed()

    def _is_supervisor_doomed(self) -> bool:
        """Whether this life's was struck, and ends: in what it still does it is not struck again."""
        return self._victim == SUPERVISOR and self._fault in ENDING and self._is_doomed(self._supervisor)

    def _await_victim(self, phase: Phase) -> int:
        """Until the supervisor holds it for ready, and it is not the one that was struck; returns its pid."""
        if self._victim == SUPERVISOR:
            return self._await_supervisor()
        if self._victim == self._name and phase in (Phase.STARTING, Phase.STOPPING):
            return os.getpid()
        limit = time.monotonic() + BACK_S
        while time.monotonic() < limit:
            state, pid = self._recorded()
            if state == "ready" and not self._is_doomed(pid):
                return pid
            time.sleep(0.01)
        raise TimeoutError(f"{self._victim} is not ready after {BACK_S:g} s")

    def _await_supervisor(self) -> int:
        """Wait until the fault ends, if it is one that ends."""
        while self._fault in (Fault.HANG, Fault.FULL_DISK):
            if all((self._run_dir / f"mended-{phase}").exists() for phase in self._struck):
                break
            time.sleep(0.01)
        return self._supervisor

    def _recorded(self) -> tuple[str, int]:
        """State and pid of the victim."""
        known = self._state()["processes"].get(self._victim, {})
        return known.get("state", "pending"), known.get("pid", 0)

    def _state(self) -> dict[str, Any]:
        """What is recorded of the run."""
        return dict(json.loads((self._run_dir / "state.json").read_text()))

    def _is_busy(self) -> bool:
        """Whether the victim still deals with the strike before, and may need this very process for that: it was asked
        to end and does so, has not lost anything yet, or has not written to its full disk yet."""
        if not self._struck or self._victim == SUPERVISOR:
            return False
        if self._fault is Fault.LOST_MESSAGES:
            return not (self._run_dir / f"lost-{self._struck[-1]}").exists()
        if self._victim == self._name:
            return False
        state, pid = self._recorded()
        notices_late = self._fault in (Fault.TERMINATE, Fault.FULL_DISK)
        return notices_late and state == "ready" and self._is_doomed(pid)

    def _is_doomed(self, pid: int) -> bool:
        """Whether that victim was struck, and does not survive it."""
        struck = [json.loads((self._run_dir / f"struck-{phase}").read_text()) for phase in self._struck]
        return {"pid": pid} in struck and self._fault is not Fault.LOST_MESSAGES

    def _strike(self, pid: int, phase: Phase) -> None:
        if self._fault is Fault.LOST_MESSAGES:
            return  # the victim notices by itself, see `lose`
        if self._fault is Fault.FULL_DISK:
            _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (DISK_BYTES, hard))
        elif self._fault is Fault.LEAVE and pid == os.getpid():
            os._exit(0)
        else:
            os.kill(pid, SIGNALS[self._fault])
        if self._victim == SUPERVISOR:
            threading.Timer(AWAY_S, self._mend, [pid, phase]).start()

    def _mend(self, pid: int, phase: Phase) -> None:
        """Nobody restarts a supervisor: people let it go on. The disk of one that is ending stays full."""
        if self._fault is Fault.HANG:
            os.kill(pid, signal.SIGCONT)
        elif self._fault is Fault.FULL_DISK and phase is not Phase.STOPPING:
            resource.prlimit(pid, resource.RLIMIT_FSIZE, resource.getrlimit(resource.RLIMIT_FSIZE))
        (self._run_dir / f"mended-{phase}").touch()

    def lose(self, frame: bytes) -> list[bytes]:
        """`Fault` of the bus: from each strike on some frames are lost, and some sent twice."""
        if self._fault is not Fault.LOST_MESSAGES or self._victim != self._name:
            return [frame]
        num_struck = len(self._struck)
        if num_struck > self._num_struck:
            self._num_struck, self._frames_left = num_struck, 2 * NUM_LOST
        if not self._frames_left:
            return [frame]
        self._frames_left -= 1
        (self._run_dir / f"lost-{self._struck[-1]}").touch()
        return [] if self._frames_left >= NUM_LOST else [frame, frame]


def struck_phases(run_dir: Path) -> list[Phase]:
    """In which the victim was struck so far."""
    return [phase for phase in Phase if (run_dir / f"struck-{phase}").exists()]


def faulty(endpoint: type[bus.Bus] | type[bus.Peer], injector: Injector) -> Callable[..., bus.Bus | bus.Peer]:
    """Makes endpoints of the bus that lose messages, and are quick to send them again."""

    def make(*args: object, **settings: object) -> bus.Bus | bus.Peer:
        made = endpoint(*args, **settings, fault=injector.lose)  # type: ignore[arg-type]
        made.resend_s = RESEND_S
        return made

    return make
