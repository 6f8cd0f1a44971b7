"""Whole groups with nothing to learn from are dropped before they cost training time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from penstock.types import EpisodeSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class Keep:
    """Train it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Drop:
    """Do not train it, because of `reason`."""

    reason: str


class GroupFilter(Protocol):
    def decide(self, group: Sequence[EpisodeSummary]) -> Keep | Drop: ...


class KeepAll:
    """Trains everything."""

    def decide(self, group: Sequence[EpisodeSummary]) -> Keep | Drop:
        return Keep()


class DropEqualRewards:
    """Drops groups whose rewards are all equal: every advantage is zero (DAPO's dynamic sampling, arXiv 2503.14476)."""

    def decide(self, group: Sequence[EpisodeSummary]) -> Keep | Drop:
        rewards = {summary.reward for summary in group}
        return Drop(reason=f"all rewards are {next(iter(rewards)):g}") if len(rewards) == 1 else Keep()
