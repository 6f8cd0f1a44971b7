"""What events.jsonl tells the dashboard: evaluations, adaptations, and the marks on the timeline."""

from __future__ import annotations

import threading
from collections import deque
from pathlib import Path
from typing import Any

from penstock.observe import jsonl
from penstock.observe.notices import notice, shortened
from penstock.supervisor.run_status import DAMAGED, EVENTS_BYTES, is_adaptation

Record = dict[str, Any]

MOST_KEPT = 20_000
"""Events kept of each kind, the newest ones."""
FIGURES = ("when", "step", "time", "reward", "tasks", "pass_at", "tags")
"""What is shown of an evaluation."""


class RunEvents:
    """Follows the events of one run. Thread-safe."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / "events.jsonl"
        self._lock = threading.Lock()
        self._begin()

    def _begin(self) -> None:
        self._follower = jsonl.Follower(self._path, last_bytes=EVENTS_BYTES)
        self._evaluations: deque[Record] = deque(maxlen=MOST_KEPT)
        self._adaptations: deque[Record] = deque(maxlen=MOST_KEPT)
        self._marks: deque[Record] = deque(maxlen=MOST_KEPT)
        self._times: tuple[float, float] | None = None

    def evaluations(self) -> list[Record]:
        """Return the evaluations that count, the newest last. Those of steps that a trainer lost are left out."""
        with self._lock:
            self._update()
            return list(self._evaluations)

    def adaptations(self) -> list[Record]:
        """Return the changes of settings that controllers made, the newest last."""
        with self._lock:
            self._update()
            return list(self._adaptations)

    def marks(self, begin: float, end: float) -> list[Record]:
        """Return the marks between two times, in seconds since the epoch."""
        with self._lock:
            self._update()
            return [mark for mark in self._marks if begin <= mark["time"] <= end]

    def extent(self) -> tuple[float, float] | None:
        """Return the times of the first and the last event; None without events."""
        with self._lock:
            self._update()
            return self._times

    def _update(self) -> None:
        if self._follower.is_replaced():
            self._begin()
        for event in self._follower.read_new():
            try:
                self._see(event)
            except DAMAGED:
                continue  # the status counts damaged events

    def _see(self, event: Record) -> None:
        match event:
            case {"time": int() | float() as time, "event": str() as kind}:
                pass
            case _:
                return
        self._times = (min(self._times[0], time), max(self._times[1], time)) if self._times else (time, time)
        match event:
            case {"event": "evaluation", "when": str(), "step": int()}:
                self._evaluations.append({name: event.get(name) for name in FIGURES})
            case {"event": "rewound" | "resumed", "step": int(back_at)}:
                kept = [each for each in self._evaluations if each["step"] <= back_at]
                self._evaluations = deque(kept, maxlen=MOST_KEPT)
        if is_adaptation(event):
            known = {"time", "event", "policy_version", "reason", "changes", "prediction", "outcome"}
            others = {name: value for name, value in event.items() if name not in known}
            row = {name: event.get(name) for name in ("time", "policy_version", "reason", "changes")}
            more = {name: event.get(name) or {} for name in ("prediction", "outcome")}
            self._adaptations.append({**row, **more, **others})
        if kind == "judged":
            self._judge(event)
        if (mark := mark_of(event, kind)) is not None:
            self._marks.append({"time": time, **mark})

    def _judge(self, event: Record) -> None:
        """Add the verdict on the latest change of settings that has none. Thresholds are not settings."""
        for row in reversed(self._adaptations):
            if not row["outcome"] and any("." in name for name in row["changes"]):
                row["outcome"] = {name: event.get(name) for name in ("promised", "measured", "reason")}
                return


def mark_of(event: Record, kind: str) -> Record | None:
    """Return the mark of an event on the timeline; None if it has none."""
    match event:
        case {"event": "process", "state": "backoff", "name": name}:
            return {"kind": "restart", "text": notice(event) or str(name)}
        case {"event": "alarm" | "stall"}:
            return {"kind": kind, "text": notice(event) or kind}
        case {"event": "adapted", "changes": dict(changes)}:
            told = ", ".join(f"{name} {pair[0]} → {pair[1]}" for name, pair in changes.items())
            return {"kind": "adapted", "text": shortened(f"{told}: {event.get('reason')}")}
        case {"event": "checkpoint", "step": step}:
            return {"kind": "checkpoint", "text": f"checkpoint of step {step}"}
        case {"event": "evaluation", "when": when, "reward": reward}:
            shown = f"{reward:.3g}" if isinstance(reward, int | float) else "unknown"
            return {"kind": "evaluation", "text": f"held-out reward {shown} ({when})"}
        case {"event": "rewound" | "resumed" | "adopted"}:
            return {"kind": "rewound" if kind == "rewound" else "restart", "text": notice(event) or kind}
    return None
