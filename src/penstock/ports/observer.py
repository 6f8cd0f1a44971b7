"""The observer: it records events, decisions and metrics of a run."""

from __future__ import annotations

from collections.abc import AsyncIterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from penstock.ports.group_records import GroupRecord
from penstock.types import NO_VERSION, LearnerState, Summaries, Task, WeightsTransport


@dataclass(frozen=True, slots=True, kw_only=True)
class BusySpan:
    """One bar of the timeline: `process` was busy with `kind` from `start` to `end` (seconds since the epoch)."""

    process: str
    kind: Literal[
        "generate", "train", "step", "update_weights", "publish", "checkpoint", "evaluate", "warm_start", "restore"
    ]
    start: float
    end: float
    policy_version: int = NO_VERSION


Scheduling = Mapping[str, float | None]
"""The scheduler's figures at a step, by name."""


class Observer:
    """The record of a run: events, decisions and metrics. A method that a subclass leaves out records nothing."""

    def event(self, event: str, **details: Any) -> None:
        """Record an event."""

    def decision(self, decider: str, reason: str, inputs: Mapping[str, Any]) -> None:
        """Record the decision of a pure decider."""

    async def restore(self, records: AsyncIterable[GroupRecord]) -> None:
        """Continue the metrics of a run without a trainer, from the group records of an earlier controller."""

    def group_completed(self, tag: str, episodes: Summaries) -> None:
        """Record a completed training group."""

    def accumulated(self, counts: Mapping[str, float]) -> None:
        """Record the counts of one `Trainer.accumulate`."""

    def updated(self, num_servers: Mapping[WeightsTransport, int]) -> None:
        """Record how the newest weights came to the servers: the number of servers by transport."""

    def stepped(self, step: int, learner: LearnerState, ledger: Mapping[str, int], scheduling: Scheduling) -> None:
        """Record an optimizer step."""

    def progressed(self, groups: int, ledger: Mapping[str, int], scheduling: Scheduling) -> None:
        """Record progress of a run without a trainer: `groups` have ended. Repeated progress is ignored."""

    def evaluated(
        self, when: str, step: int, tasks: Sequence[Task], played: Sequence[Summaries], *, shown: int, solved_at: float
    ) -> None:
        """Record an evaluation after optimizer step `step`: the episodes `played` of each held-out task."""
