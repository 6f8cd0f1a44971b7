"""Runs programs that a policy wrote: limited in time, memory and files, and gone with everything they started.

A fence against accidents, not a prison: a program runs as the same user, and may read what that user may. Limits are
the kernel's own (setrlimit), set by util-linux around the program. Where the machine lets its users make namespaces,
the program also has no network, sees no other process, and can leave none behind; elsewhere its process group is
killed. A program whose caller dies is killed too.
"""

from __future__ import annotations

import functools
import logging
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory, TemporaryFile
from typing import IO, Literal

logger = logging.getLogger(__name__)

NAMESPACES = ("unshare", "--user", "--map-current-user", "--net", "--pid", "--fork", "--kill-child", "--mount-proc")
"""Processes, network and /proc of its own."""
FIRST = ("sh", "-c", '"$@"; exit $?', "sh")
"""The first process of a namespace: nothing outlives it. It is no program's own place: signals would not end that."""
SIGNALLED = 128
"""How a shell says that a signal ended a program: this plus its number."""
WITH_CALLER = ("setpriv", "--pdeathsig", "KILL")
PASSED_ON = ("PATH", "LANG", "LC_ALL", "PENSTOCK_NONCE", "PENSTOCK_RUNTIME_DIR")
"""Of our environment, where the caller says nothing else; by the last two a run finds what it left. Keys stay here."""
PROBE_S = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What a program may use."""

    wall_s: float = 10.0
    cpu_s: int = 5
    """Per process; the kernel counts whole seconds."""
    memory_bytes: int = 512 << 20
    """Address space per process."""
    max_processes: int = 64
    """At once, threads included. Only inside namespaces, and never for root, whom the kernel exempts."""
    file_bytes: int = 16 << 20
    """Of any one file, and of either output."""
    output_bytes: int = 64 << 10
    """Of either output, what is kept: its beginning."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a program ended. What memory or files it was refused, it says itself."""

    returncode: int
    """128 plus the signal, if one ended it; 127 if there is no such program."""
    stdout: str
    stderr: str
    wall_s: float
    cpu_s: float
    exceeded: Literal["wall_s", "cpu_s"] | None
    """The limit that ended it."""


def run(
    argv: Sequence[str],
    *,
    cwd: Path,
    stdin: str = "",
    limits: Limits = Limits(),
    env: Mapping[str, str] | None = None,
    network: bool = False,
) -> Outcome:
    """What became of `argv`. Waits for its end: call it from a thread. `env`: besides a minimal one. Raises OSError if
    there is no such directory."""
    with TemporaryFile() as given, TemporaryFile() as out, TemporaryFile() as err:
        given.write(stdin.encode())
        given.seek(0)
        started = time.monotonic()
        process = subprocess.Popen(
            [*WITH_CALLER, *_fence(network=network), *_limited(limits), *argv],
            cwd=cwd,
            env=_environment(cwd) | dict(env or {}),
            stdin=given,
            stdout=out,
            stderr=err,
            start_new_session=True,
        )
        try:
            in_time = _wait(process, limits.wall_s)
        finally:
            os.killpg(process.pid, signal.SIGKILL)  # it is not reaped yet, so the group is its own
            returncode, cpu_s = _reap(process)
        return Outcome(
            returncode=returncode,
            stdout=_beginning(out, limits.output_bytes),
            stderr=_beginning(err, limits.output_bytes),
            wall_s=time.monotonic() - started,
            cpu_s=cpu_s,
            exceeded=_exceeded(returncode, in_time=in_time, cpu_s=cpu_s, limits=limits),
        )


def python(*arguments: str) -> list[str]:
    """A command line for this interpreter, isolated from the user's environment and packages; with `-S` among the
    arguments from all installed ones too, and started in half the time."""
    return [sys.executable, "-I", *arguments]


def scratch() -> TemporaryDirectory[str]:
    """A directory for programs. What a process of a run leaves behind when it is killed goes with the run."""
    return TemporaryDirectory(prefix="sandbox-", dir=os.environ.get("PENSTOCK_RUNTIME_DIR"), ignore_cleanup_errors=True)


@functools.cache
def has_namespaces() -> bool:
    """Whether this machine permits them; it says so once if it does not."""
    try:
        probe = subprocess.run([*NAMESPACES, "true"], capture_output=True, text=True, timeout=PROBE_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        reason = str(error)
    else:
        if probe.returncode == 0:
            return True
        reason = probe.stderr.strip()
    logger.warning("programs run without namespaces of their own, so with the network: %s", reason)
    return False


def _fence(*, network: bool) -> list[str]:
    if not has_namespaces():
        return []
    return [*(word for word in NAMESPACES if not (network and word == "--net")), *FIRST]


def _limited(limits: Limits) -> list[str]:
    """Hard limits: whoever meets one is killed or refused, and cannot raise it."""
    words = [
        f"--cpu={limits.cpu_s}",
        f"--as={limits.memory_bytes}",
        f"--fsize={limits.file_bytes}",
        "--core=0",
    ]
    if has_namespaces():  # elsewhere the kernel would count everything else that this user runs
        words.append(f"--nproc={limits.max_processes}")
    return ["prlimit", *words, "--"]


def _environment(cwd: Path) -> dict[str, str]:
    passed_on = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    return passed_on | {"HOME": str(cwd), "TMPDIR": str(cwd), "PYTHONDONTWRITEBYTECODE": "1"}


def _wait(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Whether it ended in time. It is not reaped."""
    pidfd = os.pidfd_open(process.pid)
    try:
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        return bool(poller.poll(1000 * seconds))
    finally:
        os.close(pidfd)


def _reap(process: subprocess.Popen[bytes]) -> tuple[int, float]:
    """What it returned, and the seconds of processor time that it and what it waited for have used."""
    _, status, usage = os.wait4(process.pid, 0)
    code = process.returncode = os.waitstatus_to_exitcode(status)
    return SIGNALLED - code if code < 0 else code, usage.ru_utime + usage.ru_stime


def _exceeded(returncode: int, *, in_time: bool, cpu_s: float, limits: Limits) -> Literal["wall_s", "cpu_s"] | None:
    if not in_time:
        return "wall_s"
    killed = returncode == SIGNALLED + signal.SIGKILL
    return "cpu_s" if killed and cpu_s > limits.cpu_s - 0.5 else None  # the kernel looks at it now and then


def _beginning(file: IO[bytes], num_bytes: int) -> str:
    file.seek(0)
    return file.read(num_bytes).decode(errors="replace")
