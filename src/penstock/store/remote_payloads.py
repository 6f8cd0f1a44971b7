"""Access to pool records that other processes wrote, on this machine or another.

On one machine all processes use one directory, and no copy is needed. On several machines, workers write to their own
machine. A process that needs a record reads it from the file service of the machine that has it, and verifies it. Then
it writes the record to its own directory, with the same file name and offset.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from xxhash import xxh3_64_intdigest

from penstock.deadline import Stalled, deadline
from penstock.runtime.file_service import POOL, FileUnavailable, link, read_range
from penstock.samples import Sample
from penstock.store.payload_files import PayloadError, PayloadReader, PayloadWriter, check_ref, is_whole
from penstock.types import PayloadRef

FETCH_S = 60.0
"""Limit of one fetch; shorter than the timeout of the workers that report records."""
MAX_SILENCE_S = 5.0
"""Limit of the silence of a host. A replacement of that host has another address."""


class PayloadsLost(RuntimeError):
    """A host does not have the pool records that it should have. The message names host and file."""

    self_explanatory = True


class FetchedPayloads(PayloadReader):
    """Pool records on several machines: copies in this process's own directory."""

    def __init__(self, directory: Path, *, secret: str, name: str) -> None:
        """`secret`: the run's secret, which its file services require. `name`: name of this process, for errors."""
        directory.mkdir(parents=True, exist_ok=True)
        super().__init__(directory)
        self._secret, self._name = secret, name

    async def fetch(self, refs: Sequence[PayloadRef], *, host: str) -> None:
        """Copy the records from `host`, the URL of the file service that has them. Raises `PayloadsLost`."""
        try:
            for ref in refs:
                check_ref(ref)
        except PayloadError as error:
            raise PayloadsLost(str(error)) from None
        files = ", ".join(sorted({ref.file for ref in refs}))
        try:
            async with deadline(FETCH_S, waiter=self._name, resource=f"records of {files}", holder=f"host {host}"):
                for ref in await asyncio.to_thread(self._missing, refs):
                    record = await self._read(ref, host)
                    await asyncio.to_thread(_write, self._directory, ref, record)
        except (Stalled, OSError) as error:
            raise PayloadsLost(str(error)) from None

    def drop(self, refs: Iterable[PayloadRef]) -> None:
        """Remove the copies of these files, which are not read again. Samples that were read stay valid.
        Raises `PayloadError` for a reference that leaves the directory."""
        for ref in refs:
            check_ref(ref)
        for file in {ref.file for ref in refs}:
            self._maps.pop(file, None)
            (self._directory / file).unlink(missing_ok=True)

    def _missing(self, refs: Sequence[PayloadRef]) -> list[PayloadRef]:
        return [ref for ref in refs if not is_whole(self._directory, ref)]

    async def _read(self, ref: PayloadRef, host: str) -> bytes:
        record, url = bytearray(), link(host, f"{POOL}/{ref.file}", self._secret)
        try:
            await read_range(url, ref.offset, ref.offset + ref.length, record.extend, max_silence_s=MAX_SILENCE_S)
        except FileUnavailable as error:
            raise PayloadsLost(f"{ref.file} cannot be read from host {host} at offset {ref.offset}: {error}") from None
        if xxh3_64_intdigest(record) != ref.checksum:
            raise PayloadsLost(f"{ref.file} of host {host} arrived damaged at offset {ref.offset}")
        return bytes(record)


def _write(directory: Path, ref: PayloadRef, record: bytes) -> None:
    """Write a record at the offset in its reference. The space between records stays a hole in the file."""
    file = os.open(directory / ref.file, os.O_CREAT | os.O_WRONLY | os.O_NOFOLLOW, 0o600)
    try:
        if (written := os.pwrite(file, record, ref.offset)) != len(record):
            raise OSError(f"{written} of {len(record)} bytes of {ref.file} could be written; disk full?")
    finally:
        os.close(file)


class TemporaryPayloadWriter(PayloadWriter):
    """Writes records that are kept only until the controller has them. A file is removed once all its records are
    released.

    Each process uses its own file names, which are unique on all machines.
    """

    def __init__(self, directory: Path, worker: str, *, max_file_bytes: int = 64 << 20) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        for left in directory.glob(f"{worker}-*.seg"):  # left by a dead worker; others repeat its work
            left.unlink()
        super().__init__(directory, f"{worker}-{secrets.token_hex(4)}", max_file_bytes=max_file_bytes)
        self._num_unreleased: Counter[str] = Counter()
        """Number of unreleased records by file."""

    def append(self, samples: Sequence[Sample]) -> PayloadRef:
        ref = super().append(samples)
        self._num_unreleased[ref.file] += 1
        return ref

    def release(self, ref: PayloadRef) -> None:
        self._num_unreleased[ref.file] -= 1
        for file in [file for file, count in self._num_unreleased.items() if not count and file != self._name]:
            del self._num_unreleased[file]
            (self._directory / file).unlink(missing_ok=True)
