"""Published weights on another machine: their file comes over HTTP in parts, is verified like any other, and mapped.

Whether it is another machine is told by the boot ids of sender and receiver. Of those that share a machine one fetches,
and the others link what came. Blocking; a receiver has threads for this.
"""

from __future__ import annotations

import errno
import hashlib
import http.client
import os
import secrets
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

from torch import Tensor

from penstock.ports import WeightsOutOfReach
from penstock.types import WeightsHandle
from penstock.weights.shared_memory import Layout, WeightsMismatch, receive

PART_BYTES, PIECE_BYTES = 32 << 20, 1 << 20
"""Asked for at once, and written at once."""
PART_S = 30.0
"""For a piece of a part to come."""
PATIENCE_S = 15.0
"""With a sender that does not answer, or a neighbour who fetches, since the last piece came."""
PAUSE_S = 0.5
LOOK_S = 0.05
"""Between looks at what a neighbour fetches."""
UNFINISHED = ".unfinished"
FILES = Path("/proc/self/ns/mnt")
"""A link that says which processes see the same files."""
GONE = 404
DIRECTLY = urllib.request.build_opener(urllib.request.ProxyHandler({}))
"""The machines of a run reach each other without a proxy."""


class Receiver:
    """Maps the weights of a handle, whichever machine they lie on."""

    def __init__(
        self,
        expected: Layout,
        *,
        machine: str,
        directory: Path,
        neighbours: Callable[[], Iterable[Path]] = tuple,
        key: str | None = None,
    ) -> None:
        """`expected`: of the model. `machine`: boot id of this one. `directory`: for what comes; it stays there until
        something newer does. `neighbours`: the directories of all receivers of this machine. `key`: what opens the
        sender."""
        self._expected, self._machine, self._directory, self._key = expected, machine, directory, key
        self._neighbours = neighbours

    def __call__(self, handle: WeightsHandle) -> dict[str, Tensor]:
        """Raises `WeightsMismatch`, or `WeightsOutOfReach`."""
        if not handle.url or (handle.machine == self._machine and Path(handle.path).exists()):
            return receive(handle, self._expected)
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = self._directory / f"{handle.policy_version}-{handle.fingerprint}.safetensors"
        for left in self._directory.iterdir():
            if not left.name.startswith(path.name):
                left.unlink(missing_ok=True)
        try:
            self._obtain(handle, path)
            return receive(replace(handle, path=str(path)), self._expected)
        except WeightsMismatch:
            path.unlink(missing_ok=True)
            raise

    def _obtain(self, handle: WeightsHandle, path: Path) -> None:
        """From a neighbour; from the sender if it is this one's turn, or whose turn it is gets nothing."""
        arrived, limit = -1, time.monotonic() + PATIENCE_S
        while True:
            folders = list(self._neighbours())
            if _link(path, folders):
                return
            with _turn(handle) as is_mine:
                if (is_mine and not _link(path, folders)) or time.monotonic() > limit:
                    self._fetch(handle, path)
                    return
            if (size := _arriving(path.name, folders)) != arrived:
                arrived, limit = size, time.monotonic() + PATIENCE_S
            time.sleep(LOOK_S)

    def _fetch(self, handle: WeightsHandle, path: Path) -> None:
        """Each part is asked for until it has come; what has come of one is kept."""
        unfinished = path.with_name(f"{path.name}.{secrets.token_hex(4)}{UNFINISHED}")
        limit = time.monotonic() + PATIENCE_S
        try:
            with os.fdopen(os.open(unfinished, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
                while (start := file.tell()) < handle.num_bytes:
                    try:
                        for piece in self._part(handle.url, start, min(start + PART_BYTES, handle.num_bytes)):
                            _write(file, piece)
                            limit = time.monotonic() + PATIENCE_S
                    except (OSError, http.client.HTTPException) as error:
                        is_gone = isinstance(error, urllib.error.HTTPError) and error.code == GONE
                        if is_gone or time.monotonic() > limit:
                            raise WeightsOutOfReach(
                                f"policy_version {handle.policy_version} cannot be had from {handle.url}: {error}"
                            ) from error
                        time.sleep(PAUSE_S)
            unfinished.rename(path)
        finally:
            unfinished.unlink(missing_ok=True)

    def _part(self, url: str, start: int, end: int) -> Iterator[bytes]:
        """As it comes."""
        headers = {"Range": f"bytes={start}-{end - 1}"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        with DIRECTLY.open(urllib.request.Request(url, headers=headers), timeout=PART_S) as response:
            while start < end:
                piece = response.read(min(PIECE_BYTES, end - start))
                if not piece:
                    raise http.client.IncompleteRead(piece, end - start)
                yield piece
                start += len(piece)


def _write(file: BinaryIO, piece: bytes) -> None:
    try:
        file.write(piece)
        file.flush()
    except OSError as error:
        raise WeightsOutOfReach(f"{file.name} cannot be written: {error.strerror}") from error


def _link(path: Path, folders: Iterable[Path]) -> bool:
    """Whether `path` is there, as it is once one of these has a file of that name."""
    if path.exists():
        return True
    for folder in folders:
        with suppress(OSError):  # it has none, or is done with it, or it lies on another file system
            path.hardlink_to(folder / path.name)
            return True
    return path.exists()


def _arriving(name: str, folders: Iterable[Path]) -> int:
    """Bytes of that file that somebody is fetching into one of these."""
    size = 0
    for folder in folders:
        for file in folder.glob(f"{name}.*{UNFINISHED}"):
            with suppress(OSError):  # it has come meanwhile
                size += file.stat().st_size
    return size


@contextmanager
def _turn(handle: WeightsHandle) -> Iterator[bool]:
    """Whether it is ours to fetch these weights for all who see the same files: a name without a file, which is free
    when its holder dies. Where there are no such names everybody fetches."""
    with socket.socket(socket.AF_UNIX) as lock:
        try:
            what = f"{handle.url} {handle.fingerprint} {FILES.readlink()}"
            lock.bind("\0penstock-weights-" + hashlib.blake2b(what.encode(), digest_size=16).hexdigest())
            is_mine = True
        except OSError as error:
            is_mine = error.errno != errno.EADDRINUSE
        yield is_mine
