"""How often automated callers are told how a run is doing. It limits answers only: what happens is recorded at once."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import Any

STAMP = ".status_answered"
"""In the run directory: when a caller was last answered (seconds since the epoch)."""


def seconds_to_wait(answered: float | None, *, now: float, interval_s: float) -> float:
    """Until the next answer is due; 0 if it is. A last answer in the future was given by a clock that was wrong."""
    if answered is None or answered > now:
        return 0.0
    return max(0.0, answered + interval_s - now)


def claim_answer(run_dir: Path, *, now: float, interval_s: float, force: bool = False) -> float:
    """0 if this caller gets an answer, which is stamped; otherwise the seconds until there is one for the next."""
    with os.fdopen(os.open(run_dir / STAMP, os.O_RDWR | os.O_CREAT, 0o644), "r+") as stamp:
        fcntl.flock(stamp, fcntl.LOCK_EX)
        wait_s = 0.0 if force else seconds_to_wait(_parse(stamp.read()), now=now, interval_s=interval_s)
        if wait_s == 0.0:
            stamp.seek(0)
            stamp.truncate()
            stamp.write(f"{now}\n")
    return wait_s


def refusal(run_id: str, wait_s: float, interval_s: float) -> dict[str, Any]:
    """What a caller gets instead of an answer."""
    return {
        "rate_limited": True,
        "run_id": run_id,
        "message": f"the status of run {run_id} is given once every {interval_s:g} s (supervisor.status_interval_s); "
        f"ask again in {wait_s:.0f} s, or with --force",
        "next_check_in_seconds": round(wait_s, 1),
    }


def _parse(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None
