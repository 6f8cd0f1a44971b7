"""How processes end, and why a run failed: the process that caused the failure, and a text about it."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from penstock.ports.process_launcher import Report
from penstock.supervisor.child import CONFIG_ERROR, GAVE_UP

DISK_FULL = ("No space left on device", "File too large")
"""Messages of ENOSPC and EFBIG; programs in all languages show them."""


class ExitKind(StrEnum):
    """The meaning of a process's end."""

    OK = "ok"
    CONFIG_ERROR = "config_error"
    GAVE_UP = "gave_up"
    """The process found that no restart can save the run."""
    OOM_HOST = "oom_host"
    """The kernel killed the process for lack of memory."""
    OOM_GPU = "oom_gpu"
    DISK_FULL = "disk_full"
    CRASHED = "crashed"
    HUNG = "hung"
    """The process made no progress, and the supervisor killed it for that."""
    LOST = "lost"
    """Unknown: the supervisor died before the process ended, or the process's machine is gone."""
    KILLED_BY_SUPERVISOR = "killed_by_supervisor"


KINDS = {0: ExitKind.OK, CONFIG_ERROR: ExitKind.CONFIG_ERROR, GAVE_UP: ExitKind.GAVE_UP}
"""Meanings of exit codes; all others mean a crash."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """A process ended, or could not even be started."""

    time: float
    """When the supervisor noticed the end (seconds since the epoch)."""
    returncode: int | None
    kind: ExitKind
    reason: str
    """How the process ended, as text."""


def classify(returncode: int, message: str, *, is_out_of_memory: bool) -> ExitKind:
    """Return the meaning of an exit code. `message` is the error that the process reported. `is_out_of_memory`: the
    kernel has just killed a process for lack of memory."""
    if "OutOfMemoryError" in message:
        return ExitKind.OOM_GPU
    if any(words in message for words in DISK_FULL):
        return ExitKind.DISK_FULL
    if returncode == -signal.SIGKILL and is_out_of_memory:
        return ExitKind.OOM_HOST
    return KINDS.get(returncode, ExitKind.CRASHED)


def describe_code(returncode: int) -> str:
    """Return `exit code 1`, `killed by SIGSEGV`, ..."""
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        return f"killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"killed by signal {-returncode}"


def first_failed(exits: Mapping[str, Exit], reports: Mapping[str, Report]) -> str:
    """Return the process that failed first: it reported an error, or it ended, or both. Later failures follow from
    it, and so does what the supervisor did to others."""
    own = {name: exit_ for name, exit_ in exits.items() if exit_.kind is not ExitKind.KILLED_BY_SUPERVISOR}
    exits = own if own or reports else exits

    def began(name: str) -> float:
        return min(found[name].time for found in (reports, exits) if name in found)

    return min(sorted(exits.keys() | reports.keys()), key=began)


def explain(name: str, exit_: Exit | None, report: Report | None, *, phase: str) -> str:
    """Return one line about a failure: which process failed, in which `phase`, its message, and how it ended."""
    ending = f" ({exit_.reason})" if exit_ else ""
    message = f": {report.message}" if report else ""
    verb = "ended" if exit_ and exit_.kind is ExitKind.OK else "failed"
    return f"{name} {verb} {phase}{message}{ending}"
