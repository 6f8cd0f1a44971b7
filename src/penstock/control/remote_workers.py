"""The controller's interfaces to other processes: `ports.Trainer` and `ports.Workers` over the bus."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from penstock.control import messages
from penstock.control.bus import CONTROLLER, Bus, PeerLost
from penstock.control.messages import AnyMessage
from penstock.deadline import deadline
from penstock.ports.training import SavedStates, SendingGroup, SendingWay, TrainerLost, TrainerState, WeightsNotSent
from penstock.ports.work import Work
from penstock.types import GroupAttempt, GroupRef, LearnerState, SegmentGrant, WeightsHandle
from penstock.version_history import VersionHistory

LONGEST_S = 7 * 24 * 3600.0
"""Limit of a call of a trainer that makes progress all the time."""
WARM_START_S = 3600.0
"""Limit of the warm start, which takes longer than all other requests."""

Reply = TypeVar("Reply", bound=AnyMessage)


class RemoteTrainer:
    """`ports.Trainer` and `ports.WeightsSender` in another process. The controller learns of the trainer's death when a
    new trainer introduces itself, or answers that it holds no state."""

    def __init__(self, bus: Bus, name: str, *, timeout_s: float) -> None:
        """`timeout_s`: longest time that a call may take without progress of the trainer."""
        self._bus, self._name, self._timeout_s = bus, name, timeout_s
        self._progress = 0
        self._timers: dict[asyncio.Timeout, float] = {}
        """Deadlines of the calls that wait, and how far ahead progress moves each."""

    def heard(self, progress: int) -> None:
        """Take the count of the trainer's heartbeat. If it has changed, calls that wait have their whole time again."""
        if progress != self._progress:
            self._progress, now = progress, asyncio.get_running_loop().time()
            for timer, seconds in self._timers.items():
                if not timer.expired():
                    timer.reschedule(now + seconds)

    async def state(self) -> TrainerState:
        return (await self._ask(messages.AskState(), messages.HeldState)).state

    async def saved(self, directory: Path) -> SavedStates:
        return (await self._ask(messages.AskSaved(directory=str(directory)), messages.FoundSaved)).saved

    async def begin(self, *, policy_version: int, history: VersionHistory) -> Mapping[str, float]:
        message = messages.Begin(policy_version=policy_version, history=history)
        return (await self._ask(message, messages.Metrics, WARM_START_S)).metrics

    async def restore(self, directory: Path, *, step: int, policy_version: int, history: VersionHistory) -> None:
        place = str(directory)
        message = messages.Restore(directory=place, step=step, policy_version=policy_version, history=history)
        await self._ask(message, messages.Ack)

    async def accumulate(self, groups: Sequence[GroupRef]) -> Mapping[str, float]:
        return (await self._ask(messages.Accumulate(groups=list(groups)), messages.Metrics)).metrics

    async def step(self) -> LearnerState:
        return (await self._ask(messages.Step(), messages.LearnerStateUpdate)).state

    async def begin_publish(self) -> int:
        return (await self._ask(messages.Publish(), messages.Publishing)).policy_version

    async def finish_publish(self, policy_version: int) -> WeightsHandle:
        return (await self._ask(messages.FinishPublish(policy_version=policy_version), messages.Published)).handle

    async def open_group(
        self, server: str, policy_version: int, *, world_size: int, way: SendingWay = "rendezvous"
    ) -> SendingGroup:
        message = messages.OpenGroup(server=server, policy_version=policy_version, world_size=world_size, way=way)
        return (await self._ask(message, messages.GroupOpened)).group

    async def send_weights(self, group: str) -> None:
        await self._ask(messages.SendWeights(group=group), messages.Ack)

    async def lend_bucket(self, group: str, number: int) -> str:
        return (await self._ask(messages.LendBucket(group=group, number=number), messages.BucketLent)).payload

    async def close_group(self, group: str) -> None:
        await self._ask(messages.CloseGroup(group=group), messages.Ack)

    async def begin_checkpoint(self, directory: Path, state: Mapping[str, Any], *, best: int | None) -> None:
        message = messages.SaveCheckpoint(directory=str(directory), state=dict(state), best=best)
        await self._ask(message, messages.Ack)

    async def finish_checkpoint(self) -> None:
        await self._ask(messages.FinishCheckpoint(), messages.Ack)

    async def _ask(self, message: AnyMessage, reply_type: type[Reply], timeout_s: float | None = None) -> Reply:
        seconds, answer = timeout_s or self._timeout_s, f"the answer to {type(message).__name__}"
        try:
            async with deadline(seconds, waiter=CONTROLLER, resource=answer, holder=self._name) as timer:
                self._timers[timer] = seconds
                try:
                    reply = await self._bus.request(self._name, message, timeout_s=LONGEST_S)
                finally:
                    del self._timers[timer]
        except PeerLost as error:
            raise TrainerLost(str(error)) from None
        if isinstance(reply, messages.HoldsNothing):
            raise TrainerLost(f"{self._name} died, and its successor holds no state")
        if isinstance(reply, messages.NotSent):
            raise WeightsNotSent(reply.reason)
        if not isinstance(reply, reply_type):
            raise TypeError(f"{self._name} answered {type(message).__name__} with {type(reply).__name__}")
        return reply


class RemoteWorkers:
    """`ports.Workers`: environment workers in other processes. A task of `tasks` sends each message that a worker must
    acknowledge."""

    def __init__(self, bus: Bus, tasks: asyncio.TaskGroup, *, timeout_s: float) -> None:
        self._bus, self._tasks, self._timeout_s = bus, tasks, timeout_s
        self._sending: set[asyncio.Task[None]] = set()
        self._is_closed = False

    def start(self, worker: str, work: Work) -> None:
        self._send(worker, messages.NewTask(work=work))

    def grant(self, worker: str, grant: SegmentGrant) -> None:
        self._send(worker, messages.Grant(grant=grant))

    def cancel(self, attempts: Sequence[GroupAttempt]) -> None:
        self._bus.broadcast(messages.Cancel(attempts=list(attempts)))

    def tell(self, workers: Sequence[str], message: AnyMessage) -> None:
        """Send a message to these workers, and repeat it until each acknowledges it or dies."""
        for worker in workers:
            self._send(worker, message)

    def close(self) -> None:
        """Stop repeating messages that are not acknowledged, and send no more: the workers may be gone already."""
        self._is_closed = True
        for sending in self._sending:
            sending.cancel()

    def _send(self, worker: str, message: AnyMessage) -> None:
        if self._is_closed:
            return
        sending = self._tasks.create_task(self._deliver(worker, message))
        self._sending.add(sending)
        sending.add_done_callback(self._sending.discard)

    async def _deliver(self, worker: str, message: AnyMessage) -> None:
        with suppress(PeerLost):  # other workers get its groups
            await self._bus.request(worker, message, timeout_s=self._timeout_s)
