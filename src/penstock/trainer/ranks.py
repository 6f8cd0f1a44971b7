"""Collective operations over the ranks of a learner: sums, maxima and broadcasts.

On one machine the ranks meet in a directory that only their user can enter. Between machines rank 0 binds a port and
then reports it, so that no other process can take the port in between. Torch's protocol on this port has no key.

Every collective call of this module has a deadline. A failed call leaves the ranks out of step, and they cannot be used
further. The error names the operation and the ranks that did not reach it. FSDP's own collectives have the same
deadline and raise torch's own errors. With a single rank no call waits.

Two ranks may also exchange tensors beside all collective calls, from threads of their own: such transfers have a group
of their own, on the CPU.
"""

from __future__ import annotations

import importlib
import os
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Protocol

import torch
import torch.distributed as distributed
from torch import Tensor
from torch._C._distributed_c10d import FileStore, PrefixStore, Store, TCPStore

from penstock.config import ConfigError
from penstock.groups.role import Rank
from penstock.runtime.interfaces import use_interface_of

TIMEOUT_S = 300.0
"""Time limit of the rendezvous and of each collective call: the largest allowed delay between ranks."""
TRANSFER_TIMEOUT_S = 600.0
"""Time limit of one transfer: the other rank may first have to copy a shard, and to serve other ranks."""
COUNTS_TIMEOUT_S = 2.0
"""Time limit for reading the ranks' call counts after a failed call."""
COUNT_BYTES = 8
"""Size of a call count in a file."""
BUCKET_ELEMENTS = 2**26
"""Largest number of elements that are concatenated for one collective call."""
PLUGINS = {"hccl": "torch_npu"}
"""Package that provides each backend."""


class RankLost(RuntimeError):
    """The ranks are out of step: one of them did not reach a collective call, or ended during the call."""

    self_explanatory = True
    blames_peer = True
    """If the other rank has ended, a call on the group raises how it ended instead of this error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """The address at which rank 0 listens for ranks of other machines."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


Rendezvous = Path | Address
"""Where the ranks meet: a directory on one machine, which only their user can enter, or rank 0's address."""


class CallCounts(Protocol):
    """The number of calls that each rank has begun."""

    def set(self, num_calls: int) -> None:
        """Report the number of this rank's calls."""

    def of(self, rank: int) -> int:
        """Return the number of a rank's calls. Raises OSError or RuntimeError if it cannot be read."""


class FileCounts(CallCounts):
    """Counts in one file for each rank, overwritten in place. Torch's `FileStore` would grow with each call."""

    def __init__(self, directory: Path, index: int) -> None:
        self._directory = directory
        self._own = os.open(directory / _calls_key(index), os.O_WRONLY | os.O_CREAT, 0o600)

    def set(self, num_calls: int) -> None:
        os.pwrite(self._own, num_calls.to_bytes(COUNT_BYTES, "little"), 0)

    def of(self, rank: int) -> int:
        return int.from_bytes((self._directory / _calls_key(rank)).read_bytes(), "little")


class StoreCounts(CallCounts):
    """Counts in the store that rank 0 serves."""

    def __init__(self, store: TCPStore, index: int) -> None:
        self._store, self._index = store, index

    def set(self, num_calls: int) -> None:
        self._store.set(_calls_key(self._index), str(num_calls))

    def of(self, rank: int) -> int:
        self._store.set_timeout(timedelta(seconds=COUNTS_TIMEOUT_S))
        return int(self._store.get(_calls_key(rank)))


class Ranks:
    """This rank's view of all ranks of a role. All ranks must make the same calls in the same order."""

    def __init__(self, rank: Rank = Rank(0, 1), *, timeout_s: float = TIMEOUT_S) -> None:  # noqa: B008 - immutable
        self.index, self.size = rank.index, rank.size
        self.device: torch.device | None = None
        """The device on which this rank computes; None before `join`."""
        self._timeout_s = timeout_s
        self._listening: TCPStore | None = None
        self._counts: CallCounts | None = None
        self._num_calls = 0
        self._groups: dict[tuple[int, int], distributed.ProcessGroup] = {}
        self._transfers: distributed.ProcessGroup | None = None

    @property
    def is_first(self) -> bool:
        """Return whether this is rank 0, which writes files that exist only once."""
        return self.index == 0

    def listen(self, host: str) -> Address:
        """Bind a port chosen by the system on `host` alone, and return the address. For rank 0, before any `join`."""
        listener = socket.create_server((host, 0))
        address = Address(host=host, port=listener.getsockname()[1])
        self._listening = self._connect(address, listener.detach())
        return address

    def join(
        self, rendezvous: Rendezvous, device: torch.device, backend: str | None = None, *, address: str | None = None
    ) -> None:
        """Wait until all ranks have joined.

        `backend`: the backend for tensors on `device`; None takes the device's default. CPU tensors use gloo.
        `address`: this machine's address for the other ranks. The default is what gloo and NCCL choose.
        Raises `RankLost` if not all ranks join in time, and `ConfigError` for an unusable backend.
        """
        self.device, name = device, _backend(device, backend)
        if address is not None:
            use_interface_of(address)
        try:
            store = self._enter(rendezvous)
            distributed.init_process_group(
                name if device.type == "cpu" else f"cpu:gloo,{device.type}:{name}",
                store=PrefixStore("ranks", store),
                rank=self.index,
                world_size=self.size,
                timeout=timedelta(seconds=self._timeout_s),
                device_id=None if device.type == "cpu" else device,
            )
        except (RuntimeError, OSError) as error:
            raise RankLost(
                f"rank {self.index} of {self.size} waited up to {self._timeout_s:g} s for the other ranks at "
                f"{rendezvous}: {_first_sentence(error)}"
            ) from error

    def _enter(self, rendezvous: Rendezvous) -> Store:
        """Return torch's store at the rendezvous, and begin to count calls there."""
        store: Store
        if isinstance(rendezvous, Path):
            self._counts = FileCounts(rendezvous, self.index)
            store = FileStore(str(rendezvous / "store"), self.size)
            store.set_timeout(timedelta(seconds=self._timeout_s))
        else:
            store = self._listening or self._connect(rendezvous)
            self._counts = StoreCounts(store, self.index)
        self._counts.set(0)
        return store

    def _connect(self, address: Address, listener: int | None = None) -> TCPStore:
        return TCPStore(
            address.host,
            address.port,
            self.size,
            is_master=listener is not None,
            wait_for_workers=False,
            timeout=timedelta(seconds=self._timeout_s),
            master_listen_fd=listener,
        )

    def sum(self, tensors: Sequence[Tensor], operation: str) -> None:
        """Replace each tensor by its sum over all ranks, in place. All ranks get the same bits."""
        self._in_buckets(tensors, operation, distributed.all_reduce)

    def broadcast(self, tensors: Sequence[Tensor], operation: str) -> None:
        """Replace each tensor by rank 0's, in place."""
        self._in_buckets(tensors, operation, lambda flat: distributed.broadcast(flat, src=0))

    def total(self, values: Sequence[float], operation: str) -> list[float]:
        """Return the sum of each value over all ranks."""
        return self._combined(values, operation, distributed.ReduceOp.SUM)

    def largest(self, values: Sequence[float], operation: str) -> list[float]:
        """Return the largest of each value over all ranks."""
        return self._combined(values, operation, distributed.ReduceOp.MAX)

    def group(self, size: int, *, stride: int = 1) -> distributed.ProcessGroup:
        """Return this rank's group of `size` ranks: neighbours, or those that are `stride` apart. Its collectives have
        the same deadline, and raise torch's own errors. All ranks must call this."""
        if (size, stride) not in self._groups:
            timeout = timedelta(seconds=self._timeout_s)
            for start in range(0, self.size, size * stride):
                for first in range(start, start + stride):
                    members = range(first, first + size * stride, stride)
                    made = distributed.new_group(members, timeout=timeout)
                    if self.index in members:
                        self._groups[size, stride] = made
        return self._groups[size, stride]

    def open_transfers(self) -> None:
        """Allow `send` and `receive`. All ranks must call this."""
        if self._transfers is None:
            self._transfers = distributed.new_group(backend="gloo", timeout=timedelta(seconds=TRANSFER_TIMEOUT_S))

    def send(self, tensor: Tensor, *, to: int, what: str) -> None:
        """Send a CPU tensor to another rank, which must `receive` one of its size. Raises `RankLost`. This and
        `receive` may be called from one other thread, beside all other calls."""
        self._transfer(lambda group: distributed.send(tensor, to, group=group), f"to send {what} to rank {to}")

    def receive(self, tensor: Tensor, *, source: int, what: str) -> None:
        """Fill a CPU tensor with what another rank sends. Raises `RankLost`."""
        self._transfer(lambda group: distributed.recv(tensor, source, group=group), f"for {what} of rank {source}")

    def _transfer(self, call: Callable[[distributed.ProcessGroup], object], purpose: str) -> None:
        start = time.monotonic()
        try:
            assert self._transfers is not None, "transfers are not open"
            call(self._transfers)
        except RuntimeError as error:
            waited = time.monotonic() - start
            raise RankLost(
                f"rank {self.index} of {self.size} waited {waited:.3g} s {purpose}, which has ended, is out of reach, "
                f"or was silent for {TRANSFER_TIMEOUT_S:g} s: {_first_sentence(error)}"
            ) from error

    def leave(self) -> None:
        """Leave the process group: ranks that wait for this rank get an error.

        The rendezvous stays, so that the other ranks can still read which ranks reached the call.
        """
        if distributed.is_initialized():
            distributed.destroy_process_group()

    def _combined(self, values: Sequence[float], operation: str, reduce: distributed.ReduceOp.RedOpType) -> list[float]:
        if self.size == 1:
            return list(values)
        together = torch.tensor(values, dtype=torch.float64)
        self._call(operation, lambda: distributed.all_reduce(together, reduce))
        return together.tolist()

    def _in_buckets(self, tensors: Sequence[Tensor], operation: str, call: Callable[[Tensor], object]) -> None:
        if self.size == 1:
            return
        for bucket in _buckets(tensors):
            flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
            self._call(operation, lambda flat=flat: call(flat))  # type: ignore[misc]
            parts = torch.split(flat, [tensor.numel() for tensor in bucket])
            torch._foreach_copy_(bucket, [part.view_as(t) for part, t in zip(parts, bucket, strict=True)])

    def _call(self, operation: str, call: Callable[[], object]) -> None:
        self._num_calls += 1
        start = time.monotonic()
        try:
            assert self._counts is not None, "the ranks have not joined"
            self._counts.set(self._num_calls)
            call()
        except RuntimeError as error:
            waited, absent = time.monotonic() - start, self._absent()
            self.leave()
            raise RankLost(
                f"rank {self.index} of {self.size} waited {waited:.3g} s to {operation} with the other ranks; "
                f"{absent}: {_first_sentence(error)}"
            ) from error

    def _absent(self) -> str:
        """Return a description of the ranks that did not reach the current call."""
        try:
            assert self._counts is not None
            calls = [self._counts.of(rank) for rank in range(self.size)]
        except (RuntimeError, OSError):
            return "rank 0, which made the rendezvous, has ended, and the rendezvous with it"
        absent = [str(rank) for rank, num_calls in enumerate(calls) if num_calls < self._num_calls]
        return f"rank {', '.join(absent)} did not join the call" if absent else "a rank ended in the middle of the call"


def _backend(device: torch.device, backend: str | None) -> str:
    """Return the backend's name. Raises `ConfigError` if it is not installed, or does not support the device."""
    if backend in PLUGINS:
        try:
            importlib.import_module(PLUGINS[backend])
        except ImportError:
            raise ConfigError(
                f"trainer.distributed.backend {backend} needs {PLUGINS[backend]}: install it, or choose another"
            ) from None
    name = backend or distributed.get_default_backend_for_device(device)
    if device.type == "cpu" and name != "gloo":
        raise ConfigError(f"trainer.distributed.backend {name} needs an accelerator: use gloo on the CPU")
    if not distributed.is_backend_available(name):
        raise ConfigError(f"trainer.distributed.backend {name} is not in this build of torch: choose another")
    return name


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Yield runs of adjacent tensors with one dtype and at most `BUCKET_ELEMENTS` elements.

    A larger single tensor is a bucket of its own.
    """
    bucket, size = list[Tensor](), 0
    for tensor in tensors:
        if bucket and (tensor.dtype != bucket[0].dtype or size + tensor.numel() > BUCKET_ELEMENTS):
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += tensor.numel()
    if bucket:
        yield bucket


def _calls_key(rank: int) -> str:
    return f"calls-{rank}"


def _first_sentence(error: Exception) -> str:
    """Return the first sentence of the error's first line: backends write long messages."""
    return str(error).partition("\n")[0].partition(". ")[0]
