"""Groups that other programs played, traded for leases."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest
from fake_ports import leased

from penstock.envs.pushed_group_exchange import Exchange, Offer, ScoredEpisode
from penstock.samples import Segment, Trajectory, Turn, VersionSpan
from penstock.types import Sampling


class Trade:
    """An exchange, and what came of its leases."""

    def __init__(self) -> None:
        self.served = 0
        self.exchange = Exchange(max_staleness=1, newest=lambda: self.served, holder=lambda: "nobody")
        self.ended: dict[str, list[Trajectory]] = {}
        self.tasks: list[asyncio.Task[None]] = []

    async def lease(self, name: str) -> asyncio.Task[None]:
        work = leased(range(2), max_tokens=8, sampling=Sampling(), deadline_s=5.0, env_seed=1)
        ended = self.ended.setdefault(name, [])
        task = asyncio.create_task(self.exchange.play(work, lambda trajectory, text: ended.append(trajectory)))
        self.tasks.append(task)
        await asyncio.sleep(0)
        return task

    async def offer(self, reward: float, *, version: int = 0) -> Offer:
        offer = Offer(episodes=[episode(reward, version), episode(reward + 1, version)], source="letters_0")
        self.exchange.offer(offer)
        for _ in range(3):
            await asyncio.sleep(0)
        return offer

    def rewards(self, name: str) -> list[float]:
        return [trajectory.reward for trajectory in self.ended[name]]


def episode(reward: float, version: int) -> ScoredEpisode:
    said = Segment(token_ids=[5], logprobs=[-0.5], spans=[VersionSpan(version, 0, 1)], finish_reason="stop")
    return ScoredEpisode(turns=[Turn(observation_ids=[1, 2], segments=[said])], reward=reward, status="completed")


@pytest.fixture
async def trade() -> AsyncIterator[Trade]:
    trade = Trade()
    yield trade
    for task in trade.tasks:
        task.cancel()
    await asyncio.gather(*trade.tasks, return_exceptions=True)


async def test_what_comes_first_is_taken_first_on_both_sides(trade: Trade) -> None:
    early = [await trade.offer(0), await trade.offer(10)]
    assert trade.exchange.num_offers == 2 and not trade.exchange.has_begun
    for name in "abc":
        await trade.lease(name)
    late = await trade.offer(20)
    assert [trade.rewards(name) for name in "abc"] == [[0, 1], [10, 11], [20, 21]]
    assert all(offer.outcome.done() for offer in (*early, late)) and trade.exchange.num_offers == 0
    assert trade.exchange.counts == {"offered": 3, "taken": 3}


async def test_a_member_keeps_its_tokens_and_versions(trade: Trade) -> None:
    await trade.lease("a")
    await trade.offer(0, version=7)
    sample = trade.ended["a"][1].flatten()
    assert sample.token_ids.tolist() == [1, 2, 5] and sample.loss_mask.tolist() == [0, 0, 1]
    assert sample.versions[2] == 7 and sample.episode == 1


async def test_a_group_that_grew_too_stale_in_the_queue_is_rejected_and_delays_no_other(trade: Trade) -> None:
    old, young = await trade.offer(0, version=1), await trade.offer(10, version=2)
    trade.served = 3
    await trade.lease("a")
    assert "policy_version 1, 3 is served, and scheduler.max_staleness is 1" in str(old.outcome.result())
    assert young.outcome.done() and trade.rewards("a") == [10, 11]
    assert trade.exchange.counts["stale"] == 1


async def test_a_refused_group_is_the_failure_of_whoever_waits_longest(trade: Trade) -> None:
    trade.exchange.refuse("nobody waits yet", is_only=True)
    await trade.lease("a")
    await trade.lease("b")
    trade.exchange.refuse("letters_0 pushed a group that cannot be trained: scores[1] is nan", is_only=True)
    trade.exchange.refuse("another environment is at work", is_only=False)
    await trade.offer(0)
    assert [trajectory.error for trajectory in trade.ended["a"]] == [
        "letters_0 pushed a group that cannot be trained: scores[1] is nan"
    ] * 2
    assert trade.rewards("b") == [0, 1]
    assert trade.exchange.counts["refused"] == 3


async def test_a_group_given_to_a_lease_that_was_cancelled_is_first_in_line_again(trade: Trade) -> None:
    cancelled = await trade.lease("a")
    offer = Offer(episodes=[episode(0, 0), episode(1, 0)], source="letters_0")
    trade.exchange.offer(offer)  # it is handed over, and the lease has not heard of it
    cancelled.cancel()
    await asyncio.sleep(0)
    await trade.offer(10)
    assert not offer.outcome.done() and trade.ended["a"] == []
    await trade.lease("b")
    await asyncio.sleep(0)
    assert trade.rewards("b") == [0, 1] and trade.exchange.num_offers == 1


async def test_a_lease_that_is_gone_takes_nothing(trade: Trade) -> None:
    (await trade.lease("a")).cancel()
    await asyncio.sleep(0)
    await trade.lease("b")
    await trade.offer(0)
    assert trade.rewards("b") == [0, 1] and trade.rewards("a") == []
