"""The conserved ledger: every admitted episode is in exactly one state, and the states always add up.

    admitted = pending + leased + unfinished + rewarding + ready + training
             + trained + collected + filtered + discarded(stale | surplus) + failed + cancelled

The ledger holds live episodes one by one, and ended episodes only as counts, so that memory does not grow with the run.
The states of a group's episodes define the state of the group. Pure: no clock, no tasks, no logging.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain

from penstock.types import EpisodeState as S

FINAL = frozenset({S.TRAINED, S.COLLECTED, S.FILTERED, S.DISCARDED_STALE, S.DISCARDED_SURPLUS, S.FAILED, S.CANCELLED})

_LEAVES = frozenset({S.FAILED, S.CANCELLED})
NEXT: Mapping[S, frozenset[S]] = {
    S.PENDING: frozenset({S.LEASED, S.DISCARDED_SURPLUS}) | _LEAVES,
    S.LEASED: frozenset({S.PENDING, S.UNFINISHED, S.REWARDING, S.READY, S.DISCARDED_SURPLUS}) | _LEAVES,
    S.UNFINISHED: frozenset({S.LEASED, S.PENDING, S.READY, S.DISCARDED_SURPLUS}) | _LEAVES,
    S.REWARDING: frozenset({S.PENDING, S.READY, S.DISCARDED_SURPLUS}) | _LEAVES,
    S.READY: frozenset({S.TRAINING, S.COLLECTED, S.PENDING, S.FILTERED, S.DISCARDED_STALE, S.DISCARDED_SURPLUS})
    | _LEAVES,
    S.TRAINING: frozenset({S.TRAINED, S.READY}) | _LEAVES,
}
"""Legal transitions.

LEASED, UNFINISHED, REWARDING or READY -> PENDING: a new attempt starts after a lost, failed or restarted one.
UNFINISHED -> READY: an agent ended before its answer was complete.
TRAINING -> READY: the trainer was lost.
"""


class LedgerError(RuntimeError):
    """A change that would break the sum of states. It is always a bug, never an error of the user."""


class Ledger:
    """Counts of all episodes by state, and the states of live episodes by group."""

    def __init__(self) -> None:
        self._live: dict[int, list[S]] = {}
        self._counts: Counter[S] = Counter()
        self.num_admitted = 0

    def admit(self, group: int, size: int) -> None:
        """Add `size` pending episodes of `group`."""
        if group in self._live:
            raise LedgerError(f"group {group} is already in the ledger")
        self._live[group] = [S.PENDING] * size
        self._counts[S.PENDING] += size
        self.num_admitted += size

    def add_counts(self, counts: Mapping[S, int]) -> None:
        """Count episodes that ended under an earlier controller, by final state."""
        self._counts.update(counts)
        self.num_admitted += sum(counts.values())

    def remove_counts(self, counts: Mapping[S, int]) -> None:
        """Remove the counts of an ended group, before the group is admitted again."""
        self._counts.subtract(counts)
        self.num_admitted -= sum(counts.values())

    def move(self, group: int, episodes: Iterable[int], to: S) -> None:
        """Move members of `group` to state `to`. Raises `LedgerError`, and moves none, if a transition is illegal."""
        states, moved = self._group(group), set(episodes)
        if not moved:
            return
        if min(moved) < 0 or max(moved) >= len(states):
            raise LedgerError(f"group {group} has {len(states)} episodes: {sorted(moved)} are not all among them")
        leaving = _by_state(states, moved)
        for state in leaving:
            if to not in NEXT.get(state, ()):
                episode = min(episode for episode in moved if states[episode] is state)
                raise LedgerError(f"episode {group}/{episode} cannot go from {state} to {to}")
        for state, count in leaving.items():
            self._counts[state] -= count
        self._counts[to] += len(moved)
        if len(moved) == len(states):
            states[:] = [to] * len(states)
        else:
            for episode in moved:
                states[episode] = to
        if to in FINAL and FINAL.issuperset(states):
            del self._live[group]

    def keep_members(self, group: int, kept: Sequence[int]) -> None:
        """Discard all members except `kept` as surplus.

        The `kept` members are ready. They get the numbers from 0 on, in this order.
        """
        states = self._group(group)
        self.move(group, set(range(len(states))).difference(kept), S.DISCARDED_SURPLUS)
        states[:] = [states[member] for member in kept]

    def state(self, group: int, episode: int) -> S:
        """Return the state of a live group's member."""
        return self._group(group)[episode]

    def members(self, group: int, *states: S) -> tuple[int, ...]:
        """Return the members of a live group that are in one of `states`; all members without `states`."""
        held = self._group(group)
        if not states or held.count(held[0]) == len(held):
            return tuple(range(len(held))) if not states or held[0] in states else ()
        return tuple(i for i, state in enumerate(held) if state in states)

    def __contains__(self, group: int) -> bool:
        """Return whether the group has members that have not ended."""
        return group in self._live

    def count(self, *states: S) -> int:
        return sum(self._counts[state] for state in states)

    def counts(self) -> dict[str, int]:
        """Return the count of every state, and `admitted`."""
        return {"admitted": self.num_admitted} | {state.value: self._counts[state] for state in S}

    def check(self) -> None:
        """Raise `LedgerError` unless the states add up to the number of admitted episodes."""
        if any(count < 0 for count in self._counts.values()):
            raise LedgerError(f"negative count in {self.counts()}")
        if sum(self._counts.values()) != self.num_admitted:
            raise LedgerError(f"episodes lost or invented: {self.counts()}")
        held = Counter(chain.from_iterable(self._live.values()))
        for state in S:
            if state not in FINAL and held[state] != self._counts[state]:
                raise LedgerError(f"{self._counts[state]} {state} episodes counted, {held[state]} held")

    def _group(self, group: int) -> list[S]:
        try:
            return self._live[group]
        except KeyError:
            raise LedgerError(f"group {group} is not in the ledger or already finished") from None


def _by_state(states: Sequence[S], moved: Collection[int]) -> Mapping[S, int]:
    """Count `moved` by state. The usual case is fast: all members of the group are in one state."""
    if states.count(states[0]) == len(states):
        return {states[0]: len(moved)}
    return Counter([states[episode] for episode in moved])
