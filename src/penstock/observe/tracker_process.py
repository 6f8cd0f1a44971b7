"""The process of one tracker. It reads the run's own files and gives the library what it has not had yet.

A library in a process of its own cannot slow the controller, and it can be killed when it hangs. Its queue is the file:
a tracker that was down, or that the user adds when the run is resumed, gets all points.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from penstock.observe import jsonl, overview
from penstock.observe.jsonl import Follower
from penstock.observe.tracker_libraries import Tracker, Tracking, open_tracker
from penstock.runtime.frames import Frames

POSITIONS = "trackers"
"""Folder of the run directory with a file for each tracker: how far it has been given the run's files."""
READ_BYTES = 2**20
"""Bytes read for one `Advance`, so that it takes seconds even if the tracker has to catch up."""
TRACED = 2
"""Number of trajectories of each sample that become traces: the best and the worst of a group."""


class Advance(msgspec.Struct, tag=True):
    """Give the tracker the next points."""


class Finish(msgspec.Struct, tag=True):
    """Close the tracker."""


class Open(msgspec.Struct, tag=True):
    """Open the tracker; the first request. `axis`: the key of a point's x in metrics.jsonl."""

    tracking: Tracking
    axis: str


Request = Open | Advance | Finish


class Reply(msgspec.Struct):
    """The answer to each request."""

    error: str = ""
    """What the library raised; empty if it raised nothing."""
    is_behind: bool = False
    """More points wait for another `Advance`."""


class Position(msgspec.Struct, frozen=True, kw_only=True):
    """How far a tracker has been given the files of a run."""

    metrics: int = 0
    events: int = 0
    """Offsets in the files, in bytes."""
    x: int = 0
    """The x of the latest point."""
    samples: float = 0.0
    """Time at which the latest trajectories were written, in seconds since the epoch."""


@dataclass(eq=False)
class Feed:
    """Gives one tracker the points of a run, from the position that an earlier process has reached."""

    _tracker: Tracker
    _run_dir: Path
    _path: Path
    """File of the position."""
    _axis: str
    _position: Position
    _metrics: Follower
    _events: Follower
    _unsettled: deque[tuple[float, Position]] = field(default_factory=deque)
    """Positions that a death would undo, with the times at which they were reached."""
    _evaluations: deque[dict[str, Any]] = field(default_factory=deque)
    _before: dict[str, Any] | None = None
    """The latest line."""

    @classmethod
    def open(cls, request: Open) -> Feed:
        tracking = request.tracking
        run_dir = Path(tracking.run_dir)
        path = run_dir / POSITIONS / f"{tracking.tracker}.json"
        path.parent.mkdir(exist_ok=True)
        position = msgspec.convert(jsonl.read_json(path), Position)
        metrics = Follower(run_dir / "metrics.jsonl", position.metrics)
        events = Follower(run_dir / "events.jsonl", position.events)
        return cls(open_tracker(tracking), run_dir, path, request.axis, position, metrics, events)

    def advance(self) -> bool:
        """Give the tracker the next points. Return whether there are more."""
        while events := self._events.read_new(READ_BYTES):
            self._evaluations += [event for event in events if event.get("event") == "evaluation"]
        lines = self._metrics.read_new(READ_BYTES)
        for line in lines:
            while self._evaluations and self._evaluations[0]["time"] <= line["time"]:
                self._evaluate()
            self._position = msgspec.structs.replace(self._position, x=int(line[self._axis]))
            self._tracker.log(self._position.x, line["time"], overview.point(line, self._before))
            self._before = line
        if not lines:
            while self._evaluations:
                self._evaluate()
            self._show()
        self._tracker.flush()
        self._reached()
        return bool(lines)

    def _evaluate(self) -> None:
        """Log the next evaluation, at the x that the run had reached when the evaluation ended."""
        event = self._evaluations.popleft()
        self._tracker.log(self._position.x, event["time"], overview.evaluation(event))

    def _show(self) -> None:
        """Show the trajectories that were written since the last time."""
        files = [(path.stat().st_mtime, path) for path in (self._run_dir / "trajectories").glob("step_*.jsonl")]
        for at, path in sorted(files):
            if at > self._position.samples:
                rows = sorted(jsonl.read(path), key=lambda row: row.get("reward") or 0.0, reverse=True)
                chosen = rows if len(rows) <= TRACED else [rows[0], rows[-1]]
                self._tracker.show(self._position.x, [_decoded(row) for row in chosen])
                self._position = msgspec.structs.replace(self._position, samples=at)

    def _reached(self) -> None:
        """Write the latest position that a death would not undo."""
        if self._evaluations:
            return
        now = time.monotonic()
        offsets = {"metrics": self._metrics.offset, "events": self._events.offset}
        self._position = msgspec.structs.replace(self._position, **offsets)
        if math.isinf(self._tracker.settle_s):
            return
        self._unsettled.append((now, self._position))
        settled = None
        while self._unsettled and self._unsettled[0][0] <= now - self._tracker.settle_s:
            settled = self._unsettled.popleft()[1]
        if settled is not None:
            jsonl.write_json(self._path, msgspec.to_builtins(settled))

    def finish(self) -> None:
        self._tracker.close()
        jsonl.write_json(self._path, msgspec.to_builtins(self._position))


def _decoded(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row of a dump with its messages as objects; of several conversations, the first."""
    text, branches = row.get("messages"), row.get("branches")
    messages = msgspec.json.decode(text) if text else (msgspec.json.decode(branches)[0] if branches else [])
    return {**row, "messages": messages}


class TrackerAnswerer:
    """Answers the controller's requests."""

    def __init__(self) -> None:
        self._feed: Feed | None = None
        sys.stdout = open(os.devnull, "w")  # noqa: PTH123, SIM115 - greetings of libraries have no place in a log

    def answer(self, request: Frames) -> Frames:
        try:
            reply = self._carry_out(msgspec.msgpack.decode(request[0], type=Request))
        except Exception as error:  # of a library, of any type
            text = " ".join(str(error).split())
            reply = Reply(error=f"{type(error).__name__}: {text}")
        return [msgspec.msgpack.encode(reply)]

    def _carry_out(self, request: Request) -> Reply:
        if isinstance(request, Open):
            self._feed = Feed.open(request)
            return Reply()
        assert self._feed is not None, "it is opened first"
        if isinstance(request, Finish):
            self._feed.finish()
            return Reply()
        return Reply(is_behind=self._feed.advance())
