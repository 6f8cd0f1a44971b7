"""Why a run failed, in words: which process was the cause, how it ended, and the last lines of its log."""

from __future__ import annotations

import json
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

TAIL_LINES = 20
TAIL_BYTES = 16_384


@dataclass(frozen=True, slots=True, kw_only=True)
class Exit:
    """A process ended."""

    time: float
    """When it was noticed (seconds since the epoch)."""
    returncode: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """A process said itself what went wrong."""

    time: float
    message: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Cause:
    """The process in which the trouble began: it said so, or it ended, or both."""

    name: str
    report: Report | None
    exit: Exit | None


def describe_code(returncode: int) -> str:
    """`exit code 1`, `killed by SIGSEGV`, ..."""
    if returncode >= 0:
        return f"exit code {returncode}"
    try:
        name = signal.Signals(-returncode).name
    except ValueError:
        name = f"signal {-returncode}"
    return f"killed by {name}" + (", perhaps for lack of memory" if name == "SIGKILL" else "")


def read_reports(runtime_dir: Path) -> dict[str, Report]:
    """What the processes of a run reported as errors, by name."""
    found = {}
    for path in (runtime_dir / "errors").glob("[!.]*.json"):
        report = json.loads(path.read_text())
        found[path.stem] = Report(time=float(report["time"]), message=str(report["message"]))
    return found


def root_cause(exits: Mapping[str, Exit], reports: Mapping[str, Report]) -> Cause:
    """The earliest of all failures; the others followed from it."""

    def began(name: str) -> float:
        return min(found[name].time for found in (reports, exits) if name in found)

    first = min(sorted(exits.keys() | reports.keys()), key=began)
    return Cause(name=first, report=reports.get(first), exit=exits.get(first))


def explain(cause: Cause, *, phase: str, log: Path) -> str:
    """The one message for people: what, how, and the end of the log."""
    ending = f" ({describe_code(cause.exit.returncode)})" if cause.exit else ""
    said = f": {cause.report.message}" if cause.report else ""
    verb = "ended" if cause.exit and cause.exit.returncode == 0 else "failed"
    return f"{cause.name} {verb} {phase}{said}{ending}" + quote_log(log)


def quote_log(log: Path) -> str:
    """The last lines of a log, to be appended to a message."""
    lines = tail(log)
    if not lines:
        return f"\n  its log {log} is empty"
    return "\n".join([f"\n  last lines of {log}:", *(f"    {line}" for line in lines)])


def tail(log: Path, num_lines: int = TAIL_LINES) -> list[str]:
    """The last lines of a text file; none if there is no such file."""
    try:
        with log.open("rb") as file:
            size = file.seek(0, 2)
            file.seek(max(0, size - TAIL_BYTES))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    return text.rstrip().splitlines()[-num_lines:]
