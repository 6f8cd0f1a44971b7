"""Log lines: `2026-11-23T04:01:02.345Z INFO trainer-0: step 3 ...`, one for each message (standard library only).
Further lines of a message, such as a traceback, are indented.

Times are UTC, so that lines of several processes and machines sort by their text. Penstock's own loggers write messages
from INFO on; loggers of libraries write messages from WARNING on.
"""

from __future__ import annotations

import json
import logging
import platform
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import penstock
from penstock.observe.visible_text import visible
from penstock.redaction import redacted_text

LINE = re.compile(
    r"(?P<time>\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z) (?P<level>[A-Z]+) (?P<process>\S+): (?P<message>.*)"
)
"""A log line. Times are UTC, and their text sorts by time."""
LONGEST_LINE = 65_536
"""In bytes. Of a longer line the beginning is shown, or the end of one that is redrawn."""
COLOUR = re.compile(r"\x1b\[[0-9;]*m")
"""Escape sequence of a colour or a style."""
SECOND = "%Y-%m-%dT%H:%M:%S"
HEAVY_PACKAGES = ("torch", "transformers", "ray")
"""Packages that only some processes import. A log names the versions of those that its process has imported."""
MIN_PAUSE_S = 1.0
"""Shortest time in seconds between two lines about frequent events, such as optimizer steps."""


def formatted(process: str, message: str, *, level: str = "INFO", at: float | None = None) -> str:
    """Return one entry of a log without the newline; `at` is in seconds since the epoch, now by default."""
    at = time.time() if at is None else at
    return (
        f"{time.strftime(SECOND, time.gmtime(at))}.{int(at * 1000) % 1000:03d}Z {level} {process}: {one_entry(message)}"
    )


def as_last_drawn(line: bytes) -> str:
    """Return a line of a log as the last carriage return left it."""
    line = line.rstrip(b"\r")
    line = line[-LONGEST_LINE:] if b"\r" in line else line[:LONGEST_LINE]
    drawn = [part for part in line.split(b"\r") if part.strip()]
    return (drawn[-1] if drawn else b"").decode(errors="replace").rstrip()


def without_colours(text: str) -> str:
    """Return a line of a log without the sequences for colours and styles: colours also hide text."""
    return COLOUR.sub("", text)


def one_entry(text: str) -> str:
    """Return `text` with its later lines indented, so that none of them passes for an entry of the log."""
    return text.replace("\n", "\n  ")


def log_to_stderr(process: str) -> None:
    """Send the log lines of this process to stderr until it ends."""
    _add(logging.StreamHandler(), process)


@contextmanager
def logging_to(path: Path, process: str) -> Iterator[None]:
    """Append the log lines of this process to `path` while the body runs."""
    logger = logging.getLogger("penstock")
    before, handler = logger.level, logging.FileHandler(path)
    _add(handler, process)
    try:
        yield
    finally:
        logging.getLogger().removeHandler(handler)
        logger.setLevel(before)
        handler.close()


def _add(handler: logging.Handler, process: str) -> None:
    formatter = _PrintableFormatter(f"%(asctime)s.%(msecs)03dZ %(levelname)s {process}: %(message)s", SECOND)
    formatter.converter = time.gmtime
    handler.setFormatter(formatter)
    logging.getLogger().addHandler(handler)
    logging.getLogger("penstock").setLevel(logging.INFO)


class _PrintableFormatter(logging.Formatter):
    """Writes messages that a terminal does not obey, that begin no second entry, and that show no secret, not even one
    in a library's traceback."""

    def format(self, record: logging.LogRecord) -> str:
        return one_entry(visible(redacted_text(super().format(record))))


def versions() -> str:
    """Return the versions of penstock, Python and the heavy packages that this process has imported."""
    found = {"penstock": penstock.__version__, "python": platform.python_version()}
    found |= {name: sys.modules[name].__version__ for name in HEAVY_PACKAGES if name in sys.modules}
    return ", ".join(f"{name} {version}" for name, version in found.items())


def pairs(values: Mapping[str, object]) -> str:
    """Return `name=value` for every known plain value; nested values are left out."""
    known = {name: value for name, value in values.items() if isinstance(value, str | int | float) and value != ""}
    return " ".join(f"{name}={_plain(value)}" for name, value in known.items())


def _plain(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.0f}" if value.is_integer() else f"{value:.4g}"
    text = str(value)
    return json.dumps(text, ensure_ascii=False) if re.search(r"\s", text) else text


class Paced:
    """Logs at most one line per second; a line reports how many lines before it were left out."""

    def __init__(self, logger: logging.Logger, now: Callable[[], float] = time.monotonic) -> None:
        self._logger, self._now = logger, now
        self._last: float | None = None
        self._num_skipped = 0

    def info(self, message: str) -> bool:
        """Log `message`, or count it as left out; return whether it was logged."""
        now = self._now()
        if self._last is not None and now - self._last < MIN_PAUSE_S:
            self._num_skipped += 1
            return False
        left_out = f" ({self._num_skipped} before it not shown)" if self._num_skipped else ""
        self._logger.info("%s%s", message, left_out)
        self._last, self._num_skipped = now, 0
        return True
