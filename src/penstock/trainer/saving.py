"""Work that reads a state while training goes on: a checkpoint, and published weights.

    main thread     begin ─► accumulate ─► accumulate ─► (waits until it is read) step ─► ...
    own thread      read: copy to main memory, or to where servers map it ─► the rest: write the files

Gradients are added without a change of weights and optimizer. So the state is read beside the passes of the next step,
and the step rarely waits.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from penstock.deadline import Stalled
from penstock.ticks import tick
from penstock.trainer.shards import own_part

READ_S = 600.0
"""Limit until a state is read. A terabyte takes less."""

Rest = Callable[[], None]
"""What is left to do when the state may change again."""


class Reader:
    """Work that reads one rank's state, on a thread of its own."""

    def __init__(self, read: Callable[[], Rest | None], *, device: torch.device | None, purpose: str) -> None:
        """Begin `read`, and then what it returns. The caller must call `await_read` before it changes the state.

        `device`: of the state's tensors, or of some of them. On CUDA `read` runs beside the kernels that begin later.
        """
        self._read: Callable[[], Rest | None] | None = read
        self._purpose = purpose
        self._taken = _event_after_kernels(device)
        self._device = device
        self._error: Exception | None = None
        self._is_read = threading.Event()
        self._thread = threading.Thread(target=self._run, name=purpose, daemon=True)
        self._thread.start()

    def await_read(self) -> None:
        """Wait until the state may change. Raises `Stalled`."""
        if not self._is_read.wait(READ_S):
            raise Stalled(waiter="the learner", resource="its state", holder=self._purpose, seconds=READ_S)

    def await_end(self) -> None:
        """Wait until all is done. Raises `Stalled`, or the error of the work."""
        if not self.is_done(READ_S):
            raise Stalled(waiter="the learner", resource="the end of work", holder=self._purpose, seconds=READ_S)

    def is_done(self, wait_s: float = 0.0) -> bool:
        """Return whether all is done, at the latest after `wait_s` seconds. Raises the error of the work."""
        self._thread.join(wait_s)
        if self._thread.is_alive():
            return False
        if self._error is not None:
            raise self._error
        return True

    def _run(self) -> None:
        try:
            with torch.no_grad(), self._beside_kernels():
                assert self._read is not None
                rest = self._read()
            self._read = None  # frees the state
            self._is_read.set()
            if rest is not None:
                rest()
        except Exception as error:  # `is_done` raises it
            self._error = error
        finally:
            self._read = None
            self._is_read.set()

    @contextmanager
    def _beside_kernels(self) -> Iterator[None]:
        """On CUDA, use a stream of its own, after the kernels that had begun before."""
        if self._taken is None:
            yield
            return
        stream: Any = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        stream.wait_event(self._taken)
        with torch.cuda.device(self._device), torch.cuda.stream(stream):  # a new thread begins on the first device
            yield


def saved(state: Mapping[str, Any], write: Callable[[dict[str, Any]], None]) -> Reader:
    """Begin to copy this rank's part of `state` to main memory. `write` then gets the copy."""
    own = own_part(state)

    def read() -> Rest:
        return partial(write, _in_main_memory(own))

    return Reader(read, device=_cuda_device(own), purpose="a checkpoint")


def _in_main_memory(own: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a state in main memory."""

    def copy(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        tick()
        return value.to("cpu", copy=True)  # waits for each tensor

    found: dict[str, Any] = tree_map(copy, own)
    return found


def _event_after_kernels(device: torch.device | None) -> torch.cuda.Event | None:
    """Return an event of the current stream after all kernels begun so far; None if `device` is no CUDA device."""
    if device is None or device.type != "cuda":
        return None
    event: torch.cuda.Event = torch.cuda.current_stream(device).record_event()
    return event


def _cuda_device(own: dict[str, Any]) -> torch.device | None:
    """Return the device of a rank's state; None if no tensor is on CUDA."""
    return next((value.device for value in tree_leaves(own) if isinstance(value, Tensor) and value.is_cuda), None)
