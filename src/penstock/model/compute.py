"""The clock that busy fractions are measured with: seconds of model compute, however the device works."""

from __future__ import annotations

import time

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
