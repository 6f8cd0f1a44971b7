"""The controller's view of the other processes: ports.Trainer and ports.Workers over the bus."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from penstock.control.bus import Bus, PeerLost
from penstock.control.messages import (
    Accumulate,
    Accumulated,
    Ack,
    AnyMessage,
    AskSaved,
    AskState,
    Begin,
    Begun,
    Cancel,
    FoundSaved,
    Grant,
    HeldState,
    HoldsNothing,
    LearnerStateUpdate,
    NewTask,
    Publish,
    Published,
    Restore,
    SaveCheckpoint,
    Step,
)
from penstock.ports import SavedStates, TrainerLost, TrainerState, Work
from penstock.types import GroupAttempt, GroupRef, LearnerState, SegmentGrant, WeightsHandle

Reply = TypeVar("Reply", bound=AnyMessage)


class RemoteTrainer:
    """ports.Trainer in another process. That it died is known once its successor has introduced itself, or answers that
    it holds nothing."""

    def __init__(self, bus: Bus, name: str, *, timeout_s: float, warm_start_timeout_s: float = 3600.0) -> None:
        self._bus, self._name, self._timeout_s = bus, name, timeout_s
        self._warm_start_timeout_s = warm_start_timeout_s

    async def state(self) -> TrainerState:
        return (await self._ask(AskState(), HeldState)).state

    async def saved(self, directory: Path) -> SavedStates:
        return (await self._ask(AskSaved(directory=str(directory)), FoundSaved)).saved

    async def begin(self, *, policy_version: int) -> Mapping[str, float]:
        return (await self._ask(Begin(policy_version=policy_version), Begun, self._warm_start_timeout_s)).metrics

    async def restore(self, directory: Path, *, step: int, policy_version: int) -> None:
        await self._ask(Restore(directory=str(directory), step=step, policy_version=policy_version), Ack)

    async def accumulate(self, groups: Sequence[GroupRef]) -> Mapping[str, float]:
        return (await self._ask(Accumulate(groups=list(groups)), Accumulated)).metrics

    async def step(self) -> LearnerState:
        return (await self._ask(Step(), LearnerStateUpdate)).state

    async def publish(self) -> WeightsHandle:
        return (await self._ask(Publish(), Published)).handle

    async def checkpoint(self, directory: Path, state: Mapping[str, Any]) -> None:
        await self._ask(SaveCheckpoint(directory=str(directory), state=dict(state)), Ack)

    async def _ask(self, message: AnyMessage, reply_type: type[Reply], timeout_s: float | None = None) -> Reply:
        try:
            reply = await self._bus.request(self._name, message, timeout_s=timeout_s or self._timeout_s)
        except PeerLost as error:
            raise TrainerLost(str(error)) from None
        if isinstance(reply, HoldsNothing):
            raise TrainerLost(f"{self._name} died, and its successor holds nothing")
        if not isinstance(reply, reply_type):
            raise TypeError(f"{self._name} answered {type(message).__name__} with {type(reply).__name__}")
        return reply


class RemoteWorkers:
    """ports.Workers: environment workers in other processes. What they must acknowledge is sent by `tasks`."""

    def __init__(self, bus: Bus, tasks: asyncio.TaskGroup, *, timeout_s: float) -> None:
        self._bus, self._tasks, self._timeout_s = bus, tasks, timeout_s
        self._sending: set[asyncio.Task[None]] = set()

    def start(self, worker: str, work: Work) -> None:
        self._send(worker, NewTask(work=work))

    def grant(self, worker: str, grant: SegmentGrant) -> None:
        self._send(worker, Grant(grant=grant))

    def cancel(self, attempts: Sequence[GroupAttempt]) -> None:
        self._bus.broadcast(Cancel(attempts=list(attempts)))

    def tell(self, workers: Sequence[str], message: AnyMessage) -> None:
        """They hear it, unless they die before."""
        for worker in workers:
            self._send(worker, message)

    def close(self) -> None:
        """Nobody cares any more whether they heard."""
        for sending in self._sending:
            sending.cancel()

    def _send(self, worker: str, message: AnyMessage) -> None:
        sending = self._tasks.create_task(self._deliver(worker, message))
        self._sending.add(sending)
        sending.add_done_callback(self._sending.discard)

    async def _deliver(self, worker: str, message: AnyMessage) -> None:
        with suppress(PeerLost):  # what it was to play goes to others
            await self._bus.request(worker, message, timeout_s=self._timeout_s)
