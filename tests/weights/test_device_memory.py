"""Device memory between two processes; the transfer itself needs a GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import multiprocessing

from penstock.types import DeviceTensors
from penstock.weights.device_memory import share, take

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA IPC needs a CUDA device")

HANDLE = DeviceTensors(
    names=["a"],
    dtypes=["float32"],
    shapes=[[2]],
    device_uuid="none",
    memory_handle=b"",
    num_bytes=8,
    offset_bytes=0,
    ref_counter_handle=b"",
    ref_counter_offset=0,
    event_handle=b"",
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


def sender(queue: Any, done: Any) -> None:
    named = {"a": torch.arange(6.0, device="cuda").reshape(2, 3), "b": torch.ones(5, dtype=torch.bfloat16).cuda()}
    handle, memory = share(named)
    queue.put(handle)
    done.wait(60)
    del memory


@needs_gpu
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
