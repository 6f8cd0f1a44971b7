"""Which cores a process may use, and how many of them its model computes on."""

from __future__ import annotations

import os

from penstock.config import Config


def num_usable_cpus() -> int:
    """Those this process may run on, where the platform tells."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def num_threads(config: Config, configured: int, *, num_sharing: int = 1) -> int:
    """Torch threads of a process: as configured, but all cores where generation and training take turns on them, split
    between the `num_sharing` processes whose turn it is."""
    return max(num_usable_cpus() // num_sharing, 1) if config.scheduler.mode == "colocated" else configured
