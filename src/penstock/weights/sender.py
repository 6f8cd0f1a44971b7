"""Send published weights to servers of other engines: the trainer's process broadcasts, in one group for each server.

    open    listen for the server, and say in which buckets the weights come
    send    broadcast the buckets, while the server takes one after the other
    close   leave the group, even in the middle of a broadcast

A bucket is a run of bytes of the published file, which is mapped, so training goes on meanwhile. Each group works in a
thread of its own, and each of its waits has a limit: a server that dies or hangs holds nothing but this thread. Where
the trainer's process computes on a CUDA device, the ranks use NCCL, and a bucket is first copied to the device.
"""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import closing
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

from penstock.ports.training import SendingGroup, TensorBucket, WeightsNotSent
from penstock.ticks import tick
from penstock.weights.collective import Group, GroupFailed, Rendezvous, listening_store
from penstock.weights.shared_memory import Placed, WeightsMismatch, map_file, tensors_in

BUCKET_BYTES = 256 * 2**20
"""Most bytes of one broadcast, except for a larger tensor."""
JOIN_S = 120.0
"""Time limit until the server has joined."""
BUCKET_S = 60.0
"""Time limit of one bucket."""
IDLE_S = 900.0
"""Time limit between two calls for a group."""


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

    def __init__(self, host: str, *, device: torch.device) -> None:
        """`host`: the address of this machine for others. `device`: where this process computes."""
        self._host, self._device = host, device
        self._lock = threading.Lock()
        self._groups: dict[str, _ServerGroup] = {}
        self._of_servers: dict[str, str] = {}
        """The name of each server's group."""

    def open(self, server: str, path: Path, *, world_size: int) -> SendingGroup:
        """Open a group to send a published file to a server, and close an earlier group of this server. Raises
        `WeightsNotSent`."""
        try:
            store, port = listening_store(self._host, timeout_s=JOIN_S)
            buckets = in_buckets(tensors_in(path), BUCKET_BYTES)
            data = map_file(path)
        except (OSError, RuntimeError, WeightsMismatch) as error:
            raise WeightsNotSent(f"{path} cannot be sent: {error}") from error
        opened = SendingGroup(
            name=f"penstock-{secrets.token_hex(8)}",
            address=self._host,
            port=port,
            world_size=world_size,
            backend="nccl" if self._device.type == "cuda" else "gloo",
            buckets=[_announced(bucket) for bucket in buckets],
        )
        parts = [data[bucket[0].start : bucket[-1].end] for bucket in buckets]
        with self._lock:
            before = self._groups.pop(self._of_servers.get(server, ""), None)
            self._groups[opened.name] = _ServerGroup(opened, parts, store, self._device)
            self._of_servers[server] = opened.name
        if before is not None:
            before.close()
        return opened

    def send(self, name: str) -> Future[None]:
        """Begin to broadcast the buckets of a group. The result is there when all are sent; else it is
        `WeightsNotSent`."""
        with self._lock:
            group = self._groups.get(name)
        if group is None:
            raise WeightsNotSent(f"there is no group {name}: it was closed, or another one of its server replaced it")
        return group.send()

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

    def __init__(self, opened: SendingGroup, parts: Sequence[Tensor], store: Store, device: torch.device) -> None:
        self._parts, self._device = parts, device
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
                if self._begun.wait(IDLE_S) and not self._closed.is_set():
                    self._broadcast(joined)
                    self._sent.set_result(None)
                    self._closed.wait(IDLE_S)
        except (GroupFailed, RuntimeError, MemoryError) as failure:
            error = str(failure)
        finally:
            self._parts = ()
            if not self._sent.done():
                self._sent.set_exception(WeightsNotSent(f"the trainer did not send all weights: {error}"))

    def _broadcast(self, joined: Group) -> None:
        # On a stream of their own, copies do not wait for what training computes.
        stream: Any = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None  # type: ignore[no-untyped-call]
        with torch.cuda.stream(stream):
            for number, part in enumerate(self._parts, 1):
                joined.broadcast([part.to(self._device)], f"bucket {number} of {len(self._parts)} to be taken")
                tick()


def _announced(tensors: Sequence[Placed]) -> TensorBucket:
    return TensorBucket(
        names=[tensor.name for tensor in tensors],
        dtypes=[str(tensor.dtype).removeprefix("torch.") for tensor in tensors],
        shapes=[list(tensor.shape) for tensor in tensors],
    )
