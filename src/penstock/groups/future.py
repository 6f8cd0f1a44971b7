"""The result of a call that has not been waited for: a value, which other calls take as an argument."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, CancelledError, Future, wait
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, NoReturn

from penstock.groups.backend import Gone, Handle, Raised, settle
from penstock.groups.errors import CallTimedOut, RemoteError, WorkerLost
from penstock.groups.mesh import Parts
from penstock.groups.method import Masks, RemoteMethod, Split

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Prepared:
    """A call that can be sent."""

    split: Split
    parts: Parts


@dataclass(frozen=True, slots=True)
class Sent:
    """A call that is on its way."""

    handles: Mapping[int, Handle]
    collectors: Sequence[int]
    """The rank whose result counts, by part."""
    padding: Masks | None
    at: float
    """When it was sent, on the monotonic clock."""


class CallFuture:
    """Of a call on a group."""

    def __init__(self, role: str, method: RemoteMethod) -> None:
        self._role, self._method = role, method
        self._sent: Future[Sent] = Future()
        self._is_asked = False
        """Somebody has seen, or will see, how it ended."""

    def begin(self, prepare: Callable[[], Prepared], send: Callable[[Prepared], Sent]) -> None:
        """Prepare the call, and send it unless it was cancelled meanwhile. What either raises is the result."""
        try:
            prepared = prepare()
            if self._sent.set_running_or_notify_cancel():
                self._sent.set_result(send(prepared))
        except Gone as gone:
            settle(self._sent, error=self._lost(gone))
        except Exception as error:
            settle(self._sent, error=error)

    def raise_if_refused(self) -> None:
        """Once it has begun: raise why it could not be sent."""
        self._is_asked = self._sent.exception() is not None
        self._sent.result()

    def result(self, timeout: float | None = None) -> Any:
        """The collected result, waited for at most `timeout` seconds, and no longer than the method's own deadline.

        Raises `RemoteError` or `WorkerLost` as soon as one rank does, `CallTimedOut`, after which it can be asked
        again, `CancelledError`, and what the call was refused for."""
        self._is_asked, began = True, time.monotonic()
        try:
            sent = self._sent.result(timeout)
        except TimeoutError:
            if self._sent.done():
                raise
            self._time_out([], "the calls before it, and what it is given", seconds=time.monotonic() - began)
        ends = [began + timeout] if timeout is not None else []
        ends += [sent.at + self._method.timeout] if self._method.timeout is not None else []
        remaining = max(0.0, min(ends) - time.monotonic()) if ends else None
        _, missing = wait(sent.handles.values(), remaining, return_when=FIRST_EXCEPTION)
        self._raise_first(sent.handles)
        if missing:
            ranks = [rank for rank, handle in sent.handles.items() if handle in missing]
            holder = f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
            self._time_out(ranks, holder, seconds=time.monotonic() - min(began, sent.at))
        return self._collected

    def done(self) -> bool:
        """Whether `result` would return, or raise, at once."""
        if not self._sent.done():
            return False
        if self._sent.cancelled() or self._sent.exception() is not None:
            return True
        handles = self._sent.result().handles.values()
        return all(handle.done() for handle in handles) or any(map(_has_failed, handles))

    def cancel(self) -> bool:
        """Give up on the result; False if it is there already. A call that was not sent never is. One that was is
        carried out to its end on every rank, so that no rank waits for another in vain, and nobody hears of it."""
        self._is_asked = True
        if self._sent.cancel():
            return True
        if self._sent.exception() is not None:
            return False
        given_up = [handle.cancel() for handle in self._sent.result().handles.values()]
        for handle, was_given_up in zip(self._sent.result().handles.values(), given_up, strict=True):
            if was_given_up:
                handle.set_running_or_notify_cancel()
        return any(given_up)

    @cached_property
    def _collected(self) -> Any:
        sent = self._sent.result()
        return self._method.join([sent.handles[rank].result() for rank in sent.collectors], sent.padding)

    def _raise_first(self, handles: Mapping[int, Handle]) -> None:
        for rank, handle in handles.items():
            if not handle.done():
                continue
            if handle.cancelled():
                raise CancelledError(f"{self._role}.{self._method.name} was cancelled")
            error = handle.exception()
            if isinstance(error, Gone):
                raise self._lost(error)
            if isinstance(error, Raised):
                raise RemoteError(error, rank=rank, role=self._role, method=self._method.name)
            if error is not None:
                raise error

    def _lost(self, gone: Gone) -> WorkerLost:
        return WorkerLost(rank=gone.rank, role=self._role, method=self._method.name, end=gone.end)

    def _time_out(self, ranks: list[int], holder: str, *, seconds: float) -> NoReturn:
        raise CallTimedOut(
            role=self._role, method=self._method.name, missing=ranks, holder=holder, seconds=round(seconds, 3)
        )

    def __del__(self) -> None:
        """An error that nobody asked for is told in the log."""
        if self._is_asked or not self._sent.done() or self._sent.cancelled():
            return
        what = f"{self._role}.{self._method.name}"
        if (error := self._sent.exception()) is not None:
            logger.error("nobody asked what became of %s: %s", what, error)
            return
        for rank, handle in self._sent.result().handles.items():
            handle.add_done_callback(partial(_tell, what, rank))

    def __reduce__(self) -> NoReturn:
        raise TypeError("a CallFuture does not travel: it is an argument of its own, or give its result()")


def _has_failed(handle: Handle) -> bool:
    return handle.done() and (handle.cancelled() or handle.exception() is not None)


def _tell(what: str, rank: int, handle: Handle) -> None:
    """A worker that is gone is found missing by others."""
    error = None if handle.cancelled() else handle.exception()
    if isinstance(error, Raised):
        logger.error("nobody asked what became of %s on rank %d:\n%s", what, rank, error.trace)
