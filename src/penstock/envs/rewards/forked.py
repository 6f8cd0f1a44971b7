"""A call in a forked process, for code that may execute the text that it reads.

The text can do what it likes to the forked process, which ends with the call. It cannot change how the next text is
scored: it has no file of the worker, cannot start processes or threads, cannot read or write the worker's memory, and
cannot signal the worker or change its priority.
"""

from __future__ import annotations

import ctypes
import functools
import os
import resource
import signal
import struct
from collections.abc import Callable

from penstock.sandbox import seccomp

MOST_BYTES = 1 << 16
PR_SET_DUMPABLE, PR_SET_SECCOMP, PR_SET_NO_NEW_PRIVS, SECCOMP_MODE_FILTER = 4, 22, 38, 2
LIBC = ctypes.CDLL(None)


def close_memory() -> None:
    """Close this process to the others of its user: they can neither trace it nor open its memory."""
    LIBC.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)


def forked(work: Callable[[], bytes]) -> bytes | None:
    """Return the result of `work`, called in a forked process. None if that process ended without one."""
    _filter()  # made once, not in every forked process
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        _work(work, theirs)
    os.close(theirs)
    try:
        with os.fdopen(ours, "rb") as result:
            content = result.read(MOST_BYTES)
    finally:
        _end(pid)
    return content or None


def _work(work: Callable[[], bytes], result: int) -> None:
    """Write the result in the forked process. This does not return."""
    try:
        os.dup2(result, 3)
        os.closerange(4, os.sysconf("SC_OPEN_MAX"))
        resource.setrlimit(resource.RLIMIT_NPROC, (0, 0))
        _leave_others_alone()
        os.write(3, work())
    finally:
        os._exit(0)


@functools.cache
def _filter() -> bytes:
    """Return the seccomp filter of forked processes; an empty one on a processor without filters (and boxes)."""
    try:
        return seccomp.lone_program()
    except seccomp.UnknownArchitecture:
        return b""


def _leave_others_alone() -> None:
    """Forbid this process to signal other processes and to change their priority."""
    kept = ctypes.create_string_buffer(_filter(), len(_filter()))
    program = struct.pack("@HP", len(kept) // 8, ctypes.addressof(kept))
    LIBC.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    LIBC.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, program, 0, 0)  # fails only without a box, on a kernel without it


def _end(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
