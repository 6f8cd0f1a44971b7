"""Alarms: conditions that a person should hear about once, when they begin. And errors that only a person can cure."""

from __future__ import annotations


class HopelessError(RuntimeError):
    """An error that a restart cannot cure. Its message says what to do, so no traceback is shown."""

    self_explanatory = True
    hopeless = True


class Alarms:
    """Standing and new alarms. An alarm of a kind is raised once, when its condition begins."""

    def __init__(self) -> None:
        self._standing: set[str] = set()
        self._new: list[str] = []

    def update(self, kind: str, reason: str | None) -> None:
        """Raise the alarm `kind` for `reason`, unless it stands already. With `reason` None, end it."""
        if reason is None:
            self._standing.discard(kind)
        elif kind not in self._standing:
            self._standing.add(kind)
            self._new.append(f"{kind}: {reason}")

    def take(self) -> list[str]:
        """Return the alarms raised since the last call."""
        new, self._new = self._new, []
        return new
