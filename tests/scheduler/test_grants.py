"""Leases and grants: what runs next, and that every slot taken is given back."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fake_ports import NumberedTasks, played

from penstock.config import Config
from penstock.ports.work import Work
from penstock.scheduler.scheduler import Scheduler
from penstock.simulator.clock import run_virtual
from penstock.types import EpisodeId, GroupAttempt, PayloadRef, SegmentGrant

SETTINGS: dict[str, Any] = {
    "env": {"group_size": 2, "max_new_tokens": 8},
    "scheduler": {"max_running": 4, "segment_length": 3, "group_filter": [], "trigger": {"min_samples": 2}},
    "trainer": {"groups_per_step": 4},
}
REF = PayloadRef(file="none", offset=0, length=0, checksum=0)


async def scheduler_with(num_groups: int, *, redundancy: int = 0, **changes: Any) -> Scheduler:
    env, scheduling = SETTINGS["env"] | {"redundancy": redundancy}, SETTINGS["scheduler"] | changes
    settings = Config.model_validate(SETTINGS | {"env": env, "scheduler": scheduling})
    scheduler = Scheduler(settings, now=asyncio.get_running_loop().time, log_decision=lambda *decision: None)
    scheduler.add_worker("env-0", 100)
    source = NumberedTasks("train")
    for index in range(num_groups):
        task = source.task(index)
        assert task is not None
        scheduler.admit_tasks([task])
    return scheduler


async def next_items(scheduler: Scheduler) -> list[Work | SegmentGrant]:
    return [assignment.item for assignment in await scheduler.next_assignments()]


async def next_works(scheduler: Scheduler) -> list[Work]:
    items = await next_items(scheduler)
    assert all(isinstance(item, Work) for item in items)
    return [item for item in items if isinstance(item, Work)]


async def is_idle(scheduler: Scheduler) -> bool:
    """Nothing can run now."""
    try:
        async with asyncio.timeout(1.0):
            await scheduler.next_assignments()
    except TimeoutError:
        return True
    return False


def finish(scheduler: Scheduler, work: Work, **details: Any) -> None:
    episodes = [played(lease.episode, reward=1.0, **details) for lease in work.leases]
    scheduler.finish_group(work.leases[0].episode.group_attempt, REF, episodes)


def ask(scheduler: Scheduler, episode: EpisodeId, *, unfinished: bool, num_tokens: int = 3) -> None:
    scheduler.members.request_grant(
        episode.group_attempt, episode.episode, unfinished=unfinished, num_tokens=num_tokens
    )


def test_running_episodes_are_bounded_and_places_return() -> None:
    async def main() -> None:
        scheduler = await scheduler_with(4)
        first, second = await next_works(scheduler)
        assert await is_idle(scheduler), "four episodes run, no more may"
        finish(scheduler, first)
        (third,) = await next_works(scheduler)
        assert [w.leases[0].episode.group for w in (first, second, third)] == [0, 1, 2]

    run_virtual(main())


def test_a_cut_answer_goes_before_new_groups_and_its_slot_is_free_meanwhile() -> None:
    async def main() -> None:
        scheduler = await scheduler_with(3)
        first, _ = await next_works(scheduler)
        assert [grant.max_tokens for grant in first.grants] == [3, 3]
        for lease in first.leases:
            ask(scheduler, lease.episode, unfinished=True)
        assert scheduler.ledger.counts()["unfinished"] == 2
        grants = await next_items(scheduler)
        assert grants == [SegmentGrant(episode=lease.episode, max_tokens=3) for lease in first.leases]
        assert scheduler.ledger.counts()["unfinished"] == 0
        assert await is_idle(scheduler), "the slots are taken again"
        scheduler.ledger.check()

    run_virtual(main())


def test_the_budget_of_an_answer_is_pinned() -> None:
    async def main() -> None:
        scheduler = await scheduler_with(1, global_max_length=8)
        (work,) = await next_works(scheduler)
        ask(scheduler, work.leases[0].episode, unfinished=True, num_tokens=6)
        assert await next_items(scheduler) == [SegmentGrant(episode=work.leases[0].episode, max_tokens=2)]

    run_virtual(main())


def test_members_that_end_early_give_their_grants_back() -> None:
    async def main() -> None:
        scheduler = await scheduler_with(3)
        first, second = await next_works(scheduler)
        scheduler.members.end_members(GroupAttempt(0, 0), [played(first.leases[0].episode, reward=1.0)], [None])
        assert await is_idle(scheduler), "one free grant is not enough for a group of two"
        scheduler.members.end_members(GroupAttempt(1, 0), [played(second.leases[1].episode, reward=1.0)], [None])
        (third,) = await next_works(scheduler)
        assert third.leases[0].episode.group == 2
        assert scheduler.ledger.counts()["ready"] == 2
        finish(scheduler, first)
        assert scheduler.ledger.counts()["ready"] == 3

    run_virtual(main())


def test_a_probe_goes_first_and_the_longest_probed_group_is_the_next() -> None:
    async def main() -> None:
        scheduler = await scheduler_with(3, dispatch={"policy": "probe"}, max_running=3)
        probes = await next_works(scheduler)
        assert [(w.leases[0].episode.group, len(w.leases)) for w in probes] == [(0, 1), (1, 1), (2, 1)]
        for number, tokens in ((0, 3), (1, 8), (2, 5)):
            episode = probes[number].leases[0].episode
            scheduler.members.end_members(
                GroupAttempt(number, 0), [played(episode, reward=1.0, response_tokens=tokens)], [None]
            )
        rests = await next_works(scheduler)
        assert [lease.episode for work in rests for lease in work.leases] == [
            EpisodeId("train", group, 1, 0) for group in (1, 2, 0)
        ]
        scheduler.ledger.check()

    run_virtual(main())


def test_a_lost_worker_s_groups_go_on_elsewhere_from_where_they_were_saved() -> None:
    async def main() -> None:
        scheduler = await scheduler_with(2)
        cut, whole = await next_works(scheduler)
        scheduler.members.request_grant(
            GroupAttempt(0, 0), cut.leases[0].episode.episode, unfinished=True, num_tokens=3, saved=REF
        )
        scheduler.members.end_members(GroupAttempt(0, 0), [played(cut.leases[1].episode, reward=1.0)], [REF])
        scheduler.add_worker("env-1", 100)
        scheduler.remove_worker("env-0")
        again = {work.leases[0].episode.group: work for work in await next_works(scheduler)}
        saved = {episode.episode: episode.ended for episode in again[0].saved}
        assert saved == {EpisodeId("train", 0, 0, 1): False, EpisodeId("train", 0, 1, 1): True}
        assert again[0].grants[0].max_tokens == 3
        assert not again[1].saved and again[1].leases[0].episode.attempt == 1
        finish(scheduler, whole)
        assert scheduler.ledger.counts()["ready"] == 1, "only the ended member that was saved"
        finish(scheduler, again[0])
        finish(scheduler, again[1])
        assert scheduler.ledger.counts()["ready"] == 4
        scheduler.ledger.check()

    run_virtual(main())


def test_grants_of_the_past_are_ignored() -> None:
    async def main() -> None:
        scheduler = await scheduler_with(1)
        (work,) = await next_works(scheduler)
        ask(scheduler, work.leases[0].episode, unfinished=True)
        finish(scheduler, work, error="the environment broke")
        ask(scheduler, work.leases[1].episode, unfinished=False)
        ask(scheduler, EpisodeId("train", 999, 0, 0), unfinished=False)
        (again,) = await next_works(scheduler)
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
        works = await next_works(scheduler)
        for work in works[:num_played]:
            finish(scheduler, work)
        ask(scheduler, works[1].leases[0].episode, unfinished=True)
        assert len(scheduler.cancel_all()) == 4
        scheduler.ledger.check()
        counts = scheduler.ledger.counts()
        assert counts["cancelled"] == counts["admitted"] == 8

    run_virtual(main())
