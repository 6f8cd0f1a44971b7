"""The time that parts of an episode take. Parts may overlap."""

from __future__ import annotations

import asyncio
from types import TracebackType


class Stopwatch:
    """Measures the time during which at least one body of `with` runs, on the clock of the event loop."""

    __slots__ = ("_num_running", "_since", "_stopped_s")

    def __init__(self) -> None:
        self._num_running, self._since, self._stopped_s = 0, 0.0, 0.0

    @property
    def seconds(self) -> float:
        """Return the time so far."""
        return self._stopped_s + (asyncio.get_running_loop().time() - self._since if self._num_running else 0.0)

    def __enter__(self) -> None:
        if not self._num_running:
            self._since = asyncio.get_running_loop().time()
        self._num_running += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._num_running -= 1
        if not self._num_running:
            self._stopped_s += asyncio.get_running_loop().time() - self._since
