"""Alarms: what a person should hear of once, when it begins."""

from __future__ import annotations


class Alarms:
    """Each kind is raised once per onset."""

    def __init__(self) -> None:
        self._standing: set[str] = set()
        self._new: list[str] = []

    def update(self, kind: str, reason: str | None) -> None:
        """`kind` stands because of `reason`, or stands no more."""
        if reason is None:
            self._standing.discard(kind)
        elif kind not in self._standing:
            self._standing.add(kind)
            self._new.append(f"{kind}: {reason}")

    def take(self) -> list[str]:
        """Those raised since the last call."""
        new, self._new = self._new, []
        return new
