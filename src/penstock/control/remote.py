"""The controller's view of the other processes: ports.Trainer and ports.Workers over the bus."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from penstock.control.bus import Bus
from penstock.control.messages import (
    Accumulate,
    Accumulated,
    AnyMessage,
    Cancel,
    Grant,
    LearnerStateUpdate,
    NewTask,
    Publish,
    Published,
    SaveCheckpoint,
    Step,
    WarmStart,
    WarmStarted,
)
from penstock.ports import Work
from penstock.types import GroupAttempt, GroupRef, LearnerState, SegmentGrant, WeightsHandle

Reply = TypeVar("Reply", bound=AnyMessage)


class RemoteTrainer:
    """ports.Trainer in another process."""

    def __init__(self, bus: Bus, name: str, *, timeout_s: float, warm_start_timeout_s: float = 3600.0) -> None:
        self._bus, self._name, self._timeout_s = bus, name, timeout_s
        self._warm_start_timeout_s = warm_start_timeout_s

    async def warm_start(self) -> Mapping[str, float]:
        return (await self._ask(WarmStart(), WarmStarted, self._warm_start_timeout_s)).metrics

    async def accumulate(self, groups: Sequence[GroupRef]) -> Mapping[str, float]:
        return (await self._ask(Accumulate(groups=list(groups)), Accumulated)).metrics

    async def step(self) -> LearnerState:
        return (await self._ask(Step(), LearnerStateUpdate)).state

    async def publish(self) -> WeightsHandle:
        return (await self._ask(Publish(), Published)).handle

    async def checkpoint(self, directory: Path, state: Mapping[str, Any]) -> None:
        message = SaveCheckpoint(directory=str(directory), state=dict(state))
        await self._bus.request(self._name, message, timeout_s=self._timeout_s)

    async def _ask(self, message: AnyMessage, reply_type: type[Reply], timeout_s: float | None = None) -> Reply:
        reply = await self._bus.request(self._name, message, timeout_s=timeout_s or self._timeout_s)
        if not isinstance(reply, reply_type):
            raise TypeError(f"{self._name} answered {type(message).__name__} with {type(reply).__name__}")
        return reply


class RemoteWorkers:
    """ports.Workers: environment workers in other processes. What they must acknowledge is sent by `tasks`."""

    def __init__(self, bus: Bus, tasks: asyncio.TaskGroup, *, timeout_s: float) -> None:
        self._bus, self._tasks, self._timeout_s = bus, tasks, timeout_s
        self._sending: set[asyncio.Task[AnyMessage]] = set()

    def start(self, worker: str, work: Work) -> None:
        self._send(worker, NewTask(work=work))

    def grant(self, worker: str, grant: SegmentGrant) -> None:
        self._send(worker, Grant(grant=grant))

    def cancel(self, attempts: Sequence[GroupAttempt]) -> None:
        self._bus.broadcast(Cancel(attempts=list(attempts)))

    def close(self) -> None:
        """Nobody cares any more whether they heard."""
        for sending in self._sending:
            sending.cancel()

    def _send(self, worker: str, message: AnyMessage) -> None:
        sending = self._tasks.create_task(self._bus.request(worker, message, timeout_s=self._timeout_s))
        self._sending.add(sending)
        sending.add_done_callback(self._sending.discard)
