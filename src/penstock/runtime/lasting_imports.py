"""Spare the garbage collector what imports make: modules, classes and functions, which stay as long as the process."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def lasting_imports() -> Iterator[None]:
    """Import modules in the body. The garbage collector does not run meanwhile, and from then on it leaves out all
    objects that exist by the end of the body. With torch, this saves a third of the processor time that a process takes
    to start and to end."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
