"""Location of an exception in user code or in a library: the line to look at, and the traceback from there."""

from __future__ import annotations

import logging
import sysconfig
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from penstock.sendable import sendable

logger = logging.getLogger(__name__)

OURS = str(Path(__file__).parents[1])
STANDARD_LIBRARY = sysconfig.get_path("stdlib")
INSTALLED = ("site-packages", "dist-packages")

MAX_TRACE_CHARS = 50_000
"""A longer traceback is cut."""

OnError = Callable[[str, BaseException], None]
"""Called with the name of the called method, and the exception that it raised."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Location of an exception. Both fields are empty if only Penstock's own code was involved."""

    place: str
    """`file.py:line` of the innermost frame outside Penstock and installed packages. If there is none, the location of
    the first frame outside Penstock."""
    trace: str
    """The traceback, starting at the first frame outside Penstock."""


class RaisedElsewhere(RuntimeError):
    """Stands for an exception of another process: its type, message and location."""

    def __init__(self, message: str, origin: Origin) -> None:
        super().__init__(message)
        self.origin = origin


def origin(error: BaseException) -> Origin:
    """Return the location of an exception that was caught in this process or in another one."""
    if isinstance(error, RaisedElsewhere):
        return error.origin
    trace = error.__traceback__
    while trace is not None and not _is_theirs(trace.tb_frame.f_code.co_filename):
        trace = trace.tb_next
    if trace is None:
        return Origin("", "")
    frames = [frame for frame in traceback.extract_tb(trace) if _is_theirs(frame.filename)]
    last = next((frame for frame in reversed(frames) if not _is_installed(frame.filename)), frames[0])
    shown = "".join(traceback.format_exception(type(error), error, trace))
    return Origin(f"{Path(last.filename).name}:{last.lineno}", sendable(shown.rstrip(), MAX_TRACE_CHARS))


def described(error: BaseException) -> str:
    """Return the exception's type, message and line as text."""
    kind = "" if isinstance(error, RaisedElsewhere) else f"{type(error).__name__}: "
    place = origin(error).place
    return f"{kind}{sendable(str(error))}{f' ({place})' if place else ''}"


class LoggedOnce:
    """An `OnError` that logs the traceback of every distinct error once. Errors that differ only in their message count
    as the same."""

    def __init__(self) -> None:
        self._logged: set[tuple[str, str, str]] = set()

    def __call__(self, called: str, error: BaseException) -> None:
        found = origin(error)
        distinct = called, described(error).partition(":")[0], found.place
        if found.trace and distinct not in self._logged:
            self._logged.add(distinct)
            logger.error("%s raised:\n%s", called, found.trace)


def _is_theirs(file: str) -> bool:
    if file.startswith(("<", OURS)):
        return False
    return _is_installed(file) or not file.startswith(STANDARD_LIBRARY)


def _is_installed(file: str) -> bool:
    return any(folder in Path(file).parts for folder in INSTALLED)
