"""Starts the processes of a run on this machine, and sees to it that none outlives it.

Every child gets a session of its own, the read end of the death pipe (see `child`), and the run's nonce in its
environment; the janitor holds the other insurance. Orphans of children are re-parented to the supervisor (a
"subreaper"), where the sweep finds them even if they left their session and forgot their environment. An exit is an
event on a pidfd. Where the system lacks one of these (they are Linux's), the others still hold.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from penstock.ports import End, Look, ProcessHandle, ProcessSpec
from penstock.supervisor import procfs
from penstock.supervisor.janitor import NONCE, RUNTIME_DIR, Janitor, marks_of
from penstock.supervisor.reports import read_beat, read_ready, read_report
from penstock.supervisor.runtime import claim

if TYPE_CHECKING:
    import aiohttp

PR_SET_CHILD_SUBREAPER = 36
NAME = "PENSTOCK_PROCESS"
"""Environment variable: which process of the run it is, or was started by."""
HEALTH_S = 2.0
SWEEP_ROUNDS = 10

_reserved: set[int] = set()
"""Children that have an owner in this process who will collect their exit code, and those that were there before the
launcher (of a shell, say, that became this process). All other dead children are orphans."""


@dataclass(eq=False, slots=True, kw_only=True)
class LocalProcess:
    """One child. Its pid stays its own until the exit code is collected, which only the launcher does."""

    spec: ProcessSpec
    popen: subprocess.Popen[bytes]
    identity: procfs.Identity | None
    num_oom_kills: int
    """That there had been when it was started."""
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    end: End | None = None

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def facts(self) -> dict[str, Any]:
        return asdict(self.identity) if self.identity else {"pid": self.pid}


class LocalLauncher:
    """`ports.Launcher` for processes of this machine. An async context manager: leaving it leaves nothing."""

    def __init__(
        self,
        *,
        run_dir: Path,
        runtime_dir: Path,
        run_id: str,
        nonce: str | None = None,
        environment: Mapping[str, str] | None = None,
        keeps_record: bool = True,
    ) -> None:
        """`keeps_record`: it starts processes for the supervisor of the run, which is this very process. Else that is
        on another machine, and what this one leaves behind is no news of the run."""
        self._run_dir = run_dir
        self._runtime_dir = runtime_dir
        self._nonce = nonce or secrets.token_hex(16)
        self._keeps_record = keeps_record
        self._environment = {
            **os.environ,
            **(environment or {}),
            "PENSTOCK_RUN_ID": run_id,
            NONCE: self._nonce,
            RUNTIME_DIR: str(runtime_dir),
            "PYTHONUNBUFFERED": "1",
        }
        self._processes: dict[int, LocalProcess] = {}
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        self._environment |= claim(self._runtime_dir, run_dir=self._run_dir, nonce=self._nonce)
        (self._run_dir / "logs").mkdir(exist_ok=True)
        self._death_read, self._death_write = os.pipe()
        _reserved.update(stat.pid for stat in procfs.children())
        _become_subreaper()
        if threading.current_thread() is threading.main_thread():
            asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, _reap_orphans)
        self._janitor = Janitor(
            run_dir=self._run_dir, runtime_dir=self._runtime_dir, nonce=self._nonce, keeps_record=self._keeps_record
        )
        _reserved.add(self._janitor.pid)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.sweep()
        if self._session:
            await self._session.close()
        asyncio.get_running_loop().remove_signal_handler(signal.SIGCHLD)
        os.close(self._death_write)
        os.close(self._death_read)
        await asyncio.to_thread(self._janitor.release)
        _reserved.discard(self._janitor.pid)

    async def spawn(self, spec: ProcessSpec) -> LocalProcess:
        """What a predecessor of the same name left behind (memory of a device, ports) is ended first."""
        if any(process.spec.name == spec.name for process in self._processes.values()):
            await asyncio.to_thread(self._kill_escapees, spec.name)
        num_oom_kills, popen = procfs.num_oom_kills(), self._fork(spec)
        identity = procfs.identify(popen.pid)
        process = LocalProcess(spec=spec, popen=popen, identity=identity, num_oom_kills=num_oom_kills)
        _reserved.add(process.pid)
        self._processes[process.pid] = process
        self._janitor.watch(process.pid)
        self._await_exit(process)
        return process

    async def probe(self, process: ProcessHandle) -> str | None:
        report = read_ready(self._runtime_dir, process.spec.name)
        if report is None:
            return "it has not reported ready"
        if report.get("nonce") != self._nonce or report.get("pid") != process.pid:
            return "the readiness report was written by another process"
        return await self._check_health(report["url"]) if "url" in report else None

    async def look(self, process: ProcessHandle) -> Look:
        name, pid = process.spec.name, process.pid
        return Look(beat=read_beat(self._runtime_dir, name, pid), report=read_report(self._runtime_dir, name, pid))

    async def signal(self, process: ProcessHandle, signum: int) -> None:
        local = self._processes[process.pid]
        if local.end is None and procfs.identify(local.pid) == local.identity:
            _signal_group(local.pid, signum)

    async def wait(self, process: ProcessHandle) -> End:
        local = self._processes[process.pid]
        await local.ended.wait()
        assert local.end is not None
        return local.end

    async def sweep(self) -> list[str]:
        """End children, their descendants and orphans; remove the runtime directory; say what resisted."""
        remaining = await asyncio.to_thread(self._kill_remaining)
        _reap_orphans()
        await asyncio.to_thread(shutil.rmtree, self._runtime_dir, ignore_errors=True)
        leftovers = [f"process {stat.pid} (state {stat.state})" for stat in remaining]
        return leftovers + ([str(self._runtime_dir)] if self._runtime_dir.exists() else [])

    def _kill_escapees(self, name: str) -> None:
        marks = marks_of(self._nonce, self._runtime_dir) | {f"{NAME}={name}".encode()}
        procfs.kill_family(
            lambda stat: marks <= set(procfs.environment(stat.pid)), spare={os.getpid()}, rounds=SWEEP_ROUNDS
        )

    def _kill_remaining(self) -> list[procfs.Stat]:
        marks = marks_of(self._nonce, self._runtime_dir)

        def belongs(stat: procfs.Stat) -> bool:
            entries = procfs.environment(stat.pid)
            is_marked = any(entry.startswith(f"{NONCE}=".encode()) for entry in entries)
            return marks <= set(entries) if is_marked else _is_orphan(stat)

        return procfs.kill_family(belongs, spare={os.getpid()}, rounds=SWEEP_ROUNDS)

    def _fork(self, spec: ProcessSpec) -> subprocess.Popen[bytes]:
        with (self._run_dir / "logs" / f"{spec.name}.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", spec.module, "--run-dir", str(self._run_dir), "--name", spec.name],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={**self._environment, **spec.env, NAME: spec.name, "PENSTOCK_DEATH_FD": str(self._death_read)},
                pass_fds=(self._death_read,),
                start_new_session=True,
            )

    async def _check_health(self, url: str) -> str | None:
        import aiohttp

        if self._session is None:
            self._session = aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=HEALTH_S))
        try:
            async with self._session.get(f"{url}/health") as reply:
                return None if reply.status == 200 else f"GET {url}/health answered {reply.status}"
        except (aiohttp.ClientError, TimeoutError) as error:
            return f"GET {url}/health failed: {error or type(error).__name__}"

    def _await_exit(self, process: LocalProcess) -> None:
        loop = asyncio.get_running_loop()
        try:
            fd = os.pidfd_open(process.pid)
        except (OSError, AttributeError):
            threading.Thread(target=self._wait_for, args=(process, loop), daemon=True).start()
            return

        def readable() -> None:
            loop.remove_reader(fd)
            os.close(fd)
            self._collect(process)

        loop.add_reader(fd, readable)

    def _wait_for(self, process: LocalProcess, loop: asyncio.AbstractEventLoop) -> None:
        """On a thread of its own, where there is no pidfd."""
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        loop.call_soon_threadsafe(self._collect, process)

    def _collect(self, process: LocalProcess) -> None:
        """Kill the rest of its group first: as long as the leader is a zombie, the number is surely theirs."""
        _signal_group(process.pid, signal.SIGKILL)
        process.end = End(
            returncode=process.popen.wait(),
            report=read_report(self._runtime_dir, process.spec.name, process.pid),
            is_out_of_memory=procfs.num_oom_kills() > process.num_oom_kills,
        )
        _reserved.discard(process.pid)
        self._janitor.forget(process.pid)
        _reap_orphans()
        process.ended.set()


def _signal_group(group: int, signum: int) -> None:
    try:
        os.killpg(group, signum)
    except (ProcessLookupError, PermissionError):
        """Nobody of the group is left but zombies."""


def _become_subreaper() -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def _is_orphan(stat: procfs.Stat) -> bool:
    """Whether an ancestor within the run left it to us; what this process itself starts shares its session."""
    return stat.parent == os.getpid() and stat.session != os.getsid(0) and stat.pid not in _reserved


def _reap_orphans() -> None:
    """Collect orphans that have ended, so that they do not stay in the process table."""
    for stat in procfs.children():
        if stat.state == "Z" and _is_orphan(stat):
            os.waitpid(stat.pid, os.WNOHANG)
