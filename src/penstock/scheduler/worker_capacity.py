"""Capacity: free episode slots per worker, and the segment grants in use."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.scheduler.active_group import ActiveGroup


class WorkerCapacity:
    """Slots and grants. A group reserves one slot per member at its worker. A generating member holds one of
    `max_running` grants."""

    def __init__(self, *, max_running: int) -> None:
        self.max_running = max_running
        self._num_running = 0
        self._free_slots: dict[str, int] = {}

    def add_worker(self, worker: str, capacity: int) -> None:
        """Let `worker` play up to `capacity` episodes."""
        self._free_slots[worker] = capacity

    def remove_worker(self, worker: str) -> None:
        """Give `worker` no more work."""
        self._free_slots.pop(worker, None)

    @property
    def free_grants(self) -> int:
        """Return how many more episodes may generate."""
        return self.max_running - self._num_running

    def find_worker(self, num_slots: int) -> str | None:
        """Return the worker with the most free slots; None unless it has `num_slots`."""
        worker = max(self._free_slots, key=self._free_slots.__getitem__, default=None)
        return worker if worker is not None and self._free_slots[worker] >= num_slots else None

    def reserve_slots(self, group: ActiveGroup, worker: str) -> None:
        """Assign `group` to `worker`, and reserve its slots."""
        group.worker = worker
        self._free_slots[worker] -= group.size

    def release_slots(self, group: ActiveGroup) -> None:
        """Free the slots and grants of a group that its worker no longer plays."""
        if group.worker in self._free_slots:
            self._free_slots[group.worker] += group.size
        group.worker = None
        self.return_grants(group, range(group.size))

    def take_grants(self, group: ActiveGroup, members: Iterable[int]) -> None:
        """Give grants to `members`, so that they may generate."""
        self._num_running -= len(group.generating)
        group.generating = group.generating.union(members)
        self._num_running += len(group.generating)

    def return_grants(self, group: ActiveGroup, members: Iterable[int]) -> None:
        """Free the grants of `members`."""
        self._num_running -= len(group.generating)
        group.generating = group.generating.difference(members)
        self._num_running += len(group.generating)
