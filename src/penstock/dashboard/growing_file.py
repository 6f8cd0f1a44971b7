"""Reads a growing JSON-lines file of a run in pieces, each of whole lines."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO, Generic, TypeVar

import msgspec

from penstock.own_files import open_plain

LONGEST_LINE = 8 << 20
"""Bytes. The rest of a longer line counts as a damaged line."""

Line = TypeVar("Line")


class Lines(Generic[Line]):
    """Decodes lines to one type. Lines that are damaged, or hold something else, are left out."""

    def __init__(self, kind: type[Line]) -> None:
        self._decoder = msgspec.json.Decoder(kind)

    def decode(self, data: bytes) -> tuple[list[Line], int]:
        """Return the records of whole lines, and the number of lines that hold none."""
        try:
            return self._decoder.decode_lines(data), 0
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return self._decode_each(data)

    def one(self, line: bytes) -> Line | None:
        """Return the record of one line; None if it holds none."""
        with suppress(msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            return self._decoder.decode(line)
        return None

    def _decode_each(self, data: bytes) -> tuple[list[Line], int]:
        found, num_damaged = [], 0
        for line in data.split(b"\n"):
            if line.strip():
                record = self.one(line)
                if record is None:
                    num_damaged += 1
                else:
                    found.append(record)
        return found, num_damaged


class GrowingFile:
    """A file that others append to. It may be missing, become shorter, or be replaced."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._inode: int | None = None

    @property
    def size(self) -> int:
        """Return the size in bytes; 0 if there is no such file."""
        try:
            return self.path.lstat().st_size
        except OSError:
            return 0

    def is_replaced(self, known_size: int) -> bool:
        """Return whether the file is another one than at the last call, or shorter than `known_size`."""
        try:
            found = self.path.lstat()
        except OSError:
            return known_size > 0
        before, self._inode = self._inode, found.st_ino
        return found.st_size < known_size or before not in (None, found.st_ino)

    def read(self, begin: int, end: int) -> bytes:
        """Return the bytes from `begin` up to `end`, fewer at the end of the file. Raises `Foreign` if it is a link or
        no plain file."""
        with suppress(FileNotFoundError), open_plain(self.path) as file:
            return _pread(file, begin, end - begin)
        return b""

    def whole_lines(self, begin: int, most: int) -> bytes:
        """Return whole lines from `begin` on, of about `most` bytes. A line longer than `LONGEST_LINE` is returned as
        far as it was read."""
        data = self.read(begin, begin + most)
        if b"\n" not in data and len(data) == most:
            data = self.read(begin, begin + LONGEST_LINE)
            if b"\n" not in data:
                return data if len(data) == LONGEST_LINE else b""
        return data[: data.rfind(b"\n") + 1]

    def first_line_after(self, offset: int) -> tuple[int, bytes]:
        """Return where the first line that begins at or after `offset` begins, and the line; an empty line if there is
        none that is whole."""
        begin = max(offset - 1, 0)  # the byte before tells whether a line begins at `offset`
        data = self.read(begin, begin + 65_536)
        place = 0 if offset == 0 else data.find(b"\n") + 1
        if offset > 0 and place == 0:
            return begin + len(data), b""
        end = data.find(b"\n", place)
        if end < 0:
            return begin + place, self.whole_lines(begin + place, 65_536).partition(b"\n")[0]
        return begin + place, data[place:end]

    def backwards(self, end: int, *, piece: int) -> Iterator[tuple[int, bytes]]:
        """Yield pieces of whole lines from `end` backwards, each with its offset. `end` is the end of a line."""
        while end > 0:
            begin = max(0, end - piece)
            data = self.read(max(begin - 1, 0), end)
            if begin > 0:
                cut = data.find(b"\n") + 1
                while (cut == 0 or cut == len(data)) and begin > 0 and end - begin < LONGEST_LINE:
                    begin = max(0, begin - piece)  # one line fills the piece
                    data = self.read(max(begin - 1, 0), end)
                    cut = data.find(b"\n") + 1 if begin > 0 else 0
                if begin > 0:
                    begin, data = begin - 1 + cut, data[cut:]
            yield begin, data
            if begin >= end:
                return
            end = begin


def _pread(file: BinaryIO, offset: int, size: int) -> bytes:
    return os.pread(file.fileno(), size, offset) if size > 0 else b""
