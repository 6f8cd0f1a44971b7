"""Receive published weights: get the file to this machine, verify it, and map it.

Sender and receiver compare boot ids to detect different machines. On the sender's machine the file is mapped where it
lies. On other machines one receiver gets the file, and the other receivers create hard links to it. The file comes by
the first transport that works: a broadcast to all machines that ask for it, or else HTTP. Calls block, so a receiver
makes them from its own threads.
"""

from __future__ import annotations

import asyncio
import errno
import hashlib
import logging
import math
import re
import secrets
import shutil
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, NamedTuple
from urllib.parse import urlsplit

from torch import Tensor

from penstock.ports.inference import WeightsOutOfReach
from penstock.runtime.file_service import WEIGHTS, FileUnavailable, link, read_range, without_token
from penstock.types import WeightsHandle, WeightsTransport
from penstock.weights import broadcast
from penstock.weights.adapters import layout_of_adapters
from penstock.weights.shared_memory import Layout, WeightsMismatch, receive

logger = logging.getLogger(__name__)

MAX_SILENCE_S = 15.0
"""Time limit since the last received piece, for a silent sender and for a neighbour that reads the file."""
LOOK_S = 0.05
"""Interval between checks of a neighbour's progress."""
UNFINISHED = ".unfinished"
FINGERPRINT = re.compile(r"[0-9a-f]{32}")
MACHINE = re.compile(r"[0-9A-Za-z-]{0,64}")
MEETING = re.compile(r"(?:[0-9A-Za-z.:-]{1,253}:[0-9]{1,5})?")
MAX_HEADER_BYTES = 2**16
"""Largest header of a weights file, besides `HEADER_BYTES` for each tensor."""
HEADER_BYTES = 1024
FILES = Path("/proc/self/ns/mnt")
"""A symbolic link with equal targets for processes in the same mount namespace, which see the same files."""


def linked(handle: WeightsHandle, *, service: str, secret: str, machine: str) -> WeightsHandle:
    """Return the handle with a URL for other machines.

    `service`: address of this machine's file service. `machine`: this machine's boot id.
    """
    folder, name = Path(handle.path).parts[-2:]
    adapters = handle.adapters
    if adapters is not None and adapters.base is not None:
        adapters = replace(adapters, base=linked(adapters.base, service=service, secret=secret, machine=machine))
    url = link(service, str(Path(WEIGHTS) / folder / name), secret)
    return replace(handle, machine=machine, url=url, adapters=adapters)


class NotCarried(RuntimeError):
    """A transport could not carry the weights. Another one may."""


class Carrier(NamedTuple):
    """A transport between machines."""

    transport: WeightsTransport
    is_offered: Callable[[WeightsHandle], bool]
    """Whether the sender offers these weights by it."""
    carry: Callable[[WeightsHandle, BinaryIO], None]
    """Writes the file's bytes. Raises `NotCarried`, or OSError from the file."""


class Receiver:
    """A callable that maps the weights of a handle, from this machine or another one."""

    def __init__(
        self,
        expected: Layout | None,
        *,
        machine: str,
        directory: Path,
        neighbours: Callable[[], Iterable[Path]] = tuple,
        published: Callable[[], Iterable[Path]] | None = None,
        carriers: Sequence[Carrier] = (),
    ) -> None:
        """`expected`: the model's layout; None for files of any model. `machine`: this machine's boot id. `directory`:
        for received files; a file stays until the next version arrives. `neighbours`: returns the directories of all
        receivers of this machine. `published`: returns the directories in which a handle's path may lie; None for any
        path. `carriers`: the transports from other machines, the preferred ones first; none for all of them."""
        self._expected, self._machine, self._directory = expected, machine, directory
        self._neighbours, self._published = neighbours, published
        self._carriers = carriers or CARRIERS
        for left in directory.glob(f"*{UNFINISHED}"):  # of an earlier process that was killed
            left.unlink(missing_ok=True)
        self.transport: WeightsTransport = "shared_memory"
        """How the latest weights came: by a transport if this receiver got the file, and else from shared memory."""
        self.path: Path | None = None
        """Where the file of the latest weights lies on this machine."""

    def __call__(self, handle: WeightsHandle) -> dict[str, Tensor]:
        """Return the mapped weights by name; of a handle of adapters, the adapters.

        Raises `WeightsMismatch` if they differ from the handle or the model, and `WeightsOutOfReach` if they cannot be
        transferred.
        """
        self._check(handle)
        expected = self._expected
        if handle.adapters is not None and expected is not None:
            expected = layout_of_adapters(handle.adapters, expected)
        if not handle.url or (handle.machine == self._machine and Path(handle.path).exists()):
            self.check_place(Path(handle.path))
            self.transport, self.path = "shared_memory", Path(handle.path)
            return receive(handle, expected)
        if expected is not None and handle.num_bytes > (most := _max_bytes(expected)):
            raise WeightsMismatch(f"weights of this model have at most {most} bytes, not {handle.num_bytes}")
        self._directory.mkdir(parents=True, exist_ok=True, mode=0o700)
        path = self._directory / _file_name(handle)
        base = None if handle.adapters is None else handle.adapters.base
        kept = [path.name] if base is None else [path.name, _file_name(base)]
        for left in self._directory.iterdir():
            if not left.name.startswith(tuple(kept)):
                left.unlink(missing_ok=True)
        try:
            self._obtain(handle, path)
            self.path = path
            return receive(replace(handle, path=str(path)), expected)
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
        """Check the values of a handle, of which file names and requests are made. Raises `WeightsMismatch`."""
        if handle.num_bytes <= 0:
            raise WeightsMismatch(f"`num_bytes` of a weights handle must be positive, not {handle.num_bytes}")
        for name, form in (("fingerprint", FINGERPRINT), ("machine", MACHINE), ("meeting", MEETING)):
            if not form.fullmatch(getattr(handle, name)):
                raise WeightsMismatch(f"`{name}` of a weights handle does not have the form {form.pattern}")
        parts = urlsplit(handle.url)
        if handle.url and (parts.scheme not in ("http", "https") or not parts.hostname or parts.username is not None):
            raise WeightsMismatch("`url` of a weights handle must be http(s)://HOST/..., without a user name")

    def _obtain(self, handle: WeightsHandle, path: Path) -> None:
        """Link the file from a neighbour, or get it from the sender.

        The receiver gets it if it holds the lock, or if the neighbour that holds the lock makes no progress for
        `MAX_SILENCE_S` seconds.
        """
        if path.exists():  # from an earlier call
            return
        arrived, limit = -1, time.monotonic() + MAX_SILENCE_S
        while True:
            folders = list(self._neighbours())
            if _link(path, folders):
                self.transport = "shared_memory"
                return
            with _turn(handle) as is_mine:
                if (is_mine and not _link(path, folders)) or time.monotonic() > limit:
                    self.transport = self._fetch(handle, path)
                    return
            if (size := _arriving(path.name, folders)) != arrived:
                arrived, limit = size, time.monotonic() + MAX_SILENCE_S
            time.sleep(LOOK_S)

    def _fetch(self, handle: WeightsHandle, path: Path) -> WeightsTransport:
        """Get the file from its sender by the first transport that works, and return which one it was. The file gets
        its final name when it is complete. Raises `WeightsOutOfReach`."""
        free = shutil.disk_usage(self._directory).free
        if handle.num_bytes > free:
            raise WeightsOutOfReach(
                f"policy_version {handle.policy_version} has {handle.num_bytes} bytes, and {self._directory} has room "
                f"for {free}: free some, or mount it larger"
            )
        unfinished = path.with_name(f"{path.name}.{secrets.token_hex(4)}{UNFINISHED}")
        failures = list[str]()
        try:
            for carrier in self._carriers:
                if not carrier.is_offered(handle):
                    continue
                try:
                    unfinished.touch(mode=0o600, exist_ok=False)
                    with unfinished.open("wb") as file:
                        carrier.carry(handle, file)
                    unfinished.rename(path)
                    return carrier.transport
                except NotCarried as error:
                    logger.info("policy_version %d did not come %s", handle.policy_version, error)
                    failures.append(str(error))
                    unfinished.unlink()
        except OSError as error:
            raise WeightsOutOfReach(f"{unfinished} cannot be written: {error.strerror}") from error
        finally:
            unfinished.unlink(missing_ok=True)
        raise WeightsOutOfReach(f"policy_version {handle.policy_version} cannot be read {', nor '.join(failures)}")


def _file_name(handle: WeightsHandle) -> str:
    """Return the name of the received file of a handle."""
    return f"{handle.policy_version}-{handle.fingerprint}.safetensors"


def _max_bytes(expected: Layout) -> int:
    """Return the most bytes that a file with these tensors has."""
    header = MAX_HEADER_BYTES + HEADER_BYTES * len(expected)
    return header + sum(math.prod(shape) * dtype.itemsize for shape, dtype in expected.values())


def _by_broadcast(handle: WeightsHandle, file: BinaryIO) -> None:
    try:
        broadcast.collect(handle, file)
    except broadcast.NoBroadcast as error:
        raise NotCarried(f"by broadcast: {error}") from error


def _by_http(handle: WeightsHandle, file: BinaryIO) -> None:
    def write(piece: bytes) -> None:
        file.write(piece)
        file.flush()

    try:
        asyncio.run(read_range(handle.url, 0, handle.num_bytes, write, max_silence_s=MAX_SILENCE_S))
    except FileUnavailable as error:
        raise NotCarried(f"from {without_token(handle.url)}: {error}") from error


CARRIERS = (
    Carrier("collective", lambda handle: bool(handle.meeting), _by_broadcast),
    Carrier("file", lambda handle: bool(handle.url), _by_http),
)


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
