"""The grant that the answers of an episode share."""

from __future__ import annotations

import asyncio
from typing import NamedTuple

from hypothesis import given
from hypothesis import strategies as st

from penstock.envs.shared_grant import SharedGrant
from penstock.simulator.clock import run_virtual
from penstock.types import EpisodeId, SegmentGrant

EPISODE = EpisodeId("train", 0, 0, 0)
GRANT_S = 0.7
"""Seconds until a requested grant comes."""


class Plan(NamedTuple):
    """An answer: when its request arrives, and how long each of its segments takes."""

    arrives_s: float
    segments_s: list[float]


class Scheduler:
    """Numbers its grants, in `max_tokens`."""

    def __init__(self) -> None:
        self.asked: list[bool] = []
        self.num_running = self.num_outstanding = 0

    async def request(self, continues: bool) -> SegmentGrant:
        assert not self.num_running and not self.num_outstanding, "asked for a grant while one is used or on its way"
        self.asked.append(continues)
        self.num_outstanding += 1
        try:
            await asyncio.sleep(GRANT_S)
        finally:
            self.num_outstanding -= 1
        return SegmentGrant(episode=EPISODE, max_tokens=1 + len(self.asked))


def played(plans: list[Plan]) -> tuple[Scheduler, list[list[int]], float]:
    """Return the scheduler, the grants of each answer's segments, and the seconds that all of them took."""
    scheduler, used = Scheduler(), [list[int]() for _ in plans]

    async def main() -> float:
        shared = SharedGrant(SegmentGrant(episode=EPISODE, max_tokens=1), scheduler.request, waiter="e")

        async def answer(plan: Plan, grants: list[int]) -> None:
            await asyncio.sleep(plan.arrives_s)
            number: int | None = None
            for seconds in plan.segments_s:
                number, grant = await shared.begin(number)
                grants.append(grant.max_tokens)
                scheduler.num_running += 1
                await asyncio.sleep(seconds)
                scheduler.num_running -= 1
                shared.end()

        async with asyncio.TaskGroup() as tasks:
            for plan, grants in zip(plans, used, strict=True):
                tasks.create_task(answer(plan, grants))
        return asyncio.get_running_loop().time()

    return scheduler, used, run_virtual(main())


async def take(shared: SharedGrant) -> int:
    """A new answer of one segment that takes no time. Returns the number of its grant."""
    _, grant = await shared.begin(None)
    shared.end()
    return grant.max_tokens


TIMES = st.integers(0, 40).map(lambda tenths: tenths / 10)
PLANS = st.lists(st.builds(Plan, TIMES, st.lists(TIMES, min_size=1, max_size=4)), min_size=1, max_size=6)


@given(plans=PLANS)
def test_every_segment_has_a_grant_and_an_answer_uses_each_once(plans: list[Plan]) -> None:
    scheduler, used, _ = played(plans)
    for plan, grants in zip(plans, used, strict=True):
        assert len(grants) == len(plan.segments_s)
        assert sorted(set(grants)) == grants, "an answer used a grant twice"
    assert {grant for grants in used for grant in grants} == set(range(1, len(scheduler.asked) + 2))


def test_answers_that_arrive_meanwhile_join_the_grant() -> None:
    scheduler, used, seconds = played([Plan(0.0, [3.0]), Plan(1.0, [3.0]), Plan(2.0, [1.0])])
    assert (used, scheduler.asked, seconds) == ([[1], [1], [1]], [], 4.0)


def test_a_cut_answer_does_not_wait_for_ever_behind_new_ones() -> None:
    """One that arrives after the cut waits for the next grant with it."""
    scheduler, used, seconds = played([Plan(0.0, [1.0, 1.0]), Plan(0.5, [2.0]), Plan(1.5, [1.0])])
    assert (used, scheduler.asked, seconds) == ([[1, 2], [1], [2]], [True], 2.5 + GRANT_S + 1.0)


def test_an_answer_after_a_pause_asks_for_a_grant() -> None:
    scheduler, used, _ = played([Plan(0.0, [1.0]), Plan(2.0, [1.0])])
    assert (used, scheduler.asked) == ([[1], [2]], [False])


def test_who_leaves_while_waiting_does_not_take_the_grant_along() -> None:
    scheduler = Scheduler()

    async def main() -> int:
        shared = SharedGrant(SegmentGrant(episode=EPISODE, max_tokens=1), scheduler.request, waiter="e")

        assert await take(shared) == 1
        leaving, staying = asyncio.create_task(take(shared)), asyncio.create_task(take(shared))
        await asyncio.sleep(GRANT_S / 2)
        leaving.cancel()
        return await staying

    assert run_virtual(main()) == 2 and scheduler.asked == [False], "the scheduler would not take a second request"


def test_a_request_that_nobody_waits_for_serves_a_later_answer_or_ends_with_the_episode() -> None:
    scheduler = Scheduler()

    async def main() -> float:
        shared = SharedGrant(SegmentGrant(episode=EPISODE, max_tokens=1), scheduler.request, waiter="e")

        assert await take(shared) == 1
        for expected in (2, None):
            leaving = asyncio.create_task(take(shared))
            await asyncio.sleep(GRANT_S / 2)
            leaving.cancel()
            await asyncio.sleep(GRANT_S if expected else 0.0)
            if expected:
                assert await take(shared) == expected
        await shared.close()
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) < 4 * GRANT_S and not scheduler.num_outstanding
