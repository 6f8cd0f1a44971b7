"""Progress of long work. Code that works for long calls `tick` after each part. The process then reports progress, and
does not count as hung."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

_listeners: list[Callable[[], None]] = []


def tick() -> None:
    """Say that a part of the work is done. Calls all listeners, on the calling thread."""
    for listener in [*_listeners]:
        listener()


@contextmanager
def heard_by(listener: Callable[[], None]) -> Iterator[None]:
    """Call `listener` at every tick of this process, as long as the body runs."""
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)
