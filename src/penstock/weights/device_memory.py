"""Weights in device memory that two processes of one host share (CUDA IPC): nothing passes through the host.

The sender keeps the memory as it is until the receiver has answered; the receiver copies what it was told of, on the
device, into memory of its own. A handle is plain numbers and bytes: the constructors around them are torch's own
(`torch.multiprocessing.reductions`), chosen here and not by the sender. Verified on a GPU only.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.multiprocessing.reductions import rebuild_cuda_tensor, reduce_tensor

from penstock.types import DeviceTensors
from penstock.weights.tensors import announce, flatten, specs, unflatten


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
    """The tensors of `handle`, copied on `device`. Raises ValueError if this process cannot see that memory."""
    if device.type != "cuda":
        raise ValueError(f"weights in CUDA memory need a server on a CUDA device, and this one computes on {device}")
    wanted = specs(handle, max_bytes=max_bytes)
    total = sum(spec.num_bytes for spec in wanted)
    if total > handle.num_bytes:
        raise ValueError(f"{total} bytes are announced, but the shared memory holds {handle.num_bytes}")
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


def _index_of(uuid: str) -> int:
    for index in range(torch.cuda.device_count()):
        if str(torch.cuda.get_device_properties(index).uuid) == uuid:
            return index
    raise ValueError(f"CUDA device {uuid} is not visible to this server: it must run on the sender's host")
