"""How long the model was computing: what `trainer_busy_s` counts."""

from __future__ import annotations

import time

import torch


class BusyClock:
    """Use as a context manager around model compute; `seconds` is the duration of the last one.

    With one torch thread on the CPU all compute happens in the calling thread, whose CPU time excludes the waiting for
    a core that others hold. Elsewhere it is wall time, after the device has finished.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.seconds = 0.0

    def __enter__(self) -> BusyClock:
        # Asked here, not at construction: the number of torch threads belongs to the calling thread.
        self._alone = self._device.type == "cpu" and torch.get_num_threads() == 1
        self._start = self._now()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = self._now() - self._start

    def _now(self) -> float:
        if self._alone:
            return time.thread_time()
        if self._device.type != "cpu":
            torch.accelerator.synchronize(self._device)
        return time.perf_counter()
