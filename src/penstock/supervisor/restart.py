"""The decision whether and when a lost process is restarted. Pure: it takes `now`, and reads no clock.

Each process of a run, in any role, has a budget of restarts within a sliding window. The pauses before restarts grow.
So a single accident is repaired at once, and a permanent fault does not cause rapid restarts. A process that goes back
to a checkpoint may fail at the same place again and again, even slowly. So its restarts count until it saves again.
A process that fails before it was ever ready will most likely fail again, so it is not restarted. The loss of its
machine proves nothing against it, so then it is.

The processes of a restart set are useless without each other. When one ends, all are ended and restarted, which counts
as one restart of the set.
"""

from __future__ import annotations

import random
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import NamedTuple

from penstock.config import SupervisorConfig
from penstock.supervisor.failure import Exit, ExitKind

JITTER = 0.25
"""Largest random share added to a pause, so that processes that ended together do not restart at the same moment."""


class Action(StrEnum):
    """The action after an exit."""

    RESTART = "restart"
    FAIL = "fail"
    IGNORE = "ignore"


@dataclass(frozen=True, slots=True, kw_only=True)
class Decision:
    """The action after an exit, and its reason."""

    action: Action
    reason: str
    after_s: float = 0.0
    """The pause before a restart."""
    ends_set: bool = False
    """The other processes of its restart set have to be ended, and are restarted with it."""


class _Restart(NamedTuple):
    """A restart that was granted."""

    at: float
    num_saved: int | None


class _SetRestart(NamedTuple):
    """The restart of a whole restart set."""

    first: str
    """The process that ended first."""
    ended_at: float
    restart_at: float


@dataclass(eq=False)
class RestartPolicy:
    """Decides about restarts, and remembers the ones that it granted."""

    settings: SupervisorConfig
    jitter: Callable[[], float] = random.random
    """Returns numbers in [0, 1)."""
    _granted: defaultdict[str, deque[_Restart]] = field(default_factory=lambda: defaultdict(deque))
    _set_restarts: dict[str, _SetRestart] = field(default_factory=dict)
    """The latest restart of each restart set."""

    def decide(
        self,
        name: str,
        loss: Exit,
        *,
        was_ready: bool,
        completed: bool,
        now: float,
        num_saved: int | None = None,
        restart_set: str = "",
        started: float = 0.0,
    ) -> Decision:
        """Decide what follows after process `name` ended at `now` (seconds of any steady clock).

        `was_ready`: the process, and all of its restart set, was ready once in this life of the run. `completed`: the
        run's work is done and recorded. `num_saved`: how many checkpoints it has saved; None if it restores nothing.
        `restart_set`: name of its restart set; empty if it has none. `started`: when it was started, on the same clock.
        """
        if completed:
            return Decision(action=Action.IGNORE, reason="the run is complete")
        if loss.kind is ExitKind.CONFIG_ERROR:
            return Decision(action=Action.FAIL, reason="a restart cannot repair a wrong configuration")
        if loss.kind is ExitKind.GAVE_UP:
            return Decision(action=Action.FAIL, reason=f"{name} reported that the run cannot continue")
        latest = self._set_restarts.get(restart_set) if restart_set else None
        if latest and started <= latest.ended_at:
            reason = f"{name} is restarted together with {latest.first}"
            return Decision(action=Action.RESTART, reason=reason, after_s=max(0.0, latest.restart_at - now))
        if not was_ready and loss.kind is not ExitKind.LOST:
            return Decision(action=Action.FAIL, reason=f"{restart_set or name} was never ready, so it is not restarted")
        if not restart_set:
            return self._within_budget(name, now, num_saved)
        decision = self._within_budget(restart_set, now, num_saved)
        if decision.action is Action.RESTART:
            self._set_restarts[restart_set] = _SetRestart(name, ended_at=now, restart_at=now + decision.after_s)
        return replace(decision, ends_set=decision.action is Action.RESTART)

    def _within_budget(self, name: str, now: float, num_saved: int | None) -> Decision:
        settings, granted = self.settings, self._granted[name]
        since = now - settings.restart_window_s
        while granted and granted[0].at <= since and (num_saved is None or granted[0].num_saved != num_saved):
            granted.popleft()
        spent = f"{len(granted)} of {settings.max_restarts} restarts within {settings.restart_window_s:g} s"
        if num_saved is not None:
            spent += " or since it last saved"
        if len(granted) >= settings.max_restarts:
            return Decision(action=Action.FAIL, reason=f"{name} has used {spent}")
        pause_s = settings.backoff_s * 2 ** len(granted)
        after_s = min(pause_s * (1 + JITTER * self.jitter()), settings.max_backoff_s)
        reason = f"{name} has used {spent}: it restarts in {after_s:.2f} s"
        granted.append(_Restart(at=now, num_saved=num_saved))
        return Decision(action=Action.RESTART, reason=reason, after_s=after_s)
