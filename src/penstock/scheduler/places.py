"""Who can play: free episode places per worker, and the segment grants that are out."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.scheduler.live import LiveGroup


class Places:
    """A group that a worker plays reserves a place for each member; a member that generates holds a grant."""

    def __init__(self, *, max_running: int) -> None:
        self._max_running = max_running
        self._running = 0
        self._free: dict[str, int] = {}

    def join(self, worker: str, capacity: int) -> None:
        """`worker` can hold `capacity` episodes."""
        self._free[worker] = capacity

    def lose(self, worker: str) -> None:
        """`worker` is gone."""
        self._free.pop(worker, None)

    @property
    def free_grants(self) -> int:
        """Episodes that may start generating."""
        return self._max_running - self._running

    def roomiest(self, num_places: int) -> str | None:
        """The worker with the most free places, if it has `num_places`."""
        worker = max(self._free, key=self._free.__getitem__, default=None)
        return worker if worker is not None and self._free[worker] >= num_places else None

    def reserve(self, group: LiveGroup, worker: str) -> None:
        """`worker` plays `group`."""
        group.worker = worker
        self._free[worker] -= group.size

    def release(self, group: LiveGroup) -> None:
        """Nobody plays the group any more: its places and grants return."""
        if group.worker in self._free:
            self._free[group.worker] += group.size
        group.worker = None
        self.stop(group, range(group.size))

    def generate(self, group: LiveGroup, members: Iterable[int]) -> None:
        """`members` hold a grant now."""
        self._running -= len(group.generating)
        group.generating.update(members)
        self._running += len(group.generating)

    def stop(self, group: LiveGroup, members: Iterable[int]) -> None:
        """`members` hold none any more."""
        self._running -= len(group.generating)
        group.generating.difference_update(members)
        self._running += len(group.generating)
