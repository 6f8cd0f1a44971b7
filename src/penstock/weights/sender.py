"""Send published weights to servers of other engines: the trainer's process broadcasts, in one group for each server.

    open    listen for the server, and say in which buckets the weights come
    send    broadcast the buckets, while the server takes one after the other
    lend    or else lend one bucket after the other, in memory of a device that both share
    close   leave the group, even in the middle of a broadcast

A bucket is a run of bytes of the published file, which is mapped, so training goes on meanwhile. Each broadcasting
group works in a thread of its own, and each of its waits has a limit: a server that dies or hangs holds nothing but
this thread. Where the trainer's process computes on a CUDA device, the ranks use NCCL, and a bucket is first copied to
the device: from the file, or from the trainer's weights as long as they are those of this version.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace
from torch import Tensor
from torch._C._distributed_c10d import Store

from penstock.ports.training import SendingGroup, SendingWay, TensorBucket, WeightsNotSent
from penstock.ticks import tick
from penstock.weights.collective import Group, GroupFailed, Rendezvous, communicator_id, listening_store
from penstock.weights.lent_memory import LentMemory
from penstock.weights.live_weights import LiveWeights
from penstock.weights.shared_memory import Placed, WeightsMismatch, map_file, tensors_in

BUCKET_BYTES = 256 * 2**20
"""Most bytes of one broadcast, except for a larger tensor."""
JOIN_S = 120.0
"""Time limit until the server has joined."""
BUCKET_S = 60.0
"""Time limit of one bucket."""
IDLE_S = 900.0
"""Time limit between two calls for a group."""
JOINING: tuple[SendingWay, ...] = ("rendezvous", "communicator")
"""Ways of servers that are ranks of a group."""


def in_buckets(tensors: Sequence[Placed], most_bytes: int) -> list[list[Placed]]:
    """Divide tensors that follow each other into buckets of at most `most_bytes`, or of a single larger tensor. A
    bucket has one dtype, so that its tensors are aligned."""
    buckets: list[list[Placed]] = []
    for tensor in tensors:
        bucket = buckets[-1] if buckets else []
        fits = bucket and bucket[0].dtype == tensor.dtype and tensor.end - bucket[0].start <= most_bytes
        if fits:
            bucket.append(tensor)
        else:
            buckets.append([tensor])
    return buckets


class Sender:
    """The groups of the trainer's process. Calls block for a moment; only the result of `send` takes long."""

    def __init__(self, host: str, *, device: torch.device, live: LiveWeights | None = None) -> None:
        """`host`: the address of this machine for others. `device`: where this process computes. `live`: the weights
        there."""
        self._host, self._device, self._live = host, device, live
        self._lock = threading.Lock()
        self._groups: dict[str, _ServerGroup | LentMemory] = {}
        self._of_servers: dict[str, str] = {}
        """The name of each server's group."""

    def open(
        self, server: str, path: Path, policy_version: int, *, world_size: int, way: SendingWay = "rendezvous"
    ) -> SendingGroup:
        """Open a group to send the published file of a version to a server, and close an earlier group of this server.
        Raises `WeightsNotSent`."""
        try:
            buckets = Buckets(path, policy_version, self._live, self._device)
            store, port = listening_store(self._host, timeout_s=JOIN_S) if way in JOINING else (None, 0)
        except (OSError, RuntimeError, WeightsMismatch) as error:
            raise WeightsNotSent(f"{path} cannot be sent: {error}") from error
        opened = SendingGroup(
            name=f"penstock-{secrets.token_hex(8)}",
            address=self._host,
            port=port,
            world_size=world_size,
            backend="nccl" if self._device.type == "cuda" else "gloo",
            buckets=[_announced(bucket) for bucket in buckets.tensors],
        )
        if store is None:
            give_up = partial(self.close_group, opened.name)
            lent = LentMemory(way, buckets.tensors, buckets.fill, self._device, most_s=IDLE_S, give_up=give_up)
            self._replace(server, opened.name, lent)
            return opened
        begins = way == "communicator"
        group = _ServerGroup(opened, buckets, store, self._device, begins=begins)
        self._replace(server, opened.name, group)
        if not begins:
            return opened
        try:
            return replace(opened, communicator=communicator_id(store, opened.name, is_over=group.is_over))
        except (GroupFailed, RuntimeError) as error:
            self.close_group(opened.name)
            raise WeightsNotSent(str(error)) from error

    def _replace(self, server: str, name: str, group: _ServerGroup | LentMemory) -> None:
        with self._lock:
            before = self._groups.pop(self._of_servers.get(server, ""), None)
            self._groups[name], self._of_servers[server] = group, name
        if before is not None:
            before.close()

    def send(self, name: str) -> Future[None]:
        """Begin to broadcast the buckets of a group. The result is there when all are sent; else it is
        `WeightsNotSent`."""
        group = self._group(name)
        assert isinstance(group, _ServerGroup)
        return group.send()

    def lend(self, name: str, number: int) -> str:
        """Return the payload with which the server of a group finds a bucket on the device, and wait until it is there.
        Raises `WeightsNotSent`."""
        group = self._group(name)
        assert isinstance(group, LentMemory)
        try:
            with torch.cuda.stream(stream_of(self._device)):
                return group.lend(number)
        except (RuntimeError, MemoryError, IndexError) as error:
            raise WeightsNotSent(f"bucket {number} cannot be lent: {error}") from error

    def _group(self, name: str) -> _ServerGroup | LentMemory:
        with self._lock:
            group = self._groups.get(name)
        if group is None:
            raise WeightsNotSent(f"there is no group {name}: it was closed, or another one of its server replaced it")
        return group

    def close_group(self, name: str) -> None:
        """Leave a group, if it exists. A broadcast in it ends with an error."""
        with self._lock:
            group = self._groups.pop(name, None)
        if group is not None:
            group.close()

    def close(self) -> None:
        """Leave all groups."""
        for name in list(self._groups):
            self.close_group(name)


class _ServerGroup:
    """One group, with the thread that joins it and sends."""

    def __init__(
        self, opened: SendingGroup, buckets: Buckets, store: Store, device: torch.device, *, begins: bool
    ) -> None:
        """`begins`: begin the communicator of the group at once, because the server joins with its id."""
        self._device, self._begins = device, begins
        self._buckets: Buckets | None = buckets
        self._place = Rendezvous(
            group_name=opened.name,
            master_address=opened.address,
            master_port=opened.port,
            world_size=opened.world_size,
            backend=opened.backend,
        )
        self._lock = threading.Lock()
        self._group: Group | None = None
        self._begun, self._closed = threading.Event(), threading.Event()
        self._sent: Future[None] = Future()
        threading.Thread(target=self._run, args=(store,), name=opened.name, daemon=True).start()

    def send(self) -> Future[None]:
        self._begun.set()
        return self._sent

    def is_over(self) -> bool:
        return self._sent.done()

    def close(self) -> None:
        with self._lock:
            self._closed.set()
            group = self._group
        self._begun.set()
        if group is not None:
            group.close()

    def _run(self, store: Store) -> None:
        """Join, wait for `send`, and broadcast. The group stays open until `close`, because the server may still read
        the last bucket."""
        error = "its group was closed"
        try:
            joined = Group(self._place, 0, join_timeout_s=JOIN_S, transfer_timeout_s=BUCKET_S, store=store)
            with closing(joined):
                with self._lock:
                    self._group = joined
                if self._begins:
                    joined.begin_communicator(self._device)
                if self._begun.wait(IDLE_S) and not self._closed.is_set():
                    self._broadcast(joined)
                    self._sent.set_result(None)
                    self._closed.wait(IDLE_S)
        except (GroupFailed, RuntimeError, MemoryError) as failure:
            error = str(failure)
        finally:
            self._buckets = None  # unmaps the file
            if not self._sent.done():
                self._sent.set_exception(WeightsNotSent(f"the trainer did not send all weights: {error}"))

    def _broadcast(self, joined: Group) -> None:
        buckets = self._buckets
        assert buckets is not None
        with torch.cuda.stream(stream_of(self._device)):
            for number in range(len(buckets.tensors)):
                what = f"bucket {number + 1} of {len(buckets.tensors)} to be taken"
                joined.broadcast([buckets.on_device(number)], what)
                tick()


class Buckets:
    """The buckets of one published version."""

    def __init__(self, path: Path, policy_version: int, live: LiveWeights | None, device: torch.device) -> None:
        """Map the file. Raises OSError or `WeightsMismatch`."""
        self.tensors = in_buckets(tensors_in(path), BUCKET_BYTES)
        self._version, self._live, self._device = policy_version, live, device
        data = map_file(path)
        self._parts = [data[bucket[0].start : bucket[-1].end] for bucket in self.tensors]

    def on_device(self, number: int) -> Tensor:
        """Return a bucket on the device, [bytes] uint8."""
        if self._live is None:
            return self._parts[number].to(self._device)
        bucket = torch.empty(len(self._parts[number]), dtype=torch.uint8, device=self._device)
        self.fill(number, bucket)
        return bucket

    def fill(self, number: int, out: Tensor) -> None:
        """Write a bucket to `out`, [bytes] uint8, and wait for it."""
        if self._live is None or not self._live.copy(self._version, self.tensors[number], out):
            out.copy_(self._parts[number])


def stream_of(device: torch.device) -> Any:
    """Return a stream of its own, on which copies do not wait for what training computes. None on a CPU."""
    return torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]


def _announced(tensors: Sequence[Placed]) -> TensorBucket:
    return TensorBucket(
        names=[tensor.name for tensor in tensors],
        dtypes=[str(tensor.dtype).removeprefix("torch.") for tensor in tensors],
        shapes=[list(tensor.shape) for tensor in tensors],
    )
