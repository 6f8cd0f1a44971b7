"""Runs programs that a policy wrote, with limits on time, memory and files. All processes they start end with them.

The sandbox protects against accidents, not against attacks: a program runs as the same user, and can read what that
user can read. The kernel enforces the limits (setrlimit), and util-linux sets them around the program. If users may
create namespaces on this machine, the program also has no network, sees no other process and leaves no process behind.
Otherwise its process group is killed. If the caller dies, the program is killed too.
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
"""Command prefix that gives the program its own processes, network and /proc."""
FIRST = ("sh", "-c", '"$@"; exit $?', "sh")
"""The first process of a namespace: when it ends, all other processes there end. It is a shell and not the program,
because signals do not end the first process of a namespace."""
SIGNALLED = 128
"""Exit status of a program ended by a signal, as a shell reports it: this number plus the signal's number."""
WITH_CALLER = ("setpriv", "--pdeathsig", "KILL")
"""Command prefix that kills the program when its caller dies."""
PASSED_ON = ("PATH", "LANG", "LC_ALL", "PENSTOCK_NONCE", "PENSTOCK_RUNTIME_DIR")
"""Environment variables that the program inherits, unless the caller overrides them. With the last two a run finds its
leftover processes and files. API keys are not passed on."""
PROBE_S = 10.0
"""Time limit of the test for namespaces."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits on a program's resources."""

    wall_s: float = 10.0
    cpu_s: int = 5
    """Processor time per process, in whole seconds as the kernel counts it."""
    memory_bytes: int = 512 << 20
    """Address space per process."""
    max_processes: int = 64
    """Maximum number of processes and threads at the same time. The limit applies only inside namespaces. The kernel
    exempts root from it."""
    file_bytes: int = 16 << 20
    """Largest size of a single file, and of standard output or standard error."""
    output_bytes: int = 64 << 10
    """Number of bytes kept from the beginning of standard output and of standard error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a program ended. Refused memory or files show only in the program's own output."""

    returncode: int
    """Exit status: 128 plus the signal's number if a signal ended the program, 127 if there is no such program."""
    stdout: str
    stderr: str
    wall_s: float
    cpu_s: float
    exceeded: Literal["wall_s", "cpu_s"] | None
    """The limit that ended the program."""


def run(
    argv: Sequence[str],
    *,
    cwd: Path,
    stdin: str = "",
    limits: Limits = Limits(),
    env: Mapping[str, str] | None = None,
    network: bool = False,
) -> Outcome:
    """Run `argv` and return its outcome. This blocks until the program ends: call it from a thread. `env`: variables
    added to a minimal environment. Raises OSError if the directory `cwd` does not exist."""
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
            os.killpg(process.pid, signal.SIGKILL)  # not reaped yet, so the group id is not reused
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
    """Return a command line for this Python interpreter, isolated from the user's environment and packages. The
    argument `-S` also hides all installed packages and halves the start time."""
    return [sys.executable, "-I", *arguments]


def scratch() -> TemporaryDirectory[str]:
    """Return a temporary directory for a program. Inside a run it lies in the run's runtime folder, so that the run
    removes it even if its creator was killed."""
    return TemporaryDirectory(prefix="sandbox-", dir=os.environ.get("PENSTOCK_RUNTIME_DIR"), ignore_cleanup_errors=True)


@functools.cache
def has_namespaces() -> bool:
    """Return whether users may create namespaces on this machine. If not, log a warning once."""
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
    """Return the command prefix that sets hard limits. A process that reaches a limit is killed or its request is
    refused. It cannot raise the limit."""
    words = [f"--cpu={limits.cpu_s}", f"--as={limits.memory_bytes}", f"--fsize={limits.file_bytes}", "--core=0"]
    if has_namespaces():  # without them the kernel counts all processes of this user
        words.append(f"--nproc={limits.max_processes}")
    return ["prlimit", *words, "--"]


def _environment(cwd: Path) -> dict[str, str]:
    passed_on = {name: os.environ[name] for name in PASSED_ON if name in os.environ}
    return passed_on | {"HOME": str(cwd), "TMPDIR": str(cwd), "PYTHONDONTWRITEBYTECODE": "1"}


def _wait(process: subprocess.Popen[bytes], seconds: float) -> bool:
    """Return whether the process ended in time. The process is not reaped."""
    pidfd = os.pidfd_open(process.pid)
    try:
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        return bool(poller.poll(1000 * seconds))
    finally:
        os.close(pidfd)


def _reap(process: subprocess.Popen[bytes]) -> tuple[int, float]:
    """Return the exit status, and the processor seconds of the process and of the children it waited for."""
    _, status, usage = os.wait4(process.pid, 0)
    code = process.returncode = os.waitstatus_to_exitcode(status)
    return SIGNALLED - code if code < 0 else code, usage.ru_utime + usage.ru_stime


def _exceeded(returncode: int, *, in_time: bool, cpu_s: float, limits: Limits) -> Literal["wall_s", "cpu_s"] | None:
    if not in_time:
        return "wall_s"
    killed = returncode == SIGNALLED + signal.SIGKILL
    return "cpu_s" if killed and cpu_s > limits.cpu_s - 0.5 else None  # the kernel checks at intervals


def _beginning(file: IO[bytes], num_bytes: int) -> str:
    file.seek(0)
    return file.read(num_bytes).decode(errors="replace")
