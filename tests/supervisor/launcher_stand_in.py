"""A launcher without processes, for a supervisor on the virtual clock: faults that take minutes cost milliseconds."""

from __future__ import annotations

import asyncio
import itertools
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from types import SimpleNamespace

import pytest

from penstock.config import SupervisorConfig
from penstock.observe import jsonl
from penstock.ports.process_launcher import Beat, End, Look, ProcessSpec, Report
from penstock.supervisor import process_monitor, supervisor
from penstock.supervisor.run_journal import RunJournal
from penstock.supervisor.supervisor import Outcome, Supervisor

BEAT_S, READY_S, DRAIN_S, STEP_S = 0.5, 2.0, 1.0, 1.0
"""Between two heartbeats; from start to readiness; from SIGTERM to the end; of one step of the run's work."""
NO_ROOM = "OSError: [Errno 28] No space left on device"
MACHINE_GONE = "its machine is gone"


class Fault(StrEnum):
    """What happens to a process."""

    KILL = "SIGKILL"
    HANG = "SIGSTOP"
    STUCK = "no progress"
    TERMINATE = "SIGTERM"
    LEAVE = "exit 0"
    FULL_DISK = "full disk"
    LOSE_MACHINE = "machine lost"


@dataclass(frozen=True, slots=True)
class Strike:
    """One fault, `at` seconds after the start of the run. `again`: also each later process of that name, when it is as
    old as this one was."""

    victim: str
    fault: Fault
    at: float
    again: bool = False


@dataclass(eq=False)
class FakeProcess:
    """A process that exists in the stand-in alone."""

    spec: ProcessSpec
    pid: int
    born: float
    end: End | None = None
    stopped_at: float | None = None
    """Since then it neither beats nor hears."""
    is_stuck: bool = False
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    signals: list[tuple[str, int]] = field(default_factory=list)
    """(name, signal) of all processes, in the order in which they were sent."""

    @property
    def facts(self) -> Mapping[str, int]:
        return {"pid": self.pid}

    @property
    def is_ready(self) -> bool:
        return self.stopped_at is None and asyncio.get_running_loop().time() >= self.born + READY_S

    async def probe(self) -> str | None:
        return None if self.is_ready else "it is not ready yet"

    async def look(self) -> Look:
        until = asyncio.get_running_loop().time() if self.stopped_at is None else self.stopped_at
        number = int((until - self.born) / BEAT_S)
        beat = Beat(time=number * BEAT_S, progress=0 if self.is_stuck else number, doing="Step")
        return Look(beat=beat, report=self.end.report if self.end else None)

    async def signal(self, signum: int) -> None:
        self.signals.append((self.spec.name, signum))
        if signum == signal.SIGKILL:
            self.exit(-signal.SIGKILL)
        elif signum == signal.SIGTERM and self.stopped_at is None:
            asyncio.get_running_loop().call_later(DRAIN_S, self._drained)

    def _drained(self) -> None:
        if self.stopped_at is None:
            self.exit(0)

    async def wait(self) -> End:
        await self.ended.wait()
        assert self.end is not None
        return self.end

    def exit(self, returncode: int | None, report: str = "") -> None:
        """End, once. `returncode`: None if the machine is gone, and with it the code."""
        if self.end is None:
            now = asyncio.get_running_loop().time()
            said = Report(time=now, message=report) if report else None
            self.end = End(returncode=returncode, report=said, lost="" if returncode is not None else MACHINE_GONE)
            self.ended.set()


class LauncherStandIn:
    """`ports.Launcher`. The processes work together: a step is made while all are ready, the last one completes the
    run."""

    def __init__(self, run_dir: Path, names: Sequence[str], strikes: Sequence[Strike], *, num_steps: int) -> None:
        self.all: list[FakeProcess] = []
        self.signals: list[tuple[str, int]] = []
        """(name, signal) in the order in which they were sent."""
        self.num_done = 0
        self.swept = False
        self._run_dir, self._names, self._num_steps = run_dir, names, num_steps
        self._pids = itertools.count(1)
        self._again: list[tuple[Strike, float]] = []
        self._tasks = [self._task(self._strike_at(strike)) for strike in strikes] + [self._task(self._work())]

    def _task(self, work: object) -> asyncio.Task[None]:
        return asyncio.get_running_loop().create_task(work)  # type: ignore[arg-type]

    @property
    def now(self) -> float:
        return asyncio.get_running_loop().time()

    def living(self, name: str) -> FakeProcess | None:
        """The process of that name that lives; there is never a second one."""
        found = [process for process in self.all if process.spec.name == name and process.end is None]
        assert len(found) <= 1, f"{name} was started while it lived"
        return found[0] if found else None

    async def spawn(self, spec: ProcessSpec) -> FakeProcess:
        assert self.living(spec.name) is None and not self.swept
        process = FakeProcess(spec, next(self._pids), self.now, signals=self.signals)
        self.all.append(process)
        for strike, age in self._again:
            if strike.victim == spec.name:
                self._tasks.append(self._task(self._strike_after(strike, age)))
        return process

    async def sweep(self) -> list[str]:
        assert all(process.end for process in self.all), "the supervisor ends what it started itself"
        self.swept = True
        for task in self._tasks:
            task.cancel()
        return []

    async def _work(self) -> None:
        while self.num_done < self._num_steps:
            await asyncio.sleep(STEP_S)
            living = [self.living(name) for name in self._names]
            self.num_done += all(process is not None and process.is_ready for process in living)
        jsonl.append(self._run_dir / "events.jsonl", {"event": "completed", "step": self.num_done})
        if controller := self.living("controller"):
            controller.exit(0)

    async def _strike_at(self, strike: Strike) -> None:
        await asyncio.sleep(strike.at)
        if (victim := self.living(strike.victim)) is None:
            return
        if strike.again:
            self._again.append((strike, self.now - victim.born))
        self._hit(victim, strike.fault)

    async def _strike_after(self, strike: Strike, age: float) -> None:
        await asyncio.sleep(age)
        if victim := self.living(strike.victim):
            self._hit(victim, strike.fault)

    def _hit(self, victim: FakeProcess, fault: Fault) -> None:
        if fault is Fault.KILL:
            victim.exit(-signal.SIGKILL)
        elif fault is Fault.HANG:
            victim.stopped_at = self.now
        elif fault is Fault.STUCK:
            victim.is_stuck = True
        elif fault is Fault.TERMINATE:
            victim.exit(0 if victim.is_ready else -signal.SIGTERM)
        elif fault is Fault.LEAVE:
            victim.exit(0)
        elif fault is Fault.LOSE_MACHINE:
            victim.exit(None)
        else:
            victim.exit(1, NO_ROOM)


def spec_of(name: str) -> ProcessSpec:
    """Of a process that the stand-in plays."""
    role = name.split("-")[0]
    return ProcessSpec(name=name, role=role, module=f"stand_in.{role}", ready_s=20.0, grace_s=5.0)


STAGES = (["controller"], ["rollout-0", "trainer-0"], ["env-0"])
NAMES = [name for stage in STAGES for name in stage]
EPOCH = 1_000_000.0


class VirtualRun:
    """One life of a run: the real supervisor, monitors, restart policy, liveness and record, on the virtual clock."""

    def __init__(self, run_dir: Path, strikes: Sequence[Strike], settings: SupervisorConfig, *, num_steps: int) -> None:
        self.run_dir, self._strikes, self._settings, self._num_steps = run_dir, strikes, settings, num_steps
        self.launcher: LauncherStandIn

    async def live(self, *, stop_after_s: float | None = None) -> Outcome:
        """To its end. `stop_after_s`: then a user asks for a stop."""
        loop = asyncio.get_running_loop()
        clock = SimpleNamespace(monotonic=loop.time, time=lambda: EPOCH + loop.time())
        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(process_monitor, "time", clock)
            patched.setattr(supervisor, "time", clock)
            self.launcher = LauncherStandIn(self.run_dir, NAMES, self._strikes, num_steps=self._num_steps)
            supervising = Supervisor(
                run_dir=self.run_dir,
                stages=[[spec_of(name) for name in stage] for stage in STAGES],
                launcher=self.launcher,
                journal=RunJournal.create(self.run_dir, run_id="virtual", runtime_dir=self.run_dir / "runtime"),
                settings=self._settings,
            )
            if stop_after_s is not None:
                loop.call_later(stop_after_s, supervising.request_stop, "a user asked")
            return await supervising.run()

    @property
    def events(self) -> list[dict[str, object]]:
        return jsonl.read(self.run_dir / "events.jsonl")
