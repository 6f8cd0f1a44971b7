"""The part of one server of another engine when it gets weights from the trainer: it joins the trainer's group, takes
one bucket after the other, and leaves. Torch-free: the trainer broadcasts, or lends memory of a device that both share.

The engine writes each bucket over its weights as it arrives. So the server must be paused, and a failure leaves it with
weights of no known version.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import suppress
from typing import Self

from penstock.deadline import Stalled, deadline
from penstock.ports.training import SendingGroup, SendingWay, TensorBucket, TrainerLost, WeightsNotSent, WeightsSender
from penstock.rollout.generator import all_of
from penstock.rollout.session import HttpSession, RolloutError
from penstock.types import WeightsTransport

JOIN_S = 120.0
"""Time limit until trainer and server have joined."""
BUCKET_S = 90.0
"""Time limit of one bucket, a little longer than the trainer's own."""
BRACKET_S = 90.0
"""Time limit of what a server does with all weights, at the beginning and the end of a bracket."""
LEAVE_S = 5.0
"""Time limit for leaving the group, which a dead server or trainer does not answer."""
SEND_S = 3600.0
"""Time limit of all buckets. Each of them has its own."""
UNREACHABLE_WEIGHTS = 424
"""Status of an update with weights that the server cannot get from where they are."""


class WeightsGroup(ABC):
    """A group of the trainer and one server, for one version."""

    way: SendingWay
    transport: WeightsTransport = "collective"
    shares_device = False
    """Whether the server needs the trainer's device."""

    def __init__(self, url: str, session: HttpSession, sender: WeightsSender, opened: SendingGroup) -> None:
        self._url, self._session, self._sender, self._opened = url, session, sender, opened
        self.has_sent = False
        """Whether the server may have weights of a bucket."""
        self.is_torn = False
        """Whether the server may have layers that cannot compute."""

    @classmethod
    async def open(cls, url: str, session: HttpSession, sender: WeightsSender, policy_version: int) -> Self:
        """Return the group when the server has joined it. The server is not paused for it."""
        num_ranks = await cls._num_ranks(url, session)
        if cls.shares_device and num_ranks > 1:
            raise RolloutError(url, f"has {num_ranks} devices, and only one can be the trainer's", 400)
        try:
            opened = await sender.open_group(url, policy_version, world_size=1 + num_ranks, way=cls.way)
        except (TrainerLost, WeightsNotSent) as error:
            raise _not_sent(url, error) from error
        group = cls(url, session, sender, opened)
        try:
            await group._join(opened)
        except BaseException:
            await group.leave()
            raise
        return group

    async def leave(self) -> None:
        """End the group on both sides."""
        await all_of([self._close(), self._destroy()])

    @abstractmethod
    async def take(self, label: str, *, flush: bool) -> None:
        """Make the paused server take all buckets, under a label. `flush`: also empty its cache."""

    @classmethod
    @abstractmethod
    async def _num_ranks(cls, url: str, session: HttpSession) -> int:
        """Return how many ranks the server has in the group."""

    @abstractmethod
    async def _join(self, opened: SendingGroup) -> None:
        """Make the server join, within `JOIN_S`."""

    @abstractmethod
    async def _take_bucket(self, bucket: TensorBucket, payload: str, *, last: bool, label: str, flush: bool) -> None:
        """Make the server take a bucket, within `BUCKET_S`. `payload`: where it finds it; empty if it is broadcast."""

    @abstractmethod
    async def _destroy(self) -> None:
        """Make the server leave the group, if it answers within `LEAVE_S`."""

    async def _transfer(self, label: str, *, flush: bool) -> None:
        """Broadcast all buckets, and make the server take them meanwhile."""
        await all_of([self._send(), self._take_buckets(label, flush=flush)])

    async def _send(self) -> None:
        name = self._opened.name
        try:
            async with deadline(SEND_S, waiter="rollout client", resource=f"group {name}", holder="the trainer"):
                await self._sender.send_weights(name)
        except (TrainerLost, WeightsNotSent) as error:
            raise _not_sent(self._url, error) from error

    async def _take_buckets(self, label: str, *, flush: bool) -> None:
        buckets = self._opened.buckets
        for number, bucket in enumerate(buckets, 1):
            self.has_sent = True
            await self._take_bucket(bucket, "", last=number == len(buckets), label=label, flush=flush)

    async def _close(self) -> None:
        name = self._opened.name
        with suppress(TrainerLost, Stalled):
            async with deadline(LEAVE_S, waiter="rollout client", resource=f"group {name}", holder="the trainer"):
                await self._sender.close_group(name)


class MemoryGroup(WeightsGroup):
    """A group of a server that finds the buckets in memory of the device that it shares with the trainer. The first
    bucket is there before the server pauses."""

    transport = "device_memory"
    shares_device = True
    _first = ""

    async def _join(self, opened: SendingGroup) -> None:
        self._first = await self._lent(0)

    async def _transfer(self, label: str, *, flush: bool) -> None:
        buckets = self._opened.buckets
        for number, bucket in enumerate(buckets):
            payload = await self._lent(number) if number else self._first
            self.has_sent = True
            await self._take_bucket(bucket, payload, last=number + 1 == len(buckets), label=label, flush=flush)

    async def _lent(self, number: int) -> str:
        name = self._opened.name
        try:
            async with deadline(BUCKET_S, waiter="rollout client", resource=f"group {name}", holder="the trainer"):
                return await self._sender.lend_bucket(name, number)
        except (TrainerLost, WeightsNotSent) as error:
            raise _not_sent(self._url, error) from error


def _not_sent(url: str, error: TrainerLost | WeightsNotSent) -> RolloutError:
    return RolloutError(url, str(error), UNREACHABLE_WEIGHTS if isinstance(error, TrainerLost) else None)
