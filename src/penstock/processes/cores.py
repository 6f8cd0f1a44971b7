"""Which cores a process may use, and how many of them its model computes on."""

from __future__ import annotations

import os

from penstock.config import Config


def num_usable_cpus() -> int:
    """Those this process may run on, where the platform tells."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def num_threads(config: Config, configured: int) -> int:
    """Torch threads of a process: as configured, but all cores where generation and training take turns on them."""
    return num_usable_cpus() if config.scheduler.mode == "colocated" else configured
