"""What callers see of a sandbox."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Protocol

from penstock.sandbox.limits import Limits, Outcome


class BoxEnded(OSError):
    """The box is closed, or a program broke it."""


class Program(Protocol):
    """A long-lived program in a box."""

    @property
    def pid(self) -> int:
        """Its process id in the box."""

    def poll(self) -> int | None:
        """Return the exit status; None while the program runs."""

    def kill(self) -> None:
        """Kill the program and everything that it started."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end and return the exit status. Raises TimeoutError."""


class Box(Protocol):
    """A sandbox with its own work directory and its own processes."""

    def write(self, name: str, text: str | bytes) -> None:
        """Write a file below the work directory."""

    def read(self, name: str) -> bytes:
        """Return the content of a file below the work directory. Links are not followed."""

    def run(
        self,
        argv: Sequence[str],
        *,
        stdin: str = "",
        env: Mapping[str, str] | None = None,
        limits: Limits | None = None,
    ) -> Outcome:
        """Run a program in the work directory and return its outcome. This blocks: call it from a thread."""

    def start(self, argv: Sequence[str], *, pass_fds: Sequence[int] = ()) -> Program:
        """Start a program without limits on time, which ends with the box."""

    def close(self) -> None:
        """End all processes of the box and remove its files."""

    def __enter__(self) -> Box: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
