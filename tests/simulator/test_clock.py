"""Time that jumps, however late it is."""

from __future__ import annotations

import asyncio

import pytest

from penstock.deadline import Stalled
from penstock.scheduler.wakeup import Progress
from penstock.simulator.clock import Deadlock, run_virtual


@pytest.mark.parametrize("start", [0.0, 2e7, 3e9])
def test_timers_run_in_order_at_any_time(start: float) -> None:
    async def main() -> None:
        loop, seen = asyncio.get_running_loop(), list[int]()
        await asyncio.sleep(start)
        for number, after in ((2, 0.5), (1, 0.25), (3, 1.0)):
            loop.call_later(after, seen.append, number)
        await asyncio.sleep(1.5)
        assert seen == [1, 2, 3]

    run_virtual(main())


def test_a_stall_is_told_however_long_it_took() -> None:
    async def main() -> None:
        progress = Progress(now=asyncio.get_running_loop().time, stall_s=3e9)
        await progress.wait(progress.signal("dispatch", resource="slots", holder="generation"))

    with pytest.raises(Stalled, match="dispatch waited 3e"):
        run_virtual(main())


def test_waiting_for_nothing_is_an_error() -> None:
    async def main() -> None:
        await asyncio.get_running_loop().create_future()

    with pytest.raises(Deadlock):
        run_virtual(main())
