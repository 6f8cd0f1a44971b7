"""Errors of calls on a group of workers."""

from __future__ import annotations

import traceback
from collections.abc import Sequence
from dataclasses import dataclass

from penstock.deadline import Stalled


class CallRefused(ValueError):
    """The arguments do not fit the method's declaration. Nothing was sent."""


class ResultRefused(TypeError):
    """The method has run, but its results do not fit its declaration."""


@dataclass(frozen=True, slots=True)
class Raised:
    """A worker's answer if the method raised an exception."""

    kind: str
    message: str
    trace: str
    error: BaseException | None
    """None if the exception cannot be pickled."""

    @classmethod
    def of(cls, error: Exception) -> Raised:
        return cls(type(error).__name__, str(error), "".join(traceback.format_exception(error)), error)


class RemoteError(RuntimeError):
    """A method raised an exception on a worker. The exception is the `__cause__` if it could be pickled."""

    def __init__(self, raised: Raised, *, rank: int, role: str, method: str) -> None:
        super().__init__(f"{role}.{method} failed on rank {rank}: {raised.kind}: {raised.message}")
        self.rank, self.role, self.method, self.kind = rank, role, method, raised.kind
        self.remote_traceback = raised.trace
        self.self_explanatory = getattr(raised.error, "self_explanatory", False)
        self.hopeless = getattr(raised.error, "hopeless", False)
        self.blames_peer = getattr(raised.error, "blames_peer", False)
        self.__cause__ = raised.error
        if raised.error is None or raised.error.__traceback__ is None:  # otherwise its own traceback shows the place
            self.add_note(f"on rank {rank}:\n{raised.trace}")


class WorkerLost(RuntimeError):
    """The worker's process ended before it answered the call. `end` says how it ended."""

    self_explanatory = True

    def __init__(self, *, rank: int, role: str, method: str, end: str) -> None:
        super().__init__(f"{role}.{method} lost its worker of rank {rank}: {end}")
        self.rank, self.role, self.method, self.end = rank, role, method, end


class CallTimedOut(Stalled):
    """Some ranks did not answer in time. They may still be busy with the call; later calls wait behind it."""

    def __init__(self, *, role: str, method: str, missing: Sequence[int], holder: str, seconds: float) -> None:
        super().__init__(waiter="the driver", resource=f"{role}.{method}", holder=holder, seconds=seconds)
        self.role, self.method, self.missing = role, method, tuple(missing)
