"""Where in code that is not ours an exception comes from: which line of it to look at, and how it got there."""

from __future__ import annotations

import logging
import sysconfig
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

logger = logging.getLogger(__name__)

OURS = str(Path(__file__).parents[1])
STANDARD_LIBRARY = sysconfig.get_path("stdlib")
INSTALLED = ("site-packages", "dist-packages")

OnError = Callable[[str, BaseException], None]
"""Told what was called, and what it raised."""


@dataclass(frozen=True, slots=True)
class Origin:
    """Both are empty if no code but ours had a part in it."""

    place: str
    """`file.py:line`, the innermost that was not installed."""
    trace: str
    """The traceback, from the first frame that is not ours on."""


class RaisedElsewhere(RuntimeError):
    """An exception that stays in another process: its type and message, and where it comes from."""

    def __init__(self, message: str, origin: Origin) -> None:
        super().__init__(message)
        self.origin = origin


def origin(error: BaseException) -> Origin:
    """Of an exception that was caught here, or in another process."""
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
    return Origin(f"{Path(last.filename).name}:{last.lineno}", shown.rstrip())


def described(error: BaseException) -> str:
    """Its type and message, and the line it comes from."""
    kind = "" if isinstance(error, RaisedElsewhere) else f"{type(error).__name__}: "
    place = origin(error).place
    return f"{kind}{error}{f' ({place})' if place else ''}"


class LoggedOnce:
    """`OnError`: the traceback of every distinct error goes to the log, once; what differs in its message alone is no
    other error."""

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
