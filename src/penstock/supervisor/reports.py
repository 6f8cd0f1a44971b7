"""What a process of a run has left in its runtime directory (see `child`), as whoever started it reads it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from penstock.ports import Beat, Report


def read_ready(runtime_dir: Path, name: str) -> dict[str, Any] | None:
    """What the latest process of that name said when it was ready; None if none has said so."""
    try:
        return dict(json.loads((runtime_dir / "ready" / f"{name}.json").read_text()))
    except FileNotFoundError:
        return None


def read_beat(runtime_dir: Path, name: str, pid: int) -> Beat | None:
    """The latest heartbeat of that very process; None if there is none, or it is just being written."""
    try:
        beat = json.loads((runtime_dir / "heartbeats" / f"{name}.json").read_bytes())
    except (FileNotFoundError, ValueError):
        return None
    return Beat(time=beat["time"], progress=beat["progress"], doing=beat["doing"]) if beat["pid"] == pid else None


def read_report(runtime_dir: Path, name: str, pid: int) -> Report | None:
    """What that very process reported as its error; the words of a predecessor under its name are not its own."""
    try:
        report = json.loads((runtime_dir / "errors" / f"{name}.json").read_text())
    except FileNotFoundError:
        return None
    return Report(time=float(report["time"]), message=str(report["message"])) if report["pid"] == pid else None
