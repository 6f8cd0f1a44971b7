"""A run that is shown: its readers and indexes, which are opened once and shared by all requests."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from contextlib import suppress
from pathlib import Path
from typing import Any

from penstock.dashboard.balance import balance, bound
from penstock.dashboard.decision_pages import Filter, Page, page
from penstock.dashboard.groups import Groups
from penstock.dashboard.metrics_index import MetricsIndex
from penstock.dashboard.run_events import RunEvents
from penstock.dashboard.series import RATE, Curves, curves, needed, step_at
from penstock.dashboard.settings_table import settings_table
from penstock.dashboard.timeline_index import TimelineIndex
from penstock.dashboard.timeline_window import shown_spans
from penstock.dashboard.trajectory_pages import Trajectories
from penstock.supervisor.known_runs import config_of
from penstock.supervisor.run_status import DAMAGED, StatusReader

Document = dict[str, Any]

STATUS_AGE_S = 0.5
"""A status of this age is given again."""
FRESH_BYTES = 1 << 20
"""Bytes of a file that a request reads itself; what is more is read in the background."""
LONGEST_PAUSE_S = 1.0
"""Seconds that the background waits for requests to end before it reads the next piece."""
LAST_S = 60.0
"""Seconds of the window that is shown first."""
TOTAL_ENDINGS = ("_total", "_busy_s", "cpu_s")
"""Ends of the names of totals, which have a rate."""
MOST_SERIES = 64
"""Series in one answer."""
MOST_OPEN = 12
"""Runs that stay open."""


class DamagedRun(OSError):
    """The state, the settings or the results of a run cannot be understood."""


class Requests:
    """The requests that are being answered. What reads in the background lets them go first: a thread that computes
    takes the interpreter from one that reads a file, for milliseconds at each piece."""

    def __init__(self) -> None:
        self._num_open = 0
        self._changed = threading.Condition()

    def __enter__(self) -> None:
        with self._changed:
            self._num_open += 1

    def __exit__(self, *exception: object) -> None:
        with self._changed:
            self._num_open -= 1
            self._changed.notify_all()

    def wait_for_pause(self) -> None:
        """Wait until no request is open, at most `LONGEST_PAUSE_S`."""
        with self._changed:
            self._changed.wait_for(lambda: not self._num_open, timeout=LONGEST_PAUSE_S)


class OpenedRun:
    """The readers of one run. Thread-safe."""

    def __init__(self, run_dir: Path, requests: Requests) -> None:
        self.run_dir, self._requests = run_dir, requests
        self.metrics = MetricsIndex(run_dir)
        self.timeline = TimelineIndex(run_dir)
        self.events = RunEvents(run_dir)
        self.trajectories = Trajectories(run_dir, self.timeline)
        self.num_viewers = 0
        """Viewers of the live stream. A run with some stays open."""
        self._status_reader = StatusReader(run_dir)
        self._status: Document = {}
        self._status_at = -STATUS_AGE_S
        self._steps_at: dict[float, int] = {}
        """Steps of the alarms that were shown, by their times."""
        self._lock = threading.RLock()
        self._is_reading = False
        self._is_closed = threading.Event()

    def status(self) -> Document:
        """Return the status of the run, with the sentence about who waits for whom."""
        with self._lock:
            if time.monotonic() - self._status_at >= STATUS_AGE_S:
                document = self._read_status()
                progress = document["progress"]
                of_metrics = self.metrics.warnings  # they are about the whole file
                others = [
                    each for each in document["warnings"] if not (of_metrics and each.startswith("metrics.jsonl"))
                ]
                indexed = [*of_metrics, *self.timeline.warnings]
                added = {"balance": balance(progress), "bound": bound(progress), "warnings": others + indexed}
                added["alarms"] = [alarm | {"step": self._step_at(alarm["time"])} for alarm in document["alarms"]]
                self._status, self._status_at = document | added, time.monotonic()
            return self._status

    def _step_at(self, time: float) -> int | None:
        """Return the latest step that had ended at a time (seconds since the epoch), 0 before the first one; None if
        metrics.jsonl cannot be read. Of a file that is not read to its end, the step is about right."""
        if (known := self._steps_at.get(time)) is not None:
            return known
        try:
            self.catch_up(self.metrics)
            step = step_at(self.metrics.columns(["step", "time"]), time)
        except OSError:
            return None
        if self.metrics.indexed >= 1:
            self._steps_at[time] = step
        return step

    def _read_status(self) -> Document:
        try:
            return self._status_reader.read()
        except DAMAGED as error:
            name = type(error).__name__
            raise DamagedRun(f"documents of run {self.run_dir.name} hold what no run writes ({name})") from error

    def settings(self) -> list[Document]:
        """Return the settings of the run beside their defaults."""
        return settings_table(config_of(self.run_dir))

    def names(self) -> list[str]:
        """Return the names of all series, also of rates."""
        self.catch_up(self.metrics)
        names = self.metrics.names
        return names + [f"{RATE}{name}" for name in names if name.endswith(TOTAL_ENDINGS)]

    def series(self, names: list[str], *, x: str, points: int, begin: float | None, end: float | None) -> Curves:
        """Return series as `series.curves` does, as far as metrics.jsonl is read."""
        self.catch_up(self.metrics)
        return curves(self.metrics.columns(needed(names, x)), names, x=x, points=points, begin=begin, end=end)

    def window(self, begin: float | None, end: float | None, *, width: int) -> Document:
        """Return the timeline between two times, by default of the last minute."""
        self.catch_up(self.timeline)
        found = [extent for extent in (self.timeline.extent, self.events.extent()) if extent is not None]
        earliest = min((extent[0] for extent in found), default=0.0)
        latest = max((extent[1] for extent in found), default=0.0)
        if end is None:  # the end of a run may take long after its last span
            end = (found[0][1] if found else 0.0) if begin is None else begin + LAST_S
        if begin is None:
            begin = max(end - LAST_S, min(earliest, end))
        lanes = self.timeline.lanes
        spans = shown_spans(lambda: self.timeline.spans(begin, end), begin, end, width=width, num_lanes=len(lanes))
        return {
            "from": begin,
            "to": end,
            "begin": earliest,
            "end": latest,
            "processes": sorted({process for process, _ in lanes}),
            "kinds": sorted({kind for _, kind in lanes}),
            "spans": [
                [*span.lane, span.start, span.end, span.policy_version, span.num_merged, round(span.busy_share, 4)]
                for span in spans
            ],
            "marks": self.events.marks(begin, end),
            **partly(self.timeline.indexed),
        }

    @property
    def groups(self) -> Groups:
        """Return the groups, which have reasons as far as timeline.jsonl can be read and is read."""
        with suppress(OSError):
            self.catch_up(self.timeline)
        return self.trajectories.groups

    def decisions(self, wanted: Filter, *, before: int | None, limit: int) -> Page:
        """Return a page of decisions, the newest first."""
        self.catch_up(self.timeline)
        return page(self.timeline, wanted, before=before, limit=limit)

    def catch_up(self, index: MetricsIndex | TimelineIndex) -> None:
        """Read what is new in the file of an index, if it is little; otherwise let the background read it. Raises
        OSError."""
        if index.unread > FRESH_BYTES:
            self._read_in_background()
        else:
            self.finish_reading(index)

    def finish_reading(self, index: MetricsIndex | TimelineIndex) -> None:
        """Read all that is there of the file of an index. Raises OSError."""
        while index.update():
            pass

    def end_reading(self) -> None:
        """Let the background read no further. Requests that still use the run go on."""
        self._is_closed.set()

    def close(self) -> None:
        """Close the files of the indexes."""
        self.end_reading()
        self.metrics.close()
        self.timeline.close()

    def _read_in_background(self) -> None:
        with self._lock:
            if self._is_reading or self._is_closed.is_set():
                return
            self._is_reading = True
        threading.Thread(target=self._read_rest, name=f"index {self.run_dir.name}", daemon=True).start()

    def _read_rest(self) -> None:
        """Read the files to their ends, between requests. The metrics come first: they are fewer, and shown first."""
        try:
            for index in (self.metrics, self.timeline):
                with suppress(OSError):  # a request that reads the file reports the error
                    while index.update() and not self._is_closed.is_set():
                        self._requests.wait_for_pause()
        finally:
            with self._lock:
                self._is_reading = False


class OpenedRuns:
    """The runs that are open: those that were asked for last, and those with viewers. Thread-safe."""

    def __init__(self) -> None:
        self.requests = Requests()
        self._runs: OrderedDict[Path, OpenedRun] = OrderedDict()
        self._lock = threading.Lock()

    def open(self, run_dir: Path) -> OpenedRun:
        """Return the readers of a run."""
        with self._lock:
            run = self._runs.get(run_dir)
            if run is None:
                run = self._runs[run_dir] = OpenedRun(run_dir, self.requests)
            self._runs.move_to_end(run_dir)
            unused = [path for path, each in self._runs.items() if not each.num_viewers and each is not run]
            for path in unused[: max(0, len(self._runs) - MOST_OPEN)]:
                self._runs.pop(path).end_reading()
            return run

    def close(self) -> None:
        """Close all runs."""
        with self._lock:
            for run in self._runs.values():
                run.close()
            self._runs.clear()


def partly(indexed: float) -> Document:
    """Return what says that an answer is not complete yet; empty if it is."""
    return {"indexed": round(indexed, 3)} if indexed < 1 else {}
