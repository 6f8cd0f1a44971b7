"""A state that is written to files while training goes on.

    main thread     take ─► accumulate ─► accumulate ─► (waits for the copy) step ─► ...
    own thread      copy to main memory ─► write the files

Gradients are added without a change of weights and optimizer. So the copy is made beside the passes of the next step,
and the step rarely waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from penstock.deadline import Stalled
from penstock.ticks import tick
from penstock.trainer.shards import own_part

COPY_S = 600.0
"""Limit for the copy. A terabyte takes less."""


class Saving:
    """One rank's state at a moment, on its way to files."""

    def __init__(self, state: Mapping[str, Any], write: Callable[[dict[str, Any]], None]) -> None:
        """Take the rank's part of `state`, and begin to copy it. `write` then writes the copy, on the thread of this
        object. The caller must call `await_copy` before it changes the tensors."""
        self._own, self._write = own_part(state), write
        self._taken = _event_after_kernels(self._own)
        self._error: Exception | None = None
        self._copied = threading.Event()
        self._thread = threading.Thread(target=self._run, name="saving", daemon=True)
        self._thread.start()

    def await_copy(self) -> None:
        """Wait until the tensors may change. Raises `Stalled`."""
        if not self._copied.wait(COPY_S):
            raise Stalled(waiter="the learner", resource="a copy of its state", holder="a checkpoint", seconds=COPY_S)

    def is_done(self, wait_s: float = 0.0) -> bool:
        """Return whether all files are written, at the latest after `wait_s` seconds. Raises the error of the copy or
        of a file."""
        self._thread.join(wait_s)
        if self._thread.is_alive():
            return False
        if self._error is not None:
            raise self._error
        return True

    def _run(self) -> None:
        try:
            with torch.no_grad():
                copied = _in_main_memory(self._own, self._taken)
            del self._own
            self._copied.set()
            self._write(copied)
        except Exception as error:  # `is_done` raises it
            self._error = error
        finally:
            self._copied.set()


def _in_main_memory(own: dict[str, Any], taken: torch.cuda.Event | None) -> dict[str, Any]:
    """Return a copy of a state in main memory. On CUDA it runs beside the kernels that were begun after `taken`."""

    def copy(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        tick()
        return value.to("cpu", copy=True)

    if taken is None:
        found: dict[str, Any] = tree_map(copy, own)
        return found
    device = _cuda_device(own)  # a new thread begins on the first device
    stream: Any = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_event(taken)
    with torch.cuda.device(device), torch.cuda.stream(stream):
        copied: dict[str, Any] = tree_map(copy, own)  # waits for each tensor
    return copied


def _event_after_kernels(own: dict[str, Any]) -> torch.cuda.Event | None:
    """Return an event of the current stream after all kernels begun so far; None if no tensor of `own` is on CUDA."""
    device = _cuda_device(own)
    if device is None:
        return None
    event: torch.cuda.Event = torch.cuda.current_stream(device).record_event()
    return event


def _cuda_device(own: dict[str, Any]) -> torch.device | None:
    """Return the device of a rank's state; None if no tensor is on CUDA."""
    return next((value.device for value in tree_leaves(own) if isinstance(value, Tensor) and value.is_cuda), None)
