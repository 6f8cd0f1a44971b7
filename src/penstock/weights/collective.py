"""Weights by broadcast: the trainer is rank 0 of a group, every server another rank; both ends.

A group is named, joined by all of its ranks at the same time, and apart from the process's default group. The meeting
place and its keys are those of the frameworks that speak SGLang's protocol, so that either end may be somebody else's.
Everything has a time limit. A broadcast that fails on one side leaves the ranks out of step: the group is closed there,
which ends the other side's wait, and must be made anew.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as distributed
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import distributed_c10d

from penstock.types import GroupTensors
from penstock.weights.tensors import Spec, announce, flatten, specs, unflatten

JOIN_TIMEOUT_S = 120.0
"""For all ranks to meet."""
TRANSFER_TIMEOUT_S = 120.0
"""For one bucket."""
POLL_S, LET_GO_POLL_S = 0.0005, 0.2
BACKENDS = ("gloo", "nccl", "hccl")
MAX_WORLD_SIZE = 100_000


class GroupFailed(ValueError):
    """A group could not be joined, or is no longer of use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupPlace:
    """Where and as what a group meets. Rank 0 listens at `address`."""

    name: str
    address: str
    port: int
    world_size: int
    backend: str = "gloo"


class Group:
    """One rank's membership."""

    def __init__(self, place: GroupPlace, rank: int, *, join_timeout_s: float, transfer_timeout_s: float) -> None:
        """Blocks until all ranks are there. Raises `GroupFailed` when they are not in time."""
        self.place, self.rank = place, rank
        self._transfer_timeout_s = transfer_timeout_s
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._failure: str | None = None
        self._works: list[distributed.Work] = []
        try:
            self._group: distributed.ProcessGroup | None = _join(place, rank, timedelta(seconds=join_timeout_s))
        except Exception as error:  # backends are plugins, and one that is missing can fail in any way
            others = f"rank 0 at {place.address}:{place.port}" if rank else f"{place.world_size - 1} servers"
            raise GroupFailed(
                f"rank {rank} waited up to {join_timeout_s:g} s for {others} to join group {place.name}: "
                f"{_first_line(error)}"
            ) from error

    @property
    def is_open(self) -> bool:
        """Whether it can still be of use."""
        return self._group is not None

    def broadcast(self, tensors: Sequence[Tensor], resource: str) -> None:
        """From rank 0 to the others, in this order. Raises `GroupFailed`; the group is closed then."""
        with self._lock:
            if self._group is None:
                raise GroupFailed(f"group {self.place.name} is closed: {self._failure}; make it anew")
            start = time.monotonic()
            try:
                self._works = _begin(self._group, tensors, self._transfer_timeout_s)
                _watch(self._works, self._transfer_timeout_s, self._closing)
                self._works = []
                return
            except Exception as error:  # whatever a backend raises, the ranks are out of step
                why = _first_line(error)
            # Not raised from that error: its traceback would keep the process group.
            holder = f"{self.place.world_size - 1} servers" if self.rank == 0 else "rank 0"
            failure = f"rank {self.rank} waited {time.monotonic() - start:.3g} s for {resource}, held by {holder}"
            self._leave(failure)
            raise GroupFailed(f"{failure}: {why}")

    def close(self, reason: str = "it was destroyed") -> None:
        """Leave; whoever waits for this rank, or in it, is told so."""
        self._closing.set()
        with self._lock:
            self._leave(reason)

    def _leave(self, reason: str) -> None:
        group, self._group = self._group, None
        works, self._works = self._works, []
        self._failure = self._failure or reason
        if group is not None:
            with suppress(RuntimeError):  # some backends cannot
                group.abort()
            distributed.destroy_process_group(group)
            if not all(work.is_completed() for work in works):
                held, group = [group], None
                threading.Thread(target=_let_go, args=(held, works), name="leave", daemon=True).start()


class Broadcast:
    """The trainer's end."""

    def __init__(
        self,
        place: GroupPlace,
        *,
        join_timeout_s: float = JOIN_TIMEOUT_S,
        transfer_timeout_s: float = TRANSFER_TIMEOUT_S,
    ) -> None:
        """Blocks until every server has joined, so the servers are told at the same time."""
        self._group = Group(place, 0, join_timeout_s=join_timeout_s, transfer_timeout_s=transfer_timeout_s)

    def announce(self, named: Mapping[str, Tensor]) -> GroupTensors:
        """What servers are told, while `send` sends the same tensors."""
        told = announce(named)
        return GroupTensors(
            group_name=self._group.place.name, names=told.names, dtypes=told.dtypes, shapes=told.shapes, flat=True
        )

    def send(self, named: Mapping[str, Tensor]) -> None:
        """One bucket, as `announce` described it. Raises `GroupFailed`."""
        self._group.broadcast([flatten(list(named.values()))], f"{len(named)} tensors to be taken")

    def close(self) -> None:
        """Leave the group."""
        self._group.close()


class Groups:
    """A server's end: its memberships by name. Blocking; buckets of one group are received one after another."""

    def __init__(
        self,
        *,
        device: torch.device,
        max_bytes: int,
        join_timeout_s: float = JOIN_TIMEOUT_S,
        transfer_timeout_s: float = TRANSFER_TIMEOUT_S,
    ) -> None:
        """`device`: where device backends receive. `max_bytes`: the most that one bucket may hold."""
        self._device, self._max_bytes = device, max_bytes
        self._join_timeout_s, self._transfer_timeout_s = join_timeout_s, transfer_timeout_s
        self._groups: dict[str, Group] = {}
        self._joining: set[str] = set()
        self._ended = False
        self._lock = threading.Lock()

    def join(self, place: GroupPlace, rank: int) -> None:
        """Raises `GroupFailed` unless all ranks meet in time. A group of that name that failed is replaced."""
        self._check(place, rank)
        with self._lock:
            known = self._groups.get(place.name)
            if (known is not None and known.is_open) or place.name in self._joining:
                raise GroupFailed(f"group {place.name} exists already: destroy it first")
            self._joining.add(place.name)
        try:
            group = Group(place, rank, join_timeout_s=self._join_timeout_s, transfer_timeout_s=self._transfer_timeout_s)
            with self._lock:
                self._groups[place.name] = group
            if self._ended:
                self.close()
        finally:
            with self._lock:
                self._joining.discard(place.name)

    def receive(self, announced: GroupTensors) -> dict[str, Tensor]:
        """The announced tensors, in memory of their own. Raises `GroupFailed`; an announcement that makes no sense, or
        for which there is no room, closes the group, so that rank 0 does not wait."""
        with self._lock:
            group = self._groups.get(announced.group_name)
        if group is None:
            raise GroupFailed(f"there is no group {announced.group_name!r}: it must be joined first")
        try:
            return self._receive(group, specs(announced, max_bytes=self._max_bytes), flat=announced.flat)
        except ValueError as error:
            group.close(str(error))
            raise
        except (RuntimeError, MemoryError) as error:
            failure = f"{len(announced.names)} tensors cannot be kept: {_first_line(error)}"
            group.close(failure)
            raise GroupFailed(f"{failure}; make the group anew, and send smaller buckets") from error

    def _receive(self, group: Group, wanted: Sequence[Spec], *, flat: bool) -> dict[str, Tensor]:
        device = torch.device("cpu") if group.place.backend == "gloo" else self._device
        resource = f"{len(wanted)} tensors of group {group.place.name}"
        if flat:
            together = torch.empty(sum(spec.num_bytes for spec in wanted), dtype=torch.uint8, device=device)
            group.broadcast([together], resource)
            return unflatten(together, wanted)
        named = {spec.name: torch.empty(spec.shape, dtype=spec.dtype, device=device) for spec in wanted}
        group.broadcast(list(named.values()), resource)
        return named

    def leave(self, name: str) -> None:
        """Raises `GroupFailed` if there is no such group."""
        with self._lock:
            group = self._groups.pop(name, None)
        if group is None:
            raise GroupFailed(f"there is no group {name!r}")
        group.close()

    def close(self) -> None:
        """Leave all groups, those that are being joined as soon as they are."""
        self._ended = True
        with self._lock:
            groups, self._groups = list(self._groups.values()), {}
        for group in groups:
            group.close()

    def _check(self, place: GroupPlace, rank: int) -> None:
        if place.backend not in BACKENDS:
            raise GroupFailed(f"backend must be one of {', '.join(BACKENDS)}, not {place.backend!r}")
        if place.backend != "gloo" and self._device.type == "cpu":
            raise GroupFailed(f"backend {place.backend} needs a device, and this server computes on the CPU: use gloo")
        if not 0 < rank < place.world_size <= MAX_WORLD_SIZE:
            raise GroupFailed(
                f"rank_offset {rank} of world_size {place.world_size}: rank 0 is the trainer's, this server takes one"
            )
        if not 0 < place.port < 2**16:
            raise GroupFailed(f"master_port {place.port} is not a port")


def _join(place: GroupPlace, rank: int, timeout: timedelta) -> distributed.ProcessGroup:
    store = TCPStore(
        place.address, place.port, place.world_size, is_master=rank == 0, timeout=timeout, wait_for_workers=False
    )
    # An empty list of ranks: as if it were the default group, which it does not become.
    group: distributed.ProcessGroup
    group, _ = distributed_c10d._new_process_group_helper(
        place.world_size,
        rank,
        [],
        place.backend,
        PrefixStore(place.name, store),
        group_name=distributed_c10d.GroupName(place.name),
        timeout=timeout,
    )
    distributed_c10d._world.pg_group_ranks[group] = {each: each for each in range(place.world_size)}
    return group


def _begin(group: distributed.ProcessGroup, tensors: Sequence[Tensor], timeout_s: float) -> list[distributed.Work]:
    options = distributed.BroadcastOptions()
    options.rootRank, options.rootTensor, options.asyncOp = 0, 0, True
    options.timeout = timedelta(seconds=timeout_s)
    return [group.broadcast([tensor], options) for tensor in tensors]


def _watch(works: Sequence[distributed.Work], timeout_s: float, closing: threading.Event) -> None:
    end = time.monotonic() + timeout_s
    for work in works:
        # Device backends return from `wait` before the transfer is done, so it is watched instead.
        while not work.is_completed():
            if time.monotonic() > end:
                raise RuntimeError("the time is up")
            if closing.is_set():
                raise RuntimeError("the group was left")
            time.sleep(POLL_S)
        work.wait()


def _let_go(held: list[distributed.ProcessGroup | None], works: Sequence[distributed.Work]) -> None:
    """Once nothing is under way: letting go of a process group waits for that, and nothing can be done meanwhile."""
    while not all(work.is_completed() for work in works):
        time.sleep(LET_GO_POLL_S)
    held.clear()


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
