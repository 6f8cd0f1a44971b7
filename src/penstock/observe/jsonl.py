"""Append-only JSON-lines files: the one format of everything a run reports.

A record is one `write` of one whole line to a file opened for appending, so several processes may share a file and a
reader sees a record at once. A writer that was killed can leave a torn line: the next one to open the file ends it,
and readers pass over it. Non-finite numbers become null, since JSON has no word for them.
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Mapping
from numbers import Integral, Real
from pathlib import Path
from types import TracebackType
from typing import Any, Self


class JsonLinesWriter:
    """Appends records to `path`; records appear in order and whole."""

    def __init__(self, path: str | Path) -> None:
        self._path = str(path)
        self._fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o644)
        self._torn = _is_torn(self._fd)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record. Raises `OSError` if there was no room for the whole; the next one has its own line."""
        line = b"\n" * self._torn + dumps(record).encode() + b"\n"
        written = os.write(self._fd, line)
        self._torn = written < len(line)
        if written < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._path)

    def sync(self) -> None:
        """Return once everything written is on disk."""
        os.fsync(self._fd)

    def close(self) -> None:
        """Close the file; closing twice is fine."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def append(path: str | Path, record: Mapping[str, Any], *, durable: bool = False) -> None:
    """Append one record to a file that is not worth keeping open; `durable` returns once it is on disk."""
    with JsonLinesWriter(path) as writer:
        writer.write(record)
        if durable:
            writer.sync()


def read(path: str | Path) -> list[dict[str, Any]]:
    """All whole records of `path`; none if there is no such file."""
    return Follower(path).read_new()


def tail(path: str | Path, num_bytes: int) -> list[dict[str, Any]]:
    """The whole records within the last `num_bytes` of `path`; none if there is no such file."""
    try:
        with Path(path).open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - num_bytes - 1))
            data = file.read()
    except FileNotFoundError:
        return []
    whole = data[: data.rfind(b"\n") + 1]
    if size > len(data):
        whole = whole[whole.find(b"\n") + 1 :]
    return [record for line in whole.splitlines() if (record := _parse(line)) is not None]


class Follower:
    """Reads a growing file piece by piece, only ever up to the last complete line."""

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._offset = 0

    def read_new(self) -> list[dict[str, Any]]:
        """The records that were completed since the last call."""
        try:
            with self._path.open("rb") as file:
                file.seek(self._offset)
                data = file.read()
        except FileNotFoundError:
            return []
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        return [record for line in whole.splitlines() if (record := _parse(line)) is not None]


def dumps(value: Any) -> str:
    """JSON without NaN or infinities; NumPy scalars and paths are understood."""
    try:
        return json.dumps(value, default=_plain, allow_nan=False, ensure_ascii=False)
    except ValueError:
        return json.dumps(_finite(value), default=_plain, ensure_ascii=False)


def write_json(path: Path, value: Any) -> None:
    """Replace `path` as a whole: whoever reads it sees the old document or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(dumps(value) + "\n")
    temporary.replace(path)


def read_json(path: Path) -> dict[str, Any]:
    """The document at `path`; an empty one if there is none, or none that can be read."""
    try:
        document = json.loads(path.read_text())
    except (OSError, ValueError):
        return {}
    return document if isinstance(document, dict) else {}


def _is_torn(fd: int) -> bool:
    size = os.fstat(fd).st_size
    return size > 0 and os.pread(fd, 1, size - 1) != b"\n"


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def _plain(value: object) -> object:
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        number = float(value)
        return number if math.isfinite(number) else None
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise TypeError(f"{type(value).__name__} has no place in a JSON record")


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return value
