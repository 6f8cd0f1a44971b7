"""Published weights on another machine: their file comes over HTTP in parts, is verified like any other, and mapped.

Whether it is another machine is told by the boot ids of sender and receiver. Of those that share a machine one fetches,
and the others link what came. Blocking; a receiver has threads for this.
"""

from __future__ import annotations

import hashlib
import http.client
import os
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from torch import Tensor

from penstock.ports import WeightsOutOfReach
from penstock.types import WeightsHandle
from penstock.weights.shared_memory import Layout, WeightsMismatch, receive

PART_BYTES = 32 << 20
PART_S = 30.0
"""For a part, or a piece of one, to come."""
PATIENCE_S = 15.0
"""With a sender that does not answer, since the last part came."""
PAUSE_S = 0.5
LOOK_S = 0.05
"""Between looks at what a neighbour fetches."""
UNFINISHED = ".unfinished"
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
        for older in self._directory.glob("*.safetensors"):
            if older != path:
                older.unlink()
        try:
            self._obtain(handle, path)
            return receive(replace(handle, path=str(path)), self._expected)
        except WeightsMismatch:
            path.unlink()
            raise

    def _obtain(self, handle: WeightsHandle, path: Path) -> None:
        """From a neighbour; from the sender if it is this one's turn, or whose turn it is gets nothing."""
        arrived, limit = -1, time.monotonic() + PATIENCE_S
        while not self._link(path):
            with _turn(handle) as is_mine:
                if (is_mine and not self._link(path)) or time.monotonic() > limit:
                    self._fetch(handle, path)
                    return
            if (size := self._arriving(path.name)) != arrived:
                arrived, limit = size, time.monotonic() + PATIENCE_S
            time.sleep(LOOK_S)

    def _link(self, path: Path) -> bool:
        """Whether `path` is there, as it is once a neighbour has a file of that name."""
        for folder in () if path.exists() else self._neighbours():
            with suppress(OSError):  # it has none, or is done with it, or it lies on another file system
                path.hardlink_to(folder / path.name)
        return path.exists()

    def _arriving(self, name: str) -> int:
        """Bytes of what neighbours are fetching."""
        files = [file for folder in self._neighbours() for file in folder.glob(name + UNFINISHED)]
        return sum(file.stat().st_size for file in files if file.exists())

    def _fetch(self, handle: WeightsHandle, path: Path) -> None:
        unfinished = path.with_name(path.name + UNFINISHED)
        try:
            with os.fdopen(os.open(unfinished, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600), "wb") as file:
                for part in self._parts(handle):
                    file.write(part)
            unfinished.rename(path)
        finally:
            unfinished.unlink(missing_ok=True)

    def _parts(self, handle: WeightsHandle) -> Iterator[bytes]:
        """Each is asked for until it has come."""
        start, limit = 0, time.monotonic() + PATIENCE_S
        while start < handle.num_bytes:
            end = min(start + PART_BYTES, handle.num_bytes)
            try:
                part = self._part(handle.url, start, end)
            except (OSError, http.client.HTTPException) as error:
                is_gone = isinstance(error, urllib.error.HTTPError) and error.code == GONE
                if is_gone or time.monotonic() > limit:
                    raise WeightsOutOfReach(
                        f"policy_version {handle.policy_version} cannot be had from {handle.url}: {error}"
                    ) from error
                time.sleep(PAUSE_S)
                continue
            yield part
            start, limit = end, time.monotonic() + PATIENCE_S

    def _part(self, url: str, start: int, end: int) -> bytes:
        headers = {"Range": f"bytes={start}-{end - 1}"}
        if self._key:
            headers["Authorization"] = f"Bearer {self._key}"
        with DIRECTLY.open(urllib.request.Request(url, headers=headers), timeout=PART_S) as response:
            part: bytes = response.read()
        if len(part) != end - start:
            raise http.client.IncompleteRead(part, end - start - len(part))
        return part


@contextmanager
def _turn(handle: WeightsHandle) -> Iterator[bool]:
    """Whether it is ours to fetch these weights for this machine: a name without a file, that is free when its holder
    dies."""
    name = hashlib.blake2b(f"{handle.url} {handle.fingerprint}".encode(), digest_size=16).hexdigest()
    with socket.socket(socket.AF_UNIX) as lock:
        try:
            lock.bind(f"\0penstock-weights-{name}")
        except OSError:
            yield False
        else:
            yield True
