"""Whole groups with nothing to learn from are dropped before they cost training time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import msgspec

from penstock.types import EpisodeSummary


class Keep(msgspec.Struct, frozen=True, kw_only=True):
    """Train it."""


class Drop(msgspec.Struct, frozen=True, kw_only=True):
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
