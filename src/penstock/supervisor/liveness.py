"""Whether a process that runs also gets on. A pure decider: it takes `now` and the latest heartbeat.

Two things can be wrong. *Silence*: no new heartbeat, since the process is stopped or its event loop blocked. *No
progress*: it beats and says that it is doing something, and neither what it does nor how far it is changes. A long step
is no silence, because steps run in threads beside the event loop.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from penstock.config import SupervisorConfig
from penstock.ports import Beat

DEGRADED_SHARE = 0.5
"""Of what makes a process hung."""
LOOK_BEATS = 4
"""Beats whose time one look may add, at most, to what a process is held to account for: if this very process was
stopped for a while, so perhaps were all."""


class Health(StrEnum):
    """How a process does."""

    ALIVE = "alive"
    DEGRADED = "degraded"
    HUNG = "hung"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """How a process does, and why it is thought so."""

    health: Health
    reason: str


class Liveness:
    """Watches one process from the moment it is ready."""

    def __init__(self, settings: SupervisorConfig, *, now: float) -> None:
        self._settings = settings
        self._looked_at = now
        self._beat: Beat | None = None
        self._silent_s = self._stuck_s = 0.0

    def look(self, beat: Beat | None, *, now: float) -> Finding:
        """`beat` is the latest at `now` (seconds of any steady clock); None means that nothing new was heard."""
        elapsed_s = min(now - self._looked_at, LOOK_BEATS * self._settings.heartbeat_s)
        self._looked_at = now
        before, self._beat = self._beat, beat or self._beat
        is_new = beat is not None and (before is None or beat.time != before.time)
        self._silent_s = 0.0 if is_new else self._silent_s + elapsed_s
        self._stuck_s = self._stuck_s + elapsed_s if _is_stuck(before, self._beat) else 0.0
        return max(
            _judge(self._silent_s, self._settings.silent_s, "no heartbeat"),
            _judge(self._stuck_s, self._settings.hang_s, f"no progress with {self._beat.doing if self._beat else ''}"),
            key=lambda finding: list(Health).index(finding.health),
        )


def _is_stuck(before: Beat | None, beat: Beat | None) -> bool:
    if before is None or beat is None:
        return False
    return bool(beat.doing) and (before.doing, before.progress) == (beat.doing, beat.progress)


def _judge(seconds: float, limit_s: float, what: str) -> Finding:
    if seconds < DEGRADED_SHARE * limit_s:
        return Finding(health=Health.ALIVE, reason="it gets on")
    health = Health.HUNG if seconds >= limit_s else Health.DEGRADED
    return Finding(health=health, reason=f"{what} for {seconds:.1f} s")
