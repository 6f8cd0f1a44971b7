"""Whether a process that was lost is started again, and when. A pure decider: it takes `now`, and reads no clock.

Each process of a run, whatever its role, has a budget of restarts within a sliding window. The pauses before them grow,
so that what cannot work is not tried in a hurry, and what was an accident is mended at once. A process that goes back
to what it had saved may fail for ever at the same place, however slowly: its restarts count until it has saved more.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum

from penstock.config import SupervisorConfig
from penstock.supervisor.failure import Exit, ExitKind

JITTER = 0.25
"""Share of a pause that chance may add: processes that fell together need not get up together."""


class Action(StrEnum):
    """What follows from an exit."""

    RESTART = "restart"
    FAIL = "fail"
    IGNORE = "ignore"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """What follows from an exit, and why."""

    action: Action
    reason: str
    after_s: float = 0.0
    """The pause before a restart."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Restart:
    """One that was granted."""

    at: float
    num_saved: int | None


class RestartPolicy:
    """Remembers the restarts it has granted."""

    def __init__(self, settings: SupervisorConfig, *, jitter: Callable[[], float] = random.random) -> None:
        """`jitter` returns numbers in [0, 1)."""
        self._settings = settings
        self._jitter = jitter
        self._granted: defaultdict[str, deque[_Restart]] = defaultdict(deque)

    def decide(
        self, name: str, loss: Exit, *, was_ready: bool, completed: bool, now: float, num_saved: int | None = None
    ) -> Decision:
        """The process `name` ended at `now` (seconds of any steady clock). `was_ready`: it was once, in this life of
        the run. `completed`: the run's work is done, and recorded. `num_saved`: how often it has saved what it goes
        back to; None if it goes back to nothing."""
        if completed:
            return Decision(action=Action.IGNORE, reason="the run is complete")
        if loss.kind is ExitKind.CONFIG_ERROR:
            return Decision(action=Action.FAIL, reason="no restart mends a configuration")
        if loss.kind is ExitKind.GAVE_UP:
            return Decision(action=Action.FAIL, reason=f"{name} says that the run cannot go on")
        if not was_ready:
            return Decision(action=Action.FAIL, reason=f"{name} was never ready, so it is not restarted")
        return self._within_budget(name, now, num_saved)

    def _within_budget(self, name: str, now: float, num_saved: int | None) -> Decision:
        settings, granted = self._settings, self._granted[name]
        while (
            granted
            and granted[0].at <= now - settings.restart_window_s
            and (num_saved is None or granted[0].num_saved != num_saved)
        ):
            granted.popleft()
        spent = f"{len(granted)} of {settings.max_restarts} restarts within {settings.restart_window_s:g} s"
        if num_saved is not None:
            spent += " or since it last saved"
        if len(granted) >= settings.max_restarts:
            return Decision(action=Action.FAIL, reason=f"{name} has had {spent}")
        pause_s = settings.backoff_s * 2 ** len(granted)
        after_s = min(pause_s * (1 + JITTER * self._jitter()), settings.max_backoff_s)
        reason = f"{name} has had {spent}: one more after {after_s:.2f} s"
        granted.append(_Restart(at=now, num_saved=num_saved))
        return Decision(action=Action.RESTART, reason=reason, after_s=after_s)
