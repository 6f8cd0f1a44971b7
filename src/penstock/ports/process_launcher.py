"""The launcher: it starts, watches and ends the processes of a run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """How to start one process of a run."""

    name: str
    """Unique within the run, e.g. `rollout-0`; also the log's name."""
    role: str
    module: str
    """Python module run with `-m`; it receives the run directory and its own name."""
    ready_s: float
    """Deadline for readiness."""
    grace_s: float
    """Time between SIGTERM and SIGKILL."""
    env: Mapping[str, str] = field(default_factory=dict)
    serves_at: tuple[str, int] | None = None
    """Host and port at which the process serves others; port 0 lets the system choose. None if it serves no others. The
    launcher keeps the port for later processes of the same name."""
    pool: str | None = None
    """Pool of the cluster in which the process runs; None for the supervisor's machine."""
    num_slots: int = 1
    """Number of slots that the process takes in the pool, all on one node."""
    beside: str = ""
    """Name of another process with which it shares slots; empty if it has its own slots."""
    restart_set: str = ""
    """Name of the set of processes that restart together; empty if the process restarts alone."""
    saves: str = ""
    """Name of the event that reports a saved state for its successor; empty if a successor restores nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Beat:
    """A heartbeat that the process wrote."""

    time: float
    """Seconds on the monotonic clock of the process."""
    progress: int
    """A progress count of the process; only changes of it matter."""
    doing: str
    """Current activity; empty while it is idle."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """An error that the process itself reported."""

    time: float
    """Seconds since the epoch."""
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """An accelerator that a process uses, when it became ready. The memory is that of all processes there."""

    name: str
    number: str
    """Its number or id on the machine."""
    used_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """The latest heartbeat and error report of a process."""

    beat: Beat | None = None
    """None if there is no heartbeat, or while the process is writing one."""
    report: Report | None = None
    devices: Sequence[Device] | None = None
    """Accelerators of a process that is ready; empty if it computes on the CPU, None if they are not known."""


@dataclass(frozen=True, slots=True, kw_only=True)
class End:
    """How a process ended."""

    returncode: int | None = None
    """As in subprocess: negative for a signal. None if the process was lost."""
    report: Report | None = None
    """The last error report of the process."""
    is_out_of_memory: bool = False
    """Whether the kernel killed a process for lack of memory while this process ran."""
    lost: str = ""
    """Why the end of the process is unknown; empty if it is known."""


class ProcessHandle(Protocol):
    """A started process."""

    @property
    def spec(self) -> ProcessSpec: ...

    @property
    def pid(self) -> int: ...

    @property
    def facts(self) -> Mapping[str, Any]:
        """Return the facts that identify the process in records: pid, start time and machine."""

    @property
    def end(self) -> End | None:
        """Return how the process ended; None while it runs."""

    async def probe(self) -> str | None:
        """Return None once the process is ready, else what is still missing. Checks the identity of the process."""

    async def look(self) -> Look:
        """Return the latest heartbeat, error report and devices of exactly this process; empty if they cannot be read
        now."""

    async def signal(self, signum: int) -> None:
        """Signal the process and all its descendants. A process that SIGKILL cannot reach counts as lost."""

    async def wait(self) -> End:
        """Wait until the process ends."""


class Launcher(Protocol):
    """Starts the processes of a run, on this machine or on a Ray cluster."""

    async def spawn(self, spec: ProcessSpec) -> ProcessHandle:
        """Start a process. Raises `OSError` if the start fails."""

    async def sweep(self) -> list[str]:
        """Remove everything that the processes of the run left behind. Returns the things that could not be removed."""
