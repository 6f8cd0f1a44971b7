"""Whose server it is."""

from __future__ import annotations

import pytest
from tiny_policy import serve

from penstock.rollout.app import ApiKeys
from penstock.rollout.claim import Claim
from penstock.rollout.client import RolloutClient
from penstock.rollout.generator import Conflict
from penstock.rollout.runner import EngineRunner
from penstock.rollout.session import HttpSession, RolloutError


def test_another_run_waits_for_the_end_of_the_lease() -> None:
    claim = Claim()
    claim.take("first", "a", lease_s=8, now=100)
    with pytest.raises(Conflict, match=r"run first already uses this server: stop that run, or set rollout\.urls"):
        claim.take("second", "b", lease_s=8, now=107)
    claim.take("first", "a", lease_s=8, now=107)
    with pytest.raises(Conflict, match="run first"):
        claim.take("first", "b", lease_s=8, now=114)
    claim.take("second", "b", lease_s=8, now=115)
    with pytest.raises(Conflict, match="run second"):
        claim.take("first", "a", lease_s=8, now=116)


def test_what_is_given_up_is_free_at_once() -> None:
    claim = Claim()
    claim.take("first", "a", lease_s=8, now=100)
    claim.take("first", "a", lease_s=0, now=101)
    claim.take("second", "b", lease_s=8, now=101)
    with pytest.raises(Conflict, match="run second"):
        claim.take("first", "a", lease_s=8, now=101)


def test_the_server_of_a_run_is_never_another_ones() -> None:
    claim = Claim("first", "a")
    with pytest.raises(Conflict, match="run first"):
        claim.take("second", "b", lease_s=8, now=1e9)


async def test_a_claim_needs_the_key_for_control_and_refuses_the_second_run(runner: EngineRunner) -> None:
    async with serve(runner, keys=ApiKeys(generation="play", admin="rule")) as url:
        player, ruler = HttpSession(api_key="play"), HttpSession(api_key="rule")
        with pytest.raises(RolloutError, match="answered 401"):
            await RolloutClient(url, player).claim("first", "a", lease_s=8)
        client = RolloutClient(url, ruler)
        await client.claim("first", "a", lease_s=8)
        with pytest.raises(RolloutError, match="answered 409: run first already uses this server"):
            await client.claim("second", "b", lease_s=8)
        await client.claim("first", "a", lease_s=0)
        await client.claim("second", "b", lease_s=8)
        await player.close()
        await ruler.close()
