"""Append-only JSON-lines files: the single format of all reports of a run.

A record is one `write` of one whole line to a file opened for appending. Several processes may therefore share a file,
and a reader sees a record at once. A writer that is killed can leave an incomplete line. The next writer to open the
file ends that line, and readers skip it. Non-finite numbers become null, since JSON cannot represent them.
"""

from __future__ import annotations

import errno
import json
import math
import os
from collections.abc import Iterable, Mapping
from contextlib import closing, suppress
from numbers import Integral, Real
from pathlib import Path
from typing import Any

from penstock.own_files import max_bytes, open_plain, read_document
from penstock.redaction import redacted_parts


class JsonLinesWriter:
    """Appends records to `path`; records appear in order, each as a whole."""

    def __init__(self, path: str | Path) -> None:
        self._path = str(path)
        self.fd = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        self._torn = _is_torn(self.fd)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record. Raises `OSError` if there was no room for the whole record; the next record then starts a
        new line."""
        line = b"\n" * self._torn + dumps(record).encode() + b"\n"
        written = os.write(self.fd, line)
        self._torn = written < len(line)
        if written < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self._path)

    def close(self) -> None:
        """Close the file; closing twice is fine."""
        if self.fd >= 0:
            os.close(self.fd)
            self.fd = -1


def append(path: str | Path, record: Mapping[str, Any], *, durable: bool = False) -> None:
    """Append one record and close the file. With `durable`, return only after the record is on disk."""
    with closing(JsonLinesWriter(path)) as writer:
        writer.write(record)
        if durable:
            os.fsync(writer.fd)


def read(path: str | Path) -> list[dict[str, Any]]:
    """Return all complete records of `path`; empty if there is no such file."""
    return Follower(path).read_new()


def tail(path: str | Path, num_bytes: int) -> list[dict[str, Any]]:
    """Return the complete records within the last `num_bytes` of `path`; empty if there is no such file. Of the file of
    another user, less is read: `own_files.MAX_FOREIGN_BYTES`."""
    with suppress(FileNotFoundError), open_plain(Path(path)) as file:
        num_bytes = min(num_bytes, max_bytes(file))
        offset = max(0, os.fstat(file.fileno()).st_size - num_bytes - 1)
        file.seek(offset)
        data = file.read(num_bytes + 1)
        return _records(data[data.find(b"\n") + 1 :] if offset else data)
    return []


class Follower:
    """Reads a growing file in pieces, never past the last complete line."""

    def __init__(self, path: str | Path, offset: int = 0, *, last_bytes: int | None = None) -> None:
        """`offset`: where the first record begins, in bytes. `last_bytes`: each call reads at most this much, the end
        of what is new, and of the file of another user at most `own_files.MAX_FOREIGN_BYTES`."""
        self._path, self._last_bytes = Path(path), last_bytes
        self.offset = offset
        self._inode: int | None = None
        self.num_damaged = 0
        """Number of complete lines so far that hold no record."""

    def read_new(self, max_bytes: int = -1) -> list[dict[str, Any]]:
        """Return the records that were completed since the last call; at most those within the next `max_bytes`, if it
        is not negative."""
        lines = self.read_new_bytes(max_bytes).splitlines()
        found = _parsed(lines)
        self.num_damaged += sum(map(bool, lines)) - len(found)
        return found

    def read_new_bytes(self, most: int = -1) -> bytes:
        """Return the lines that were completed since the last call, each with its end; at most those within the next
        `most` bytes, if it is not negative."""
        with suppress(FileNotFoundError), open_plain(self._path) as file:
            found = os.fstat(file.fileno())
            self._inode = found.st_ino
            start = self.offset
            if self._last_bytes is not None:
                start = max(start, found.st_size - min(self._last_bytes, max_bytes(file)))
            is_cut = start > self.offset
            file.seek(start - is_cut)  # the byte before tells whether a line begins here
            data = file.read(most) if self._last_bytes is None else file.read(found.st_size - start + is_cut)
            whole = data[data.find(b"\n") + 1 if is_cut else 0 : data.rfind(b"\n") + 1]
            self.offset = start - is_cut + data.rfind(b"\n") + 1 if b"\n" in data else self.offset
            return whole
        return b""

    def is_replaced(self) -> bool:
        """Return whether the path names another file than the one that was read, or the file has become shorter."""
        try:
            found = self._path.lstat()
        except OSError:
            return self.offset > 0
        return self._inode is not None and (found.st_ino != self._inode or found.st_size < self.offset)


def dumps(value: Any) -> str:
    """Return `value` as JSON without NaN or infinities, and without the secrets that text shows. NumPy scalars and
    paths are supported. Raises `TypeError` for other objects."""
    try:
        text = json.dumps(value, default=_plain, allow_nan=False, ensure_ascii=False)
    except ValueError:  # NaN or infinities
        finite = json.loads(json.dumps(value, default=_plain), parse_constant=lambda constant: None)
        text = json.dumps(finite, ensure_ascii=False)
    return redacted_parts(text)


def write_json(path: Path, value: Any) -> None:
    """Replace `path` atomically: a reader sees either the old document or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(dumps(value) + "\n")
    temporary.replace(path)


def read_json(path: Path) -> dict[str, Any]:
    """Return the document at `path`; empty if the file is missing, unreadable, a link, too large or no JSON object."""
    try:
        return parse(read_document(path)) or {}
    except OSError:
        return {}


def _is_torn(fd: int) -> bool:
    size = os.fstat(fd).st_size
    return size > 0 and os.pread(fd, 1, size - 1) != b"\n"


def _records(data: bytes) -> list[dict[str, Any]]:
    """Return the records of all complete lines; damaged lines are left out."""
    return _parsed(data[: data.rfind(b"\n") + 1].splitlines())


def _parsed(lines: Iterable[bytes]) -> list[dict[str, Any]]:
    return [record for line in lines if (record := parse(line)) is not None]


def parse(text: str | bytes) -> dict[str, Any] | None:
    """Return the JSON object that `text` holds; None if it holds anything else."""
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


def _plain(value: object) -> object:
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        number = float(value)
        return number if math.isfinite(number) else None
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise TypeError(f"{type(value).__name__} has no place in a JSON record")
