"""What a program in a sandbox may use, and how it ended."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits on a program's resources."""

    wall_s: float = 10.0
    cpu_s: int = 5
    """Processor time per process, in whole seconds as the kernel counts it."""
    memory_bytes: int = 512 << 20
    """Address space per process. Where control groups are writable, the whole box has no more than this, beside its
    files."""
    max_processes: int = 64
    """Maximum number of processes and threads in a box at the same time."""
    file_bytes: int = 16 << 20
    """Largest size of a single file, and of standard output or standard error."""
    output_bytes: int = 64 << 10
    """Number of bytes kept from the beginning of standard output and of standard error."""
    work_bytes: int = 64 << 20
    """Size of the work directory. /tmp and /dev/shm of the box have the same size."""


DEFAULT_LIMITS = Limits()


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
