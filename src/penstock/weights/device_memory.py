"""Weights in device memory that two processes of one host share (CUDA IPC): nothing passes through the host.

The sender keeps the memory as it is until the receiver has answered; the receiver copies what it was told of, on the
device, into memory of its own. A handle is plain numbers and bytes: the constructors around them are torch's own
(`torch.multiprocessing.reductions`), chosen here and not by the sender. Every field is checked before torch sees it,
but whether a handle is what it says only the driver knows: whoever may control the server is trusted with its memory.
Verified on a GPU only.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from penstock.types import DeviceTensors
from penstock.weights.tensors import announce, flatten, specs, unflatten

CUDA_HANDLE_BYTES = 64
"""Of memory, and of an event."""
MAX_SEGMENTS_BYTES = 2**16
"""Of a handle to expandable segments, which lists them."""
NUM_COUNTERS = 10_000
"""In a file of torch's reference counters."""
COUNTER_FILE = re.compile(rb"/torch_[0-9]+(_[0-9]+)*")
MAX_NAME_BYTES = 255


def share(named: Mapping[str, Tensor]) -> tuple[DeviceTensors, Tensor]:
    """The handle of one bucket, and its memory, to be held until every receiver has answered. Raises ValueError unless
    all of it lies on one CUDA device."""
    devices = {tensor.device for tensor in named.values()}
    if len(devices) != 1 or next(iter(devices)).type != "cuda":
        raise ValueError(f"only tensors of one CUDA device can be shared, not of {sorted(map(str, devices))}")
    flat = flatten(list(named.values()))
    _, arguments = reduce_tensor(flat)  # type: ignore[no-untyped-call]
    device, memory_handle, num_bytes, offset_bytes, _, counter, counter_offset, event, sync = arguments[6:]
    # Whoever opens the handle may use another stream.
    torch.cuda.current_stream(flat.device).synchronize()
    told = announce(named)
    handle = DeviceTensors(
        names=told.names,
        dtypes=told.dtypes,
        shapes=told.shapes,
        device_uuid=str(torch.cuda.get_device_properties(device).uuid),
        memory_handle=memory_handle,
        num_bytes=num_bytes,
        offset_bytes=offset_bytes,
        ref_counter_handle=counter,
        ref_counter_offset=counter_offset,
        event_handle=event,
        event_sync_required=sync,
    )
    return handle, flat


def take(handle: DeviceTensors, *, device: torch.device, max_bytes: int) -> dict[str, Tensor]:
    """The tensors of `handle`, copied on `device`. Raises ValueError if this process cannot see that memory, or the
    handle is none."""
    if device.type != "cuda":
        raise ValueError(f"weights in CUDA memory need a server on a CUDA device, and this one computes on {device}")
    wanted = specs(handle, max_bytes=max_bytes)
    total = sum(spec.num_bytes for spec in wanted)
    if total > handle.num_bytes:
        raise ValueError(f"{total} bytes are announced, but the shared memory holds {handle.num_bytes}")
    _check(handle)
    index = _index_of(handle.device_uuid)
    try:
        flat = rebuild_cuda_tensor(  # type: ignore[no-untyped-call]
            Tensor,
            torch.Size([total]),
            (1,),
            0,
            torch.storage.TypedStorage,
            torch.uint8,
            index,
            handle.memory_handle,
            handle.num_bytes,
            handle.offset_bytes,
            False,
            handle.ref_counter_handle,
            handle.ref_counter_offset,
            handle.event_handle,
            handle.event_sync_required,
        )
        named = {name: tensor.to(device) for name, tensor in unflatten(flat, wanted).items()}
        torch.cuda.current_stream(index).synchronize()
    except RuntimeError as error:
        raise ValueError(f"the shared device memory cannot be opened: {error}") from error
    return named


def _check(handle: DeviceTensors) -> None:
    """Raise ValueError for a field that torch would read beyond its bounds."""
    end = handle.offset_bytes + handle.num_bytes
    if not (0 <= handle.num_bytes <= end < 2**63 and handle.offset_bytes >= 0):
        raise ValueError(f"no memory has {handle.num_bytes} bytes at offset {handle.offset_bytes}")
    if not 0 <= handle.ref_counter_offset < NUM_COUNTERS:
        raise ValueError(f"ref_counter_offset must be in [0, {NUM_COUNTERS}), not {handle.ref_counter_offset}")
    if len(handle.ref_counter_handle) > MAX_NAME_BYTES or not COUNTER_FILE.fullmatch(handle.ref_counter_handle):
        raise ValueError("ref_counter_handle does not name a file of torch's reference counters")
    if len(handle.event_handle) != CUDA_HANDLE_BYTES:
        raise ValueError(f"event_handle must have {CUDA_HANDLE_BYTES} bytes, not {len(handle.event_handle)}")
    if not _is_memory(handle.memory_handle):
        raise ValueError(f"memory_handle, of {len(handle.memory_handle)} bytes, is not one of torch's")


def _is_memory(handle: bytes) -> bool:
    """CUDA's own handle, bare or behind torch's version and kind; or torch's of expandable segments."""
    if len(handle) == CUDA_HANDLE_BYTES:
        return True
    if handle[1:2] == b"e":
        return len(handle) <= MAX_SEGMENTS_BYTES
    return handle[1:2] == b"c" and len(handle) == CUDA_HANDLE_BYTES + 2


def _index_of(uuid: str) -> int:
    for index in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(index).uuid) == uuid:
            return index
    raise ValueError(f"CUDA device {uuid} is not visible to this server: it must run on the sender's host")
