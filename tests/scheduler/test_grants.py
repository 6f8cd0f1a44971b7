"""Leases and grants: what runs next, and that every slot taken is given back."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from penstock.config import Config
from penstock.ports import Work
from penstock.scheduler.scheduler import Scheduler
from penstock.simulator.clock import run_virtual
from penstock.simulator.parts import NumberedTasks, played
from penstock.types import EpisodeId, PayloadRef, SegmentGrant

SETTINGS: dict[str, Any] = {
    "env": {"group_size": 2, "max_new_tokens": 8},
    "scheduler": {"max_running": 4, "segment_length": 3, "filter_equal_rewards": False, "trigger": {"min_samples": 2}},
    "trainer": {"groups_per_step": 4},
}
REF = PayloadRef(file="none", offset=0, length=0, crc32=0)


async def scheduler_with(num_groups: int) -> Scheduler:
    scheduler = Scheduler(
        Config.model_validate(SETTINGS), now=asyncio.get_running_loop().time, record=lambda *decision: None
    )
    scheduler.worker_joined("env-0", 100)
    source = NumberedTasks("train")
    for index in range(num_groups):
        task = source.task(index)
        assert task is not None
        await scheduler.admit(task)
    return scheduler


async def next_work(scheduler: Scheduler) -> Work:
    item = (await scheduler.next_assignment()).item
    assert isinstance(item, Work)
    return item


async def is_idle(scheduler: Scheduler) -> bool:
    """Nothing can run now."""
    try:
        async with asyncio.timeout(1.0):
            await scheduler.next_assignment()
    except TimeoutError:
        return True
    return False


def finish(scheduler: Scheduler, work: Work, **details: Any) -> None:
    episodes = [played(lease.episode, reward=1.0, **details) for lease in work.leases]
    scheduler.finish(work.leases[0].episode.group, REF, episodes)


def test_running_episodes_are_bounded_and_places_return() -> None:
    async def main() -> None:
        scheduler = await scheduler_with(4)
        first, second = await next_work(scheduler), await next_work(scheduler)
        assert await is_idle(scheduler), "four episodes run, no more may"
        finish(scheduler, first)
        third = await next_work(scheduler)
        assert [w.leases[0].episode.group for w in (first, second, third)] == [0, 1, 2]

    run_virtual(main())


def test_a_cut_answer_goes_before_new_groups_and_its_slot_is_free_meanwhile() -> None:
    async def main() -> None:
        scheduler = await scheduler_with(3)
        first = await next_work(scheduler)
        assert [grant.max_tokens for grant in first.grants] == [3, 3]
        await next_work(scheduler)
        for lease in first.leases:
            scheduler.request_grant(lease.episode, unfinished=True)
        assert scheduler.ledger.counts()["unfinished"] == 2
        for lease in first.leases:
            grant = (await scheduler.next_assignment()).item
            assert grant == SegmentGrant(episode=lease.episode, max_tokens=3)
        assert scheduler.ledger.counts()["unfinished"] == 0
        assert await is_idle(scheduler), "the slots are taken again"
        scheduler.ledger.check()

    run_virtual(main())


def test_grants_of_the_past_are_ignored() -> None:
    async def main() -> None:
        scheduler = await scheduler_with(1)
        work = await next_work(scheduler)
        scheduler.request_grant(work.leases[0].episode, unfinished=True)
        finish(scheduler, work, error="the environment broke")
        scheduler.request_grant(work.leases[1].episode, unfinished=False)
        scheduler.request_grant(EpisodeId("train", 999, 0, 0), unfinished=False)
        again = await next_work(scheduler)
        assert again.leases[0].episode == EpisodeId("train", 0, 0, 1), "the next attempt, not the old grant"
        assert again.leases[0].env_seed == work.leases[0].env_seed
        assert again.leases[0].sampling_seed != work.leases[0].sampling_seed
        finish(scheduler, work)
        assert scheduler.ledger.counts()["leased"] == 2, "results of the old attempt change nothing"

    run_virtual(main())


@pytest.mark.parametrize("num_played", [0, 1])
def test_cancelling_gives_everything_back(num_played: int) -> None:
    async def main() -> None:
        scheduler = await scheduler_with(4)
        works = [await next_work(scheduler), await next_work(scheduler)]
        for work in works[:num_played]:
            finish(scheduler, work)
        scheduler.request_grant(works[1].leases[0].episode, unfinished=True)
        assert len(scheduler.cancel_all()) == 4
        scheduler.ledger.check()
        counts = scheduler.ledger.counts()
        assert counts["cancelled"] == counts["admitted"] == 8
        assert await is_idle(scheduler), "the grant request died with its group"
        fresh = NumberedTasks("train").task(9)
        assert fresh is not None
        await scheduler.admit(fresh)
        await next_work(scheduler)

    run_virtual(main())
