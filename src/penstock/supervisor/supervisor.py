"""The life of a run: start its processes stage by stage, watch each from its first instant, bring all to one end.

Everything waits for a single *verdict*: completed, stopped or failed, whichever is known first.

* start: each stage is spawned at once and awaited until all of it is ready; a verdict cancels it at any point;
* watch: one task per process waits for its end, and judges it;
* signals: the first SIGINT, SIGTERM or SIGHUP asks for a clean stop, the second (or SIGQUIT) kills everything.

The verdict known, processes are ended (a stop lets the controller drain first), what is left is swept away, and only
then is the final state recorded; a failure is recorded the moment it is known.
"""

from __future__ import annotations

import asyncio
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from penstock.observe import jsonl
from penstock.ports import Launcher, ProcessHandle, ProcessSpec
from penstock.supervisor import failure
from penstock.supervisor.procfs import identify
from penstock.supervisor.record import Record
from penstock.supervisor.states import ProcessState, RunState

PROBE_FIRST_S, PROBE_LAST_S = 0.02, 0.5
FAILED_GRACE_S = 1.0
"""A failed run has nothing left to save, its processes only their last words."""
STOP_MARGIN_S = 1.0
"""What a stop may take beyond the longest grace, so that it has an end whoever does not answer."""
KILL_S = 5.0
CONTROLLER = "controller"
ROLLOUT = "rollout"
KILLED = "killed by supervisor"


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
        runtime_dir: Path,
        stages: Sequence[Sequence[ProcessSpec]],
        launcher: Launcher,
        record: Record,
    ) -> None:
        self._run_dir = run_dir
        self._runtime_dir = runtime_dir
        self._stages = stages
        self._launcher = launcher
        self._record = record
        self._watches: dict[str, tuple[ProcessHandle, asyncio.Task[None]]] = {}
        self._ready: set[str] = set()
        self._verdict: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        self._forced = asyncio.Event()

    async def run(self) -> Outcome:
        """From `pending` to a final state; raises only for faults of the supervisor itself."""
        outcome = Outcome(status=RunState.FAILED, message="the supervisor itself failed")
        with self._signals():
            try:
                outcome = await self._live()
            finally:
                leftovers = await self._launcher.sweep()
                self._record.close_processes(reason=KILLED)
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
            outcome = await self._verdict
            start.cancel()
            await asyncio.wait([start])
            await self._end(outcome)
            for _, watch in self._watches.values():
                watch.cancel()
        return self._with_doubts(outcome)

    async def _start(self, tasks: asyncio.TaskGroup) -> None:
        for stage in self._stages:
            try:
                processes = [await self._spawn(spec, tasks) for spec in stage]
            except OSError as error:
                self._decide(failed(f"a process could not be started: {error}"), actor="supervisor")
                return
            async with asyncio.TaskGroup() as probes:
                for process in processes:
                    probes.create_task(self._await_ready(process))
            if self._verdict.done():
                return
        self._record.move(RunState.RUNNING, actor="supervisor")

    async def _spawn(self, spec: ProcessSpec, tasks: asyncio.TaskGroup) -> ProcessHandle:
        self._record.note("process", name=spec.name, state=ProcessState.PENDING.value)
        process = await self._launcher.spawn(spec)
        self._watches[spec.name] = process, tasks.create_task(self._watch(process))
        identity = identify(process.pid)
        facts = asdict(identity) if identity else {"pid": process.pid}
        self._record.move_process(spec.name, ProcessState.STARTING, role=spec.role, **facts)
        return process

    async def _await_ready(self, process: ProcessHandle) -> None:
        """Probe with growing pauses; an exit in the meantime is `_watch`'s to judge, and cancels this."""
        spec, pause_s = process.spec, PROBE_FIRST_S
        limit = time.monotonic() + spec.ready_s
        while missing := await self._launcher.probe(process):
            if time.monotonic() + pause_s > limit:
                message = f"{spec.name} was not ready after {spec.ready_s:g} s: {missing}"
                self._decide(failed(message + failure.quote_log(self._log_of(spec.name))), actor="supervisor")
                return
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, PROBE_LAST_S)
        if process.returncode is None:
            self._ready.add(spec.name)
            self._record.move_process(spec.name, ProcessState.READY)

    async def _watch(self, process: ProcessHandle) -> None:
        name, code = process.spec.name, await self._launcher.wait(process)
        reason = KILLED if self._verdict.done() and code < 0 else failure.describe_code(code)
        self._record.move_process(name, ProcessState.EXITED, returncode=code, reason=reason)
        if not self._verdict.done():
            self._judge(process.spec, code)

    def _serving(self) -> bool:
        """Whether a rollout server is left that can take over what another one was generating."""
        processes = [process for process, _ in self._watches.values() if process.spec.role == ROLLOUT]
        return any(process.returncode is None and process.spec.name in self._ready for process in processes)

    def _judge(self, spec: ProcessSpec, code: int) -> None:
        """An exit code of 0 proves nothing: only the controller's own record of the last step does."""
        if spec.role == ROLLOUT and spec.name in self._ready and self._serving():
            self._record.note("server_exited", process=spec.name, returncode=code)
            return
        events = jsonl.read(self._run_dir / "events.jsonl")
        if code == 0 and any(event.get("event") == "completed" for event in events):
            if spec.role == CONTROLLER:
                self._decide(Outcome(status=RunState.COMPLETED), actor=CONTROLLER)
            return
        exit_ = failure.Exit(time=time.time(), returncode=code)
        cause = failure.root_cause({spec.name: exit_}, failure.read_reports(self._runtime_dir))
        phase = "in mid-run" if cause.name in self._ready else "while starting"
        message = failure.explain(cause, phase=phase, log=self._log_of(cause.name))
        self._decide(failed(message), actor=cause.name)

    async def _end(self, outcome: Outcome) -> None:
        """Controller first (it drains while the others still serve), then stage by stage, the last stage first."""
        specs = [spec for stage in self._stages for spec in stage]
        if outcome.status is RunState.FAILED:
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
        working = [process for process, _ in self._watches.values() if process.spec.name in self._ready]
        codes = [process.returncode for process in working if process.spec.role == CONTROLLER and process.returncode]
        if outcome.status is not RunState.STOPPED or not codes:
            return outcome
        how = failure.describe_code(codes[0])
        doubt = f"the controller did not end cleanly ({how}), the final checkpoint may be missing"
        return Outcome(status=outcome.status, message=f"{outcome.message}; {doubt}")

    async def _stop(self, specs: Sequence[ProcessSpec], grace_s: float) -> None:
        """SIGTERM, grace, SIGKILL: to those of `specs` that were started and have not ended."""
        await self._signal(specs, signal.SIGTERM)
        await self._await_exits(specs, grace_s)
        await self._signal(specs, signal.SIGKILL)
        await self._await_exits(specs, KILL_S, even_if_forced=True)

    async def _signal(self, specs: Sequence[ProcessSpec], signum: int) -> None:
        for process, _ in self._alive(specs):
            if signum == signal.SIGTERM:
                self._record.move_process(process.spec.name, ProcessState.STOPPING)
            await self._launcher.signal(process, signum)

    async def _await_exits(self, specs: Sequence[ProcessSpec], seconds: float, *, even_if_forced: bool = False) -> None:
        """Until all have ended, the time is up, or somebody loses patience."""
        pending = {watch for _, watch in self._alive(specs)}
        limit = time.monotonic() + seconds
        forced = asyncio.create_task(self._forced.wait())
        while pending and (even_if_forced or not forced.done()):
            others = pending if even_if_forced else {*pending, forced}
            done, _ = await asyncio.wait(others, timeout=limit - time.monotonic(), return_when=asyncio.FIRST_COMPLETED)
            if not done:
                break
            pending -= done
        forced.cancel()

    def _alive(self, specs: Sequence[ProcessSpec]) -> list[tuple[ProcessHandle, asyncio.Task[None]]]:
        started = [self._watches[spec.name] for spec in specs if spec.name in self._watches]
        return [(process, watch) for process, watch in started if not watch.done()]

    def _log_of(self, name: str) -> Path:
        return self._run_dir / "logs" / f"{name}.log"

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
