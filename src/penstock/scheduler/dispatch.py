"""What runs next. A dispatch policy orders whole groups; it never looks at a clock, `now` is passed in."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Protocol

from penstock.types import Task


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingGroup:
    """An admitted group nobody plays yet."""

    group: int
    task: Task
    size: int
    admitted_at: float


@dataclass(frozen=True, slots=True, kw_only=True)
class DispatchDecision:
    """`group` runs next."""

    group: PendingGroup
    reason: str


class DispatchPolicy(Protocol):
    """Holds the pending groups in its own order."""

    def push(self, group: PendingGroup) -> None: ...

    def pop(self, *, now: float) -> DispatchDecision | None:
        """Take out the group to run next; None if nothing is pending."""
        ...

    def __len__(self) -> int: ...


class Fifo:
    """First admitted, first dispatched. A group that must run again goes to the end."""

    def __init__(self) -> None:
        self._queue: deque[PendingGroup] = deque()

    def push(self, group: PendingGroup) -> None:
        self._queue.append(group)

    def pop(self, *, now: float) -> DispatchDecision | None:
        if not self._queue:
            return None
        group = self._queue.popleft()
        return DispatchDecision(group=group, reason=f"fifo: waited {now - group.admitted_at:.3f} s")

    def __len__(self) -> int:
        return len(self._queue)


def dispatch_policy(name: str) -> DispatchPolicy:
    """The policy of `scheduler.dispatch`."""
    return {"fifo": Fifo}[name]()
