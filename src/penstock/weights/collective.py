"""Weight transfer by broadcast: the sender is rank 0 of a process group, and every receiver is another rank.

A group has a name, all of its ranks join at the same time, and it is separate from
the process's default group. The rendezvous and its keys follow SGLang's protocol, so either side may be another
framework. Every wait has a time limit. A failed broadcast leaves the ranks out of step. The failed side closes its
group, which ends the other side's wait; both sides must then create the group again.
"""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import accumulate
from math import prod
from typing import Annotated, Literal, NamedTuple

import torch
import torch.distributed as distributed
from msgspec import Meta, Struct
from torch import Tensor
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import distributed_c10d

from penstock.weights.shared_memory import Layout

JOIN_TIMEOUT_S = 120.0
"""Time limit until all ranks have joined."""
TRANSFER_TIMEOUT_S = 120.0
"""Time limit of one bucket."""
POLL_S, RELEASE_POLL_S = 0.0005, 0.2
ID_S, ID_KEY = 60.0, "0"
"""Time limit until torch has begun a communicator, and the key under which it stores the id of a group's first one."""
BACKENDS = ("gloo", "nccl", "hccl")
MAX_WORLD_SIZE = 100_000
DEFAULT_GROUP = "weight_update_group"
GroupName = Annotated[str, Meta(pattern="^[!-~][ -~]{0,199}$")]
"""Name of a group: printable ASCII."""

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32, "float64": torch.float64}
"""Accepted dtypes. Shorter (quantized) dtypes are meaningless without their scales."""
MAX_DIMENSIONS = 64


class GroupFailed(ValueError):
    """A group could not be joined, or is closed."""


class Rendezvous(Struct, kw_only=True):
    """The name, size and backend of a group, and where its ranks meet. Rank 0 listens at the master's address."""

    group_name: GroupName = DEFAULT_GROUP
    master_address: str
    master_port: int
    world_size: int
    backend: str = "nccl"


class GroupTensors(Struct, kw_only=True):
    """Announcement of tensors that rank 0 of a process group broadcasts."""

    names: list[str]
    dtypes: list[str]
    """Names as in torch, e.g. `bfloat16`."""
    shapes: list[list[int]]
    group_name: GroupName = DEFAULT_GROUP
    load_format: Literal["flattened_bucket"] | None = None
    """`flattened_bucket`: one broadcast carries the concatenated bytes of all tensors. None: each tensor has its own
    broadcast."""


class Spec(NamedTuple):
    """One announced tensor."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


def specs(announced: GroupTensors, *, max_bytes: int) -> list[Spec]:
    """Return the announced tensors. Raises ValueError if the announcement is inconsistent or exceeds `max_bytes`."""
    if not len(announced.names) == len(announced.dtypes) == len(announced.shapes):
        counts = f"{len(announced.names)} names, {len(announced.dtypes)} dtypes and {len(announced.shapes)} shapes"
        raise ValueError(f"every tensor has a name, a dtype and a shape, but there are {counts}")
    if not announced.names:
        raise ValueError("no tensors are announced")
    if len(set(announced.names)) < len(announced.names):
        raise ValueError("a tensor is announced twice")
    found = [
        Spec(name, _dtype(name, dtype), _shape(name, shape, max_bytes))
        for name, dtype, shape in zip(announced.names, announced.dtypes, announced.shapes, strict=True)
    ]
    if (num_bytes := sum(spec.num_bytes for spec in found)) > max_bytes:
        raise ValueError(f"{num_bytes} bytes are announced, but this model takes at most {max_bytes}")
    return found


def max_bucket_bytes(layout: Layout) -> int:
    """Return an upper bound of one bucket's size: the whole model in float64, with tied weights under two names."""
    return 2 * 8 * sum(prod(shape) for shape, _ in layout.values())


def unflatten(flat: Tensor, wanted: Sequence[Spec]) -> dict[str, Tensor]:
    """Return the `wanted` tensors as copies from `flat`, which they fill. Each copy is aligned for its dtype."""
    ends = accumulate(spec.num_bytes for spec in wanted)
    return {
        spec.name: flat[end - spec.num_bytes : end].clone().view(spec.dtype).reshape(spec.shape)
        for spec, end in zip(wanted, ends, strict=True)
    }


class Group:
    """One rank's membership of a process group."""

    def __init__(
        self,
        place: Rendezvous,
        rank: int,
        *,
        join_timeout_s: float,
        transfer_timeout_s: float,
        store: Store | None = None,
    ) -> None:
        """Wait until all ranks have joined. Raises `GroupFailed` if they do not join in time. `store`: an open
        connection to the store at the master's address; None to connect, or for rank 0 to listen there."""
        self.place, self.rank = place, rank
        self._transfer_timeout_s = transfer_timeout_s
        self._lock = threading.Lock()
        self._closing = threading.Event()
        self._failure: str | None = None
        self._works: list[distributed.Work] = []
        try:
            timeout = timedelta(seconds=join_timeout_s)
            store = store or _connect(place, rank, timeout)
            self._group: distributed.ProcessGroup | None = _join(place, rank, store, timeout)
        except Exception as error:  # backends are plugins, and a missing backend can raise any error
            who = f"rank 0 at {place.master_address}:{place.master_port}" if rank else _receivers(place)
            raise GroupFailed(
                f"rank {rank} waited up to {join_timeout_s:g} s for {who} to join group {place.group_name}: "
                f"{_first_line(error)}"
            ) from error

    @property
    def is_open(self) -> bool:
        """Return whether the group is open."""
        return self._group is not None

    def broadcast(self, tensors: Sequence[Tensor], resource: str) -> None:
        """Broadcast `tensors` from rank 0 to all ranks, in order. On error, close the group and raise `GroupFailed`."""
        with self._lock:
            if self._group is None:
                raise GroupFailed(f"group {self.place.group_name} is closed: {self._failure}; join it again")
            start = time.monotonic()
            try:
                self._works = _begin(self._group, tensors, self._transfer_timeout_s)
                _watch(self._works, self._transfer_timeout_s, self._closing)
                self._works = []
                return
            except Exception as error:  # after any error of a backend the ranks are out of step
                why = _first_line(error)
            # Do not chain the original error: its traceback would keep the process group alive.
            holder = _receivers(self.place) if self.rank == 0 else "rank 0"
            failure = f"rank {self.rank} waited {time.monotonic() - start:.3g} s for {resource}, held by {holder}"
            self._leave(failure)
            raise GroupFailed(f"{failure}: {why}")

    def begin_communicator(self, device: torch.device) -> None:
        """Begin the NCCL communicator of this group, which then has an id (`communicator_id`), and wait until all ranks
        have joined it. Like the workers of vLLM, add up one number with them. On error, close the group and raise
        `GroupFailed`. NCCL itself waits without a limit for ranks that never join."""
        group, options = self._group, distributed.AllreduceOptions()
        if group is None:
            raise GroupFailed(f"group {self.place.group_name} is closed: {self._failure}")
        options.timeout = timedelta(seconds=self._transfer_timeout_s)
        try:
            _watch([group.allreduce([torch.zeros(1, device=device)], options)], self._transfer_timeout_s, self._closing)
            return
        except Exception as error:  # as in `broadcast`
            failure = f"{_receivers(self.place)} did not join the communicator: {_first_line(error)}"
        self.close(failure)
        raise GroupFailed(failure)

    def close(self, reason: str = "it was destroyed") -> None:
        """Leave the group. Other ranks, and threads of this rank, that wait in a broadcast get an error."""
        self._closing.set()
        with self._lock:
            self._leave(reason)

    def _leave(self, reason: str) -> None:
        group, self._group = self._group, None
        works, self._works = self._works, []
        self._failure = self._failure or reason
        if group is not None:
            with suppress(RuntimeError):  # some backends cannot abort
                group.abort()
            distributed.destroy_process_group(group)
            if not all(work.is_completed() for work in works):
                held, group = [group], None
                threading.Thread(target=_release_later, args=(held, works), name="leave", daemon=True).start()


class Groups:
    """A server's groups by name. All calls block; a group receives its buckets one after another."""

    def __init__(
        self,
        *,
        device: torch.device,
        max_bytes: int,
        join_timeout_s: float = JOIN_TIMEOUT_S,
        transfer_timeout_s: float = TRANSFER_TIMEOUT_S,
    ) -> None:
        """`device`: where device backends receive tensors. `max_bytes`: upper bound of one bucket's size."""
        self._device, self._max_bytes = device, max_bytes
        self._join_timeout_s, self._transfer_timeout_s = join_timeout_s, transfer_timeout_s
        self._groups: dict[str, Group] = {}
        self._joining: set[str] = set()
        self._ended = False
        self._lock = threading.Lock()

    def join(self, place: Rendezvous, rank: int) -> None:
        """Join a group; a closed group of the same name is replaced.

        Raises `GroupFailed` if not all ranks join in time, or if an open group has this name.
        """
        self._check(place, rank)
        with self._lock:
            known = self._groups.get(place.group_name)
            if (known is not None and known.is_open) or place.group_name in self._joining:
                raise GroupFailed(f"group {place.group_name} exists already: destroy it first")
            self._joining.add(place.group_name)
        try:
            group = Group(place, rank, join_timeout_s=self._join_timeout_s, transfer_timeout_s=self._transfer_timeout_s)
            with self._lock:
                self._groups[place.group_name] = group
            if self._ended:
                self.close()
        finally:
            with self._lock:
                self._joining.discard(place.group_name)

    def receive(self, announced: GroupTensors) -> dict[str, Tensor]:
        """Receive the announced tensors into new memory.

        Raises `GroupFailed`, or ValueError for an invalid announcement. An invalid announcement and a lack of memory
        close the group, so that rank 0 does not wait.
        """
        with self._lock:
            group = self._groups.get(announced.group_name)
        if group is None:
            raise GroupFailed(f"there is no group {announced.group_name!r}: it must be joined first")
        try:
            return self._receive(group, announced)
        except ValueError as error:
            group.close(str(error))
            raise
        except (RuntimeError, MemoryError) as error:
            failure = f"{len(announced.names)} tensors cannot be kept: {_first_line(error)}"
            group.close(failure)
            raise GroupFailed(f"{failure}; join the group again, and send smaller buckets") from error

    def _receive(self, group: Group, announced: GroupTensors) -> dict[str, Tensor]:
        wanted = specs(announced, max_bytes=self._max_bytes)
        device = torch.device("cpu") if group.place.backend == "gloo" else self._device
        resource = f"{len(wanted)} tensors of group {group.place.group_name}"
        if announced.load_format is not None:
            together = torch.empty(sum(spec.num_bytes for spec in wanted), dtype=torch.uint8, device=device)
            group.broadcast([together], resource)
            return unflatten(together, wanted)
        named = {spec.name: torch.empty(spec.shape, dtype=spec.dtype, device=device) for spec in wanted}
        group.broadcast(list(named.values()), resource)
        return named

    def leave(self, name: str) -> None:
        """Leave the named group. Raises `GroupFailed` if it does not exist."""
        with self._lock:
            group = self._groups.pop(name, None)
        if group is None:
            raise GroupFailed(f"there is no group {name!r}")
        group.close()

    def close(self) -> None:
        """Leave all groups. A group that is still being joined is left once the join completes."""
        self._ended = True
        with self._lock:
            groups, self._groups = list(self._groups.values()), {}
        for group in groups:
            group.close()

    def _check(self, place: Rendezvous, rank: int) -> None:
        if place.backend not in BACKENDS:
            raise GroupFailed(f"backend must be one of {', '.join(BACKENDS)}, not {place.backend!r}")
        if place.backend != "gloo" and self._device.type == "cpu":
            raise GroupFailed(f"backend {place.backend} needs a device, and this server computes on the CPU: use gloo")
        if not 0 < rank < place.world_size <= MAX_WORLD_SIZE:
            raise GroupFailed(
                f"rank_offset {rank} of world_size {place.world_size}: rank 0 is the trainer's, this server takes one"
            )
        if not 0 < place.master_port < 2**16:
            raise GroupFailed(f"master_port {place.master_port} is not a port")


def _receivers(place: Rendezvous) -> str:
    return f"{place.world_size - 1} receivers"


def listening_store(host: str, *, timeout_s: float) -> tuple[TCPStore, int]:
    """Return a store for the ranks of groups, and its port, which the system chooses. `host`: an address of this
    machine, at which it listens."""
    listener = socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    port = int(listener.getsockname()[1])
    store = TCPStore(
        host,
        port,
        is_master=True,
        wait_for_workers=False,
        timeout=timedelta(seconds=timeout_s),
        master_listen_fd=listener.detach(),
    )
    return store, port


def communicator_id(store: Store, group_name: str, *, is_over: Callable[[], bool]) -> bytes:
    """Return the id of the NCCL communicator that rank 0 begins (`Group.begin_communicator`). torch leaves it in the
    store for the other ranks of the group. `is_over`: rank 0 has left the group. Raises `GroupFailed`."""
    own = PrefixStore("cuda/", PrefixStore(f"{group_name}/", PrefixStore(group_name, store)))  # as in `_join`
    end = time.monotonic() + ID_S
    while not own.check([ID_KEY]):
        if is_over() or time.monotonic() > end:
            raise GroupFailed(f"torch {torch.__version__} began no NCCL communicator for group {group_name}")
        time.sleep(POLL_S)
    return own.get(ID_KEY)


def _connect(place: Rendezvous, rank: int, timeout: timedelta) -> Store:
    return TCPStore(
        place.master_address,
        place.master_port,
        place.world_size,
        is_master=rank == 0,
        timeout=timeout,
        wait_for_workers=False,
    )


def _join(place: Rendezvous, rank: int, store: Store, timeout: timedelta) -> distributed.ProcessGroup:
    # An empty list of ranks makes torch build the group like a default group, but does not install it as the default.
    group: distributed.ProcessGroup
    group, _ = distributed_c10d._new_process_group_helper(
        place.world_size,
        rank,
        [],
        place.backend,
        PrefixStore(place.group_name, store),
        group_name=distributed_c10d.GroupName(place.group_name),
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
        # Device backends return from `wait` before the transfer is done, so poll for its completion.
        while not work.is_completed():
            if time.monotonic() > end:
                raise RuntimeError("the time limit has passed")
            if closing.is_set():
                raise RuntimeError("this rank has left the group")
            time.sleep(POLL_S)
        work.wait()


def _release_later(held: list[distributed.ProcessGroup | None], works: Sequence[distributed.Work]) -> None:
    """Drop the process group once its transfers have completed.

    The destructor waits for unfinished transfers and blocks the interpreter meanwhile; this thread waits instead.
    """
    while not all(work.is_completed() for work in works):
        time.sleep(RELEASE_POLL_S)
    held.clear()


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]


def _dtype(name: str, text: str) -> torch.dtype:
    try:
        return DTYPES[text.removeprefix("torch.")]
    except KeyError:
        raise ValueError(f"tensor {name} has dtype {text!r}: send {', '.join(DTYPES)}") from None


def _shape(name: str, shape: Sequence[int], max_bytes: int) -> tuple[int, ...]:
    # Count 0 as 1: a size of 0 must not hide huge other sizes, which torch cannot represent either.
    sizes = tuple(shape[: MAX_DIMENSIONS + 1])
    possible = len(sizes) <= MAX_DIMENSIONS and all(0 <= size <= max_bytes for size in sizes)
    if not possible or prod(max(size, 1) for size in sizes) > max_bytes:
        raise ValueError(f"tensor {name} has shape {str(sizes)[:100]}, but this model takes at most {max_bytes} bytes")
    return sizes
