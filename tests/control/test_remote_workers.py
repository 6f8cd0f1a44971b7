"""Handing work to workers in other processes, on a bus that answers when it likes."""

from __future__ import annotations

import asyncio
from typing import cast

import pytest
from fake_ports import leased

from penstock.control.bus import Bus
from penstock.control.messages import Ack, AnyMessage, Grant, NewTask
from penstock.control.remote_workers import RemoteTrainer, RemoteWorkers
from penstock.deadline import Stalled, reporting_to
from penstock.simulator.clock import run_virtual
from penstock.types import EpisodeId, Sampling, SegmentGrant

GRANT = SegmentGrant(episode=EpisodeId("train", 1, 0, 0), max_tokens=8)


class SlowBus:
    """`quick` acknowledges at once, anybody else never."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, AnyMessage]] = []

    async def request(self, peer: str, message: AnyMessage, *, timeout_s: float) -> AnyMessage:
        self.heard.append((peer, message))
        if peer != "quick":
            await asyncio.sleep(timeout_s)
            raise Stalled(waiter="controller", resource="an answer", holder=peer, seconds=timeout_s)
        return Ack()


def test_a_slow_worker_holds_up_nobody_else_and_ends_the_run() -> None:
    bus = SlowBus()

    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            workers = RemoteWorkers(cast(Bus, bus), tasks, timeout_s=5.0)
            workers.start("slow", leased(max_tokens=8, sampling=Sampling()))
            workers.grant("quick", GRANT)
            await asyncio.sleep(1.0)
            assert [(peer, type(message)) for peer, message in bus.heard] == [("slow", NewTask), ("quick", Grant)]
            await asyncio.sleep(60.0)

    with pytest.raises(ExceptionGroup) as failure:
        run_virtual(main())
    assert "held by slow" in str(failure.value.exceptions[0])


def test_nobody_waits_for_acknowledgements_after_the_end() -> None:
    async def main() -> None:
        async with asyncio.TaskGroup() as tasks:
            workers = RemoteWorkers(cast(Bus, SlowBus()), tasks, timeout_s=5.0)
            workers.grant("slow", GRANT)
            await asyncio.sleep(1.0)
            workers.close()
            workers.grant("slow", GRANT)  # by a message that was on its way
            workers.tell(["slow"], Ack())
        assert asyncio.get_running_loop().time() == 1.0

    run_virtual(main())


def test_a_trainer_that_makes_progress_may_take_its_time() -> None:
    """A call has its whole time again with every count that the heartbeat has not had before."""

    class Silent:
        async def request(self, peer: str, message: object, *, timeout_s: float) -> None:
            await asyncio.get_running_loop().create_future()

    async def main() -> float:
        trainer = RemoteTrainer(Silent(), "trainer-0", timeout_s=600.0)  # type: ignore[arg-type]
        call = asyncio.create_task(trainer.step())
        for seconds, progress in ((500, 1), (1000, 2), (1500, 2)):
            await asyncio.sleep(seconds - asyncio.get_running_loop().time())
            trainer.heard(progress)
        with pytest.raises(Stalled, match="waited 600 s for the answer to Step, held by trainer-0"):
            await call
        trainer.heard(3)
        return asyncio.get_running_loop().time()

    with reporting_to(lambda stall: None):
        assert run_virtual(main()) == 1600.0
