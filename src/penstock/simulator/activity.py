"""What the modelled servers did when, for the records of a simulated run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from penstock.types import NO_VERSION

AddSpan = Callable[[str, str, float, float, int], None]
"""Called as add_span(process, kind, start, end, policy version)."""


class Activity:
    """Spans, busy seconds and tokens of all servers. A server is busy while it has a sequence, except in the pause of
    a weight update."""

    def __init__(self, names: Sequence[str], add_span: AddSpan) -> None:
        self._names, self._add_span = names, add_span
        self._since: list[float | None] = [None] * len(names)
        """When each server began to generate, or begins after a pause; None if it is idle."""
        self._paused_until = [0.0] * len(names)
        self._version = NO_VERSION
        self._busy_s = [0.0] * len(names)
        self.num_tokens = [0] * len(names)
        """Tokens of each server, in requests that have ended."""

    def change_load(self, number: int, load: int, now: float) -> None:
        """Record that a server has `load` sequences."""
        if load and self._since[number] is None:
            self._since[number] = max(now, self._paused_until[number])
        elif not load:
            self._end(number, now)

    def update_weights(self, version: int, ends: Sequence[float], pause_s: float) -> None:
        """Record that the servers get `version` in pauses of `pause_s`, which end at `ends`."""
        for number, end in enumerate(ends):
            is_busy = self._since[number] is not None
            self._end(number, end - pause_s)
            self._add_span(self._names[number], "update_weights", end - pause_s, end, version)
            self._paused_until[number] = end
            if is_busy:
                self._since[number] = end
        self._version = version

    def busy_s(self, number: int, now: float) -> float:
        """Return for how many seconds a server has generated until `now`."""
        since = self._since[number]
        return self._busy_s[number] + (max(now - since, 0.0) if since is not None else 0.0)

    def end(self, now: float) -> None:
        """Record that the run ends."""
        for number in range(len(self._names)):
            self._end(number, now)

    def _end(self, number: int, now: float) -> None:
        since, self._since[number] = self._since[number], None
        if since is not None and now > since:
            self._busy_s[number] += now - since
            self._add_span(self._names[number], "generate", since, now, self._version)
