"""The life of a run: start its processes stage by stage, keep each going, bring all to one end.

Everything waits for a single *verdict*: completed, stopped or failed, whichever is known first.

* start: each stage is spawned at once and awaited until all of it is ready; a verdict cancels it at any point;
* keep: one task per process waits for its end, and starts it again as the restart policy says (`keeper`); meanwhile the
  run stays what it is, and whoever needs that process waits for it;
* signals: the first SIGINT, SIGTERM or SIGHUP asks for a clean stop, the second (or SIGQUIT) kills everything.

The verdict known, processes are ended (the controller first, so that it can save what was learned, also when another
process has failed), what is left is swept away, and only then is the final state recorded; a failure is recorded the
moment it is known.
"""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from penstock.config import SupervisorConfig
from penstock.ports import Launcher, ProcessSpec
from penstock.supervisor import failure, log_files
from penstock.supervisor.failure import Exit, ExitKind
from penstock.supervisor.keeper import KILLED, Keeper
from penstock.supervisor.record import Record
from penstock.supervisor.restart import Action, Decision, RestartPolicy
from penstock.supervisor.states import RunState

FAILED_GRACE_S = 1.0
"""A run that failed while starting has nothing to save, its processes only their last words."""
STOP_MARGIN_S = 1.0
"""What a stop may take beyond the longest grace, so that it has an end whoever does not answer."""
KILL_S = 5.0
ROTATE_EVERY_S = 10.0
"""Between two looks at the logs' sizes."""
CONTROLLER = "controller"


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a run ended, and for people why."""

    status: RunState
    message: str = ""


def failed(message: str) -> Outcome:
    """The verdict of a run that failed."""
    return Outcome(status=RunState.FAILED, message=message)


class Supervisor:
    """Runs one run once (made inside the event loop): owns its state and its processes, knows nothing of training."""

    def __init__(
        self,
        *,
        run_dir: Path,
        stages: Sequence[Sequence[ProcessSpec]],
        launcher: Launcher,
        record: Record,
        settings: SupervisorConfig,
    ) -> None:
        self._run_dir = run_dir
        self._stages = stages
        self._launcher = launcher
        self._record = record
        self._settings = settings
        self._restarts = RestartPolicy(settings)
        self._kept: dict[str, tuple[Keeper, asyncio.Task[None]]] = {}
        self._verdict: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._forced = asyncio.Event()
        self._was_whole = False
        """All processes were ready at once."""

    async def run(self) -> Outcome:
        """From `pending` to a final state; raises only for faults of the supervisor itself."""
        outcome = Outcome(status=RunState.FAILED, message="the supervisor itself failed")
        with self._signals():
            try:
                outcome = await self._live()
            finally:
                leftovers = await self._launcher.sweep()
                self._record.close_processes(kind=ExitKind.KILLED_BY_SUPERVISOR, reason=KILLED)
                if leftovers:
                    self._record.add_leftovers(leftovers)
                if not self._record.status.is_final:
                    self._record.move(outcome.status, actor="supervisor", reason=outcome.message)
        return outcome

    def request_stop(self, reason: str) -> None:
        """Ask for a clean stop; asked again, everything is killed at once. Legal at any time."""
        if self._verdict.done():
            self.force_stop()
        else:
            self._decide(Outcome(status=RunState.STOPPED, message=reason), actor="user")

    def force_stop(self) -> None:
        """Kill everything at once."""
        if not self._verdict.done():
            self._decide(Outcome(status=RunState.STOPPED, message="killed on request"), actor="user")
        self._forced.set()

    def _decide(self, outcome: Outcome, *, actor: str) -> None:
        if self._verdict.done():
            return
        self._verdict.set_result(outcome)
        following = RunState.FAILED if outcome.status is RunState.FAILED else RunState.STOPPING
        self._record.move(following, actor=actor, reason=outcome.message)

    async def _live(self) -> Outcome:
        self._record.move(RunState.STARTING, actor="supervisor")
        async with asyncio.TaskGroup() as tasks:
            start = tasks.create_task(self._start(tasks))
            rotating = tasks.create_task(self._rotate_logs())
            outcome = await self._verdict
            start.cancel()
            await asyncio.wait([start])
            await self._end(outcome)
            for _, keeping in self._kept.values():
                keeping.cancel()
            rotating.cancel()
        return self._with_doubts(outcome)

    async def _start(self, tasks: asyncio.TaskGroup) -> None:
        for stage in self._stages:
            keepers = [self._keep(spec, tasks) for spec in stage]
            for keeper in keepers:
                await keeper.ready.wait()
        if not self._verdict.done():
            self._was_whole = True
            self._record.move(RunState.RUNNING, actor="supervisor")

    def _keep(self, spec: ProcessSpec, tasks: asyncio.TaskGroup) -> Keeper:
        log = self._run_dir / "logs" / f"{spec.name}.log"
        keeper = Keeper(
            spec,
            settings=self._settings,
            launcher=self._launcher,
            record=self._record,
            log=log,
        )
        self._kept[spec.name] = keeper, tasks.create_task(keeper.keep(self._judge))
        return keeper

    async def _rotate_logs(self) -> None:
        """A log that cannot be rotated, for lack of room, is left as it is until it can."""
        while True:
            for log in (self._run_dir / "logs").glob("*.log"):
                with suppress(OSError):
                    await asyncio.to_thread(log_files.rotate, log)
            await asyncio.sleep(ROTATE_EVERY_S)

    async def _judge(self, keeper: Keeper, loss: Exit) -> Decision:
        """An exit code of 0 proves nothing: only the controller's own record of the last step does."""
        if self._verdict.done():
            return Decision(action=Action.IGNORE, reason="the run is ending")
        completed = self._record.is_complete()
        if completed and keeper.spec.role == CONTROLLER:
            self._decide(Outcome(status=RunState.COMPLETED), actor=CONTROLLER)
        decision = self._restarts.decide(
            keeper.spec.name,
            loss,
            was_ready=keeper.ready.is_set(),
            completed=completed,
            now=time.monotonic(),
            num_saved=self._record.count(keeper.spec.saves) if keeper.spec.saves else None,
        )
        if decision.action is Action.FAIL:
            await self._fail(decision)
        return decision

    async def _fail(self, decision: Decision) -> None:
        """Of all that went wrong and was not mended, what went wrong first is the cause."""
        keepers = {name: keeper for name, (keeper, _) in self._kept.items()}
        reports = zip(keepers, await asyncio.gather(*(keeper.report() for keeper in keepers.values())), strict=True)
        cause = failure.root_cause(
            {name: keeper.failure for name, keeper in keepers.items() if keeper.failure},
            {name: report for name, report in reports if report},
        )
        culprit = keepers[cause.name]
        what = failure.explain(cause, phase="in mid-run" if culprit.ready.is_set() else "while starting")
        self._decide(failed(f"{what}; {decision.reason}{log_files.quote(culprit.log, culprit.born)}"), actor=cause.name)

    async def _end(self, outcome: Outcome) -> None:
        """Controller first (it drains while the others still serve), then stage by stage, the last stage first."""
        for keeper, _ in self._kept.values():
            keeper.retire()
        specs = [spec for stage in self._stages for spec in stage]
        if outcome.status is RunState.FAILED and not self._was_whole:
            await self._stop(specs, FAILED_GRACE_S)
            return
        limit = time.monotonic() + max(spec.grace_s for spec in specs) + STOP_MARGIN_S
        controllers = [spec for spec in specs if spec.role == CONTROLLER]
        await self._stop(controllers, max((spec.grace_s for spec in controllers), default=0.0))
        for num_left, stage in reversed(list(enumerate(self._stages, start=1))):
            share_s = max(limit - time.monotonic(), STOP_MARGIN_S) / num_left
            await self._stop(stage, min(share_s, max(spec.grace_s for spec in stage)))

    def _with_doubts(self, outcome: Outcome) -> Outcome:
        """A stop is clean only if that of a working controller was."""
        controllers = [keeper for keeper, _ in self._kept.values() if keeper.spec.role == CONTROLLER]
        ends = [keeper.failure for keeper in controllers if keeper.ready.is_set() and keeper.failure]
        unclean = [end.reason for end in ends if end.kind is not ExitKind.OK]
        if outcome.status is not RunState.STOPPED or not unclean:
            return outcome
        doubt = f"the controller did not end cleanly ({unclean[0]}), the final checkpoint may be missing"
        return Outcome(status=outcome.status, message=f"{outcome.message}; {doubt}")

    async def _stop(self, specs: Sequence[ProcessSpec], grace_s: float) -> None:
        """SIGTERM, grace, SIGKILL: to those of `specs` that were started and have not ended."""
        for signum, seconds in ((signal.SIGTERM, grace_s), (signal.SIGKILL, KILL_S)):
            for keeper, _ in self._started(specs):
                await keeper.signal(signum)
            await self._await_ends(specs, seconds, even_if_forced=signum == signal.SIGKILL)

    async def _await_ends(self, specs: Sequence[ProcessSpec], seconds: float, *, even_if_forced: bool) -> None:
        """Until all have ended, the time is up, or somebody loses patience."""
        pending = {keeping for _, keeping in self._started(specs) if not keeping.done()}
        limit = time.monotonic() + seconds
        forced = asyncio.create_task(self._forced.wait())
        while pending and (even_if_forced or not forced.done()):
            others = pending if even_if_forced else {*pending, forced}
            done, _ = await asyncio.wait(others, timeout=limit - time.monotonic(), return_when=asyncio.FIRST_COMPLETED)
            if not done:
                break
            pending -= done
        forced.cancel()

    def _started(self, specs: Sequence[ProcessSpec]) -> list[tuple[Keeper, asyncio.Task[None]]]:
        return [self._kept[spec.name] for spec in specs if spec.name in self._kept]

    @contextmanager
    def _signals(self) -> Iterator[None]:
        """Only the main thread can have signal handlers; elsewhere the two methods are the way."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        loop = asyncio.get_running_loop()
        # What is ignored already stays so: `nohup` outlives its terminal.
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
