"""Measure model compute, and copy data on a separate device stream during compute."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def compute_seconds(device: torch.device) -> float:
    """Return a clock reading in seconds. The difference of two readings is the calling thread's model compute.

    With one torch thread on the CPU, all compute happens in the calling thread. The reading is then the thread's CPU
    time, which excludes waiting for a busy core. In all other cases the reading is wall time, after the device has
    finished.
    """
    if device.type == "cpu" and torch.get_num_threads() == 1:
        return time.thread_time()
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
    return time.perf_counter()


class CopyStream:
    """A context manager for copies to or from a device while other threads compute on it.

    On a CUDA device the copies use a separate stream. They start after all work submitted before, and are complete when
    the context ends. On other devices it does nothing.
    """

    def __init__(self, device: torch.device) -> None:
        # One stream for all copies: the allocator gives freed memory only to the stream that freed it.
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


class BusyClock:
    """A context manager around model compute. `seconds` is the duration of the last use."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.seconds = self._untaken_s = 0.0

    def take_seconds(self) -> float:
        """Return the measured seconds since the last call of this method."""
        seconds, self._untaken_s = self._untaken_s, 0.0
        return seconds

    def __enter__(self) -> BusyClock:
        self._start = compute_seconds(self._device)
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = compute_seconds(self._device) - self._start
        self._untaken_s += self.seconds
