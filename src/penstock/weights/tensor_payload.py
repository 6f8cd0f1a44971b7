"""Read the weights that SGLang's trainers send: `serialized_named_tensors` of `/update_weights_from_tensor`.

SGLang's serializer pickles handles of shared memory, not numbers. This module reads such a pickle without Python's
reader (see `inert_pickle`), checks every handle, and copies the tensors into memory of this process. So the sender may
reuse its memory once the call has returned.

A handle names memory of another process of this machine. It is opened only if it is a segment of torch that belongs to
this process's user. The process that keeps torch's segments is never asked: the payload would say where it listens.
Torch's counters of users are counted down as in any receiver, so the sender's memory is freed. Handles of file
descriptors are refused, because the descriptor would have to be fetched from a socket that the payload names.
"""

from __future__ import annotations

import base64
import ctypes
import os
import re
import stat
import time
from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor, UntypedStorage

from penstock.weights.collective import DTYPES, MAX_DIMENSIONS
from penstock.weights.inert_pickle import MAX_SHOWN, Call, Name, read_pickle

SEGMENTS = Path("/dev/shm")
SEGMENT = re.compile(rb"/torch_[0-9]{1,10}_[0-9]{1,20}_[0-9]{1,20}")
"""Form of the names of torch's shared-memory segments."""
SEGMENT_HEADER_BYTES = 64
"""Start of a segment, where torch counts its users."""
NUM_COUNTERS = 10_000
"""Number of 8-byte counters in the segment that counts the users of a process's device memory."""
COPY_TIMEOUT_S = 120.0
"""Time limit until the sender's device has finished the tensors and they are copied."""
POLL_S = 0.0005
PLAIN, EXPANDABLE = b"c", b"e"
"""Kinds of device memory, in the second byte of torch's handle: of one call of CUDA's allocator, or of segments that
file descriptors share."""

LOAD_FORMATS = (None, "direct", "flattened_bucket")
REDUCTIONS = "torch.multiprocessing.reductions"
FILE, EMPTY = Name(REDUCTIONS, "rebuild_storage_filename"), Name(REDUCTIONS, "rebuild_storage_empty")
TYPED = Name(REDUCTIONS, "rebuild_typed_storage")
TENSOR, DEVICE_TENSOR = Name(REDUCTIONS, "rebuild_tensor"), Name(REDUCTIONS, "rebuild_cuda_tensor")
DESCRIPTOR = Name(REDUCTIONS, "rebuild_storage_fd")
SIZE = Name("torch", "Size")
CLASSES = {
    *(Name("torch", "Tensor"), Name("torch.nn.parameter", "Parameter")),
    *(Name("torch.storage", "UntypedStorage"), Name("torch.storage", "TypedStorage")),
}
FUNCTIONS = {FILE, EMPTY, TYPED, TENSOR, DEVICE_TENSOR, SIZE}
PAYLOAD_DTYPES = {Name("torch", name): dtype for name, dtype in (DTYPES | {"uint8": torch.uint8}).items()}
SGLANG_DEVICE_TENSOR, PER_RANK, BUCKET_ENTRY = (
    "_rebuild_cuda_tensor_modified",
    "LocalSerializedTensor",
    "FlattenedTensorMetadata",
)
"""Names of SGLang that trainers copy into modules of their own, so any module may have them."""
WHAT_TO_SEND = (
    "send (name, tensor) pairs or a flattened bucket of plain tensors, made by SGLang's MultiprocessingSerializer, or "
    "Penstock's `handle` of a safetensors file"
)

T = TypeVar("T")


class Segment(NamedTuple):
    """A shared-memory file of torch."""

    name: bytes
    num_bytes: int


class DeviceMemory(NamedTuple):
    """Memory of a CUDA device that another process shares. The fields are those of torch's handle, in its order."""

    device: int | str
    """Its index, or its UUID."""
    handle: bytes
    num_bytes: int
    offset_bytes: int
    counters: bytes
    """Name of the segment with the counter of users."""
    counter: int
    event: bytes
    event_sync_required: bool


Memory = Segment | DeviceMemory | None


@dataclass(frozen=True, slots=True, eq=False)
class View:
    """A tensor in shared memory."""

    memory: Memory
    """None for a tensor without elements."""
    dtype: torch.dtype
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    """First element, in elements from the start of the memory."""

    @property
    def num_bytes(self) -> int:
        return prod(self.shape) * self.dtype.itemsize


class Part(NamedTuple):
    """A weight: the elements [start, end) of a flattened tensor, or a whole tensor."""

    view: View
    dtype: torch.dtype
    shape: tuple[int, ...]
    start: int | None = None
    end: int | None = None

    def of(self, tensor: Tensor) -> Tensor:
        """Return a copy of this part of the view's `tensor`."""
        if self.start is None:
            return tensor.clone(memory_format=torch.contiguous_format)
        copied = tensor[self.start : self.end].clone()
        # Early releases of SGLang flatten tensors of one dtype, later ones the bytes of all dtypes.
        return (copied.view(self.dtype) if copied.dtype == torch.uint8 else copied.to(self.dtype)).reshape(self.shape)


def read_tensors(
    serialized: Sequence[str], load_format: str | None, *, max_bytes: int, device: torch.device
) -> dict[str, Tensor]:
    """Return copies of the tensors that a payload names.

    `max_bytes`: limit of all tensors together. `device`: that of the server. Raises ValueError, before anything is
    opened, for a payload of any other form, and for memory that cannot be opened. Blocks while it copies.
    """
    if load_format not in LOAD_FORMATS:
        raise ValueError(f"load_format must be null, direct or flattened_bucket, not {load_format[:MAX_SHOWN]!r}")
    if len(serialized) != 1:
        raise ValueError(
            f"this server has tp_size 1: send one string of serialized_named_tensors, not {len(serialized)}"
        )
    try:
        pickled = base64.b64decode(serialized[0], validate=True)
    except ValueError as error:
        raise ValueError(f"serialized_named_tensors[0] is not base64: {error}") from None
    content = read_pickle(pickled, _check_name)
    read = _Reader()
    parts = read.bucket(content) if load_format == "flattened_bucket" else read.pairs(content)
    num_bytes = sum(prod(part.shape) * part.dtype.itemsize for part in parts.values())
    if num_bytes > max_bytes:
        raise ValueError(f"{num_bytes} bytes are sent, but this model takes at most {max_bytes}")
    return _copied(parts, device)


def _check_name(name: Name) -> None:
    """Raise ValueError unless handles of tensors consist of this name."""
    if name in CLASSES or name in FUNCTIONS or name in PAYLOAD_DTYPES:
        return
    if name.name in (SGLANG_DEVICE_TENSOR, PER_RANK, BUCKET_ENTRY):
        return
    if name == DESCRIPTOR:
        raise ValueError(
            "the payload has a file descriptor of the sender, which another process cannot open: call "
            'torch.multiprocessing.set_sharing_strategy("file_system") in the sender, or send tensors on the GPU'
        )
    raise ValueError(f"the payload names {name}, which this server does not load: {WHAT_TO_SEND}")


class _Reader:
    """Reads views of memory from the plain data of a pickle. Memory that several tensors share is one object."""

    def __init__(self) -> None:
        self._segments: dict[int, tuple[Call, Segment | None]] = {}
        self._views: dict[int, tuple[Call, View]] = {}

    def pairs(self, content: Any) -> dict[str, Part]:
        """Read (name, tensor) pairs."""
        parts: dict[str, Part] = {}
        for pair in _a(list, content, "a list of (name, tensor) pairs"):
            if not isinstance(pair, tuple | list) or len(pair) != 2:
                _refuse("a list of (name, tensor) pairs", pair)
            name, value = _a(str, pair[0], "a name"), pair[1]
            if isinstance(value, Call) and value.target.name == PER_RANK:
                value = self._own_rank(name, value)
            view = self._view(name, value)
            _add(parts, name, Part(view, view.dtype, view.shape))
        return parts

    def bucket(self, content: Any) -> dict[str, Part]:
        """Read a flattened tensor and the names, dtypes and shapes of the weights in it."""
        form = "a dict with flattened_tensor and metadata"
        bucket = _a(dict, content, form)
        if bucket.keys() != {"flattened_tensor", "metadata"}:
            _refuse(form, content)
        flat = self._view("flattened_tensor", bucket["flattened_tensor"])
        if len(flat.shape) != 1:
            raise ValueError(f"flattened_tensor has {len(flat.shape)} dimensions instead of 1")
        parts: dict[str, Part] = {}
        for entry in _a(list, bucket["metadata"], "a list of FlattenedTensorMetadata"):
            if not isinstance(entry, Call) or entry.target.name != BUCKET_ENTRY or entry.state is None:
                _refuse("FlattenedTensorMetadata", entry)
            name = _a(str, entry.state.get("name"), "a name")
            dtype, shape = _dtype(name, entry.state.get("dtype")), _shape(name, entry.state.get("shape"))
            start, end = (_count(name, entry.state.get(key), key) for key in ("start_idx", "end_idx"))
            num_elements = prod(shape) * (dtype.itemsize if flat.dtype == torch.uint8 else 1)
            if end - start != num_elements or end > flat.shape[0]:
                raise ValueError(
                    f"tensor {name} of shape {shape} is said to be the elements {start} to {end} of a bucket of "
                    f"{flat.shape[0]}"
                )
            _add(parts, name, Part(flat, dtype, shape, start, end))
        return parts

    def _own_rank(self, name: str, value: Call) -> Any:
        """Return the tensor that a value with one pickle for each rank has for this server, which is rank 0."""
        values = (value.state or {}).get("values")
        if not isinstance(values, list) or not values:
            _refuse(f"{PER_RANK} with values", value)
        return read_pickle(_a(bytes, values[0], f"the pickle of tensor {name}"), _check_name)

    def _view(self, name: str, value: Any) -> View:
        if not isinstance(value, Call):
            _refuse(f"the handle of tensor {name}", value)
        if id(value) not in self._views:
            try:
                view = self._read_view(name, value)
            except (TypeError, ValueError) as error:
                raise ValueError(f"tensor {name}: {error}") from None
            self._views[id(value)] = value, view  # keeps `value`, so that its id stays its own
        return self._views[id(value)][1]

    def _read_view(self, name: str, value: Call) -> View:
        if value.target == TENSOR:
            _, storage, metadata = _exactly(3, value.args)
            segment, dtype = self._storage(name, storage)
            memory: Memory = segment
            offset, shape, stride, _ = _exactly(4, metadata)
        elif value.target == DEVICE_TENSOR or value.target.name == SGLANG_DEVICE_TENSOR:
            _, shape, stride, offset, _, dtype_name, device, handle, size, start, _, *rest = _exactly(15, value.args)
            dtype = _dtype(name, dtype_name)
            memory = None if handle is None or size == 0 else _device_memory(name, (device, handle, size, start), rest)
        else:
            _refuse("the handle of a tensor", value)
        view = View(memory, dtype, _shape(name, shape), _shape(name, stride), _count(name, offset, "offset"))
        _check_inside(view)
        return view

    def _storage(self, name: str, value: Any) -> tuple[Segment | None, torch.dtype]:
        if not isinstance(value, Call) or value.target != TYPED:
            _refuse("the handle of a storage", value)
        storage, dtype = _exactly(2, value.args)
        if not isinstance(storage, Call):
            _refuse("the handle of a storage", storage)
        if id(storage) not in self._segments:
            self._segments[id(storage)] = storage, _segment(name, storage)
        return self._segments[id(storage)][1], _dtype(name, dtype)


def _segment(name: str, storage: Call) -> Segment | None:
    if storage.target == EMPTY:
        return None
    if storage.target != FILE:
        _refuse("the handle of a storage", storage)
    _, _, segment, size = _exactly(4, storage.args)
    num_bytes = _count(name, size, "size")
    return Segment(_segment_name(segment), num_bytes) if num_bytes else None


def _device_memory(name: str, memory: tuple[Any, ...], rest: list[Any]) -> DeviceMemory:
    device, handle, size, start = memory
    counters, counter, event, event_sync_required = rest
    if not isinstance(device, str):
        device = _count(name, device, "device")
    kind = _a(bytes, handle, "a handle of memory")[1:2]
    if kind not in (PLAIN, EXPANDABLE):
        raise ValueError(f"its handle of device memory is not one that torch {torch.__version__} writes")
    if kind == EXPANDABLE:
        raise ValueError(
            "its memory is an expandable segment, which only file descriptors share: set "
            "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:False in the sender"
        )
    if _count(name, counter, "counter") >= NUM_COUNTERS:
        raise ValueError(f"counter {counter} is not below {NUM_COUNTERS}")
    return DeviceMemory(
        device,
        handle,
        _count(name, size, "size"),
        _count(name, start, "storage offset"),
        _segment_name(counters),
        counter,
        _a(bytes, event, "the handle of an event"),
        _a(bool, event_sync_required, "whether to wait"),
    )


def _segment_name(value: Any) -> bytes:
    name = _a(bytes, value, "the name of a segment")
    if not SEGMENT.fullmatch(name):
        raise ValueError(f"{name[:MAX_SHOWN]!r} is not the name of a shared-memory segment of torch")
    return name


def _check_inside(view: View) -> None:
    """Raise ValueError unless the view lies inside its memory."""
    if len(view.shape) != len(view.stride):
        raise ValueError(f"shape {view.shape} and stride {view.stride} have different lengths")
    if 0 in view.shape:
        return
    last = view.offset + sum((size - 1) * step for size, step in zip(view.shape, view.stride, strict=True))
    num_bytes = 0 if view.memory is None else view.memory.num_bytes
    if isinstance(view.memory, DeviceMemory) and view.memory.offset_bytes % view.dtype.itemsize:
        raise ValueError(f"its memory at {view.memory.offset_bytes} is not aligned for {view.dtype}")
    if (last + 1) * view.dtype.itemsize > num_bytes:
        raise ValueError(f"shape {view.shape} with stride {view.stride} leaves its memory of {num_bytes} bytes")


def _add(parts: dict[str, Part], name: str, part: Part) -> None:
    if name in parts:
        raise ValueError(f"tensor {name} is sent twice")
    parts[name] = part


def _a(kind: type[T], value: Any, what: str) -> T:
    return value if isinstance(value, kind) else _refuse(what, value)


def _refuse(wanted: str, value: Any) -> NoReturn:
    found = str(value.target) if isinstance(value, Call) else type(value).__name__
    raise ValueError(f"the payload has {found} instead of {wanted}: {WHAT_TO_SEND}")


def _exactly(count: int, values: Any) -> tuple[Any, ...]:
    if not isinstance(values, tuple) or len(values) != count:
        raise ValueError(f"its handle does not have the {count} values that torch {torch.__version__} writes")
    return values


def _count(name: str, value: Any, what: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**63:
        raise ValueError(f"the {what} of tensor {name} is not a count")
    return value


def _dtype(name: str, value: Any) -> torch.dtype:
    if not isinstance(value, Name) or value not in PAYLOAD_DTYPES:
        raise ValueError(f"the dtype of tensor {name} is not one of {', '.join(DTYPES)}")
    return PAYLOAD_DTYPES[value]


def _shape(name: str, value: Any) -> tuple[int, ...]:
    if isinstance(value, Call) and value.target == SIZE:
        (value,) = _exactly(1, value.args)
    if not isinstance(value, tuple) or len(value) > MAX_DIMENSIONS:
        raise ValueError(f"the shape of tensor {name} is not a tuple of at most {MAX_DIMENSIONS} sizes")
    return tuple(_count(name, size, "size") for size in value)


def _copied(parts: dict[str, Part], device: torch.device) -> dict[str, Tensor]:
    """Open each memory once, and return copies of all parts."""
    memories = list({id(memory): memory for part in parts.values() if (memory := part.view.memory)}.values())
    for memory in memories:
        _check_memory(memory, device)
    if not any(isinstance(memory, DeviceMemory) for memory in memories):
        return _copies(parts, device, {})
    storages: dict[int, UntypedStorage] = {}
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    # torch makes the current stream wait for the sender's event. Generation must not wait for it.
    with torch.cuda.device(device), torch.cuda.stream(stream):
        copies = _copies(parts, device, storages)
        _wait(stream)
        storages.clear()
    for copy in copies.values():
        if copy.is_cuda:
            copy.record_stream(torch.cuda.default_stream(device))
    return copies


def _copies(parts: dict[str, Part], device: torch.device, storages: dict[int, UntypedStorage]) -> dict[str, Tensor]:
    """Return copies of all parts. `storages` gets the opened memory, which must stay open until they are complete."""
    copies = {}
    for name, part in parts.items():
        view = part.view
        if view.memory is None:
            tensor = torch.empty(view.shape, dtype=view.dtype)
        else:
            if id(view.memory) not in storages:
                try:
                    storages[id(view.memory)] = _open(view.memory, device)
                except RuntimeError as error:
                    first_line = str(error).partition("\n")[0]
                    raise ValueError(f"tensor {name}: its memory cannot be opened: {first_line}") from None
            storage = storages[id(view.memory)]
            tensor = torch.empty(0, dtype=view.dtype, device=storage.device)
            tensor.set_(storage, view.offset, view.shape, view.stride)
        copies[name] = part.of(tensor)
    return copies


def _check_memory(memory: Segment | DeviceMemory, device: torch.device) -> None:
    """Raise ValueError for memory that must not be opened."""
    if isinstance(memory, Segment):
        _check_segment(memory.name, memory.num_bytes)
        return
    if device.type != "cuda":
        raise ValueError(
            "the payload has memory of a CUDA device, but this server computes on the CPU: send CPU tensors"
        )
    own = torch.cuda.get_device_properties(device)
    if memory.device not in (device.index, str(own.uuid)):
        raise ValueError(
            f"the payload has memory of device {memory.device}, but this server computes on device {device.index} "
            f"({own.uuid}): send the weights from the same device, with SGLang's patch that names a device by its UUID"
        )
    _check_segment(memory.counters, 8 * NUM_COUNTERS)


def _check_segment(name: bytes, num_bytes: int) -> None:
    """Raise ValueError unless the segment is a plain file of this user with at least `num_bytes` after its header."""
    shown = name.decode()
    try:
        descriptor = os.open(SEGMENTS / shown[1:], os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise ValueError(
            f"the shared memory {shown} cannot be opened ({error.strerror}): keep the tensors until the call returns, "
            "on the machine of the server, as the same user, with the same /dev/shm"
        ) from None
    try:
        found = os.fstat(descriptor)
    finally:
        os.close(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        raise ValueError(f"the shared memory {shown} does not belong to the user of this server")
    if found.st_size < SEGMENT_HEADER_BYTES + num_bytes:
        raise ValueError(f"the shared memory {shown} is shorter than the {num_bytes} bytes that its handle says")


def _open(memory: Segment | DeviceMemory, device: torch.device) -> UntypedStorage:
    """Map checked memory. It is unmapped, and its user counted down, when the storage is dropped."""
    if isinstance(memory, Segment):
        # An empty manager is torch's own in this process, so that no socket of the payload is connected to.
        mapped: UntypedStorage = UntypedStorage._new_shared_filename_cpu(b"", memory.name, memory.num_bytes)
        mapped._shared_decref()  # the sender counted one user up for each handle
        return mapped
    storage = UntypedStorage._new_shared_cuda(device.index, *memory[1:])
    base, size = ctypes.c_uint64(), ctypes.c_size_t()
    query = ctypes.CDLL("libcuda.so.1").cuMemGetAddressRange_v2
    failure = query(ctypes.byref(base), ctypes.byref(size), ctypes.c_uint64(storage.data_ptr() - memory.offset_bytes))
    # torch does not compare a handle with the allocation. A copy beyond it would end all use of the device.
    if failure or memory.offset_bytes + memory.num_bytes > size.value:
        raise RuntimeError(f"{memory.offset_bytes} + {memory.num_bytes} bytes exceed an allocation of {size.value}")
    return storage


def _wait(stream: torch.cuda.Stream) -> None:
    """Wait until the copies are complete. Raises ValueError after `COPY_TIMEOUT_S`."""
    end = time.monotonic() + COPY_TIMEOUT_S
    while not stream.query():
        if time.monotonic() > end:
            raise ValueError(f"the sender's device did not finish the tensors within {COPY_TIMEOUT_S:g} s")
        time.sleep(POLL_S)
