"""`penstock logs`: what the processes of a run wrote, together or one by one, and what they go on to write.

Lines carry no times: what is there already is shown process by process, what comes while it is followed as it comes.
A log appears with its process, and is rotated when it has grown: what it held is in `NAME.log.1` then, and it is empty,
or another file. What a progress bar redraws on one line is shown as it was drawn last; of one that goes on, every few
seconds.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from rich.console import Console
from rich.text import Text

from penstock.cli.console import open_console
from penstock.cli.refusal import refuse
from penstock.cli.runs import has_ended, status_of
from penstock.supervisor.record import read_state

LOOK_EVERY_S = 0.1
REDRAW_EVERY_S = 5.0
CHUNK_BYTES = 65_536
COLOURS = ("cyan", "green", "magenta", "yellow", "blue", "bright_cyan", "bright_green", "bright_magenta")

Show = Callable[[str, str], None]
"""show(process, line)"""


def logs(run_dir: Path, process: str | None, *, follow: bool, num_lines: int) -> int:
    """Returns the exit code."""
    known = names(run_dir)
    if process is not None and process not in known:
        return refuse(f"run {run_dir.name} has no log of {process}: there are {', '.join(known) or 'none yet'}", 1)
    show = printer(open_console(), known if process is None else [])
    opened = {name: Log(path_of(run_dir, name)) for name in (known if process is None else [process])}
    for name, log in opened.items():
        for line in log.last(num_lines):
            show(name, line)
    if follow:
        keep_showing(run_dir, opened, show, only=process)
    for name, log in opened.items():
        for line in log.rest():
            show(name, line)
        log.close()
    return 0


def names(run_dir: Path) -> list[str]:
    """The processes that have a log, in the order in which they were started."""
    started = list((read_state(run_dir) or {}).get("processes", {}))
    found = sorted(path.stem for path in (run_dir / "logs").glob("*.log"))
    return sorted(found, key=lambda name: started.index(name) if name in started else len(started))


def path_of(run_dir: Path, name: str) -> Path:
    return run_dir / "logs" / f"{name}.log"


def as_last_drawn(line: bytes) -> str:
    """What the last carriage return left of a line."""
    drawn = [part for part in line.split(b"\r") if part.strip()]
    return (drawn[-1] if drawn else b"").decode(errors="replace").rstrip()


class Log:
    """One log: its last lines, then those that are added."""

    def __init__(self, path: Path) -> None:
        self._path, self._older = path, path.with_name(f"{path.name}.1")
        self._file: BinaryIO | None = self._open()
        self._older_seen = _identify(self._older)
        self._rest = b""
        self._redrawn_at = 0.0

    def last(self, num_lines: int) -> list[str]:
        """The last whole lines, across a rotation; what is added comes after them."""
        if self._file is None:
            return []
        *whole, self._rest = _tail(self._file, num_lines)
        if len(whole) < num_lines and self._older.exists():
            with self._older.open("rb") as older:
                whole = [*_tail(older, num_lines)[:-1], *whole]
        return [as_last_drawn(line) for line in whole[max(0, len(whole) - num_lines) :]]

    def new_lines(self, now: float) -> Iterator[str]:
        """Lines that were completed since the last call, rotated files included; `now` in seconds of any clock."""
        yield from self._read()
        if self._was_replaced():
            yield from self._read()  # what came in between
            yield from self.rest()
            self.close()
            self._file, self._older_seen = self._open(), _identify(self._older)
            yield from self._read()
        if b"\r" in self._rest and now - self._redrawn_at >= REDRAW_EVERY_S:
            self._redrawn_at = now
            yield from self.rest()

    def rest(self) -> Iterator[str]:
        """What there is of an unfinished line."""
        rest, self._rest = self._rest, b""
        if shown := as_last_drawn(rest):
            yield shown

    def close(self) -> None:
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> BinaryIO | None:
        try:
            return self._path.open("rb")
        except FileNotFoundError:
            return None

    def _read(self) -> Iterator[str]:
        if self._file is None:
            return
        data = b""
        if self._was_emptied():
            if (older := _identify(self._older)) != self._older_seen:
                self._older_seen = older
                data = self._moved(self._file.tell())
            self._file.seek(0)
        *whole, self._rest = (self._rest + data + self._file.read()).split(b"\n")
        yield from map(as_last_drawn, whole)

    def _was_emptied(self) -> bool:
        """It is shorter than it was, or than what has just been moved out of it."""
        assert self._file is not None
        size, moved = os.fstat(self._file.fileno()).st_size, _identify(self._older)
        was_moved = moved is not None and moved != self._older_seen and size < self._older.stat().st_size
        return size < self._file.tell() or was_moved

    def _moved(self, position: int) -> bytes:
        """What had not been read when the log was emptied."""
        with suppress(FileNotFoundError), self._older.open("rb") as older:
            older.seek(position)
            return older.read()
        return b""

    def _was_replaced(self) -> bool:
        there = _identify(self._path)
        here = None if self._file is None else os.fstat(self._file.fileno())
        return there is not None and (here is None or (here.st_dev, here.st_ino) != there)


def _identify(path: Path) -> tuple[int, int] | None:
    """Which file that is; None if there is none."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return None
    return found.st_dev, found.st_ino


def _tail(file: BinaryIO, num_lines: int) -> list[bytes]:
    """At least the last lines and the unfinished one, read from the end."""
    end = position = file.seek(0, os.SEEK_END)
    data = b""
    while position > 0 and data.count(b"\n") <= num_lines:
        position = max(0, position - CHUNK_BYTES)
        file.seek(position)
        data = file.read(end - position)
    return data.split(b"\n")


def keep_showing(run_dir: Path, opened: dict[str, Log], show: Show, *, only: str | None) -> None:
    """Until the run has ended and all is shown."""
    has_run_ended = False
    while not has_run_ended:
        has_run_ended = has_ended(
            status_of(run_dir, read_state(run_dir) or {})
        )  # before looking: nothing comes afterwards
        for name in names(run_dir) if only is None else [only]:
            log = opened.get(name) or opened.setdefault(name, Log(path_of(run_dir, name)))
            for line in log.new_lines(time.monotonic()):
                show(name, line)
        if not has_run_ended:
            time.sleep(LOOK_EVERY_S)


def printer(console: Console, prefixed: list[str]) -> Show:
    """Prints lines, with the names of their processes in front if there are several."""
    width = max(map(len, prefixed), default=0)
    colours: dict[str, str] = {}

    def show(name: str, line: str) -> None:
        colour = colours.setdefault(name, COLOURS[len(colours) % len(COLOURS)])
        text = Text.from_ansi(line)
        prefix = Text.assemble((f"{name:<{width}} | ", colour)) if prefixed else Text()
        console.print(prefix + text, soft_wrap=True)

    return show
