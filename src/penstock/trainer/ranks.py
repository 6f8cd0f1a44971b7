"""The ranks of a learner as one: sums over all of them.

Rank 0 binds the port at which they meet, and then says where that is: no port is chosen before somebody has it. Every
collective call made here has a deadline. One that fails leaves the ranks out of step, so that they are of no more use;
the error says what was being done and which ranks had not come to it. What FSDP gathers by itself has the same deadline
and fails in torch's own words. A rank that is alone waits for nobody.
"""

from __future__ import annotations

import importlib
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta

import psutil
import torch
import torch.distributed as distributed
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from penstock.config import ConfigError
from penstock.groups.role import Rank

TIMEOUT_S = 300.0
"""For all ranks to meet, and for one collective call: how far apart they may be."""
ASKING_S = 2.0
"""For the places where the others are, once a call has failed."""
BUCKET_ELEMENTS = 2**26
"""What is copied together at a time, in order to be summed in one call."""
PLUGINS = {"hccl": "torch_npu"}
"""Packages that bring a backend."""


class RankLost(RuntimeError):
    """The ranks are out of step: one of them did not come to a collective call, or ended in the middle of it."""

    self_explanatory = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """Where rank 0 listens."""

    host: str
    port: int


class Ranks:
    """This rank among those that learn together. All of them must make the same calls in the same order."""

    def __init__(self, rank: Rank = Rank(0, 1), *, timeout_s: float = TIMEOUT_S) -> None:  # noqa: B008 - immutable
        self.index, self.size = rank.index, rank.size
        self.device: torch.device | None = None
        """On which this rank computes; unknown until it meets the others."""
        self._timeout_s = timeout_s
        self._store: TCPStore | None = None
        self._num_calls = 0

    @property
    def is_first(self) -> bool:
        """Writes what is written once."""
        return self.index == 0

    def listen(self, host: str = "127.0.0.1") -> Meeting:
        """On rank 0, before anybody meets. Binds a port that the system chooses on `host` alone."""
        listener = socket.create_server((host, 0))
        meeting = Meeting(host=host, port=listener.getsockname()[1])
        self._store = self._connect(meeting, listener.detach())
        return meeting

    def meet(
        self, meeting: Meeting, device: torch.device, backend: str | None = None, *, address: str | None = None
    ) -> None:
        """Blocks until all ranks are there. `backend` sums what lies on `device`, by default the one made for it; what
        lies on the CPU is gloo's. `address`: of this machine, where there are several. Raises `RankLost` when they are
        not in time."""
        self.device, name = device, _backend(device, backend)
        if address is not None:
            _speak_from(address)
        try:
            self._store = self._store or self._connect(meeting)
            self._store.set(_place(self.index), "0")
            distributed.init_process_group(
                name if device.type == "cpu" else f"cpu:gloo,{device.type}:{name}",
                store=PrefixStore("ranks", self._store),
                rank=self.index,
                world_size=self.size,
                timeout=timedelta(seconds=self._timeout_s),
                device_id=None if device.type == "cpu" else device,
            )
        except RuntimeError as error:
            raise RankLost(
                f"rank {self.index} of {self.size} waited up to {self._timeout_s:g} s for the others at "
                f"{meeting.host}:{meeting.port}: {_brief(error)}"
            ) from error

    def _connect(self, meeting: Meeting, listener: int | None = None) -> TCPStore:
        return TCPStore(
            meeting.host,
            meeting.port,
            self.size,
            is_master=listener is not None,
            wait_for_workers=False,
            timeout=timedelta(seconds=self._timeout_s),
            master_listen_fd=listener,
        )

    def mesh(self, device: torch.device) -> DeviceMesh:
        """All ranks in a row."""
        return init_device_mesh(device.type, (self.size,))

    def sum(self, tensors: Sequence[Tensor], what: str) -> None:
        """Each becomes its sum over all ranks, in place: the same bits everywhere."""
        self._in_buckets(tensors, what, distributed.all_reduce)

    def share(self, tensors: Sequence[Tensor], what: str) -> None:
        """Each becomes what rank 0 has, in place."""
        self._in_buckets(tensors, what, lambda flat: distributed.broadcast(flat, src=0))

    def total(self, values: Sequence[float], what: str) -> list[float]:
        """Of each value the sum over all ranks."""
        return self._combined(values, what, distributed.ReduceOp.SUM)

    def largest(self, values: Sequence[float], what: str) -> list[float]:
        """Of each value the largest over all ranks."""
        return self._combined(values, what, distributed.ReduceOp.MAX)

    def leave(self) -> None:
        """Whoever waits for this rank is told so. Rank 0 goes on telling who had come."""
        if distributed.is_initialized():
            distributed.destroy_process_group()

    def _combined(self, values: Sequence[float], what: str, operation: distributed.ReduceOp.RedOpType) -> list[float]:
        if self.size == 1:
            return list(values)
        together = torch.tensor(values, dtype=torch.float64)
        self._call(what, lambda: distributed.all_reduce(together, operation))
        return together.tolist()

    def _in_buckets(self, tensors: Sequence[Tensor], what: str, call: Callable[[Tensor], object]) -> None:
        if self.size == 1:
            return
        for bucket in _buckets(tensors):
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
            self._call(what, lambda flat=flat: call(flat))  # type: ignore[misc]
            parts = torch.split(flat, [tensor.numel() for tensor in bucket])
            torch._foreach_copy_(bucket, [part.view_as(t) for part, t in zip(parts, bucket, strict=True)])

    def _call(self, what: str, call: Callable[[], object]) -> None:
        self._num_calls += 1
        start = time.monotonic()
        try:
            self._store_or_fail().set(_place(self.index), str(self._num_calls))
            call()
        except RuntimeError as error:
            waited, absent = time.monotonic() - start, self._absent()
            self.leave()
            raise RankLost(
                f"rank {self.index} of {self.size} waited {waited:.3g} s to {what} with the others; {absent}: "
                f"{_brief(error)}"
            ) from error

    def _store_or_fail(self) -> TCPStore:
        if self._store is None:
            raise RuntimeError("the ranks have not met")
        return self._store

    def _absent(self) -> str:
        """Who had not come to the present call."""
        try:
            store = self._store_or_fail()
            store.set_timeout(timedelta(seconds=ASKING_S))
            calls = [int(store.get(_place(rank))) for rank in range(self.size)]
        except RuntimeError:
            return "rank 0, at which they meet, is gone"
        absent = [str(rank) for rank, calls_made in enumerate(calls) if calls_made < self._num_calls]
        return f"rank {', '.join(absent)} had not come" if absent else "one of them ended in the middle of it"


def _backend(device: torch.device, backend: str | None) -> str:
    """Raises `ConfigError` for one that is not there, or not for this device."""
    if backend in PLUGINS:
        try:
            importlib.import_module(PLUGINS[backend])
        except ImportError:
            raise ConfigError(
                f"trainer.distributed.backend {backend} needs the package {PLUGINS[backend]}: install it, or choose "
                "another backend"
            ) from None
    name = backend or distributed.get_default_backend_for_device(device)
    if device.type == "cpu" and name != "gloo":
        raise ConfigError(
            f"trainer.distributed.backend {name} needs a device, and the trainer computes on the CPU: use gloo"
        )
    if not distributed.is_backend_available(name):
        raise ConfigError(f"trainer.distributed.backend {name} is not in this build of torch: choose another")
    return name


def _speak_from(address: str) -> None:
    """Backends go by the machine's name, which need not lead to where others reach it. Who has named an interface
    himself knows better."""
    named = psutil.net_if_addrs().items()
    for interface in [name for name, held in named if address in {each.address for each in held}][:1]:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", interface)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", f"={interface}")


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Neighbours of one dtype, at most `BUCKET_ELEMENTS` together but for a single one that is larger."""
    bucket, size = list[Tensor](), 0
    for tensor in tensors:
        if bucket and (tensor.dtype != bucket[0].dtype or size + tensor.numel() > BUCKET_ELEMENTS):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.numel()
    if bucket:
        yield bucket


def _place(rank: int) -> str:
    return f"calls/{rank}"


def _brief(error: Exception) -> str:
    """Backends are talkative."""
    return str(error).partition("\n")[0].partition(". ")[0]
