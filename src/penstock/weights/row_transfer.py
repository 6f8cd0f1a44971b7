"""Rows of ranks on other machines, on their way to the published file (`publication.py`).

    copy      a rank copies its rows to memory of its machine, and may change its weights again
    send      it announces where its rows belong, and sends them to rank 0, one bucket after the other
    receive   rank 0 takes a bucket from each rank in turn, and writes it to its places in the file

The copy has as many bytes as the rank's rows in the dtype of the file. Besides, each side holds one bucket.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import NoReturn

import msgspec
import torch
from torch import Tensor

from penstock.own_files import write_all
from penstock.ticks import tick
from penstock.weights.publication import NotPublished, Publication

BUCKET_BYTES = 16 * 2**20
"""Most bytes that are sent at a time."""

Transfer = Callable[[Tensor], object]
"""Sends a tensor to another rank, or fills it with what that rank sends. Has a deadline."""


class Announcement(msgspec.Struct, kw_only=True):
    """What a rank sends before its rows."""

    runs: list[tuple[int, int]] = []
    """(start in the file, number of bytes) of each run of bytes, in the order in which they are sent."""
    error: str = ""
    """Why the rank has no copy of its rows; empty if it has one."""


class RowsCopy:
    """A copy of one rank's rows, in the memory of its machine."""

    def __init__(self) -> None:
        self._file = os.fdopen(os.memfd_create("rows"), "r+b", buffering=0)  # it ends with this process
        self._runs: list[tuple[int, int]] = []
        self._num_bytes = 0

    def add(self, start: int, data: memoryview) -> None:
        """Copy bytes that belong at `start` of the published file. Raises OSError if there is no memory for them."""
        write_all(self._file.fileno(), data, self._num_bytes)
        self._num_bytes += data.nbytes
        if self._runs and sum(self._runs[-1]) == start:
            start, before = self._runs.pop()
            self._runs.append((start, before + data.nbytes))
        else:
            self._runs.append((start, data.nbytes))
        tick()

    def send(self, send: Transfer) -> None:
        """Send the copy, and free its memory."""
        with self._file as file:
            _announce(send, Announcement(runs=self._runs))
            bucket = torch.empty(min(BUCKET_BYTES, self._num_bytes), dtype=torch.uint8)
            for start in range(0, self._num_bytes, BUCKET_BYTES):
                part = bucket[: self._num_bytes - start]
                if os.preadv(file.fileno(), [part.numpy().data], start) != part.nbytes:
                    raise OSError(f"the copy of the rows ends before byte {start + part.nbytes}")
                send(part)
                tick()


def send_failure(send: Transfer, error: Exception) -> NoReturn:
    """Tell rank 0 that this rank could not copy its rows, and raise the error."""
    _announce(send, Announcement(error=f"{type(error).__name__}: {error}"))
    raise error


def receive_rows(publication: Publication, receive: Mapping[int, Transfer]) -> None:
    """Write the rows that other ranks send. `receive`: by the number of the shard.

    Raises `NotPublished` if a rank has no copy of its rows, and the errors of `receive` and of a full disk.
    """
    bucket = torch.empty(BUCKET_BYTES, dtype=torch.uint8)
    turns = deque(_received(publication, shard, take, bucket) for shard, take in receive.items())
    while turns:
        turn = turns.popleft()
        if next(turn, None) is not None:
            turns.append(turn)


def _received(publication: Publication, shard: int, receive: Transfer, bucket: Tensor) -> Iterator[int]:
    """Write the rows of one shard, and yield the number of bytes that are left after each bucket."""
    announced = _announced(receive)
    if announced.error:
        raise NotPublished(f"rank {shard} could not copy its rows: {announced.error}")
    runs = deque(announced.runs)
    left = sum(num_bytes for _, num_bytes in runs)
    while left:
        part = bucket[:left]
        receive(part)
        left -= part.nbytes
        data = part.numpy().data
        while data:
            start, num_bytes = runs.popleft()
            taken = data[:num_bytes]
            publication.put(start, taken)
            data = data[taken.nbytes :]
            if taken.nbytes < num_bytes:
                runs.appendleft((start + taken.nbytes, num_bytes - taken.nbytes))
        yield left
    publication.written(shard)


def _announce(send: Transfer, announcement: Announcement) -> None:
    message = torch.frombuffer(bytearray(msgspec.json.encode(announcement)), dtype=torch.uint8)
    send(torch.tensor([message.nbytes]))
    send(message)


def _announced(receive: Transfer) -> Announcement:
    length = torch.empty(1, dtype=torch.int64)
    receive(length)
    message = torch.empty(int(length), dtype=torch.uint8)
    receive(message)
    return msgspec.json.decode(message.numpy().data, type=Announcement)
