"""What can go wrong with a call on a group of workers."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.deadline import Stalled
from penstock.groups.backend import Raised


class CallRefused(ValueError):
    """The arguments do not fit what the method declares; nothing has been sent."""


class ResultRefused(TypeError):
    """The method has run, but its results do not fit what it declares."""


class RemoteError(RuntimeError):
    """A method raised on a worker. What it raised is the cause, as far as it could travel."""

    def __init__(self, raised: Raised, *, rank: int, role: str, method: str) -> None:
        super().__init__(f"{role}.{method} failed on rank {rank}: {raised.kind}: {raised.message}")
        self.rank, self.role, self.method, self.kind = rank, role, method, raised.kind
        self.remote_traceback = raised.trace
        self.self_explanatory = getattr(raised.error, "self_explanatory", False)
        self.hopeless = getattr(raised.error, "hopeless", False)
        self.__cause__ = raised.error
        if raised.error is None or raised.error.__traceback__ is None:  # else it shows where it comes from itself
            self.add_note(f"on rank {rank}:\n{raised.trace}")


class WorkerLost(RuntimeError):
    """The worker's process has ended, and with it the call."""

    self_explanatory = True

    def __init__(self, *, rank: int, role: str, method: str, end: str) -> None:
        super().__init__(f"{role}.{method} lost its worker of rank {rank}: {end}")
        self.rank, self.role, self.method, self.end = rank, role, method, end


class CallTimedOut(Stalled):
    """Some ranks did not answer in time. They may still be at it: no later call overtakes this one."""

    def __init__(self, *, role: str, method: str, missing: Sequence[int], holder: str, seconds: float) -> None:
        super().__init__(waiter="the driver", resource=f"{role}.{method}", holder=holder, seconds=seconds)
        self.role, self.method, self.missing = role, method, tuple(missing)
