"""The table of all active groups. A group has one entry, at one stage, from its admission to its end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from penstock.ports.group_records import EndedGroup
from penstock.scheduler.active_group import ActiveGroup, Kind, Stage
from penstock.scheduler.ledger import FINAL, Ledger
from penstock.scheduler.wakeup import Clock
from penstock.types import EpisodeState, GroupAttempt, Task

DecisionLogger = Callable[[str, str, Mapping[str, Any]], None]
"""The scheduler calls log_decision(decider, reason, inputs) for every decision."""

STARTED = (Stage.PLAYING, Stage.INTERRUPTED)


class ActiveGroups:
    """Active groups by number and by stage. A stage keeps the order in which groups arrived."""

    def __init__(self, *, now: Clock, log_decision: DecisionLogger) -> None:
        self.now, self.log_decision = now, log_decision
        self.ledger, self.evaluation_ledger = Ledger(), Ledger()
        self._groups: dict[int, ActiveGroup] = {}
        self._by_stage: dict[Stage, dict[int, ActiveGroup]] = {stage: {} for stage in Stage}
        self._num_started: Counter[Kind] = Counter()
        self._ended: list[EndedGroup] = []
        self.num_ended = 0
        """Number of training groups that ended, in any final state."""
        self.next_number = 0
        """Number of the next new group."""

    def admit_group(
        self, task: Task, kind: Kind, size: int, *, redundancy: int = 0, number: int | None = None
    ) -> ActiveGroup:
        """Add a group of `size` members and `redundancy` further members to the table and to the ledger of its kind."""
        number = self.next_number if number is None else number
        self.next_number = max(self.next_number, number + 1)
        group = ActiveGroup(
            number=number,
            task=task,
            kind=kind,
            stage=Stage.HELD_OUT if kind == "evaluation" else Stage.WAITING,
            size=size + redundancy,
            redundancy=redundancy,
            ledger=self.evaluation_ledger if kind == "evaluation" else self.ledger,
            admitted_at=self.now(),
        )
        group.ledger.admit(number, group.size)
        self._groups[number] = group
        self._put(group)
        return group

    def move(self, group: ActiveGroup, stage: Stage, *, kind: Kind | None = None) -> None:
        """Move `group` to the end of `stage`. `kind` also changes its kind."""
        self._take_out(group)
        group.stage, group.kind = stage, kind or group.kind
        self._put(group)

    def discard_surplus(self, group: ActiveGroup, kept: Sequence[int]) -> None:
        """Complete `group` with the members `kept`, and discard the other members."""
        if len(kept) == group.size:
            return
        group.num_surplus += group.size - len(kept)
        group.ledger.keep_members(group.number, kept)
        group.size, group.redundancy = len(kept), 0
        self.log_decision("surplus", f"{group.num_surplus} episodes more than needed", {"group": group.number})

    def end_group(self, group: ActiveGroup, state: EpisodeState, *, trained_in: int | None = None) -> None:
        """Remove `group`. Members that have not ended yet end in `state`."""
        if not group.has_ended:
            rest = [member for member in range(group.size) if group.ledger.state(group.number, member) not in FINAL]
            group.move_members(rest, state)
        del self._groups[group.number]
        self._take_out(group)
        if group.kind != "evaluation":
            counts = {
                state: group.size - group.num_stale,
                EpisodeState.DISCARDED_STALE: group.num_stale,
                EpisodeState.DISCARDED_SURPLUS: group.num_surplus,
            }
            counts = {each: count for each, count in counts.items() if count}
            self._ended.append(EndedGroup(group=group.number, counts=counts, trained_in=trained_in))
            self.num_ended += 1

    def take_ended(self) -> list[EndedGroup]:
        """Return the training groups that ended since the last call."""
        ended, self._ended = self._ended, []
        return ended

    def get(self, number: int) -> ActiveGroup | None:
        return self._groups.get(number)

    def find_attempt(self, attempt: GroupAttempt) -> ActiveGroup | None:
        """Return the group of `attempt`; None unless a worker plays exactly this attempt now."""
        group = self._groups.get(attempt.group)
        return group if group is not None and group.worker is not None and group.attempt == attempt.attempt else None

    def at(self, stage: Stage) -> list[ActiveGroup]:
        """Return the groups at `stage`, in the order of their arrival."""
        return list(self._by_stage[stage].values())

    def first(self, stage: Stage) -> ActiveGroup | None:
        """Return the group that has been at `stage` longest; None if there is no group."""
        return next(iter(self._by_stage[stage].values()), None)

    def count(self, stage: Stage) -> int:
        return len(self._by_stage[stage])

    def num_started(self, *kinds: Kind) -> int:
        """Return the number of groups of `kinds` that are PLAYING or INTERRUPTED."""
        return sum(self._num_started[kind] for kind in kinds)

    def __iter__(self) -> Iterator[ActiveGroup]:
        return iter(list(self._groups.values()))

    def __len__(self) -> int:
        return len(self._groups)

    def _put(self, group: ActiveGroup) -> None:
        self._by_stage[group.stage][group.number] = group
        if group.stage in STARTED:
            self._num_started[group.kind] += 1

    def _take_out(self, group: ActiveGroup) -> None:
        del self._by_stage[group.stage][group.number]
        if group.stage in STARTED:
            self._num_started[group.kind] -= 1
