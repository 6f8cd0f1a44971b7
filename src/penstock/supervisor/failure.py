"""How processes end, and why a run failed, in words: which was the cause, and how it ended."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from penstock.supervisor.child import CONFIG_ERROR, GAVE_UP

if TYPE_CHECKING:  # the janitor knows the standard library only
    from penstock.ports import Report

DISK_FULL = ("No space left on device", "File too large")
"""How ENOSPC and EFBIG read, in every language's messages."""


class ExitKind(StrEnum):
    """What an end means."""

    OK = "ok"
    CONFIG_ERROR = "config_error"
    GAVE_UP = "gave_up"
    """It found that the run cannot go on, whoever tries."""
    OOM_HOST = "oom_host"
    """The kernel killed it for lack of memory."""
    OOM_GPU = "oom_gpu"
    DISK_FULL = "disk_full"
    CRASHED = "crashed"
    HUNG = "hung"
    """It did not get on, and was killed for that."""
    LOST = "lost"
    """Its supervisor died first, or the machine it was on is gone: nobody knows."""
    KILLED_BY_SUPERVISOR = "killed_by_supervisor"


KINDS = {0: ExitKind.OK, CONFIG_ERROR: ExitKind.CONFIG_ERROR, GAVE_UP: ExitKind.GAVE_UP}
"""Of the exit codes that say what they mean."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """A process ended, or could not even be started."""

    time: float
    """When it was noticed (seconds since the epoch)."""
    returncode: int | None
    kind: ExitKind
    reason: str
    """How, in words."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """The process in which the trouble began: it said so, or it ended, or both."""

    name: str
    report: Report | None
    exit: Exit | None


def classify(returncode: int, said: str, *, is_out_of_memory: bool) -> ExitKind:
    """What an exit code means, together with what the process `said` last and whether the kernel has just killed
    somebody for lack of memory."""
    if "OutOfMemoryError" in said:
        return ExitKind.OOM_GPU
    if any(words in said for words in DISK_FULL):
        return ExitKind.DISK_FULL
    if returncode == -signal.SIGKILL and is_out_of_memory:
        return ExitKind.OOM_HOST
    return KINDS.get(returncode, ExitKind.CRASHED)


def describe_code(returncode: int) -> str:
    """`exit code 1`, `killed by SIGSEGV`, ..."""
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        return f"killed by {signal.Signals(-returncode).name}"
    except ValueError:
        return f"killed by signal {-returncode}"


def root_cause(exits: Mapping[str, Exit], reports: Mapping[str, Report]) -> Cause:
    """The earliest of all failures; the others followed from it."""

    def began(name: str) -> float:
        return min(found[name].time for found in (reports, exits) if name in found)

    first = min(sorted(exits.keys() | reports.keys()), key=began)
    return Cause(name=first, report=reports.get(first), exit=exits.get(first))


def explain(cause: Cause, *, phase: str) -> str:
    """What failed, when, why and how, in one line."""
    ending = f" ({cause.exit.reason})" if cause.exit else ""
    said = f": {cause.report.message}" if cause.report else ""
    verb = "ended" if cause.exit and cause.exit.kind is ExitKind.OK else "failed"
    return f"{cause.name} {verb} {phase}{said}{ending}"
