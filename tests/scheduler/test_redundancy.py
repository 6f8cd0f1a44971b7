"""Members that a group may do without."""

from __future__ import annotations

from fake_ports import played
from test_grants import REF, next_works, scheduler_with

from penstock.simulator.clock import run_virtual
from penstock.types import GroupAttempt


def test_a_group_is_made_of_the_first_that_end() -> None:
    async def main() -> None:
        scheduler = await scheduler_with(1, redundancy=1)
        (work,) = await next_works(scheduler)
        assert (work.members, work.group_size, work.redundancy) == ((0, 1, 2), 2, 1)
        scheduler.finish_group(
            GroupAttempt(0, 0), REF, [played(work.episodes[member], reward=1.0) for member in (0, 2)]
        )
        counts = scheduler.ledger.counts()
        assert (counts["admitted"], counts["ready"], counts["discarded_surplus"]) == (3, 2, 1)
        (group,) = (await scheduler.next_batch()).groups
        assert group.episodes == (0, 1), "of the record, which has no others"

    run_virtual(main())


def test_a_broken_member_begins_anew_with_another_worker() -> None:
    async def main() -> None:
        scheduler = await scheduler_with(1, redundancy=1)
        (work,) = await next_works(scheduler)
        broke, well = work.episodes[:2]
        scheduler.members.end_members(
            GroupAttempt(0, 0), [played(broke, reward=0.0, error="OSError: gone"), played(well, reward=1.0)], [REF, REF]
        )
        assert scheduler.ledger.counts()["pending"] == 0, "the others go on"
        scheduler.remove_worker("env-0")
        scheduler.add_worker("env-1", 100)
        (again,) = await next_works(scheduler)
        assert again.members == (0, 1, 2) and again.attempt == 1
        assert [(saved.episode.episode, saved.ended) for saved in again.saved] == [(1, True)]
        assert scheduler.ledger.counts()["leased"] == 2

    run_virtual(main())


def test_more_broken_members_than_it_can_spare_fail_a_group() -> None:
    async def main() -> None:
        scheduler = await scheduler_with(1, redundancy=1)
        (work,) = await next_works(scheduler)
        for episode in work.episodes[:2]:
            scheduler.members.end_members(
                GroupAttempt(0, 0), [played(episode, reward=0.0, error="OSError: gone")], [None]
            )
        (again,) = await next_works(scheduler)
        assert again.attempt == 1 and not again.saved

    run_virtual(main())
