"""Evaluation groups: one per held-out task, a ledger of their own, results for whoever asked."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from penstock.scheduler.ledger import Ledger
from penstock.scheduler.live import LiveGroup
from penstock.types import NO_VERSION, EpisodeId, EpisodeState, EpisodeSummary

Played = Sequence[EpisodeSummary]
"""All episodes of a task."""


class Evaluations:
    """They are played as they come, outside staleness budget and training ledger."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self._results: dict[int, asyncio.Future[Played]] = {}
        self.num_asked = 0
        """Groups, since there were none."""
        self.num_ended = 0
        """Of those, played or given up."""

    def add(self, group: LiveGroup) -> asyncio.Future[Played]:
        """The summaries of its episodes come as the result."""
        if not self._results:
            self.num_asked = self.num_ended = 0
        self.num_asked += 1
        result = self._results[group.number] = asyncio.get_running_loop().create_future()
        return result

    def __contains__(self, number: int) -> bool:
        return number in self._results

    def played(self, group: LiveGroup, summaries: Played) -> None:
        """It is whole. Its episodes end as those of a training group do, as TRAINED, though nothing trains them."""
        for state in (EpisodeState.TRAINING, EpisodeState.TRAINED):
            self.ledger.move(group.number, range(group.size), state)
        self._end(group, summaries)

    def failed(self, group: LiveGroup, error: str) -> None:
        """It was given up."""
        self._end(group, [_failed(group, member, error) for member in range(group.size)])

    def _end(self, group: LiveGroup, summaries: Played) -> None:
        self._results.pop(group.number).set_result(summaries)
        self.num_ended += 1

    def clear(self) -> None:
        """Nobody asks any more."""
        self._results.clear()


def _failed(group: LiveGroup, member: int, error: str) -> EpisodeSummary:
    return EpisodeSummary(
        episode=EpisodeId(group.task.tag, group.number, member, group.attempt),
        status="failed",
        reward=0.0,
        num_turns=0,
        prompt_tokens=0,
        response_tokens=0,
        version_min=NO_VERSION,
        version_max=NO_VERSION,
        seconds=0.0,
        error=error,
    )
