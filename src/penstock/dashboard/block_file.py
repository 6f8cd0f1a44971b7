"""A file of blocks: numbers taken from a growing text file of a run, so that no viewer reads the text twice.

A block describes a range of bytes of the text, its source. It has a header (msgpack) and columns of numbers. Blocks are
only appended. The file lies in `.dashboard` of the run directory if that is ours, and otherwise in an unnamed temporary
file. If the source has another beginning than when the file was made, or is shorter, the file begins again.
"""

from __future__ import annotations

import fcntl
import os
import struct
import tempfile
import weakref
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

import msgspec
import xxhash

from penstock.dashboard.growing_file import GrowingFile
from penstock.own_files import Foreign, is_ours, own_directory, write_all

DIRECTORY = ".dashboard"
"""Directory of these files in a run directory."""
MAGIC = b"PSTKBLK1"
"""The beginning of a file of this format."""
BEGINNING_BYTES = 4096
"""Bytes of the source that identify it."""
FILE_HEAD = struct.Struct("<8sIQ")
"""Magic, number of identifying bytes, their checksum."""
BLOCK_HEAD = struct.Struct("<IIQ")
"""Size of a header, size of its columns, checksum of the header."""
MOST_BLOCK_BYTES = 1 << 28

Header = TypeVar("Header", bound=msgspec.Struct)


@dataclass(frozen=True, slots=True)
class Block(Generic[Header]):
    """A block in the file."""

    header: Header
    offset: int
    """Where its columns begin in the file."""
    size: int
    """Bytes of its columns."""


class BlockFile(Generic[Header]):
    """The blocks of one source. One thread appends; others may read."""

    def __init__(self, run_dir: Path, name: str, source: GrowingFile, kind: type[Header]) -> None:
        self._source = source
        self._encoder, self._decoder = msgspec.msgpack.Encoder(), msgspec.msgpack.Decoder(kind)
        self.blocks: list[Block[Header]] = []
        self._fd = _open_beside(run_dir, f"{name}.blocks")
        self._closing = weakref.finalize(self, os.close, self._fd)
        try:
            self._end = self._read_blocks()
        except OSError:
            self._end = 0
        if self._end == 0:
            os.ftruncate(self._fd, 0)

    def append(self, header: Header, columns: bytes) -> None:
        """Append a block. Raises OSError; then the file holds the blocks that it had."""
        packed = self._encoder.encode(header)
        head = BLOCK_HEAD.pack(len(packed), len(columns), xxhash.xxh64_intdigest(packed))
        begin = b"" if self._end else self._file_head()
        data = begin + head + packed + columns
        try:
            write_all(self._fd, data, self._end)
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._fd, self._end)
            raise
        self._end += len(data)
        self.blocks.append(Block(header, self._end - len(columns), len(columns)))

    def read(self, block: Block[Header], offset: int, size: int) -> bytes:
        """Return `size` bytes of the columns of a block, from `offset` on. Raises OSError if they are not there."""
        data = os.pread(self._fd, size, block.offset + offset)
        if len(data) < size:
            raise OSError("a block of the dashboard's index is cut off")
        return data

    def clear(self) -> None:
        """Remove all blocks."""
        self.blocks.clear()
        self._end = 0
        os.ftruncate(self._fd, 0)

    def close(self) -> None:
        """Close the file. Without a call, it is closed with its last user."""
        self._closing()

    def _file_head(self) -> bytes:
        beginning = self._source.read(0, BEGINNING_BYTES)
        return FILE_HEAD.pack(MAGIC, len(beginning), xxhash.xxh64_intdigest(beginning))

    def _read_blocks(self) -> int:
        """Find the blocks that the file holds; return where the last one ends, and 0 if the file is of no use."""
        head = os.pread(self._fd, FILE_HEAD.size, 0)
        if len(head) < FILE_HEAD.size:
            return 0
        magic, num_bytes, checksum = FILE_HEAD.unpack(head)
        if magic != MAGIC or num_bytes > BEGINNING_BYTES:
            return 0
        if xxhash.xxh64_intdigest(self._source.read(0, num_bytes)) != checksum:
            return 0
        size, end = os.fstat(self._fd).st_size, FILE_HEAD.size
        while (block := self._block_at(end, size)) is not None:
            self.blocks.append(block)
            end = block.offset + block.size
        os.ftruncate(self._fd, end)  # what follows is the rest of an append that was interrupted
        return end

    def _block_at(self, offset: int, size: int) -> Block[Header] | None:
        head = os.pread(self._fd, BLOCK_HEAD.size, offset)
        if len(head) < BLOCK_HEAD.size:
            return None
        header_size, columns_size, checksum = BLOCK_HEAD.unpack(head)
        begin = offset + BLOCK_HEAD.size
        if begin + header_size + columns_size > size or max(header_size, columns_size) > MOST_BLOCK_BYTES:
            return None
        packed = os.pread(self._fd, header_size, begin)
        if xxhash.xxh64_intdigest(packed) != checksum:
            return None
        try:
            return Block(self._decoder.decode(packed), begin + header_size, columns_size)
        except msgspec.DecodeError:
            return None


def _open_beside(run_dir: Path, name: str) -> int:
    """Return the descriptor of a file that only this process writes: in the run directory, if it is ours and no other
    dashboard writes the file; otherwise a temporary file without a name."""
    with suppress(OSError, Foreign):
        if is_ours(run_dir):
            with own_directory(run_dir) as directory:
                (directory / DIRECTORY).mkdir(mode=0o700, exist_ok=True)
                with own_directory(directory / DIRECTORY) as folder:
                    flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
                    fd = os.open(folder / name, flags, 0o600)
            try:
                fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(fd)
            else:
                return fd
    with tempfile.TemporaryFile(prefix="penstock-dashboard-") as file:
        return os.dup(file.fileno())
