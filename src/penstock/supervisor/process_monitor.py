"""The monitor of one process of a run: it starts the process, watches it, and restarts it when it ends."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from penstock.config import SupervisorConfig
from penstock.observe.log_lines import formatted
from penstock.ports.process_launcher import End, Launcher, ProcessHandle, ProcessSpec, Report
from penstock.supervisor import failure, log_files
from penstock.supervisor.child import FAILED, HEARTBEAT_S
from penstock.supervisor.failure import Exit, ExitKind
from penstock.supervisor.liveness import Finding, Health, Liveness
from penstock.supervisor.restart import Action, Decision
from penstock.supervisor.run_journal import RunJournal
from penstock.supervisor.states import ProcessState

PROBE_FIRST_S, PROBE_LAST_S = 0.02, 0.5
STALL_REPORT_S = 1.0
"""Time for a hung process to write its stacks. A process stopped by SIGSTOP writes none."""
KILLED = "killed by supervisor"

Judge = Callable[["ProcessMonitor", Exit], Awaitable[Decision]]


@dataclass(eq=False)
class ProcessMonitor:
    """Keeps one process running. After each end, `judge` decides what follows."""

    spec: ProcessSpec
    settings: SupervisorConfig
    launcher: Launcher
    journal: RunJournal
    log: Path
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once the process was ready for the first time."""
    process: ProcessHandle | None = None
    """The latest process; None if it could not be started."""
    failure: Exit | None = None
    """The latest end; None once the process is ready again. Its time is that of the first end since the process was
    ready."""
    log_start: log_files.LogPosition = field(default_factory=log_files.LogPosition)
    """Position in the log where the latest process begins."""
    num_restarts: int = 0
    started: float = 0.0
    """Time of the latest start, or of the attempt, on the monotonic clock."""
    _sent: set[int] = field(default_factory=set)
    """Signals sent to the latest process."""
    _state: ProcessState = ProcessState.PENDING
    retired: asyncio.Event = field(default_factory=asyncio.Event)
    """Set to forbid all further starts and restarts."""
    keeping: asyncio.Task[None] = field(init=False)
    """The task of `keep`, which the supervisor starts."""

    async def report(self) -> Report | None:
        """Return the error that the process itself reported."""
        if self.process is None:
            return None
        return self.process.end.report if self.process.end else (await self.process.look()).report

    async def keep(self, judge: Judge) -> None:
        """Run the process, and restart it as `judge` decides, until it ends for good."""
        self.journal.note("process", name=self.spec.name, state=ProcessState.PENDING.value)
        while not self.retired.is_set():
            exit_ = await self._live()
            self._move(ProcessState.EXITED, returncode=exit_.returncode, kind=exit_.kind, reason=exit_.reason)
            exit_ = replace(exit_, time=self.failure.time) if self.failure else exit_
            if self.failure is None or exit_.kind is not ExitKind.KILLED_BY_SUPERVISOR:
                self.failure = exit_
            decision = await judge(self, exit_)
            if decision.action is Action.FAIL:
                self._move(ProcessState.FATAL)
            if decision.action is not Action.RESTART:
                return
            self._move(ProcessState.BACKOFF, after_s=decision.after_s, decision=decision.reason)
            with suppress(TimeoutError):
                async with asyncio.timeout(decision.after_s):
                    await self.retired.wait()
                    return
            self.num_restarts += 1
            self._announce(decision)

    async def signal(self, signum: int) -> None:
        """Signal the process and everything it started, if it is alive. SIGTERM asks it to end."""
        if self.process is None or self.process.end:
            return
        if signum == signal.SIGTERM and signum not in self._sent:
            self._move(ProcessState.STOPPING)
        self._sent.add(signum)
        await self.process.signal(signum)

    async def _live(self) -> Exit:
        """Start the process once and wait until it ends."""
        self.process, self.log_start = None, log_files.end_of(self.log)
        self._sent.clear()
        self.started = time.monotonic()
        try:
            env = {**self.spec.env, HEARTBEAT_S: str(self.settings.heartbeat_s)}
            self.process = await self.launcher.spawn(replace(self.spec, env=env))
        except OSError as error:
            kind = failure.classify(FAILED, str(error), is_out_of_memory=False)
            return Exit(time=time.time(), returncode=None, kind=kind, reason=f"cannot start: {error}")
        self.started = time.monotonic()
        self._move(
            ProcessState.STARTING,
            role=self.spec.role,
            restarts=self.num_restarts,
            returncode=None,
            kind=None,
            reason=None,
            devices=None,
            **self.process.facts,
        )
        if self.retired.is_set():  # it was set during the start
            await self.signal(signal.SIGTERM)
        hung = await self._watch(self.process)
        return self._classify(await self.process.wait(), hung)

    async def _watch(self, process: ProcessHandle) -> str:
        """Wait until the process ends, or kill it if it hangs. Returns why it was killed; empty if it ended itself."""
        exit_ = asyncio.create_task(process.wait())
        watching = asyncio.create_task(self._watch_health(process))
        try:
            await asyncio.wait([exit_, watching], return_when=asyncio.FIRST_COMPLETED)
            if exit_.done():  # the process may have become ready between two probes
                if not self.ready.is_set() and not self._sent and await process.probe() is None:
                    self._become_ready()
                return ""
            hung = watching.result()
            await process.signal(signal.SIGUSR1)
            await asyncio.wait([exit_], timeout=STALL_REPORT_S)
            await process.signal(signal.SIGKILL)
            return hung
        finally:
            exit_.cancel()
            watching.cancel()

    async def _watch_health(self, process: ProcessHandle) -> str:
        """Await readiness, then check for progress until the process is signalled. Returns why it has to be killed."""
        if missing := await self._await_ready(process):
            return f"was not ready after {self.spec.ready_s:g} s: {missing}"
        liveness, devices = Liveness(self.settings, now=time.monotonic()), None
        while True:
            await asyncio.sleep(self.settings.heartbeat_s)
            if self._sent:
                await asyncio.Event().wait()
            look = await process.look()
            if look.devices is not None and devices is None:
                devices = [asdict(each) for each in look.devices]
                self.journal.describe_process(self.spec.name, devices=devices)
            finding = liveness.look(look.beat, now=time.monotonic())
            if finding.health is Health.HUNG:
                return f"hung: {finding.reason}"
            self._note_health(finding)

    def _become_ready(self) -> None:
        self.failure = None
        self._move(ProcessState.READY)
        self.ready.set()

    async def _await_ready(self, process: ProcessHandle) -> str | None:
        """Probe with growing pauses until the process is ready. Returns what was still missing at the deadline."""
        pause_s, limit = PROBE_FIRST_S, time.monotonic() + self.spec.ready_s
        while missing := await process.probe():
            if time.monotonic() + pause_s > limit:
                return missing
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, PROBE_LAST_S)
        if not self._sent:
            self._become_ready()
        return None

    def _note_health(self, finding: Finding) -> None:
        if finding.health is Health.DEGRADED and self._state is ProcessState.READY:
            self._move(ProcessState.DEGRADED, reason=finding.reason)
        elif finding.health is Health.ALIVE and self._state is ProcessState.DEGRADED:
            self._move(ProcessState.READY, reason=None)

    def _classify(self, end: End, hung: str) -> Exit:
        code = end.returncode
        if code is None:
            kind, reason = ExitKind.LOST, end.lost
        elif hung:
            kind, reason = ExitKind.HUNG, hung
        elif -code in self._sent:
            kind, reason = ExitKind.KILLED_BY_SUPERVISOR, KILLED
        else:
            message = end.report.message if end.report else ""
            kind = failure.classify(code, message, is_out_of_memory=end.is_out_of_memory)
            reason = failure.describe_code(code) + " for lack of memory" * (kind is ExitKind.OOM_HOST)
        return Exit(time=time.time(), returncode=code, kind=kind, reason=reason)

    def _move(self, state: ProcessState, **facts: Any) -> None:
        self._state = state
        self.journal.move_process(self.spec.name, state, **facts)

    def _announce(self, decision: Decision) -> None:
        """Write a line about the restart into the process's own log."""
        assert self.failure is not None
        with suppress(OSError), self.log.open("a") as log:
            message = f"restart {self.num_restarts} of {self.spec.name} ({self.failure.reason}). {decision.reason}"
            log.write(f"{formatted(self.spec.name, message, level='WARNING')}\n")
