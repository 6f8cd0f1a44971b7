"""The supervisor of a run: it starts the processes stage by stage, keeps them running, and ends them together.

The supervisor waits for a single *verdict*: completed, stopped or failed. The first verdict counts.

* start: it spawns all processes of a stage, and waits until all are ready; a verdict cancels the start at any point;
* keep: one task per process waits for its end, and restarts it with its restart set as the restart policy says
  (`monitor`); the run keeps its state meanwhile, and processes that need the missing one wait for it;
* signals: the first SIGINT, SIGTERM or SIGHUP asks for a clean stop; the second one, or SIGQUIT, kills everything.

After the verdict the supervisor ends the processes. The controller goes first, so that it can save the training state,
even when another process has failed. Then the supervisor sweeps away what is left, and records the final state last.
Only a failure is recorded as soon as it is known.
"""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from penstock.config import SupervisorConfig
from penstock.ports.process_launcher import Launcher, ProcessSpec
from penstock.supervisor import failure, log_files
from penstock.supervisor.failure import Exit, ExitKind
from penstock.supervisor.process_monitor import KILLED, ProcessMonitor
from penstock.supervisor.restart import Action, Decision, RestartPolicy
from penstock.supervisor.run_journal import RunJournal
from penstock.supervisor.states import RunState

FAILED_GRACE_S = 1.0
"""Grace for processes of a run that failed while starting: they have no state to save, only last log lines to write."""
STOP_MARGIN_S = 1.0
"""Time that a stop may take beyond the longest grace. It bounds the stop even if processes do not answer."""
KILL_S = 5.0
ROTATE_EVERY_S = 10.0
"""Seconds between two checks of the logs' sizes."""
CONTROLLER = "controller"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run ended, and a message about the reason."""

    status: RunState
    message: str = ""


def failed(message: str) -> Outcome:
    """Return the verdict of a failed run."""
    return Outcome(status=RunState.FAILED, message=message)


@dataclass(eq=False, kw_only=True)
class Supervisor:
    """Runs one life of a run. Owns its state and its processes, and has no training logic. Create it inside the event
    loop."""

    run_dir: Path
    stages: Sequence[Sequence[ProcessSpec]]
    launcher: Launcher
    journal: RunJournal
    settings: SupervisorConfig
    _monitors: dict[str, ProcessMonitor] = field(default_factory=dict)
    """By the name of the process."""
    _forced: asyncio.Event = field(default_factory=asyncio.Event)
    _was_running: bool = False
    """Every process has been ready, so the run was in state `running`."""

    def __post_init__(self) -> None:
        self._restarts = RestartPolicy(self.settings)
        self._verdict: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()

    async def run(self) -> Outcome:
        """Take the run from `pending` to a final state. Raises only for faults of the supervisor itself."""
        outcome = Outcome(status=RunState.FAILED, message="the supervisor itself failed")
        with self._signals():
            try:
                outcome = await self._live()
            finally:
                leftovers = await self.launcher.sweep()
                self.journal.close_processes(kind=ExitKind.KILLED_BY_SUPERVISOR, reason=KILLED)
                self.journal.add_leftovers(leftovers)
                if not self.journal.status.is_final:
                    self.journal.move(outcome.status, actor="supervisor", reason=outcome.message)
        return outcome

    def request_stop(self, reason: str) -> None:
        """Ask for a clean stop. A second request kills everything at once. Legal at any time."""
        if self._verdict.done():
            self.force_stop()
        else:
            self._decide(Outcome(status=RunState.STOPPED, message=reason), actor="user")

    def force_stop(self) -> None:
        """Kill all processes at once."""
        self._decide(Outcome(status=RunState.STOPPED, message="killed on request"), actor="user")
        self._forced.set()

    def _decide(self, outcome: Outcome, *, actor: str) -> None:
        if self._verdict.done():
            return
        self._verdict.set_result(outcome)
        following = RunState.FAILED if outcome.status is RunState.FAILED else RunState.STOPPING
        self.journal.move(following, actor=actor, reason=outcome.message)

    async def _live(self) -> Outcome:
        self.journal.move(RunState.STARTING, actor="supervisor")
        async with asyncio.TaskGroup() as tasks:
            start = tasks.create_task(self._start(tasks))
            rotating = tasks.create_task(self._rotate_logs())
            outcome = await self._verdict
            start.cancel()
            await asyncio.wait([start])
            await self._end(outcome)
            for monitor in self._monitors.values():
                monitor.keeping.cancel()
            rotating.cancel()
        return self._with_warning(outcome)

    async def _start(self, tasks: asyncio.TaskGroup) -> None:
        for stage in self.stages:
            for spec in stage:
                log = self.run_dir / "logs" / f"{spec.name}.log"
                monitor = ProcessMonitor(spec, self.settings, self.launcher, self.journal, log)
                monitor.keeping = tasks.create_task(monitor.keep(self._judge))
                self._monitors[spec.name] = monitor
            for spec in stage:
                await self._monitors[spec.name].ready.wait()
        if not self._verdict.done():
            self._was_running = True
            self.journal.move(RunState.RUNNING, actor="supervisor")

    async def _rotate_logs(self) -> None:
        """Rotate the logs periodically. If the disk has no space for a copy, the log stays as it is for now."""
        while True:
            for log in (self.run_dir / "logs").glob("*.log"):
                with suppress(OSError):
                    await asyncio.to_thread(log_files.rotate, log)
            await asyncio.sleep(ROTATE_EVERY_S)

    async def _judge(self, monitor: ProcessMonitor, loss: Exit) -> Decision:
        """Decide what follows after a process ended. An exit code of 0 does not prove that the run is complete; only
        the controller's record of the last step does."""
        if self._verdict.done():
            return Decision(action=Action.IGNORE, reason="the run is ending")
        completed = self.journal.is_complete()
        if completed and monitor.spec.role == CONTROLLER:
            self._decide(Outcome(status=RunState.COMPLETED), actor=CONTROLLER)
        name = monitor.spec.restart_set
        together = [each for each in self._monitors.values() if name and each.spec.restart_set == name] or [monitor]
        decision = self._restarts.decide(
            monitor.spec.name,
            loss,
            was_ready=all(each.ready.is_set() for each in together),
            completed=completed,
            now=time.monotonic(),
            num_saved=self.journal.count(monitor.spec.saves) if monitor.spec.saves else None,
            restart_set=name,
            started=monitor.started,
        )
        if decision.action is Action.FAIL:
            await self._fail(decision)
        if decision.ends_set:
            await asyncio.gather(*(each.signal(signal.SIGKILL) for each in together if each is not monitor))
        return decision

    async def _fail(self, decision: Decision) -> None:
        """Fail the run. Its cause is the earliest failure that no restart has repaired."""
        monitors = dict(self._monitors)  # a stage may start meanwhile
        exits = {name: monitor.failure for name, monitor in monitors.items() if monitor.failure}
        found = await asyncio.gather(*(monitor.report() for monitor in monitors.values()))
        reports = {name: report for name, report in zip(monitors, found, strict=True) if report}
        name = failure.first_failed(exits, reports)
        phase = "in mid-run" if monitors[name].ready.is_set() else "while starting"
        cause = failure.explain(name, exits.get(name), reports.get(name), phase=phase)
        quote = log_files.quote(monitors[name].log, monitors[name].log_start)
        self._decide(failed(f"{cause}; {decision.reason}{quote}"), actor=name)

    async def _end(self, outcome: Outcome) -> None:
        """End all processes: first the controller, which drains while the others still serve, then the stages from last
        to first."""
        for monitor in self._monitors.values():
            monitor.retired.set()
        specs = [spec for stage in self.stages for spec in stage]
        if outcome.status is RunState.FAILED and not self._was_running:
            await self._stop(specs, FAILED_GRACE_S)
            return
        limit = time.monotonic() + max(spec.grace_s for spec in specs) + STOP_MARGIN_S
        controllers = [spec for spec in specs if spec.role == CONTROLLER]
        await self._stop(controllers, max((spec.grace_s for spec in controllers), default=0.0))
        for num_left, stage in reversed(list(enumerate(self.stages, start=1))):
            share_s = max(limit - time.monotonic(), STOP_MARGIN_S) / num_left
            await self._stop(stage, min(share_s, max(spec.grace_s for spec in stage)))

    def _with_warning(self, outcome: Outcome) -> Outcome:
        """Return `outcome`, with a warning if the run was stopped but its controller did not end cleanly."""
        controllers = [monitor for monitor in self._monitors.values() if monitor.spec.role == CONTROLLER]
        ends = [monitor.failure for monitor in controllers if monitor.ready.is_set() and monitor.failure]
        unclean = [end.reason for end in ends if end.kind is not ExitKind.OK]
        if outcome.status is not RunState.STOPPED or not unclean:
            return outcome
        warning = f"the controller did not end cleanly ({unclean[0]}), the final checkpoint may be missing"
        return Outcome(status=outcome.status, message=f"{outcome.message}; {warning}")

    async def _stop(self, specs: Sequence[ProcessSpec], grace_s: float) -> None:
        """Send SIGTERM, wait for the grace, then send SIGKILL, to the processes of `specs` that were started and have
        not ended."""
        for signum, seconds in ((signal.SIGTERM, grace_s), (signal.SIGKILL, KILL_S)):
            monitors = [self._monitors[spec.name] for spec in specs if spec.name in self._monitors]
            for monitor in monitors:
                await monitor.signal(signum)
            pending = [monitor.keeping for monitor in monitors if not monitor.keeping.done()]
            if pending:
                await self._await_ends(pending, seconds, even_if_forced=signum == signal.SIGKILL)

    async def _await_ends(self, pending: list[asyncio.Task[None]], seconds: float, *, even_if_forced: bool) -> None:
        """Wait until all tasks have ended, the time is up, or `force_stop` is called (unless `even_if_forced`)."""
        ended, forced = asyncio.create_task(asyncio.wait(pending)), asyncio.create_task(self._forced.wait())
        either = [ended] if even_if_forced else [ended, forced]
        await asyncio.wait(either, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
        ended.cancel()
        forced.cancel()

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Handle signals during the body. Only the main thread can have signal handlers; in other threads use
        `request_stop` and `force_stop`."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        # Signals that are already ignored stay ignored, so that a run under `nohup` survives the end of its terminal.
        named = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        stops = [signum for signum in named if signal.getsignal(signum) is not signal.SIG_IGN]
        for signum in stops:
            loop.add_signal_handler(signum, self.request_stop, f"{signum.name} received")
        loop.add_signal_handler(signal.SIGQUIT, self.force_stop)
        try:
            yield
        finally:
            for signum in (*stops, signal.SIGQUIT):
                loop.remove_signal_handler(signum)
