"""Weights on their way to a file that servers map: one file per version.

    open      rank 0 makes the file, with the place of every tensor
    write     each rank writes its own rows, in any order, while training goes on
    finish    rank 0 waits for the other ranks, computes the fingerprint, gives the file its name, and leaves the handle

The file gets its final name only when it is complete. Only its owner can read it (0600). The trainer and the ranks of
its machine share the folder, so no message has to pass between them while passes run. Ranks on other machines send
their rows to rank 0, which writes them (`row_transfer.py`).

A version may be a file of adapters alone. The weights to which they are added, the base, then have a folder of their
own, which stays while the publisher lives.
"""

from __future__ import annotations

import json
import os
import shutil
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from math import prod
from pathlib import Path
from types import TracebackType

import msgspec
import torch
from torch import Tensor
from xxhash import xxh3_64

from penstock.deadline import Stalled
from penstock.own_files import write_all
from penstock.ticks import tick
from penstock.types import AdaptersForm, WeightsHandle
from penstock.weights.shared_memory import DTYPES, Layout, file_in, fingerprint, mapped, take_over

KEPT_VERSIONS = 3
"""The newest version, the version that waits for the servers, and the version that the servers are mapping."""
PIECE_BYTES = 16 * 2**20
"""Bytes that are converted at a time."""
WRITE_BYTES = 2**18
"""Bytes that are written, and then read from the processor's cache for the fingerprint, at a time."""
SILENCE_S = 600.0
"""How long a waiter waits while nothing more is written."""
LOOK_S, LONGEST_LOOK_S = 0.001, 0.05
"""Seconds between two looks at a folder: a tenth of the wait so far, within these bounds."""
UNFINISHED, OUTCOME, WRITTEN = "model.unfinished", "outcome.json", "written-"
"""Names of the files in a folder before it is complete."""
BASE = "base"
"""Name of the folder with the weights to which adapters are added."""


class NotPublished(RuntimeError):
    """Weights could not be written."""


class Outcome(msgspec.Struct, kw_only=True):
    """How a publication ended."""

    handle: WeightsHandle | None = None
    error: str = ""


class Publication:
    """A file of weights that is being written. Every rank has one for itself."""

    def __init__(self, folder: Path, form: Layout, *, adapters: bool = False) -> None:
        """`folder`: of this version alone. `form`: of all tensors. `adapters`: they are adapters."""
        self.folder, self._form = folder, form
        self._path = file_in(folder, adapters=adapters)
        self._header, self._starts, self._num_bytes = _header(form)
        self._fd: int | None = None
        self._staging: Tensor | None = None
        self._checksums: dict[str, int] = {}
        """Of the tensors that this rank wrote whole."""

    def __enter__(self) -> Publication:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        """Close the file. An error of the body ends the publication."""
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None
        if isinstance(error, Exception):
            self._end(Outcome(error=f"{type(error).__name__}: {error}"))

    def create(self, spare: Path | None = None) -> None:
        """Make the file, without tensors, from the file `spare` if it is mapped nowhere, or else new."""
        self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for left in self.folder.iterdir():
            if left != self._path:  # servers may still have to map it
                left.unlink()
        unfinished, is_new = self.folder / UNFINISHED, os.O_CREAT | os.O_EXCL
        if spare is not None and take_over(spare, unfinished, num_bytes=self._num_bytes):
            is_new = 0
        fd = os.open(unfinished, is_new | os.O_WRONLY, 0o600)
        try:
            write_all(fd, self._header, 0)
        finally:
            os.close(fd)

    def write(self, name: str, rows: Tensor, first_row: int = 0) -> None:
        """Write rows of a tensor, [rows, ...] or all of it, on any device, converted to the dtype of the file."""
        checksum = xxh3_64()
        for start, data in self.pieces(name, rows, first_row):
            for first in range(0, data.nbytes, WRITE_BYTES):
                part = data[first : first + WRITE_BYTES]
                self.put(start + first, part)
                checksum.update(part)
        if rows.numel() == prod(self._form[name][0]):
            self._checksums[name] = checksum.intdigest()

    def pieces(self, name: str, rows: Tensor, first_row: int = 0) -> Iterator[tuple[int, memoryview]]:
        """Yield pieces of rows in the dtype of the file: where each begins in the file, and its bytes, which are valid
        until the next piece."""
        shape, dtype = self._form[name]
        start = self._starts[name] + first_row * prod(shape[1:]) * dtype.itemsize
        for piece in torch.split(rows.detach().reshape(-1), PIECE_BYTES // dtype.itemsize):
            data = self._in_main_memory(piece.to(dtype)).view(torch.uint8).numpy().data
            yield start, data
            start += data.nbytes

    def put(self, start: int, data: memoryview) -> None:
        """Write bytes to a place of the file. Raises OSError on a full disk."""
        if self._fd is None:
            self._fd = os.open(self.folder / UNFINISHED, os.O_WRONLY)
        write_all(self._fd, data, start)
        tick()

    def written(self, shard: int) -> None:
        """Note that all rows of a shard are written."""
        (self.folder / f"{WRITTEN}{shard}").touch()

    def write_whole(
        self, weights: Iterable[tuple[str, Tensor]], policy_version: int, *, adapters: AdaptersForm | None = None
    ) -> WeightsHandle:
        """Write all tensors one after the other, and complete the file. `adapters`: see `WeightsHandle`."""
        for name, tensor in weights:
            self.write(name, tensor)
        return self._completed(policy_version, adapters)

    def finish(
        self, policy_version: int, num_shards: int = 1, *, adapters: AdaptersForm | None = None
    ) -> WeightsHandle | None:
        """Wait until all shards are written, and complete the file. Return None if another rank has failed.

        `adapters`: see `WeightsHandle`. Raises `Stalled` if nothing more is written for `SILENCE_S`.
        """
        if not self._await_shards(num_shards):
            return None
        handle = self._completed(policy_version, adapters)
        for shard in range(num_shards):
            (self.folder / f"{WRITTEN}{shard}").unlink(missing_ok=True)
        return handle

    def _completed(self, policy_version: int, adapters: AdaptersForm | None) -> WeightsHandle:
        unfinished, path = self.folder / UNFINISHED, self._path
        checksum = fingerprint(mapped(unfinished, self._form), adapters, known=self._checksums)
        unfinished.rename(path)
        handle = WeightsHandle(
            policy_version=policy_version,
            path=str(path),
            num_bytes=path.stat().st_size,
            fingerprint=checksum,
            adapters=adapters,
        )
        self._end(Outcome(handle=handle))
        return handle

    def _await_shards(self, num_shards: int) -> bool:
        watch = Watch(self.folder, waiter="rank 0")
        while sum(1 for _ in self.folder.glob(f"{WRITTEN}*")) < num_shards:
            if (self.folder / OUTCOME).exists():
                return False
            time.sleep(watch.look())
        return True

    def _in_main_memory(self, piece: Tensor) -> Tensor:
        """Return a piece in main memory, on CUDA by way of pinned memory, which the next piece takes again."""
        if piece.device.type != "cuda":
            return piece.cpu()
        if self._staging is None:
            self._staging = torch.empty(PIECE_BYTES, dtype=torch.uint8, pin_memory=True)
        host = self._staging[: piece.nbytes].view(piece.dtype)
        return host.copy_(piece)

    def _end(self, outcome: Outcome) -> None:
        unfinished = self.folder / f".{OUTCOME}.{os.getpid()}"
        unfinished.write_bytes(msgspec.json.encode(outcome))
        unfinished.rename(self.folder / OUTCOME)


class WeightsPublisher:
    """A publisher of successive versions. It keeps the newest `KEPT_VERSIONS`."""

    def __init__(self, directory: Path, *, recycles: bool = False) -> None:
        """`recycles`: write over the files of versions that are not kept. All readers must lock them (`map_file`)."""
        self.directory, self._recycles = directory, recycles
        left = (path for path in directory.glob("*/") if path.name.isdecimal())
        self._folders = sorted(left, key=lambda path: int(path.name))
        """Published folders, oldest first, including the folders of an earlier publisher that died."""
        self._has_opened_base = False

    def open_base(self, form: Layout) -> Publication:
        """Make the file of the weights to which the adapters of versions are added."""
        opened = Publication(self.directory / BASE, form)
        opened.create()
        self._has_opened_base = True
        return opened

    def base(self) -> WeightsHandle | None:
        """Return the handle of the base; None if this publisher has not written it, or its file is gone."""
        folder = self.directory / BASE
        if not self._has_opened_base or not file_in(folder).exists():
            return None
        try:
            return handle_in(folder)
        except NotPublished:
            return None

    def open(self, form: Layout, policy_version: int, *, adapters: bool = False) -> Publication:
        """Make the file of one version, and remove the oldest ones. `adapters`: it has adapters alone."""
        opened = Publication(self.directory / str(policy_version), form, adapters=adapters)
        before = [folder for folder in self._folders if folder != opened.folder]
        retired, kept = before[: 1 - KEPT_VERSIONS], before[1 - KEPT_VERSIONS :]
        is_spare = self._recycles and not adapters and retired
        opened.create(spare=file_in(retired[-1]) if is_spare else None)
        for folder in retired:
            shutil.rmtree(folder, ignore_errors=True)
        self._folders = [*kept, opened.folder]
        return opened


def handle_in(folder: Path) -> WeightsHandle | None:
    """Return the handle of a complete publication; None as long as it is being written. Raises `NotPublished`."""
    try:
        outcome = msgspec.json.decode((folder / OUTCOME).read_bytes(), type=Outcome)
    except FileNotFoundError:
        return None
    if outcome.handle is None:
        raise NotPublished(f"the weights in {folder} could not be written: {outcome.error}")
    return outcome.handle


def await_handle(folder: Path, *, waiter: str) -> WeightsHandle:
    """Return the handle of a publication when it is complete. Raises `NotPublished`, or `Stalled` if nothing more is
    written."""
    watch = Watch(folder, waiter=waiter)
    while (handle := handle_in(folder)) is None:
        time.sleep(watch.look())
    return handle


class Watch:
    """Watches a publication that is being written."""

    def __init__(self, folder: Path, *, waiter: str) -> None:
        self._folder, self._waiter = folder, waiter
        self._files = [each / UNFINISHED for each in (folder, folder.parent / BASE)]
        self._began = self._last = time.monotonic()
        self._arrived = -1

    def look(self) -> float:
        """Return how long to wait before the next look. What was written since the last one is progress.

        Raises `Stalled` if nothing was written for `SILENCE_S`.
        """
        now, arrived = time.monotonic(), 0
        for file in self._files:
            with suppress(FileNotFoundError):  # it has just been completed, or there is no base to write
                arrived += file.stat().st_mtime_ns
        if arrived != self._arrived:
            self._arrived, self._last = arrived, now
            tick()
        if now - self._last > SILENCE_S:
            resource = f"the weights in {self._folder}"
            raise Stalled(waiter=self._waiter, resource=resource, holder="the trainer's ranks", seconds=SILENCE_S)
        return min(max((now - self._began) / 10, LOOK_S), LONGEST_LOOK_S)


def _header(form: Layout) -> tuple[bytes, dict[str, int], int]:
    """Return the header of a safetensors file, where each tensor begins in the file, and the size of the file."""
    entries: dict[str, dict[str, object]] = {}
    ends: dict[str, int] = {}
    end = 0
    for name in sorted(form, key=lambda name: (-form[name][1].itemsize, name)):  # so that all are aligned
        shape, dtype = form[name]
        start, end = end, end + prod(shape) * dtype.itemsize
        entries[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
        ends[name] = start
    text = json.dumps(entries).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return header, {name: len(header) + start for name, start in ends.items()}, len(header) + end
