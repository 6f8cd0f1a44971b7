"""Published weights for several other machines at once: a broadcast of the file, by gloo.

The sender listens for each version. Machines that ask for it at about the same time form one process group and get the
file together, so that the sender's network carries it few times however many they are. They meet in a store at the
sender's address:

    wave            number of the broadcast that admits machines at present
    {wave}/members  number of machines that asked; each gets its rank by asking
    {wave}/size     number of ranks, set once the broadcast admits no more machines

A machine that comes later joins the next wave. Every wait has a limit. As between the ranks of a trainer, torch's
protocol has no key, so only trusted machines may reach the address.
"""

from __future__ import annotations

import logging
import threading
from contextlib import closing
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import BinaryIO

import torch
from torch._C._distributed_c10d import TCPStore

from penstock.observe.log_lines import Paced
from penstock.types import WeightsHandle
from penstock.weights.collective import Group, GroupFailed, Rendezvous, listening_store
from penstock.weights.shared_memory import WeightsMismatch, map_file

logger = logging.getLogger(__name__)

BUCKET_BYTES = 32 * 2**20
"""Bytes of one broadcast."""
WINDOW_S = 0.1
"""A broadcast begins once no other machine has asked for so long."""
MAX_WINDOWS = 20
FIND_S = 5.0
"""Time limit for reaching the sender."""
JOIN_S = 8.0
"""Time limit until the machines of a broadcast are connected. Other servers of a machine wait longer for the first
byte."""
SILENCE_S = 15.0
"""Time limit of one bucket."""
LOOK_S = 0.05
"""Seconds between two looks whether a machine has asked."""
END_S = 2.0
"""Limit of the wait for the end of a withdrawn offer."""
NUM_WAVES = 3
"""Broadcasts that a machine tries to join."""
KEPT_OFFERS = 2
"""The newest version, and the version that may still be on its way."""


class NoBroadcast(RuntimeError):
    """This machine got no weights by a broadcast."""


class Offer:
    """One version, broadcast to all machines that ask for it, until it is withdrawn."""

    def __init__(self, handle: WeightsHandle, host: str) -> None:
        """Listen on a port of `host`, an address of this machine, that the system chooses."""
        self.handle = handle
        self.num_waves = 0
        """Number of broadcasts so far."""
        self._withdrawn = threading.Event()
        store, port = listening_store(host, timeout_s=JOIN_S)
        self._host, self._port = host, port
        store.set("wave", "0")
        name = f"broadcast-{handle.policy_version}"
        self._thread = threading.Thread(target=self._serve, args=(store,), name=name, daemon=True)
        self._thread.start()

    @property
    def meeting(self) -> str:
        """The address that machines ask."""
        return f"{self._host}:{self._port}"

    def withdraw(self) -> None:
        """Admit no more machines. A broadcast that has begun goes on."""
        self._withdrawn.set()

    def await_end(self) -> None:
        """Wait until a withdrawn offer has ended, but not long for a broadcast that goes on."""
        self._thread.join(END_S)

    def _serve(self, store: TCPStore) -> None:
        """Broadcast until the offer is withdrawn. The store ends with this thread, which has the last reference."""
        log = Paced(logger)
        while not self._withdrawn.wait(LOOK_S):
            if not store.add(f"{self.num_waves}/members", 0):
                continue
            try:
                self._broadcast(store)
            except (RuntimeError, GroupFailed, OSError, WeightsMismatch) as error:
                version = self.handle.policy_version
                log.info(f"policy_version {version} was not broadcast, so machines fetch it one by one: {error}")

    def _broadcast(self, store: TCPStore) -> None:
        wave, num_asked = self.num_waves, 0
        for _ in range(MAX_WINDOWS):
            before, num_asked = num_asked, store.add(f"{wave}/members", 0)
            if num_asked == before:
                break
            self._withdrawn.wait(WINDOW_S)
        self.num_waves += 1
        store.set("wave", str(self.num_waves))
        size = 1 + store.add(f"{wave}/members", 0)
        store.set(f"{wave}/size", str(size))
        data = map_file(Path(self.handle.path))
        with closing(_group(self.handle, self._host, self._port, wave, 0, size, store)) as group:
            for bucket in torch.split(data, BUCKET_BYTES):
                group.broadcast([bucket], f"policy_version {self.handle.policy_version}")


class Offers:
    """The newest versions that this machine broadcasts."""

    def __init__(self, host: str) -> None:
        """`host`: the address of this machine for others."""
        self._host = host
        self._newest: list[Offer] = []
        self._bases: list[Offer] = []
        """The weights to which the newest adapters are added, if there are any."""

    def add(self, handle: WeightsHandle) -> WeightsHandle:
        """Offer a version, and what its adapters are added to. Return its handle, with the places where machines
        meet."""
        meeting, form = self._offered(handle, self._newest, kept=KEPT_OFFERS), handle.adapters
        if form is not None and form.base is not None:
            base = replace(form.base, meeting=self._offered(form.base, self._bases, kept=1))
            form = replace(form, base=base)
        return replace(handle, meeting=meeting, adapters=form)

    def _offered(self, handle: WeightsHandle, offers: list[Offer], *, kept: int) -> str:
        for offer in offers:
            if offer.handle == handle:
                return offer.meeting
        offers.append(Offer(handle, self._host))
        while len(offers) > kept:
            offers.pop(0).withdraw()
        return offers[-1].meeting

    def close(self) -> None:
        """Withdraw all offers."""
        ended = [*self._newest, *self._bases]
        for offer in ended:
            offer.withdraw()
        for offer in ended:
            offer.await_end()
        self._newest, self._bases = [], []


def collect(handle: WeightsHandle, file: BinaryIO) -> None:
    """Take part in a broadcast of a version, and write its bytes to `file`. Raises `NoBroadcast`, or OSError from the
    file."""
    host, _, port = handle.meeting.rpartition(":")
    try:
        store = TCPStore(host, int(port), wait_for_workers=False, timeout=timedelta(seconds=FIND_S))
        store.set_timeout(timedelta(seconds=JOIN_S))
        wave, rank, size = _place(store)
        group = _group(handle, host, int(port), wave, rank, size, store)
    except (RuntimeError, ValueError) as error:
        raise NoBroadcast(f"{handle.meeting} admits no machine: {_first_line(error)}") from None
    buffer = torch.empty(min(BUCKET_BYTES, handle.num_bytes), dtype=torch.uint8)
    with closing(group):
        for start in range(0, handle.num_bytes, BUCKET_BYTES):
            bucket = buffer[: handle.num_bytes - start]
            try:
                group.broadcast([bucket], f"policy_version {handle.policy_version}")
            except GroupFailed as error:
                raise NoBroadcast(str(error)) from None
            file.write(bucket.numpy().data)
            file.flush()


def _place(store: TCPStore) -> tuple[int, int, int]:
    """Return the number of a broadcast, this machine's rank in it, and its size. Raises RuntimeError."""
    for _ in range(NUM_WAVES):
        wave = int(store.get("wave"))
        rank = store.add(f"{wave}/members", 1)
        size = int(store.get(f"{wave}/size"))
        if rank < size:
            return wave, rank, size
    raise NoBroadcast(f"{NUM_WAVES} broadcasts began without this machine")


def _group(handle: WeightsHandle, host: str, port: int, wave: int, rank: int, size: int, store: TCPStore) -> Group:
    name = f"broadcast-{handle.fingerprint}-{wave}"  # names are global in a process, which may have several offers
    place = Rendezvous(group_name=name, master_address=host, master_port=port, world_size=size, backend="gloo")
    return Group(place, rank, join_timeout_s=JOIN_S, transfer_timeout_s=SILENCE_S, store=store)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
