"""One process of a run, through all its lives: start, await readiness, await the end, and start again if so decided."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from penstock.config import SupervisorConfig
from penstock.ports import End, Launcher, ProcessHandle, ProcessSpec, Report
from penstock.supervisor import failure, log_files
from penstock.supervisor.child import FAILED, HEARTBEAT_S
from penstock.supervisor.failure import Exit, ExitKind
from penstock.supervisor.liveness import Finding, Health, Liveness
from penstock.supervisor.record import Record
from penstock.supervisor.restart import Action, Decision
from penstock.supervisor.states import ProcessState

PROBE_FIRST_S, PROBE_LAST_S = 0.02, 0.5
STALL_REPORT_S = 1.0
"""What a hung process has to write down its stacks; a stopped one never does."""
KILLED = "killed by supervisor"

Judge = Callable[["Keeper", Exit], Awaitable[Decision]]


class Keeper:
    """Keeps a process going; what follows from an end is decided by `judge`."""

    def __init__(
        self,
        spec: ProcessSpec,
        *,
        settings: SupervisorConfig,
        launcher: Launcher,
        record: Record,
        log: Path,
    ) -> None:
        self.spec = replace(spec, env={**spec.env, HEARTBEAT_S: str(settings.heartbeat_s)})
        self.log = log
        self.ready = asyncio.Event()
        """It was, at least once."""
        self.process: ProcessHandle | None = None
        """The latest."""
        self.failure: Exit | None = None
        """How it ended last, until it is ready again; timed when it ended first since it was."""
        self.born = log_files.Place()
        """The beginning of its latest life, in its log."""
        self.num_restarts = 0
        self._settings = settings
        self._launcher = launcher
        self._record = record
        self._sent: set[int] = set()
        """Signals that the process has been sent."""
        self._state = ProcessState.PENDING
        self._retired = asyncio.Event()

    @property
    def is_alive(self) -> bool:
        return self.process is not None and self.process.end is None

    async def report(self) -> Report | None:
        """What the process said itself of its failure."""
        if self.process is None:
            return None
        end = self.process.end
        return end.report if end else (await self._launcher.look(self.process)).report

    async def keep(self, judge: Judge) -> None:
        """Until it has ended, and is not to be started again."""
        self._record.note("process", name=self.spec.name, state=ProcessState.PENDING.value)
        while not self._retired.is_set():
            exit_ = await self._live()
            self.failure = replace(exit_, time=self.failure.time) if self.failure else exit_
            decision = await judge(self, self.failure)
            if decision.action is Action.FAIL:
                self._move(ProcessState.FATAL)
            if decision.action is not Action.RESTART:
                return
            self._move(ProcessState.BACKOFF, after_s=decision.after_s, decision=decision.reason)
            with suppress(TimeoutError):
                async with asyncio.timeout(decision.after_s):
                    await self._retired.wait()
                    return
            self.num_restarts += 1
            self._announce(decision)

    def retire(self) -> None:
        """From now on it is not started, nor started again."""
        self._retired.set()

    async def signal(self, signum: int) -> None:
        """To the process and everything it started, if it lives. SIGTERM asks it to end."""
        if not self.is_alive:
            return
        assert self.process is not None
        if signum == signal.SIGTERM and signum not in self._sent:
            self._move(ProcessState.STOPPING)
        self._sent.add(signum)
        await self._launcher.signal(self.process, signum)

    async def _live(self) -> Exit:
        """One life."""
        self.process, self.born = None, log_files.end_of(self.log)
        self._sent.clear()
        try:
            self.process = await self._launcher.spawn(self.spec)
        except OSError as error:
            kind = failure.classify(FAILED, str(error), is_out_of_memory=False)
            return self._ended(Exit(time=time.time(), returncode=None, kind=kind, reason=f"cannot start: {error}"))
        self._move(
            ProcessState.STARTING,
            role=self.spec.role,
            restarts=self.num_restarts,
            returncode=None,
            kind=None,
            reason=None,
            **self.process.facts,
        )
        if self._retired.is_set():  # while it was being started
            await self.signal(signal.SIGTERM)
        hung = await self._watch(self.process)
        return self._ended(self._classify(await self._launcher.wait(self.process), hung))

    async def _watch(self, process: ProcessHandle) -> str:
        """Until the process has ended, or was killed for hanging; then why."""
        exit_ = asyncio.create_task(self._launcher.wait(process))
        watching = asyncio.create_task(self._look_after(process))
        try:
            await asyncio.wait([exit_, watching], return_when=asyncio.FIRST_COMPLETED)
            if exit_.done():
                await self._hear_of_readiness(process)
                return ""
            hung = watching.result()
            await self._launcher.signal(process, signal.SIGUSR1)
            await asyncio.wait([exit_], timeout=STALL_REPORT_S)
            await self._launcher.signal(process, signal.SIGKILL)
            return hung
        finally:
            exit_.cancel()
            watching.cancel()

    async def _look_after(self, process: ProcessHandle) -> str:
        """Await readiness, then see that it gets on, until it is asked to end. Returns why it has to be killed."""
        if missing := await self._await_ready(process):
            return f"was not ready after {self.spec.ready_s:g} s: {missing}"
        liveness = Liveness(self._settings, now=time.monotonic())
        while True:
            await asyncio.sleep(self._settings.heartbeat_s)
            if self._sent:
                await asyncio.Event().wait()
            told = await self._launcher.look(process)
            finding = liveness.look(told.beat, now=time.monotonic())
            if finding.health is Health.HUNG:
                return f"hung: {finding.reason}"
            self._note_health(finding)

    async def _hear_of_readiness(self, process: ProcessHandle) -> None:
        """It may have been ready for a moment, between two probes."""
        if not self.ready.is_set() and not self._sent and await self._launcher.probe(process) is None:
            self._become_ready()

    def _become_ready(self) -> None:
        self.failure = None
        self._move(ProcessState.READY)
        self.ready.set()

    async def _await_ready(self, process: ProcessHandle) -> str | None:
        """Probe with growing pauses; returns what was missing in the end."""
        pause_s, limit = PROBE_FIRST_S, time.monotonic() + self.spec.ready_s
        while missing := await self._launcher.probe(process):
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
        code, how = end.returncode, end.lost
        if code is None:
            kind = ExitKind.LOST
        elif hung:
            kind, how = ExitKind.HUNG, hung
        elif -code in self._sent:
            kind, how = ExitKind.KILLED_BY_SUPERVISOR, KILLED
        else:
            said = end.report.message if end.report else ""
            kind = failure.classify(code, said, is_out_of_memory=end.is_out_of_memory)
            how = failure.describe_code(code)
        if kind is ExitKind.OOM_HOST:
            how += " for lack of memory"
        return Exit(time=time.time(), returncode=code, kind=kind, reason=how)

    def _ended(self, exit_: Exit) -> Exit:
        self._move(ProcessState.EXITED, returncode=exit_.returncode, kind=exit_.kind, reason=exit_.reason)
        return exit_

    def _move(self, state: ProcessState, **facts: Any) -> None:
        self._state = state
        self._record.move_process(self.spec.name, state, **facts)

    def _announce(self, decision: Decision) -> None:
        """In the process's own log, before its next words."""
        assert self.failure is not None
        with suppress(OSError), self.log.open("a") as log:
            log.write(f"penstock: restart {self.num_restarts} of {self.spec.name} ({self.failure.reason}). ")
            log.write(f"{decision.reason}\n")
