"""Whole groups that are not worth training are dropped before they cost training time, each with a reason.

A filter is one class with one method:

    class TooEasy:
        def __init__(self, *, above: float = 0.9): ...            # options of the configuration
        def decide(self, group: FinishedGroup) -> Keep | Drop: ...

It sees a group once all its members have been played, none of them failed. It may keep state: what `state_dict()`
returns (plain values) is saved with checkpoints, and given to `load_state_dict` when a run goes on from one. A filter
that raises, or answers something else, fails the run: what it would have dropped cannot be known. A dropped group gives
its place to another one.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from statistics import fmean
from typing import Any, Protocol, get_args

import msgspec

from penstock.config import ConfigError, GroupFilterConfig
from penstock.config.imports import import_named
from penstock.types import EpisodeSummary, StopReason, Task

KEY = "scheduler.group_filter"


class Keep(msgspec.Struct, frozen=True, kw_only=True):
    """Train it."""


class Drop(msgspec.Struct, frozen=True, kw_only=True):
    """Do not train it, because of `reason`. Drops are counted by it: leave out what differs from group to group."""

    reason: str


class Dropped(msgspec.Struct, frozen=True, kw_only=True):
    """Which filter dropped a group, and why."""

    name: str
    reason: str


class FinishedGroup(msgspec.Struct, frozen=True, kw_only=True):
    """What a filter sees: a group whose members were all played to an end."""

    task: Task
    episodes: Sequence[EpisodeSummary]


class GroupFilter(Protocol):
    def decide(self, group: FinishedGroup) -> Keep | Drop: ...


class FilterFailed(RuntimeError):
    """A filter raised, or did not answer; the message names it."""

    self_explanatory = True
    hopeless = True


class ZeroVariance:
    """Drops groups whose rewards are all equal: every advantage is zero (DAPO's dynamic sampling, arXiv 2503.14476)."""

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
    """Drops groups in which more than `max_share` of the members stopped for one of `reasons` (see
    `types.StopReason`): answers that were cut, by default."""

    def __init__(self, *, reasons: Collection[str] = ("max_length",), max_share: float = 0.5) -> None:
        known = get_args(StopReason)
        if unknown := set(reasons) - set(known):
            raise ValueError(f"nothing stops for the reason {', '.join(unknown)}: there are {', '.join(known)}")
        self._reasons, self._max_share = reasons, max_share

    def decide(self, group: FinishedGroup) -> Keep | Drop:
        stopped_so = fmean(episode.stop_reason in self._reasons for episode in group.episodes)
        too_many = f"more than {self._max_share:.0%} of the members stopped for {' or '.join(self._reasons)}"
        return Drop(reason=too_many) if stopped_so > self._max_share else Keep()


class ScoreRange:
    """Drops groups whose mean reward is not within `low` and `high`: too hard for this policy, or too easy."""

    def __init__(self, *, low: float = float("-inf"), high: float = float("inf")) -> None:
        self._low, self._high = low, high

    def decide(self, group: FinishedGroup) -> Keep | Drop:
        mean = fmean(episode.reward for episode in group.episodes)
        if mean < self._low:
            return Drop(reason=f"the mean reward is below {self._low:g}")
        return Drop(reason=f"the mean reward is above {self._high:g}") if mean > self._high else Keep()


BUILT_IN: Mapping[str, type[GroupFilter]] = {
    "zero_variance": ZeroVariance,
    "over_long": OverLong,
    "stop_reason": StoppedBecause,
    "score_range": ScoreRange,
}


class FilterChain:
    """All filters of a run; the first that drops a group decides."""

    def __init__(self, configs: Sequence[GroupFilterConfig]) -> None:
        """Raises `ConfigError` for a filter that there is not, or whose options do not fit it."""
        self._filters = {config.name: _make(config) for config in configs}

    def decide(self, group: FinishedGroup) -> Dropped | None:
        """Who drops the group; None if all keep it. Raises `FilterFailed`."""
        for name, each in self._filters.items():
            verdict = _ask(name, each, group)
            if isinstance(verdict, Drop):
                return Dropped(name=name, reason=verdict.reason)
        return None

    def state_dict(self) -> dict[str, Any]:
        """Of those that have one."""
        return {name: each.state_dict() for name, each in self._filters.items() if hasattr(each, "state_dict")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go back to a saved state."""
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
        raise ConfigError(
            f"{KEY} {name} with options {dict(config.options)}: {type(error).__name__}: {error}"
        ) from None
    if not callable(getattr(found, "decide", None)):
        raise ConfigError(f"{KEY} {name!r} has no decide(group)")
    filter_: GroupFilter = found
    return filter_


def _ask(name: str, asked: GroupFilter, group: FinishedGroup) -> Keep | Drop:
    try:
        verdict: object = asked.decide(group)
    except Exception as error:
        raise FilterFailed(f"{KEY} {name} raised {type(error).__name__} on {group.task.task_id}: {error}") from error
    if not isinstance(verdict, Keep | Drop):
        raise FilterFailed(f"{KEY} {name} answered {verdict!r} for {group.task.task_id}, neither Keep nor Drop")
    return verdict
