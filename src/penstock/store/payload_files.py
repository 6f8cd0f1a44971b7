"""Payload records: the token arrays of a group in one checksummed, append-only record.

    record = magic "PENS" | u32 header length | header (msgpack) | int32 token_ids | uint8 loss_mask | float32 logprobs
             | int32 versions | experts, each array holding all samples of the group back to back and starting on 8
             bytes

Experts are recorded for policies that have some: of each such sample, its rows one after the other.

A worker writes only its own segment files. Readers map the files, so the page cache is the shared memory.
"""

from __future__ import annotations

import asyncio
import errno
import mmap
import os
import re
import stat
import struct
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, BinaryIO, Literal

import msgspec
import numpy as np
import numpy.typing as npt
from xxhash import xxh3_64_intdigest

from penstock.deadline import deadline
from penstock.routed_experts import Record
from penstock.samples import Credit, Sample, TrainedTurn
from penstock.types import PayloadRef

_MAGIC = b"PENS"
_PREFIX = struct.Struct("<4sI")
_COLUMNS: tuple[tuple[str, type[np.generic]], ...] = (
    ("token_ids", np.int32),
    ("loss_mask", np.uint8),
    ("logprobs", np.float32),
    ("versions", np.int32),
)
ExpertsType = Literal["uint8", "uint16"]
_ALIGNMENT = 8
_NAME = re.compile(r"(?P<worker>[A-Za-z0-9][A-Za-z0-9._-]{0,127})-\d{5,}\.seg")
_LIFE = re.compile(r"-[0-9a-f]{8}")
"""Part of a name by which `TemporaryPayloadWriter` makes it unique."""
MAX_RECORD_BYTES = 1 << 32
MAX_KEPT_BYTES = 1 << 24
"""Most memory that a writer keeps for its next record."""
SMALL_BYTES = 1 << 20
"""Records up to this size are verified on the event loop, which takes less than a millisecond."""
VERIFY_S = 60.0
CLOCK_S = 1.0
"""Seconds; more than the file system's times lag behind the clock."""


class PayloadError(RuntimeError):
    """A record cannot be read or does not match its reference. If a file is damaged, the message names the file and the
    offset."""

    self_explanatory = True


class _Header(msgspec.Struct, frozen=True, array_like=True):
    group: int
    episode: int
    reward: float
    truncated: bool
    num_tokens: int
    temperature: float = 1.0
    conversation: int = 0
    credit: Credit | None = None
    turns: list[TrainedTurn] = []  # msgspec copies an empty default


class _RoutedHeader(_Header, frozen=True, array_like=True):
    """Of a sample whose experts are recorded; others have one entry less."""

    experts: tuple[int, ExpertsType] | None = None
    """Width and type of the record."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(list[_RoutedHeader])


def check_ref(ref: PayloadRef, *, worker: str | None = None) -> None:
    """Check that a reference stays within the pool's folder and, if `worker` is given, that its file belongs to that
    worker. Raises `PayloadError`."""
    found = _NAME.fullmatch(ref.file)
    if found is None:
        raise PayloadError(f"{ref.file[:200]!r} is not the name of a pool file")
    if worker is not None and found["worker"] != worker:
        owner, rest = found["worker"][: len(worker)], found["worker"][len(worker) :]
        if owner != worker or not _LIFE.fullmatch(rest):
            raise PayloadError(f"pool file {ref.file} does not belong to {worker}")
    if ref.offset < 0 or not 0 < ref.length <= MAX_RECORD_BYTES or ref.offset > 1 << 60:
        raise PayloadError(f"pool file {ref.file} has no record of {ref.length} bytes at offset {ref.offset}")


def open_file(directory: Path, name: str) -> BinaryIO:
    """Open a pool file to read it. Raises OSError, also for a link and for anything but a plain file."""
    number = os.open(directory / name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    if not stat.S_ISREG(os.fstat(number).st_mode):
        os.close(number)
        raise OSError(errno.EINVAL, "not a plain file", name)
    return os.fdopen(number, "rb")


def encode(samples: Sequence[Sample], buffer: bytearray) -> memoryview:
    """Return the samples of a group as one record. Every token is copied once.

    The record is the beginning of `buffer`, which grows if necessary, or has its own memory if it is large. New memory
    costs as much time as the copy.
    """
    header = _encoder.encode([_header(s) for s in samples])
    num_tokens = sum(len(s.token_ids) for s in samples)
    starts = [_aligned(_PREFIX.size + len(header))]
    for _, dtype in _COLUMNS:
        starts.append(_aligned(starts[-1] + num_tokens * np.dtype(dtype).itemsize))
    records = [s.experts for s in samples if s.experts is not None]
    size = _aligned(starts[-1] + sum(record.nbytes for record in records))
    if size > MAX_RECORD_BYTES:
        remedy = "set trainer.router_replay to false, or " if records else ""
        raise PayloadError(
            f"{len(samples)} samples of a group take {size} bytes, more than the {MAX_RECORD_BYTES} of a record: "
            f"{remedy}play smaller groups or shorter episodes"
        )
    if size <= MAX_KEPT_BYTES:
        buffer.extend(bytes(max(size - len(buffer), 0)))
    record = memoryview(buffer if size <= MAX_KEPT_BYTES else bytearray(size))[:size]
    end = _PREFIX.size + len(header)
    record[:end] = _PREFIX.pack(_MAGIC, len(header)) + header
    for (name, dtype), start in zip(_COLUMNS, starts, strict=False):
        record[end:start] = bytes(start - end)
        column = np.frombuffer(record, dtype=dtype, count=num_tokens, offset=start)
        np.concatenate([getattr(s, name) for s in samples], out=column, casting="unsafe")
        end = start + column.nbytes
    if records:
        record[end : starts[-1]] = bytes(starts[-1] - end)
        end = starts[-1]
    for experts in records:
        record[end : end + experts.nbytes] = np.ascontiguousarray(experts).reshape(-1).view(np.uint8).data
        end += experts.nbytes
    record[end:] = bytes(size - end)
    return record


def _header(s: Sample) -> _Header:
    common = s.group, s.episode, s.reward, s.truncated, len(s.token_ids)
    further = s.temperature, s.conversation, s.credit, list(s.turns)
    if s.experts is None:
        return _Header(*common, *further)
    kind: Any = s.experts.dtype.name
    return _RoutedHeader(*common, *further, (s.experts.shape[1], kind))


def decode(record: memoryview) -> list[Sample]:
    """Return the samples of a record. Their arrays are views into `record`. Raises `PayloadError`."""
    try:
        return _decode(record)
    except (struct.error, msgspec.MsgspecError, ValueError, OverflowError) as error:
        raise PayloadError(f"not a payload record: {error}") from None


def _decode(record: memoryview) -> list[Sample]:
    magic, header_length = _PREFIX.unpack_from(record)
    if magic != _MAGIC:
        raise PayloadError("not a payload record")
    headers = _decoder.decode(record[_PREFIX.size : _PREFIX.size + header_length])
    if any(h.num_tokens < 0 for h in headers):
        raise PayloadError("not a payload record: a sample has a negative number of tokens")
    if not all(_are_in_order(h.turns, h.num_tokens) for h in headers if h.turns):
        raise PayloadError("not a payload record: the turns of a sample overlap, or leave it")
    bounds = [0, *accumulate(h.num_tokens for h in headers)]
    offset = _aligned(_PREFIX.size + header_length)
    columns: list[npt.NDArray[Any]] = []
    for _, dtype in _COLUMNS:
        columns.append(np.frombuffer(record, dtype=dtype, count=bounds[-1], offset=offset))
        offset = _aligned(offset + columns[-1].nbytes)
    token_ids, loss_mask, logprobs, versions = columns
    experts = _experts(record, offset, headers)
    return [
        Sample(
            group=h.group,
            episode=h.episode,
            reward=h.reward,
            truncated=h.truncated,
            temperature=h.temperature,
            conversation=h.conversation,
            credit=h.credit,
            turns=h.turns,
            token_ids=token_ids[start:end],
            loss_mask=loss_mask[start:end],
            logprobs=logprobs[start:end],
            versions=versions[start:end],
            experts=own,
        )
        for h, (start, end), own in zip(headers, pairwise(bounds), experts, strict=True)
    ]


def _experts(record: memoryview, offset: int, headers: Sequence[_RoutedHeader]) -> Iterator[Record | None]:
    """Yield the experts of each sample. They begin at `offset`."""
    for header in headers:
        if header.experts is None:
            yield None
            continue
        width, kind = header.experts
        if width < 1:
            raise PayloadError(f"a sample with {width} experts per token")
        found = np.frombuffer(record, dtype=kind, count=header.num_tokens * width, offset=offset)
        offset += found.nbytes
        yield found.reshape(header.num_tokens, width)


def _are_in_order(turns: Sequence[TrainedTurn], num_tokens: int) -> bool:
    places = [0, *(place for turn in turns for place in (turn.start, turn.end)), num_tokens]
    numbers = [turn.turn for turn in turns]
    return places == sorted(places) and numbers == sorted(set(numbers)) and (not turns or numbers[0] >= 0)


class PayloadWriter:
    """Appends records to this worker's segment files. Starts a new file after `max_file_bytes`."""

    def __init__(self, directory: Path, worker: str, *, max_file_bytes: int = 64 << 20) -> None:
        self._directory, self._worker, self._max_file_bytes = directory, worker, max_file_bytes
        self._buffer = bytearray()
        self._number = max((number for name, number in _files(directory) if name == worker), default=-1) + 1
        self._open()

    def append(self, samples: Sequence[Sample]) -> PayloadRef:
        """Write one record. The reference is valid as soon as this returns."""
        offset = self._file.tell()
        if offset >= self._max_file_bytes:
            self._file.close()
            self._number, offset = self._number + 1, 0
            self._open()
        with encode(samples, self._buffer) as record:
            self._write(record)
            return PayloadRef(file=self._name, offset=offset, length=len(record), checksum=xxh3_64_intdigest(record))

    def release(self, ref: PayloadRef) -> None:
        """Do nothing: the controller's pool removes these files."""

    def close(self) -> None:
        self._file.close()

    def _write(self, record: memoryview) -> None:
        """Write all of `record`. The file is unbuffered, so one write may take only a part. Raises OSError."""
        num_written = 0
        try:
            while num_written < len(record):
                num_written += self._file.write(record[num_written:])
        except OSError as error:
            message = f"{num_written} of {len(record)} bytes could be written ({error.strerror}); disk full?"
            raise OSError(error.errno, message, str(self._directory / self._name)) from error

    def _open(self) -> None:
        self._name = _file_name(self._worker, self._number)
        self._file = (self._directory / self._name).open("ab", buffering=0)


class PayloadReader:
    """Maps segment files and returns zero-copy samples after a checksum test."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._maps: dict[str, mmap.mmap] = {}

    def read(self, ref: PayloadRef) -> list[Sample]:
        """Return the samples behind `ref`. Raises `PayloadError` if the file or the checksum does not match."""
        check_ref(ref)
        try:
            mapped = self._map(ref.file, ref.offset + ref.length)
        except (OSError, ValueError) as error:
            raise PayloadError(f"pool file {ref.file} cannot be read: {error}") from None
        record = memoryview(mapped)[ref.offset : ref.offset + ref.length]
        if len(record) != ref.length or xxh3_64_intdigest(record) != ref.checksum:
            raise PayloadError(f"pool file {ref.file} is damaged at offset {ref.offset} ({ref.length} bytes)")
        return decode(record)

    async def fetch(self, refs: Sequence[PayloadRef], *, host: str) -> None:
        """Do nothing: the records are on this machine. `FetchedPayloads` copies them from `host`."""

    async def verify(self, refs: Sequence[PayloadRef]) -> None:
        """Check that the records are whole and can be decoded. Raises `PayloadError`."""
        for ref in refs:
            if ref.length <= SMALL_BYTES:
                self.read(ref)
            else:
                async with deadline(VERIFY_S, waiter="the pool", resource=ref.file, holder="its disk"):
                    await asyncio.to_thread(self.read, ref)

    def drop(self, refs: Iterable[PayloadRef]) -> None:
        """Do nothing: the owner of the directory removes its files."""

    def _map(self, name: str, end: int) -> mmap.mmap:
        mapped = self._maps.get(name)
        if mapped is None or len(mapped) < end:
            # A removed file takes up disk space as long as it is mapped.
            self._maps = {known: it for known, it in self._maps.items() if (self._directory / known).exists()}
            with open_file(self._directory, name) as file:
                mapped = self._maps[name] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        return mapped


def remove_files(directory: Path, *, written_before: float, keep: Collection[str]) -> None:
    """Remove files without writes since `written_before` (seconds since the epoch).

    Files in `keep` stay, and so does the newest file of each worker, which the worker may have open.
    """
    found = sorted(_files(directory))
    newest = dict(found)
    for worker, number in found:
        path = directory / _file_name(worker, number)
        if number != newest[worker] and path.name not in keep and path.stat().st_mtime < written_before - CLOCK_S:
            path.unlink()


def is_whole(directory: Path, ref: PayloadRef) -> bool:
    """Return whether the record exists undamaged."""
    try:
        check_ref(ref)
        with open_file(directory, ref.file) as file:
            file.seek(ref.offset)
            record = file.read(ref.length)
    except (FileNotFoundError, PayloadError):
        return False
    return len(record) == ref.length and xxh3_64_intdigest(record) == ref.checksum


def sync_files(directory: Path, names: Iterable[str]) -> None:
    """Flush these files to disk, including data that other processes wrote. Ignore missing files."""
    for name in names:
        with suppress(FileNotFoundError), open_file(directory, name) as file:
            os.fsync(file.fileno())


def _file_name(worker: str, number: int) -> str:
    return f"{worker}-{number:05d}.seg"


def _files(directory: Path) -> list[tuple[str, int]]:
    """Return (worker, number) of every segment file."""
    parts = (path.stem.rpartition("-") for path in directory.glob("*.seg"))
    return [(worker, int(number)) for worker, _, number in parts]


def _aligned(offset: int) -> int:
    return -(-offset // _ALIGNMENT) * _ALIGNMENT
