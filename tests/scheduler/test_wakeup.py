"""Waiting inside the scheduler: woken by a signal, by the clock, or by having waited too long."""

from __future__ import annotations

import asyncio

import pytest

from penstock.deadline import Stall, Stalled, reporting_to
from penstock.scheduler.wakeup import Progress, Signal
from penstock.simulator.clock import run_virtual

STALL_S = 10.0


def made() -> tuple[Progress, Signal, Signal]:
    progress = Progress(now=asyncio.get_running_loop().time, stall_s=STALL_S)
    dispatch = progress.signal("dispatch", resource="slots", holder="generation")
    training = progress.signal("the trainer", resource="ready groups", holder="the workers")
    return progress, dispatch, training


def now() -> float:
    return asyncio.get_running_loop().time()


def test_a_change_wakes_only_those_it_concerns() -> None:
    async def main() -> None:
        progress, dispatch, training = made()
        waiting = asyncio.create_task(progress.wait(training))
        asyncio.get_running_loop().call_later(3.0, progress.changed, dispatch)
        await progress.wait(dispatch)
        assert now() == 3.0 and not waiting.done()
        progress.changed(training)
        await waiting

    run_virtual(main())


def test_a_time_may_end_the_wait() -> None:
    async def main() -> None:
        progress, dispatch, _ = made()
        await progress.wait(dispatch, until=4.0)
        assert now() == 4.0 and not dispatch.is_set()
        await progress.wait(dispatch, until=1.0)
        assert now() == 4.0, "that time has passed"

    run_virtual(main())


def test_everybody_is_told_when_nothing_has_changed_for_too_long() -> None:
    async def main() -> None:
        progress, dispatch, training = made()
        waiting = [asyncio.create_task(progress.wait(signal)) for signal in (dispatch, training)]
        asyncio.get_running_loop().call_later(6.0, progress.changed)  # wakes no loop, but is progress
        await asyncio.wait(waiting)
        assert now() == 6.0 + STALL_S
        errors = [task.exception() for task in waiting]
        assert all(isinstance(error, Stalled) for error in errors)
        assert str(errors[0]) == "dispatch waited 10 s for slots, held by generation"

    run_virtual(main())


def test_what_is_hopeless_is_raised_by_whoever_waits() -> None:
    async def main() -> None:
        progress, dispatch, _ = made()
        asyncio.get_running_loop().call_later(1.0, progress.give_up, RuntimeError("out of tasks"))
        for _ in range(2):
            with pytest.raises(RuntimeError, match="out of tasks"):
                await progress.wait(dispatch)
            assert now() == 1.0

    run_virtual(main())


def test_it_is_told_long_before_that() -> None:
    told: list[Stall] = []

    async def main() -> None:
        progress, dispatch, _ = made()
        waiting = asyncio.create_task(progress.wait(dispatch))
        asyncio.get_running_loop().call_later(2.0, progress.changed)
        await asyncio.sleep(2.0 + STALL_S / 4 + 0.5)
        assert [(stall.waiter, stall.resource, stall.holder) for stall in told] == [("dispatch", "slots", "generation")]
        assert told[0].seconds == pytest.approx(STALL_S / 4)
        dispatch.set()
        await waiting

    with reporting_to(told.append):
        run_virtual(main())
