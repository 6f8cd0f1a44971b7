"""Payload records: a group's token arrays in one checksummed, append-only record.

    record = magic "PENS" | u32 header length | header (msgpack) | int32 token_ids | uint8 loss_mask | float32 logprobs
             | int32 versions, each array holding all samples of the group back to back and starting on 8 bytes

A worker writes only its own segment files; readers map them, so the page cache is the shared memory.
"""

from __future__ import annotations

import errno
import mmap
import os
import struct
import zlib
from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

from penstock.types import PayloadRef, Sample

_MAGIC = b"PENS"
_PREFIX = struct.Struct("<4sI")
_COLUMNS: tuple[tuple[str, type[np.generic]], ...] = (
    ("token_ids", np.int32),
    ("loss_mask", np.uint8),
    ("logprobs", np.float32),
    ("versions", np.int32),
)
_ALIGNMENT = 8
CLOCK_S = 1.0
"""More than the file system's times lag behind the clock."""


class PayloadError(RuntimeError):
    """A record is not what its reference says; the message names file and offset."""


class _SampleHeader(msgspec.Struct, frozen=True, array_like=True):
    group: int
    episode: int
    reward: float
    truncated: bool
    num_tokens: int


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[_SampleHeader])


def encode(samples: Sequence[Sample]) -> bytes:
    """One record."""
    header = _encoder.encode(
        [_SampleHeader(s.group, s.episode, s.reward, s.truncated, len(s.token_ids)) for s in samples]
    )
    parts = [_PREFIX.pack(_MAGIC, len(header)), header]
    parts.append(_padding(_PREFIX.size + len(header)))
    for name, dtype in _COLUMNS:
        column = np.concatenate([np.asarray(getattr(s, name), dtype=dtype) for s in samples]).tobytes()
        parts += [column, _padding(len(column))]
    return b"".join(parts)


def decode(record: memoryview) -> list[Sample]:
    """Samples whose arrays are views into `record`."""
    magic, header_length = _PREFIX.unpack_from(record)
    if magic != _MAGIC:
        raise PayloadError("not a payload record")
    headers = _decoder.decode(record[_PREFIX.size : _PREFIX.size + header_length])
    bounds = [0, *accumulate(h.num_tokens for h in headers)]
    offset = _aligned(_PREFIX.size + header_length)
    columns: dict[str, list[npt.NDArray[Any]]] = {}
    for name, dtype in _COLUMNS:
        column = np.frombuffer(record, dtype=dtype, count=bounds[-1], offset=offset)
        columns[name] = [column[start:end] for start, end in pairwise(bounds)]
        offset = _aligned(offset + column.nbytes)
    return [
        Sample(
            group=h.group,
            episode=h.episode,
            reward=h.reward,
            truncated=h.truncated,
            **{name: columns[name][i] for name, _ in _COLUMNS},
        )
        for i, h in enumerate(headers)
    ]


class PayloadWriter:
    """Appends records to this worker's segment files; a new file after `max_file_bytes`."""

    def __init__(self, directory: Path, worker: str, *, max_file_bytes: int = 64 << 20) -> None:
        self._directory, self._worker, self._max_file_bytes = directory, worker, max_file_bytes
        self._number = max((number for name, number in _files(directory) if name == worker), default=-1) + 1
        self._open()

    def append(self, samples: Sequence[Sample]) -> PayloadRef:
        """Write one group; the reference is valid as soon as this returns."""
        if self._file.tell() >= self._max_file_bytes:
            self._file.close()
            self._number += 1
            self._open()
        record = encode(samples)
        offset = self._file.tell()
        self._write(record)
        return PayloadRef(file=self._name, offset=offset, length=len(record), crc32=zlib.crc32(record))

    def release(self, ref: PayloadRef) -> None:
        """Its file is the pool's."""

    @property
    def file(self) -> str:
        """That is being written to."""
        return self._name

    def close(self) -> None:
        self._file.close()

    def _write(self, record: bytes) -> None:
        """All of `record`: the file is unbuffered, and one write may take only a part."""
        num_written = 0
        while num_written < len(record):
            try:
                count = self._file.write(memoryview(record)[num_written:])
            except OSError as error:
                raise self._incomplete(num_written, len(record), error.errno) from error
            if not count:
                raise self._incomplete(num_written, len(record), errno.ENOSPC)
            num_written += count

    def _incomplete(self, num_written: int, num_bytes: int, number: int | None) -> OSError:
        message = (
            f"{num_written} of {num_bytes} bytes could be written ({os.strerror(number or errno.EIO)}); disk full?"
        )
        return OSError(number, message, str(self._directory / self._name))

    def _open(self) -> None:
        self._name = _file_name(self._worker, self._number)
        self._file = (self._directory / self._name).open("ab", buffering=0)


class PayloadReader:
    """Maps segment files and returns checked, zero-copy samples."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._maps: dict[str, mmap.mmap] = {}

    def read(self, ref: PayloadRef) -> list[Sample]:
        """The samples behind `ref`. Raises `PayloadError` if file or checksum do not match."""
        try:
            mapped = self._map(ref.file, ref.offset + ref.length)
        except (OSError, ValueError) as error:
            raise PayloadError(f"pool file {ref.file} cannot be read: {error}") from None
        record = memoryview(mapped)[ref.offset : ref.offset + ref.length]
        if len(record) != ref.length or zlib.crc32(record) != ref.crc32:
            raise PayloadError(f"pool file {ref.file} is damaged at offset {ref.offset} ({ref.length} bytes)")
        return decode(record)

    def remove(self, files: Collection[str]) -> None:
        """Nobody will read them any more; what was read stays."""
        for name in files:
            self._maps.pop(name, None)
            (self._directory / name).unlink(missing_ok=True)

    def _map(self, name: str, end: int) -> mmap.mmap:
        mapped = self._maps.get(name)
        if mapped is None or len(mapped) < end:
            # A removed file takes its space as long as it is mapped.
            self._maps = {known: it for known, it in self._maps.items() if (self._directory / known).exists()}
            with (self._directory / name).open("rb") as file:
                mapped = self._maps[name] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return mapped


def remove_files(directory: Path, *, written_before: float, keep: Collection[str]) -> None:
    """Remove files that nobody has written to since `written_before` (seconds since the epoch), but those to `keep` and
    the newest one of each worker, which it may have open."""
    found = sorted(_files(directory))
    newest = dict(found)
    for worker, number in found:
        path = directory / _file_name(worker, number)
        if number != newest[worker] and path.name not in keep and path.stat().st_mtime < written_before - CLOCK_S:
            path.unlink()


def is_whole(directory: Path, ref: PayloadRef) -> bool:
    """Whether the record is there as it was written."""
    return whole_record(directory, ref) is not None


def whole_record(directory: Path, ref: PayloadRef) -> bytes | None:
    """The record as it was written; None if it is not there, or damaged."""
    try:
        with (directory / ref.file).open("rb") as file:
            file.seek(ref.offset)
            record = file.read(ref.length)
    except FileNotFoundError:
        return None
    return record if len(record) == ref.length and zlib.crc32(record) == ref.crc32 else None


def sync_files(directory: Path, names: Iterable[str]) -> None:
    """Return once everything in them is on disk, whoever wrote it."""
    for name in names:
        with suppress(FileNotFoundError), (directory / name).open("rb") as file:
            os.fsync(file.fileno())


def _file_name(worker: str, number: int) -> str:
    return f"{worker}-{number:05d}.seg"


def _files(directory: Path) -> list[tuple[str, int]]:
    """(worker, number) of every segment file."""
    parts = (path.stem.rpartition("-") for path in directory.glob("*.seg"))
    return [(worker, int(number)) for worker, _, number in parts]


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


def _padding(offset: int) -> bytes:
    return b"\0" * (_aligned(offset) - offset)
