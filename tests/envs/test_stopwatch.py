"""Parts of an episode that overlap: the time that they take together counts once."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st
from open_episode import open_episode

from penstock.deadline import Stalled
from penstock.envs.episode import answering, spending
from penstock.simulator.clock import run_virtual

ANSWER = {"resource": "an answer", "holder": "a rollout server"}
TENTHS = st.integers(0, 30)


@given(bodies=st.lists(st.tuples(TENTHS, TENTHS), min_size=1, max_size=6))
def test_time_that_bodies_spend_together_counts_once(bodies: list[tuple[int, int]]) -> None:
    """`bodies`: beginning and duration of each, in tenths of a second."""

    async def main() -> tuple[float, float]:
        playing = open_episode(0, deadline_s=100.0)

        async def body(begins: int, takes: int) -> None:
            await asyncio.sleep(begins / 10)
            with answering([playing]):
                async with spending([playing], **ANSWER):
                    await asyncio.sleep(takes / 10)

        await asyncio.gather(*(body(*each) for each in bodies))
        return playing.remaining_s, playing.answering.seconds

    covered = {tenth for begins, takes in bodies for tenth in range(begins, begins + takes)}
    remaining_s, answering_s = run_virtual(main())
    assert (remaining_s, answering_s) == pytest.approx((100.0 - len(covered) / 10, len(covered) / 10))


def test_a_body_that_begins_later_ends_with_the_lease() -> None:
    async def main() -> float:
        playing = open_episode(0, deadline_s=10.0)

        async def body(begins: float) -> None:
            await asyncio.sleep(begins)
            async with spending([playing], **ANSWER):
                await asyncio.sleep(20.0)

        ended = await asyncio.gather(body(0.0), body(4.0), return_exceptions=True)
        assert all(isinstance(each, Stalled) for each in ended)
        return asyncio.get_running_loop().time()

    assert run_virtual(main()) == pytest.approx(10.0)
