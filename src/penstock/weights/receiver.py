"""Receive weights that another machine published: read the file over HTTP, verify it, and map it.

Sender and receiver compare boot ids to detect different machines. Among receivers on one machine, one reads the file
and the other receivers create hard links to it. Calls block, so a receiver makes them from its own threads.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import math
import os
import re
import secrets
import socket
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import BinaryIO
from urllib.parse import urlsplit

from torch import Tensor

from penstock.ports.inference import WeightsOutOfReach
from penstock.runtime.file_service import WEIGHTS, FileUnavailable, link, read_range, without_token
from penstock.types import WeightsHandle
from penstock.weights.shared_memory import Layout, WeightsMismatch, file_in, receive

MAX_SILENCE_S = 15.0
"""Time limit since the last received piece, for a silent sender and for a neighbour that reads the file."""
LOOK_S = 0.05
"""Interval between checks of a neighbour's progress."""
UNFINISHED = ".unfinished"
FINGERPRINT = re.compile(r"[0-9a-f]{32}")
MACHINE = re.compile(r"[0-9A-Za-z-]{0,64}")
MAX_HEADER_BYTES = 2**16
"""Largest header of a weights file, besides `HEADER_BYTES` for each tensor."""
HEADER_BYTES = 1024
FILES = Path("/proc/self/ns/mnt")
"""A symbolic link with equal targets for processes in the same mount namespace, which see the same files."""


def linked(handle: WeightsHandle, *, service: str, secret: str, machine: str) -> WeightsHandle:
    """Return the handle with a URL for other machines.

    `service`: address of this machine's file service. `machine`: this machine's boot id.
    """
    path = file_in(Path(WEIGHTS) / str(handle.policy_version))
    return replace(handle, machine=machine, url=link(service, str(path), secret))


class Receiver:
    """A callable that maps the weights of a handle, from this machine or another one."""

    def __init__(
        self,
        expected: Layout,
        *,
        machine: str,
        directory: Path,
        neighbours: Callable[[], Iterable[Path]] = tuple,
        published: Callable[[], Iterable[Path]] | None = None,
    ) -> None:
        """`expected`: the model's layout. `machine`: this machine's boot id. `directory`: for received files; a file
        stays until the next version arrives. `neighbours`: returns the directories of all receivers of this machine.
        `published`: returns the directories in which a handle's path may lie; None for any path."""
        self._expected, self._machine, self._directory = expected, machine, directory
        self._neighbours, self._published = neighbours, published
        header = MAX_HEADER_BYTES + HEADER_BYTES * len(expected)
        self._max_bytes = header + sum(math.prod(shape) * dtype.itemsize for shape, dtype in expected.values())

    def __call__(self, handle: WeightsHandle) -> dict[str, Tensor]:
        """Return the mapped weights by name.

        Raises `WeightsMismatch` if they differ from the handle or the model, and `WeightsOutOfReach` if they cannot be
        transferred.
        """
        self._check(handle)
        if not handle.url or (handle.machine == self._machine and Path(handle.path).exists()):
            self.check_place(Path(handle.path))
            return receive(handle, self._expected)
        if not 0 < handle.num_bytes <= self._max_bytes:
            raise WeightsMismatch(f"weights of this model have at most {self._max_bytes} bytes, not {handle.num_bytes}")
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

    def check_place(self, path: Path) -> None:
        """Raise `WeightsMismatch` unless this server may read weights at `path`."""
        if self._published is not None:
            folders = [folder.resolve() for folder in self._published()]
            if not any(path.resolve().is_relative_to(folder) for folder in folders):
                shown = ", ".join(map(str, folders))
                raise WeightsMismatch(f"{path} is not where this run publishes weights ({shown})")

    def _check(self, handle: WeightsHandle) -> None:
        """Check the words of a handle, of which file names and requests are made. Raises `WeightsMismatch`."""
        for name, form in (("fingerprint", FINGERPRINT), ("machine", MACHINE)):
            if not form.fullmatch(getattr(handle, name)):
                raise WeightsMismatch(f"`{name}` of a weights handle does not have the form {form.pattern}")
        parts = urlsplit(handle.url)
        if handle.url and (parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None):
            raise WeightsMismatch("`url` of a weights handle must be http(s)://HOST/..., without a user name")

    def _obtain(self, handle: WeightsHandle, path: Path) -> None:
        """Link the file from a neighbour, or fetch it from the sender.

        The receiver fetches if it holds the lock, or if the neighbour that holds the lock makes no progress for
        `MAX_SILENCE_S` seconds.
        """
        arrived, limit = -1, time.monotonic() + MAX_SILENCE_S
        while True:
            folders = list(self._neighbours())
            if _link(path, folders):
                return
            with _turn(handle) as is_mine:
                if (is_mine and not _link(path, folders)) or time.monotonic() > limit:
                    _fetch(handle, path)
                    return
            if (size := _arriving(path.name, folders)) != arrived:
                arrived, limit = size, time.monotonic() + MAX_SILENCE_S
            time.sleep(LOOK_S)


def _fetch(handle: WeightsHandle, path: Path) -> None:
    """Read the file from its sender. It gets its final name when it is complete."""
    unfinished = path.with_name(f"{path.name}.{secrets.token_hex(4)}{UNFINISHED}")
    try:
        with os.fdopen(os.open(unfinished, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600), "wb") as file:
            asyncio.run(read_range(handle.url, 0, handle.num_bytes, partial(_write, file), max_silence_s=MAX_SILENCE_S))
        unfinished.rename(path)
    except FileUnavailable as error:
        url = without_token(handle.url)
        raise WeightsOutOfReach(f"policy_version {handle.policy_version} cannot be read from {url}: {error}") from error
    finally:
        unfinished.unlink(missing_ok=True)


def _write(file: BinaryIO, piece: bytes) -> None:
    try:
        file.write(piece)
        file.flush()
    except OSError as error:
        raise WeightsOutOfReach(f"{file.name} cannot be written: {error.strerror}") from error


def _link(path: Path, folders: Iterable[Path]) -> bool:
    """Link `path` to a file of the same name in one of `folders`. Return whether `path` exists afterwards."""
    if path.exists():
        return True
    for folder in folders:
        with suppress(OSError):  # the file is absent, just removed, or on another file system
            path.hardlink_to(folder / path.name)
            return True
    return path.exists()


def _arriving(name: str, folders: Iterable[Path]) -> int:
    """Return how many bytes of file `name` have arrived in `folders` so far."""
    size = 0
    for folder in folders:
        for file in folder.glob(f"{name}.*{UNFINISHED}"):
            with suppress(OSError):  # the file has just been completed and renamed
                size += file.stat().st_size
    return size


@contextmanager
def _turn(handle: WeightsHandle) -> Iterator[bool]:
    """Yield whether this receiver holds the lock to fetch these weights for all processes that see the same files.

    The lock is an abstract Unix socket name, which the system frees when its holder dies. On systems without such names
    every receiver fetches.
    """
    with socket.socket(socket.AF_UNIX) as lock:
        try:
            what = f"{handle.url} {handle.fingerprint} {FILES.readlink()}"
            lock.bind("\0penstock-weights-" + hashlib.blake2b(what.encode(), digest_size=16).hexdigest())
            is_mine = True
        except OSError as error:
            is_mine = error.errno != errno.EADDRINUSE
        yield is_mine
