"""`penstock logs`: show the logs of a run's processes, together or one by one, and follow them.

Lines of all processes are shown in order of time. Output without a time (a traceback, a library's message) follows the
line before it in the same log. A log appears with its process. A log that has grown is rotated: its lines move to
`NAME.log.1`, and the log is then empty or a new file. If a progress bar redraws a line, only its latest state is shown;
while the bar moves, it is shown every few seconds.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from operator import itemgetter
from pathlib import Path
from typing import BinaryIO

from rich.console import Console
from rich.text import Text

from penstock.cli.refusal import refuse
from penstock.observe.log_lines import LINE, as_last_drawn, without_colours
from penstock.observe.tables import open_console
from penstock.observe.visible_text import visible
from penstock.own_files import Foreign, open_plain, plain_directory
from penstock.supervisor.known_runs import has_ended, status_of
from penstock.supervisor.run_journal import read_state

LOOK_EVERY_S = 0.1
REDRAW_EVERY_S = 5.0
CHUNK_BYTES = 65_536
TAIL_BYTES = 8 * 2**20
"""Most bytes that are read at once, from the ends of all logs: they may be those of another user, and have no lines. Of
each log at least a chunk is read."""
MOST_LOGS = 4096
"""A run with more logs shows them only one by one."""
COLOURS = ("cyan", "green", "magenta", "yellow", "blue", "bright_cyan", "bright_green", "bright_magenta")

Identity = tuple[int, int]
"""Device and inode of a file."""
Show = Callable[[str, str], None]
"""show(process, line)"""


def logs(run_dir: Path, process: str | None, *, follow: bool, num_lines: int) -> int:
    """Show the logs and return the exit code. No link is followed: the run may be that of another user."""
    try:
        with plain_directory(run_dir / "logs") as directory:
            try:
                return show_logs(run_dir, directory, process, follow=follow, num_lines=num_lines)
            except Foreign as error:
                return refuse(str(error).replace(str(directory), str(run_dir / "logs")), 1)
    except FileNotFoundError:
        return refuse(f"run {run_dir.name} has no logs", 1)
    except Foreign as error:
        return refuse(error, 1)


def show_logs(run_dir: Path, directory: Path, process: str | None, *, follow: bool, num_lines: int) -> int:
    """Show the logs in `directory`. Raises `Foreign` if one is a link or no plain file."""
    known = names(run_dir, directory)
    if process is not None and process not in known:
        return refuse(f"run {run_dir.name} has no log of {process}: there are {', '.join(known) or 'none yet'}", 1)
    show = printer(open_console(), known if process is None else [])
    if process is None and len(known) > MOST_LOGS:
        return refuse(f"run {run_dir.name} has {len(known)} logs: name a process to see one of them", 1)
    wanted = known if process is None else [process]
    tail_bytes = max(TAIL_BYTES // max(len(wanted), 1), CHUNK_BYTES)
    opened = {name: Log(path_of(directory, name), tail_bytes) for name in wanted}
    show_merged({name: log.last(num_lines) for name, log in opened.items()}, show)
    if follow:
        keep_showing(run_dir, directory, opened, show, only=process, tail_bytes=tail_bytes)
    show_merged({name: log.rest() for name, log in opened.items()}, show)
    return 0


def show_merged(lines: Mapping[str, Iterable[str]], show: Show) -> None:
    """Show lines of several logs in order of time."""
    timed = [(at, name, line) for name, own in lines.items() for at, line in with_times(own)]
    for _, name, line in sorted(timed, key=itemgetter(0)):
        show(name, line)


def with_times(lines: Iterable[str]) -> Iterator[tuple[str, str]]:
    """Yield each line of one log with its time. A line without a time gets that of the line before; it is empty at the
    beginning."""
    at = ""
    for line in lines:
        parsed = LINE.fullmatch(line)
        at = parsed["time"] if parsed else at
        yield at, line


def names(run_dir: Path, directory: Path) -> list[str]:
    """Return the processes that have a log, in the order in which they were started."""
    started = ["supervisor", *(read_state(run_dir) or {}).get("processes", {})]
    found = sorted(path.stem for path in directory.glob("*.log"))
    return sorted(found, key=lambda name: started.index(name) if name in started else len(started))


def path_of(directory: Path, name: str) -> Path:
    return directory / f"{name}.log"


class Log:
    """One log: its last lines, then those that are added."""

    def __init__(self, path: Path, tail_bytes: int = TAIL_BYTES) -> None:
        """Of each file at most the last `tail_bytes` are read at once."""
        self._path, self._older = path, path.with_name(f"{path.name}.1")
        self._tail_bytes = tail_bytes
        self._older_seen = _identify(self._older)
        self._seen: Identity | None = None
        """The file that was read, up to `_offset`."""
        self._offset = 0
        self._unfinished = b""
        self._redrawn_at = 0.0

    def last(self, num_lines: int) -> list[str]:
        """Return the last complete lines, across a rotation; `new_lines` continues after them."""
        whole: list[bytes] = []
        with suppress(FileNotFoundError), open_plain(self._path) as file:
            *whole, self._unfinished = _tail(file, num_lines, self._tail_bytes)
            self._seen, self._offset = _identity(os.fstat(file.fileno())), file.tell()
        with suppress(FileNotFoundError), open_plain(self._older) as older:
            if len(whole) < num_lines:
                whole = [*_tail(older, num_lines, self._tail_bytes)[:-1], *whole]
        return [as_last_drawn(line) for line in whole[max(0, len(whole) - num_lines) :]]

    def new_lines(self, now: float) -> Iterator[str]:
        """Yield lines that were completed since the last call, rotated files included, as far as they lie in the last
        bytes; `now` is in seconds of any clock."""
        *whole, self._unfinished = (self._unfinished + self._read())[-self._tail_bytes :].split(b"\n")
        yield from map(as_last_drawn, whole)
        if b"\r" in self._unfinished and now - self._redrawn_at >= REDRAW_EVERY_S:
            self._redrawn_at = now
            yield from self.rest()

    def rest(self) -> Iterator[str]:
        """Yield the beginning of an unfinished line, if there is one."""
        rest, self._unfinished = self._unfinished, b""
        if shown := as_last_drawn(rest):
            yield shown

    def _read(self) -> bytes:
        """Return the bytes that were added since the last call, also those that a rotation has moved."""
        data = b""
        with suppress(FileNotFoundError), open_plain(self._path) as file:
            is_new, size = _identity(os.fstat(file.fileno())) != self._seen, file.seek(0, os.SEEK_END)
            older = _identify(self._older)
            if older not in (None, self._older_seen) and (is_new or size < self._older.lstat().st_size):
                with open_plain(self._older) as moved:
                    data = _added(moved, self._offset, self._tail_bytes)
                self._older_seen, self._offset = older, 0
            elif is_new or size < self._offset:
                self._offset = 0
            data += _added(file, self._offset, self._tail_bytes)
            self._seen, self._offset = _identity(os.fstat(file.fileno())), file.tell()
        return data


def _identity(found: os.stat_result) -> Identity:
    return found.st_dev, found.st_ino


def _identify(path: Path) -> Identity | None:
    """Return the device and inode of a file; None if there is no file."""
    with suppress(FileNotFoundError):
        return _identity(path.lstat())
    return None


def _added(file: BinaryIO, offset: int, most: int) -> bytes:
    """Return the bytes after `offset`, at most the last `most`."""
    end = file.seek(0, os.SEEK_END)
    file.seek(max(offset, end - most))
    return file.read(most)


def _tail(file: BinaryIO, num_lines: int, most: int) -> list[bytes]:
    """Return at least the last `num_lines` lines and the unfinished one, as far as they lie in the last `most` bytes.
    The position in the file is then its end."""
    position = end = file.seek(0, os.SEEK_END)
    chunks: list[bytes] = []
    num_ends = 0
    while position > max(0, end - most) and num_ends <= num_lines:
        size = min(CHUNK_BYTES, position)
        position -= size
        file.seek(position)
        chunks.append(file.read(size))
        num_ends += chunks[-1].count(b"\n")
    file.seek(end)
    return b"".join(reversed(chunks)).split(b"\n")


def keep_showing(
    run_dir: Path, directory: Path, opened: dict[str, Log], show: Show, *, only: str | None, tail_bytes: int
) -> None:
    """Show new lines until the run has ended and all lines are shown."""
    is_over = False
    while not is_over:
        is_over = has_ended(status_of(run_dir, read_state(run_dir) or {}))  # first: an ended run writes no more lines
        for name in names(run_dir, directory)[:MOST_LOGS] if only is None else [only]:
            opened.setdefault(name, Log(path_of(directory, name), tail_bytes))
        show_merged({name: log.new_lines(time.monotonic()) for name, log in opened.items()}, show)
        time.sleep(0.0 if is_over else LOOK_EVERY_S)


def printer(console: Console, prefixed: list[str]) -> Show:
    """Return a function that prints lines, with process names in front if there are several."""
    width = max(map(len, prefixed), default=0)
    colours: dict[str, str] = {}

    def show(name: str, line: str) -> None:
        colour = colours.setdefault(name, COLOURS[len(colours) % len(COLOURS)])
        parsed = LINE.fullmatch(line) if prefixed else None
        text = Text(visible(without_colours(parsed.expand(r"\g<time> \g<level> \g<message>") if parsed else line)))
        prefix = Text.assemble((f"{name:<{width}} | ", colour)) if prefixed else Text()
        console.print(prefix + text, soft_wrap=True)

    return show
