"""The live stream of a run: what is new in its files, read once a second for all its viewers.

A viewer that reads too slowly is dropped; its browser connects again and asks for what it has missed.
"""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

import msgspec

from penstock.dashboard.opened_run import OpenedRun, OpenedRuns
from penstock.deadline import deadline
from penstock.observe import jsonl
from penstock.supervisor.known_runs import has_ended
from penstock.supervisor.run_journal import holds_run

P = ParamSpec("P")
T = TypeVar("T")

logger = logging.getLogger(__name__)

EVERY_S = 1.0
"""Seconds between two looks at the files."""
ENDED_EVERY_S = 3.0
"""The same for a run that has ended: it may be resumed."""
ALIVE_EVERY_S = 15.0
"""Seconds without news after which a comment shows that the stream is alive."""
MOST_WAITING = 32
"""Messages that a viewer may have waiting."""
READ_S = 30.0
"""Time limit for one look at the files."""
OPENING = b"retry: 2000\n\n"
COMMENT = b": alive\n\n"


def encoded(content: Any) -> bytes:
    """Return JSON. Numbers that are not finite become null. A damaged file may hold text that UTF-8 cannot."""
    try:
        return msgspec.json.encode(content)
    except UnicodeEncodeError:
        return jsonl.dumps(content).encode(errors="replace")


def message(kind: str, content: Any) -> bytes:
    """Return one server-sent event."""
    return b"event: " + kind.encode() + b"\ndata: " + encoded(content) + b"\n\n"


class Looks:
    """What one look after the other finds new in a run. Thread-safe."""

    def __init__(self, run: OpenedRun) -> None:
        self._run = run
        self._lock = threading.Lock()
        self._status: bytes = b""
        self._decisions: bytes = b""
        self._num_rows: int | None = None
        self.has_ended = False
        self.is_gone = False

    def all(self) -> list[bytes]:
        """Return messages about the run as it is, for a viewer that begins."""
        with self._lock:
            if (found := self._look()) is None:
                return []
            document, status, decisions = found
            rows, num_rows = self._run.metrics.last_rows(None)
            self._num_rows = num_rows if self._num_rows is None else self._num_rows
            steps = [message("step", {"steps": rows})] if rows else []
            ended = [_ended(document["status"])] if has_ended(document["status"]) else []
            return [status, decisions, *steps, *ended]

    def new(self) -> list[bytes]:
        """Return messages about what has changed since the last call."""
        with self._lock:
            self.is_gone = not holds_run(self._run.run_dir)
            if self.is_gone:
                return [_ended("gone")]
            if (found := self._look()) is None:
                return []
            document, status, decisions = found
            messages = [new for new, old in ((status, self._status), (decisions, self._decisions)) if new != old]
            self._status, self._decisions = status, decisions
            is_first = self._num_rows is None
            rows, self._num_rows = self._run.metrics.last_rows(self._num_rows)
            if rows and not is_first:
                messages.append(message("step", {"steps": rows}))
            before, self.has_ended = self.has_ended, has_ended(document["status"])
            return messages + ([_ended(document["status"])] if self.has_ended and not before else [])

    def _look(self) -> tuple[dict[str, Any], bytes, bytes] | None:
        """Return the status, and the messages with it and with the decisions; None if the files cannot be read now."""
        try:
            document = self._run.status()
            self._run.metrics.update()
        except OSError:  # a request for the status gets the reason
            return None
        return document, message("status", document), message("decisions", {"decisions": document["decisions"]})


class Hub:
    """Looks at one run while it has viewers."""

    def __init__(self, run: OpenedRun) -> None:
        self.run = run
        self._looks = Looks(run)
        self._viewers: set[asyncio.Queue[bytes | None]] = set()
        self.task: asyncio.Task[None] | None = None
        self.num_dropped = 0
        """Viewers that read too slowly."""

    @property
    def has_viewers(self) -> bool:
        return bool(self._viewers)

    async def stream(self) -> AsyncGenerator[bytes]:
        """Yield the messages for one viewer, until it goes."""
        queue: asyncio.Queue[bytes | None] = asyncio.Queue(MOST_WAITING)
        self._viewers.add(queue)
        self.run.num_viewers += 1
        if self.task is None or self.task.done():
            self.task = asyncio.create_task(self._follow())
        try:
            yield OPENING
            for each in await in_thread(self._looks.all):
                yield each
            while (found := await queue.get()) is not None:
                yield found
        finally:
            self._viewers.discard(queue)
            self.run.num_viewers -= 1

    async def _follow(self) -> None:
        """Send what is new, until there are no viewers."""
        told_at = time.monotonic()
        try:
            while self._viewers and not self._looks.is_gone:
                news = await in_thread(self._looks.new)
                if news or time.monotonic() - told_at > ALIVE_EVERY_S:
                    told_at = time.monotonic()
                    for queue in list(self._viewers):
                        self._put(queue, news or [COMMENT])
                await asyncio.sleep(ENDED_EVERY_S if self._looks.has_ended else EVERY_S)
        except Exception:
            logger.exception("the live stream of run %s ends", self.run.run_dir.name)
        self.end()

    def end(self) -> None:
        """End the streams of all viewers."""
        for queue in list(self._viewers):
            _end(queue)

    def _put(self, queue: asyncio.Queue[bytes | None], messages: list[bytes]) -> None:
        if queue.qsize() + len(messages) >= MOST_WAITING:
            self._viewers.discard(queue)
            self.num_dropped += 1
            _end(queue)
            return
        for each in messages:
            queue.put_nowait(each)


async def in_thread(work: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Return what `work` returns, which reads files in a thread. Raises `Stalled`."""
    async with deadline(READ_S, waiter="the dashboard", resource="the files of a run", holder="the file system"):
        return await asyncio.to_thread(work, *args, **kwargs)


def _ended(status: str) -> bytes:
    return message("ended", {"status": status})


def _end(queue: asyncio.Queue[bytes | None]) -> None:
    """End the stream of a viewer, after what it has waiting."""
    if queue.full():
        queue.get_nowait()
    queue.put_nowait(None)


class Hubs:
    """The live streams of all runs. Used on the event loop only."""

    def __init__(self, opened: OpenedRuns) -> None:
        self._opened = opened
        self._hubs: dict[Path, Hub] = {}

    @property
    def num_runs(self) -> int:
        """Number of runs with viewers."""
        return len(self._hubs)

    def close(self) -> None:
        """End all streams."""
        for hub in self._hubs.values():
            hub.end()

    async def stream(self, run_dir: Path) -> AsyncIterator[bytes]:
        """Yield the messages about a run for one viewer."""
        run = await in_thread(self._opened.open, run_dir)
        hub = self._hubs.get(run_dir)
        if hub is None or hub.run is not run or (hub.task is not None and hub.task.done()):
            hub = self._hubs[run_dir] = Hub(run)
        try:
            async with aclosing(hub.stream()) as messages:
                async for each in messages:
                    yield each
        finally:
            if not hub.has_viewers and self._hubs.get(run_dir) is hub:
                del self._hubs[run_dir]
