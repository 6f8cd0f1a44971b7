"""Device memory between two processes; the transfer itself needs a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import multiprocessing

from penstock.types import DeviceTensors
from penstock.weights.device_memory import COUNTER_FILE, share, take

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA IPC needs a CUDA device")

HANDLE = DeviceTensors(
    names=["a"],
    dtypes=["float32"],
    shapes=[[2]],
    device_uuid="none",
    memory_handle=b"\x02c" + bytes(64),
    num_bytes=8,
    offset_bytes=0,
    ref_counter_handle=b"/torch_1234_567_0",
    ref_counter_offset=0,
    event_handle=bytes(64),
    event_sync_required=False,
)


def test_a_server_without_a_device_refuses_at_once() -> None:
    with pytest.raises(ValueError, match="need a server on a CUDA device, and this one computes on cpu"):
        take(HANDLE, device=torch.device("cpu"), max_bytes=2**20)


def test_what_lies_elsewhere_cannot_be_shared() -> None:
    with pytest.raises(ValueError, match=r"only tensors of one CUDA device can be shared, not of \['cpu'\]"):
        share({"a": torch.zeros(2)})


def test_more_than_the_memory_holds_is_refused() -> None:
    with pytest.raises(ValueError, match="12 bytes are announced, but the shared memory holds 8"):
        take(replace(HANDLE, shapes=[[3]]), device=torch.device("cuda", 0), max_bytes=2**20)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"offset_bytes": -1}, "no memory has 8 bytes at offset -1"),
        ({"offset_bytes": 2**63}, "no memory has 8 bytes at offset"),
        ({"num_bytes": 10**30}, "no memory has 10+ bytes at offset 0"),
        ({"num_bytes": 2**63 - 1, "offset_bytes": 1}, "no memory has"),
        ({"ref_counter_offset": 10_000}, r"ref_counter_offset must be in \[0, 10000\), not 10000"),
        ({"ref_counter_offset": -1}, "ref_counter_offset"),
        ({"ref_counter_handle": b""}, "ref_counter_handle does not name"),
        ({"ref_counter_handle": b"/sem.other"}, "ref_counter_handle does not name"),
        ({"ref_counter_handle": b"/torch_1/../x"}, "ref_counter_handle does not name"),
        ({"ref_counter_handle": b"/torch_" + b"1" * 300}, "ref_counter_handle does not name"),
        ({"event_handle": b"x"}, "event_handle must have 64 bytes, not 1"),
        ({"memory_handle": b""}, "memory_handle, of 0 bytes, is not one of torch's"),
        ({"memory_handle": b"\x02c" + bytes(63)}, "memory_handle, of 65 bytes"),
        ({"memory_handle": b"\x02x" + bytes(64)}, "memory_handle, of 66 bytes"),
        ({"memory_handle": b"\x02e" + bytes(2**16)}, "memory_handle, of 65538 bytes"),
        ({}, "CUDA device none is not visible"),
        ({"memory_handle": bytes(64)}, "CUDA device none is not visible"),
        ({"memory_handle": b"\x02e" + bytes(24)}, "CUDA device none is not visible"),
    ],
)
def test_every_field_is_checked_before_torch_sees_it(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        take(replace(HANDLE, **change), device=torch.device("cuda", 0), max_bytes=2**20)


def test_torch_names_its_shared_files_as_is_checked() -> None:
    _, name, _ = torch.UntypedStorage(8)._share_filename_cpu_()
    assert COUNTER_FILE.fullmatch(name)


def sender(queue: Any, done: Any) -> None:
    named = {"a": torch.arange(6.0, device="cuda").reshape(2, 3), "b": torch.ones(5, dtype=torch.bfloat16).cuda()}
    handle, memory = share(named)
    queue.put(handle)
    done.wait(60)
    del memory


@needs_gpu
@pytest.mark.cuda
@pytest.mark.integration
def test_device_memory_of_another_process_is_copied() -> None:
    context = multiprocessing.get_context("spawn")
    queue, done = context.Queue(), context.Event()
    process = context.Process(target=sender, args=(queue, done))
    process.start()
    received = take(queue.get(timeout=60), device=torch.device("cuda", 0), max_bytes=2**20)
    done.set()
    process.join(60)
    assert torch.equal(received["a"].cpu(), torch.arange(6.0).reshape(2, 3))
    assert torch.equal(received["b"].cpu(), torch.ones(5, dtype=torch.bfloat16))
