"""Waits that end, waits that go on, and what is told of either."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Coroutine
from typing import Any

import pytest

from penstock.deadline import QUIET_S, Stall, Stalled, deadline, holding, reporting_to, stalled, warn_if_stalled
from penstock.simulator.clock import run_virtual


def reports_of(main: Callable[[], Coroutine[Any, Any, None]]) -> list[Stall]:
    """What is reported while `main` runs on a virtual clock."""
    told: list[Stall] = []
    with reporting_to(told.append):
        run_virtual(main())
    return told


def now() -> float:
    return asyncio.get_running_loop().time()


async def never() -> None:
    await asyncio.get_running_loop().create_future()


def test_a_deadline_says_who_waited_for_what_held_by_whom() -> None:
    async def main() -> None:
        expected = "env-0 waited 5 s for a grant, held by the scheduler"
        with pytest.raises(Stalled, match=f"^{expected}$"):
            async with deadline(5.0, waiter="env-0", resource="a grant", holder="the scheduler"):
                await never()
        assert now() == 5.0

    (told,) = reports_of(main)
    assert (told.waiter, told.resource, told.holder, told.seconds) == ("env-0", "a grant", "the scheduler", 5.0)
    assert str(told).startswith("stall: env-0 waits for a grant, held by the scheduler, since 20")


def test_who_holds_it_may_be_known_at_the_end_only() -> None:
    missing = {"rollout-0", "trainer-0"}

    async def main() -> None:
        asyncio.get_running_loop().call_later(1.0, missing.discard, "rollout-0")
        with pytest.raises(Stalled, match="held by trainer-0"):
            async with deadline(5.0, waiter="a", resource="all", holder=lambda: ", ".join(sorted(missing))):
                await never()

    (told,) = reports_of(main)
    assert told.holder == "trainer-0"


def test_what_ends_in_time_is_not_told() -> None:
    async def main() -> None:
        async with deadline(5.0, waiter="a", resource="b", holder="c"):
            await asyncio.sleep(4.0)
        with warn_if_stalled(5.0, waiter="a", resource="b", holder="c"):
            await asyncio.sleep(4.0)
        await asyncio.sleep(100.0)

    assert not reports_of(main)


def test_another_timeout_inside_passes_through() -> None:
    async def main() -> None:
        with pytest.raises(TimeoutError, match="theirs"):
            async with deadline(5.0, waiter="a", resource="b", holder="c"):
                raise TimeoutError("theirs")

    assert not reports_of(main)


def test_a_patient_wait_tells_at_growing_intervals_and_goes_on() -> None:
    async def main() -> None:
        with warn_if_stalled(10.0, waiter="swap", resource="weights", holder="the trainer"):
            await asyncio.sleep(10.0 + 1.5 * QUIET_S + 2 * QUIET_S)
        assert now() == 10.0 + 3.5 * QUIET_S

    assert [told.seconds for told in reports_of(main)] == [10.0, 10.0 + QUIET_S, 10.0 + 3 * QUIET_S]


def test_what_many_wait_for_is_told_once() -> None:
    async def wait(number: int) -> None:
        with pytest.raises(Stalled):
            async with deadline(5.0, waiter=f"episode {number}", resource="an answer", holder="rollout-0"):
                await never()

    async def main() -> None:
        await asyncio.gather(*(wait(number) for number in range(100)))

    (told,) = reports_of(main)
    assert told.waiter == "episode 0"


def test_what_was_forgotten_is_told_at_once_again() -> None:
    async def main() -> None:
        for _ in range(2):
            stalled(waiter="a", resource="b", holder="c", seconds=1.0)
            await asyncio.sleep(3 * QUIET_S)

    assert len(reports_of(main)) == 2


def test_the_stacks_say_where_everybody_is() -> None:
    leave = threading.Event()

    def busy_in_a_thread() -> None:
        leave.wait(60.0)

    async def inner() -> None:
        await never()

    async def outer() -> None:
        await inner()

    async def main() -> None:
        waiting = [asyncio.create_task(outer(), name=f"episode-{number}") for number in range(3)]
        thread = threading.Thread(target=busy_in_a_thread, name="engine")
        thread.start()
        try:
            with pytest.raises(Stalled):
                async with deadline(1.0, waiter="a", resource="b", holder="c"):
                    await asyncio.wait(waiting)
        finally:
            leave.set()
            thread.join()
            for task in waiting:
                task.cancel()

    (told,) = reports_of(main)
    tasks = next(stack for stack in told.stacks if stack.startswith("task episode-"))
    who, *frames = tasks.splitlines()
    assert who.endswith("and 2 others")
    assert [frame.rpartition(" ")[2] for frame in frames] == ["outer", "inner", "never"]
    thread = next(stack for stack in told.stacks if stack.startswith("thread engine"))
    assert "in busy_in_a_thread" in thread
    assert "tests/test_deadline.py" in thread


def test_the_wait_for_a_lock_is_bounded_and_what_is_done_with_it_is_not() -> None:
    lock = asyncio.Lock()

    async def hold(seconds: float) -> None:
        async with holding(lock, 5.0, waiter="a second update", resource="the lock", holder="the first"):
            await asyncio.sleep(seconds)

    async def main() -> None:
        first = asyncio.create_task(hold(20.0))
        await asyncio.sleep(0)
        with pytest.raises(Stalled, match="a second update waited 5 s for the lock, held by the first"):
            await hold(0.0)
        assert now() == 5.0
        await first
        await hold(0.0)

    reports_of(main)


def test_a_report_goes_to_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def main() -> None:
        with pytest.raises(Stalled):
            async with deadline(1.0, waiter="env-7", resource="a log line", holder="nobody"):
                await never()

    run_virtual(main())
    assert "stall: env-7 waits for a log line, held by nobody" in caplog.text
    assert "in never" in caplog.text
