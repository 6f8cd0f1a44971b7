"""How model compute is measured, and how a device is used beside it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def compute_seconds(device: torch.device) -> float:
    """A reading in seconds; the difference of two is the model compute of the calling thread in between.

    With one torch thread on the CPU all compute happens in the calling thread, whose CPU time excludes the waiting for
    a core that others hold. Elsewhere it is wall time, after the device has finished.
    """
    if device.type == "cpu" and torch.get_num_threads() == 1:
        return time.thread_time()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


class Beside:
    """For what a thread copies to or from a device while others compute on it: a stream of its own where the device has
    streams. What is copied in there comes after all that the device was told before, and is complete when it ends."""

    def __init__(self, device: torch.device) -> None:
        # One, not one each time: memory that was given back is used again by the same stream only.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]

    @contextmanager
    def __call__(self) -> Iterator[None]:
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.default_stream(self._stream.device))
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()
