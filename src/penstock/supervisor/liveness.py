"""The check whether a running process makes progress. Pure: it takes `now` and the latest heartbeat.

Two things can be wrong. *Silence*: no new heartbeat arrives, because the process is stopped or its event loop is
blocked. *No progress*: heartbeats arrive and name an activity, but neither the activity nor the progress count changes.
A long step causes no silence, because steps run in threads beside the event loop.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum

from penstock.config import SupervisorConfig
from penstock.ports.process_launcher import Beat

DEGRADED_SHARE = 0.5
"""Share of the limit for "hung" at which a process counts as degraded."""
LOOK_BEATS = 4
"""Most heartbeat periods that one look adds to the silent or stuck time of a process. If the supervisor itself was
stopped for a while, the other processes may have been stopped too."""


class Health(IntEnum):
    """The health of a process, from good to bad."""

    ALIVE = 0
    DEGRADED = 1
    HUNG = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """The health of a process, and the reason for this judgement."""

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
        """Judge the process at `now` (seconds of any steady clock). `beat` is the latest heartbeat, or None if it could
        not be read."""
        elapsed_s = min(now - self._looked_at, LOOK_BEATS * self._settings.heartbeat_s)
        self._looked_at = now
        before, self._beat = self._beat, beat or self._beat
        is_new = beat is not None and (before is None or beat.time != before.time)
        self._silent_s = 0.0 if is_new else self._silent_s + elapsed_s
        silence = _judge(self._silent_s, self._settings.silent_s, "no heartbeat")
        if self._beat is None or before is None:
            return silence
        doing = self._beat.doing
        is_stuck = doing and (before.doing, before.progress) == (doing, self._beat.progress)
        self._stuck_s = self._stuck_s + elapsed_s if is_stuck else 0.0
        standstill = _judge(self._stuck_s, self._settings.hang_s, f"no progress with {doing}")
        return max(silence, standstill, key=lambda finding: finding.health)


def _judge(seconds: float, limit_s: float, problem: str) -> Finding:
    if seconds < DEGRADED_SHARE * limit_s:
        return Finding(health=Health.ALIVE, reason="it makes progress")
    health = Health.HUNG if seconds >= limit_s else Health.DEGRADED
    return Finding(health=health, reason=f"{problem} for {seconds:.1f} s")
