"""Episodes whose rewards are still being computed: they hold no generation, and no death loses them."""

from __future__ import annotations

from typing import Any

import pytest
from fake_ports import played
from test_grants import REF, finish, is_idle, next_works, scheduler_with

from penstock.ports.work import Work
from penstock.scheduler.scheduler import Scheduler
from penstock.simulator.clock import run_virtual
from penstock.types import GroupAttempt


def generated(scheduler: Scheduler, work: Work, *members: int) -> None:
    episodes = [episode for episode in work.episodes if episode.episode in (members or work.members)]
    scheduler.members.finish_generation(episodes[0].group_attempt, [episode.episode for episode in episodes], 8)


def test_others_generate_while_a_reward_is_computed() -> None:
    async def main() -> None:
        scheduler = await scheduler_with(4)
        first, second = await next_works(scheduler)
        assert await is_idle(scheduler), "four episodes run, no more may"
        generated(scheduler, first)
        assert scheduler.ledger.counts()["rewarding"] == 2
        (third,) = await next_works(scheduler)
        assert third.group == 2
        finish(scheduler, first)
        assert scheduler.ledger.counts()["ready"] == 2
        assert await is_idle(scheduler), "its slots were given back once"
        finish(scheduler, second)
        assert len(await next_works(scheduler)) == 1
        scheduler.ledger.check()

    run_virtual(main())


def test_news_that_come_late_change_nothing() -> None:
    async def main() -> None:
        scheduler = await scheduler_with(2)
        first, second = await next_works(scheduler)
        finish(scheduler, first)
        generated(scheduler, first)
        scheduler.members.end_members(GroupAttempt(1, 0), [played(second.episodes[0], reward=1.0)], [None])
        generated(scheduler, second)
        generated(scheduler, second)
        counts = scheduler.ledger.counts()
        assert (counts["ready"], counts["rewarding"]) == (3, 1)
        scheduler.remove_worker("env-0")
        generated(scheduler, second)
        assert scheduler.ledger.counts()["rewarding"] == 0, "an attempt that nobody waits for"
        scheduler.ledger.check()

    run_virtual(main())


def test_the_rest_of_a_group_need_not_wait_for_the_reward_of_its_probe() -> None:
    async def main() -> None:
        scheduler = await scheduler_with(1, dispatch={"policy": "probe"})
        (probe,) = await next_works(scheduler)
        assert probe.members == (0,)
        generated(scheduler, probe)
        (rest,) = await next_works(scheduler)
        assert rest.members == (1,)
        scheduler.members.end_members(GroupAttempt(0, 0), [played(probe.episodes[0], reward=1.0)], [None])
        assert await is_idle(scheduler), "the rest runs once"
        scheduler.finish_group(
            GroupAttempt(0, 0), REF, [played(work.episodes[0], reward=1.0) for work in (probe, rest)]
        )
        assert scheduler.ledger.counts()["ready"] == 2

    run_virtual(main())


@pytest.mark.parametrize("end", ["lost worker", "failed reward", "stopped run"])
def test_whatever_ends_the_wait_for_a_reward(end: str) -> None:
    async def main() -> None:
        scheduler = await scheduler_with(1)
        (work,) = await next_works(scheduler)
        generated(scheduler, work)
        details: dict[str, Any] = {"error": "reward judge: no answer"}
        match end:
            case "lost worker":
                scheduler.remove_worker("env-0")
                scheduler.add_worker("env-1", 100)
            case "failed reward":
                finish(scheduler, work, **details)
            case "stopped run":
                scheduler.cancel_all()
        scheduler.ledger.check()
        counts = scheduler.ledger.counts()
        assert counts["rewarding"] == 0
        if end == "stopped run":
            assert counts["cancelled"] == 2
            return
        (again,) = await next_works(scheduler)
        assert (again.group, again.attempt) == (0, 1)

    run_virtual(main())
