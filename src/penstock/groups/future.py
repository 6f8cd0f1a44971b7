"""The future of a call: a result that may not exist yet, which other calls accept as an argument."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, CancelledError, Future, InvalidStateError, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NoReturn

from penstock.groups.backend import Backend, Call, Handle
from penstock.groups.errors import CallTimedOut, RemoteError, WorkerLost
from penstock.groups.method import Masks, RemoteMethod

logger = logging.getLogger(__name__)

PEER_S = 5.0
"""How long a call waits for the end of a worker's process to be noticed, after another rank has blamed that worker."""


@dataclass(frozen=True, slots=True)
class Prepared:
    """A call that is ready to be sent."""

    calls: Mapping[int, Call]
    """The calls of the workers, by rank."""
    collectors: Sequence[int]
    """For each part, the rank that returns its result."""
    padding: Masks | None


@dataclass(frozen=True, slots=True)
class Sent:
    """A call that was sent."""

    prepared: Prepared
    handles: Mapping[int, Handle]
    at: float
    """When the call was sent, on the monotonic clock."""


class CallFuture:
    """The future of a call on a group."""

    def __init__(self, role: str, method: RemoteMethod) -> None:
        self._role, self._method, self._name = role, method, f"{role}.{method.name}"
        self._sent: Future[Sent] = Future()
        self._is_claimed = False
        """A caller has received, or will receive, the outcome."""

    def begin(self, prepare: Callable[[], Prepared], backend: Backend) -> None:
        """Prepare the call, and send it unless it was cancelled meanwhile. An exception from either step becomes the
        outcome."""
        try:
            prepared = prepare()
            if self._sent.set_running_or_notify_cancel():
                self._sent.set_result(Sent(prepared, backend.start(prepared.calls), time.monotonic()))
        except Exception as error:
            with suppress(InvalidStateError):  # the call was cancelled
                self._sent.set_exception(error)

    def raise_if_refused(self) -> None:
        """Raise the error of a call that could not be sent. Call this after `begin`."""
        self._is_claimed = self._sent.exception() is not None
        self._sent.result()

    def result(self, timeout: float | None = None) -> Any:
        """Return the collected result. Wait at most `timeout` seconds, and no longer than the method's own deadline.

        Raises `RemoteError` or `WorkerLost` as soon as one rank fails, `CancelledError`, and the error of a refused
        call. If a rank fails because another rank ended, `result` raises `WorkerLost` of the rank that ended, at most
        `PEER_S` seconds later. Raises `CallTimedOut` when the time is up; `result` can be called again afterwards."""
        self._is_claimed, began = True, time.monotonic()
        try:
            sent = self._sent.result(timeout)
        except TimeoutError:
            if self._sent.done():
                raise
            self._time_out([], "earlier calls on the same workers, and calls that return its arguments", began)
        ends = [began + timeout] if timeout is not None else []
        ends += [sent.at + self._method.timeout] if self._method.timeout is not None else []
        _, missing = wait(sent.handles.values(), _until_first(ends), return_when=FIRST_EXCEPTION)
        if any(map(_blames_peer, sent.handles.values())):
            _, missing = wait(sent.handles.values(), _until_first([*ends, time.monotonic() + PEER_S]))
        for handle in sorted(sent.handles.values(), key=_is_lost, reverse=True):
            if handle.cancelled():
                raise CancelledError(f"{self._name} was cancelled")
            if handle.done():
                handle.result()
        if missing:
            ranks = [rank for rank, handle in sent.handles.items() if handle in missing]
            holder = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
            self._time_out(ranks, holder, min(began, sent.at))
        return self._collected

    def done(self) -> bool:
        """Return whether all ranks have answered, or one has failed."""
        if not self._sent.done():
            return False
        if self._sent.cancelled() or self._sent.exception() is not None:
            return True
        handles = self._sent.result().handles.values()
        return all(handle.done() for handle in handles) or any(map(_has_failed, handles))

    def cancel(self) -> bool:
        """Give up the result. Returns False if the outcome is there already.

        A call that was not sent yet is never sent. A sent call runs to its end on every rank, so that no rank waits for
        another in vain; its result is dropped.
        """
        self._is_claimed = True
        if self._sent.cancel():
            return True
        if self._sent.exception() is not None:
            return False
        cancelled = [handle for handle in self._sent.result().handles.values() if handle.cancel()]
        for handle in cancelled:
            handle.set_running_or_notify_cancel()
        return bool(cancelled)

    @cached_property
    def _collected(self) -> Any:
        sent = self._sent.result()
        results = [sent.handles[rank].result() for rank in sent.prepared.collectors]
        return self._method.join(results, sent.prepared.padding)

    def _time_out(self, ranks: list[int], holder: str, start: float) -> NoReturn:
        seconds = round(time.monotonic() - start, 3)
        raise CallTimedOut(role=self._role, method=self._method.name, missing=ranks, holder=holder, seconds=seconds)

    def __del__(self) -> None:
        """Log an error that no caller has received."""
        if self._is_claimed or not self._sent.done() or self._sent.cancelled():
            return
        if (error := self._sent.exception()) is not None:
            logger.error("%s failed, and no caller took its result: %s", self._name, error)
            return
        for handle in self._sent.result().handles.values():
            handle.add_done_callback(partial(_log_error, self._name))

    def __reduce__(self) -> NoReturn:
        raise TypeError("a CallFuture cannot be pickled: pass it as an argument of its own, or pass its result()")


def _until_first(times: Sequence[float]) -> float | None:
    """Return the seconds until the first of some times; None if there is none."""
    return max(0.0, min(times) - time.monotonic()) if times else None


def _has_failed(handle: Handle) -> bool:
    return handle.cancelled() or _error_of(handle) is not None


def _error_of(handle: Handle) -> BaseException | None:
    """Return the error of a call on one rank, as far as it is known."""
    return handle.exception() if handle.done() and not handle.cancelled() else None


def _blames_peer(handle: Handle) -> bool:
    return getattr(_error_of(handle), "blames_peer", False)


def _is_lost(handle: Handle) -> bool:
    return isinstance(_error_of(handle), WorkerLost)


def _log_error(name: str, handle: Future[Any]) -> None:
    """Log the error that a method raised. A lost worker is not logged here, since other calls report it."""
    error = None if handle.cancelled() else handle.exception()
    if isinstance(error, RemoteError):
        logger.error("%s failed on rank %d, no caller took its result:\n%s", name, error.rank, error.remote_traceback)
