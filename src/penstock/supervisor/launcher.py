"""The launcher of processes on this machine. It makes sure that no process outlives the run.

Every child gets a session of its own, the read end of the death pipe (see `child`), and the run's nonce in its
environment. The janitor is a second safeguard. The kernel gives orphans of children to the supervisor (a "subreaper").
So the sweep finds them even if they left their session and cleared their environment. The launcher learns of an exit
from a pidfd. Only Linux has these features; if a system lacks one of them, the remaining ones still work.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import secrets
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from penstock.observe import jsonl
from penstock.own_files import remove_tree
from penstock.ports.process_launcher import Beat, Device, End, Look, ProcessSpec, Report
from penstock.runtime.held_port import HeldPort
from penstock.sandbox import control_groups
from penstock.supervisor import procfs
from penstock.supervisor.child import ADDRESS, PORT
from penstock.supervisor.janitor import NONCE, RUNTIME_DIR, Janitor, marks_of
from penstock.supervisor.runtime import claim

PR_SET_CHILD_SUBREAPER = 36
NAME = "PENSTOCK_PROCESS"
"""Environment variable: name of the process of the run; its descendants inherit it."""
HEALTH_S = 2.0
SWEEP_ROUNDS = 10

_reserved: set[int] = set()
"""Pids of children with an owner in this process, which collects their exit codes. Also children from before the
launcher, for example of a shell that replaced itself with this process. All other dead children are orphans."""


@dataclass(eq=False, slots=True, kw_only=True)
class LocalProcess:
    """One child. The kernel does not reuse its pid before the exit code is collected, and only the launcher collects
    it."""

    spec: ProcessSpec
    popen: subprocess.Popen[bytes]
    identity: procfs.Identity | None
    num_oom_kills: int
    """Count of the kernel's out-of-memory kills when this child was started."""
    runtime_dir: Path
    nonce: str
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    end: End | None = None

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def facts(self) -> dict[str, Any]:
        return asdict(self.identity) if self.identity else {"pid": self.pid}

    async def probe(self) -> str | None:
        ready = self._read("ready")
        if ready.get("nonce") != self.nonce:
            return "it is still starting"
        return await _check_health(ready["url"]) if "url" in ready else None

    async def look(self) -> Look:
        beat = self._read("heartbeats")
        known = Beat(time=beat["time"], progress=beat["progress"], doing=beat["doing"]) if beat else None
        devices = self._read("ready").get("devices")
        seen = [Device(**each) for each in devices] if devices is not None else None
        return Look(beat=known, report=self.report(), devices=seen)

    def report(self) -> Report | None:
        """Return the error that the process reported."""
        error = self._read("errors")
        return Report(time=error["time"], message=error["message"]) if error else None

    async def signal(self, signum: int) -> None:
        if self.end is None and procfs.identify(self.pid) == self.identity:
            _signal_group(self.pid, signum)

    async def wait(self) -> End:
        await self.ended.wait()
        assert self.end is not None
        return self.end

    def _read(self, folder: str) -> dict[str, Any]:
        """Return what exactly this process wrote into its file in `folder` (see `child`); empty if it wrote nothing.
        The file of an earlier process with the same name does not count."""
        written = jsonl.read_json(self.runtime_dir / folder / f"{self.spec.name}.json")
        return written if written.get("pid") == self.pid else {}


@dataclass(eq=False, kw_only=True)
class LocalLauncher:
    """`ports.Launcher` for processes on this machine. An async context manager: its exit ends all its processes."""

    run_dir: Path
    runtime_dir: Path
    run_id: str
    nonce: str = field(default_factory=lambda: secrets.token_hex(16))
    environment: Mapping[str, str] = field(default_factory=dict)
    """Added to the environment of all processes."""
    keeps_journal: bool = True
    """This process is the supervisor of the run. Otherwise the supervisor runs on another machine, and the janitor of
    this machine does not touch the run's journal."""
    _started: set[str] = field(default_factory=set)
    """Names of all processes that were started."""
    _held: dict[str, HeldPort] = field(default_factory=dict)
    """Ports of processes that serve others, by the name of the process."""

    async def __aenter__(self) -> Self:
        self._environment = {
            **os.environ,
            **self.environment,
            "PENSTOCK_RUN_ID": self.run_id,
            NONCE: self.nonce,
            RUNTIME_DIR: str(self.runtime_dir),
            "PYTHONUNBUFFERED": "1",
            **claim(self.runtime_dir, run_dir=self.run_dir, nonce=self.nonce),
        }
        (self.run_dir / "logs").mkdir(exist_ok=True)
        self._death_read, self._death_write = os.pipe()
        _reserved.update(stat.pid for stat in procfs.children())
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        if threading.current_thread() is threading.main_thread():
            asyncio.get_running_loop().add_signal_handler(signal.SIGCHLD, _reap_orphans)
        self._janitor = Janitor(self.run_dir, self.runtime_dir, self.nonce, keeps_journal=self.keeps_journal)
        _reserved.add(self._janitor.process.pid)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.sweep()
        asyncio.get_running_loop().remove_signal_handler(signal.SIGCHLD)
        os.close(self._death_write)
        os.close(self._death_read)
        for held in self._held.values():
            held.close()
        await asyncio.to_thread(self._janitor.release)
        _reserved.discard(self._janitor.process.pid)

    async def spawn(self, spec: ProcessSpec) -> LocalProcess:
        """Start a process. First kill what an earlier process of the same name left running, to free device memory and
        ports. Keep its port, if it serves others, until the launcher ends."""
        if spec.name in self._started:
            await asyncio.to_thread(self._kill_escapees, spec.name)
        num_oom_kills, popen = procfs.num_oom_kills(), self._fork(spec)
        process = LocalProcess(
            spec=spec,
            popen=popen,
            identity=procfs.identify(popen.pid),
            num_oom_kills=num_oom_kills,
            runtime_dir=self.runtime_dir,
            nonce=self.nonce,
        )
        _reserved.add(process.pid)
        self._started.add(spec.name)
        self._janitor.order(watch=process.pid)
        self._await_exit(process)
        return process

    async def sweep(self) -> list[str]:
        """Kill children, descendants and orphans, and remove the runtime directory. Returns what is still there."""
        remaining = await asyncio.to_thread(self._kill_remaining)
        _reap_orphans()
        is_gone = await asyncio.to_thread(remove_tree, self.runtime_dir)
        await asyncio.to_thread(control_groups.sweep)
        leftovers = [f"process {stat.pid} (state {stat.state})" for stat in remaining]
        return leftovers + ([] if is_gone else [str(self.runtime_dir)])

    def _kill_escapees(self, name: str) -> None:
        marks = marks_of(self.nonce, self.runtime_dir) | {f"{NAME}={name}".encode()}
        procfs.kill_family(lambda stat: marks.issubset(procfs.environment(stat.pid)), rounds=SWEEP_ROUNDS)

    def _kill_remaining(self) -> list[procfs.Stat]:
        marks = marks_of(self.nonce, self.runtime_dir)

        def belongs(stat: procfs.Stat) -> bool:
            entries = procfs.environment(stat.pid)
            is_marked = any(entry.startswith(f"{NONCE}=".encode()) for entry in entries)
            return marks.issubset(entries) if is_marked else _is_orphan(stat)

        return procfs.kill_family(belongs, rounds=SWEEP_ROUNDS)

    def _fork(self, spec: ProcessSpec) -> subprocess.Popen[bytes]:
        with (self.run_dir / "logs" / f"{spec.name}.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-P", "-m", spec.module, "--run-dir", str(self.run_dir), "--name", spec.name],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env={
                    **self._environment,
                    **spec.env,
                    **self._port(spec),
                    NAME: spec.name,
                    "PENSTOCK_DEATH_FD": str(self._death_read),
                },
                pass_fds=(self._death_read,),
                start_new_session=True,
            )

    def _port(self, spec: ProcessSpec) -> dict[str, str]:
        """Return the variable with the process's port, which is held from its first start on. Raises OSError if the
        port is taken."""
        if spec.serves_at is None:
            return {}
        if spec.name not in self._held:
            host, port = spec.serves_at
            self._held[spec.name] = HeldPort(self.environment.get(ADDRESS, host), port)
        return {PORT: str(self._held[spec.name].port)}

    def _await_exit(self, process: LocalProcess) -> None:
        loop = asyncio.get_running_loop()
        pidfd = procfs.open_pidfd(process.pid)
        if pidfd is None:
            threading.Thread(target=self._wait_for, args=(process, loop), daemon=True).start()
            return

        def collect() -> None:
            loop.remove_reader(pidfd)
            os.close(pidfd)
            self._collect(process)

        loop.add_reader(pidfd, collect)

    def _wait_for(self, process: LocalProcess, loop: asyncio.AbstractEventLoop) -> None:
        """Wait for the exit in a thread. For systems without pidfd."""
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        loop.call_soon_threadsafe(self._collect, process)

    def _collect(self, process: LocalProcess) -> None:
        """Collect an exit code. First kill the rest of the process group: while its leader is a zombie, no other group
        can have its number."""
        _signal_group(process.pid, signal.SIGKILL)
        returncode, report = process.popen.wait(), process.report()
        is_out_of_memory = procfs.num_oom_kills() > process.num_oom_kills
        process.end = End(returncode=returncode, report=report, is_out_of_memory=is_out_of_memory)
        _reserved.discard(process.pid)
        self._janitor.order(forget=process.pid)
        _reap_orphans()
        process.ended.set()


async def _check_health(url: str) -> str | None:
    import aiohttp

    try:
        async with aiohttp.request("GET", f"{url}/health", timeout=aiohttp.ClientTimeout(total=HEALTH_S)) as reply:
            return None if reply.status == 200 else f"GET {url}/health answered {reply.status}"
    except (aiohttp.ClientError, TimeoutError) as error:
        return f"GET {url}/health failed: {error or type(error).__name__}"


def _signal_group(group: int, signum: int) -> None:
    with suppress(ProcessLookupError, PermissionError):  # only zombies are left in the group
        os.killpg(group, signum)


def _is_orphan(stat: procfs.Stat) -> bool:
    """Return whether the process became our child because its parent within the run died. Children that this process
    itself starts are either reserved or share its session."""
    return stat.parent == os.getpid() and stat.session != os.getsid(0) and stat.pid not in _reserved


def _reap_orphans() -> None:
    """Collect the exit codes of dead orphans, so that they leave the process table."""
    for stat in procfs.children():
        if stat.state == "Z" and _is_orphan(stat):
            os.waitpid(stat.pid, os.WNOHANG)
