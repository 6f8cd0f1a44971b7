"""Group filters drop groups that are not worth training. Each drop has a reason.

A filter is one class with one method:

    class TooEasy:
        def __init__(self, *, above: float = 0.9): ...            # options of the configuration
        def decide(self, group: FinishedGroup) -> Keep | Drop: ...

The scheduler calls it once all members of a group have ended and none failed. Episodes then bring the whole latest
`info` of their environments (`episode.info`), up to 256 KB. A filter may keep state: checkpoints save the plain values
that `state_dict()` returns, and a resumed run passes them to `load_state_dict`. If a filter raises, or returns neither
Keep nor Drop, the run fails, because the decision is missing. Another group replaces a dropped group.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from statistics import fmean
from typing import Any, Protocol, get_args

import msgspec

from penstock.alarms import HopelessError
from penstock.config import ConfigError, GroupFilterConfig
from penstock.config.imports import import_named
from penstock.types import StopReason, Summaries, Task

KEY = "scheduler.group_filter"
ZERO_VARIANCE = "zero_variance"


class Keep(msgspec.Struct, frozen=True, kw_only=True):
    """Train the group."""


class Drop(msgspec.Struct, frozen=True, kw_only=True):
    """Do not train the group. Drops are counted by `reason`, so leave out details that differ between groups."""

    reason: str


class Dropped(msgspec.Struct, frozen=True, kw_only=True):
    """The name of the filter that dropped a group, and its reason."""

    name: str
    reason: str


class FinishedGroup(msgspec.Struct, frozen=True, kw_only=True):
    """A group for a filter to judge. All its members have ended."""

    task: Task
    episodes: Summaries


class GroupFilter(Protocol):
    def decide(self, group: FinishedGroup) -> Keep | Drop: ...


class FilterFailed(HopelessError):
    """A filter raised, or returned neither Keep nor Drop. The message names the filter."""


class ZeroVariance:
    """Drops groups with equal rewards: every advantage is zero (dynamic sampling of DAPO, arXiv 2503.14476)."""

    def decide(self, group: FinishedGroup) -> Keep | Drop:
        rewards = {episode.reward for episode in group.episodes}
        return Drop(reason=f"all rewards are {next(iter(rewards)):g}") if len(rewards) == 1 else Keep()


class OverLong:
    """Drops groups in which more than `max_share` of the members generated more than `max_tokens` tokens."""

    def __init__(self, *, max_tokens: int, max_share: float = 0.5) -> None:
        self._max_tokens, self._max_share = max_tokens, max_share

    def decide(self, group: FinishedGroup) -> Keep | Drop:
        long = fmean(episode.response_tokens > self._max_tokens for episode in group.episodes)
        too_many = f"more than {self._max_share:.0%} of the answers are longer than {self._max_tokens} tokens"
        return Drop(reason=too_many) if long > self._max_share else Keep()


class StoppedBecause:
    """Drops groups in which more than `max_share` of the members stopped for one of `reasons`.

    `types.StopReason` lists the reasons. By default, the filter drops groups of truncated answers.
    """

    def __init__(self, *, reasons: Collection[str] = ("max_length",), max_share: float = 0.5) -> None:
        known = get_args(StopReason)
        if unknown := set(reasons) - set(known):
            raise ValueError(f"unknown stop reason {', '.join(unknown)}: use {', '.join(known)}")
        self._reasons, self._max_share = reasons, max_share

    def decide(self, group: FinishedGroup) -> Keep | Drop:
        stopped_so = fmean(episode.stop_reason in self._reasons for episode in group.episodes)
        too_many = f"more than {self._max_share:.0%} of the members stopped for {' or '.join(self._reasons)}"
        return Drop(reason=too_many) if stopped_so > self._max_share else Keep()


class ScoreRange:
    """Drops groups with a mean reward below `low` (too hard for this policy) or above `high` (too easy)."""

    def __init__(self, *, low: float = float("-inf"), high: float = float("inf")) -> None:
        self._low, self._high = low, high

    def decide(self, group: FinishedGroup) -> Keep | Drop:
        mean = fmean(episode.reward for episode in group.episodes)
        if mean < self._low:
            return Drop(reason=f"the mean reward is below {self._low:g}")
        return Drop(reason=f"the mean reward is above {self._high:g}") if mean > self._high else Keep()


BUILT_IN: Mapping[str, type[GroupFilter]] = {
    ZERO_VARIANCE: ZeroVariance,
    "over_long": OverLong,
    "stop_reason": StoppedBecause,
    "score_range": ScoreRange,
}


class FilterChain:
    """All filters of a run, in order. The first filter that drops a group decides."""

    def __init__(self, configs: Sequence[GroupFilterConfig]) -> None:
        """Create the filters. Raises `ConfigError` for an unknown filter, or for options that do not fit a filter."""
        self._filters = {config.name: _make(config) for config in configs}

    def decide(self, group: FinishedGroup) -> Dropped | None:
        """Return the filter that drops the group, and its reason; None if all filters keep the group.

        Raises `FilterFailed` if a filter raises or returns neither Keep nor Drop.
        """
        for name, each in self._filters.items():
            verdict = _decide(name, each, group)
            if isinstance(verdict, Drop):
                return Dropped(name=name, reason=verdict.reason)
        return None

    def state_dict(self) -> dict[str, Any]:
        """Return the states of the filters that have one."""
        return {name: each.state_dict() for name, each in self._filters.items() if hasattr(each, "state_dict")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore saved states of filters."""
        for name, each in self._filters.items():
            if name in state and hasattr(each, "load_state_dict"):
                each.load_state_dict(state[name])


def _make(config: GroupFilterConfig) -> GroupFilter:
    name = config.name
    if name not in BUILT_IN and ":" not in name:
        raise ConfigError(f"unknown {KEY} {name!r}: it is one of {', '.join(BUILT_IN)}, or package.module:Class")
    kind = BUILT_IN.get(name) or import_named(KEY, name, wanted="a class with decide(group)")
    try:
        found: Any = kind(**config.options)
    except Exception as error:
        raise ConfigError(f"{KEY} {name} with options {config.options}: {type(error).__name__}: {error}") from None
    if not callable(getattr(found, "decide", None)):
        raise ConfigError(f"{KEY} {name!r} has no decide(group)")
    made: GroupFilter = found
    return made


def _decide(name: str, each: GroupFilter, group: FinishedGroup) -> Keep | Drop:
    try:
        verdict: object = each.decide(group)
    except Exception as error:
        raise FilterFailed(f"{KEY} {name} raised {type(error).__name__} on {group.task.task_id}: {error}") from error
    if not isinstance(verdict, Keep | Drop):
        raise FilterFailed(f"{KEY} {name} returned {verdict!r} for {group.task.task_id}: return Keep or Drop")
    return verdict
