"""What every PolicyClient keeps: run over the scripted fake and over the real client and server."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from tiny_policy import VOCAB_SIZE

from penstock.ports import PolicyClient
from penstock.rollout.client import RolloutClient, Servers
from penstock.rollout.scripted import ScriptedPolicy
from penstock.types import EpisodeId, Sampling, SegmentGrant, VersionSpan

SAMPLING = Sampling(temperature=1.0, max_new_tokens=16)


def scripted_answer(prompt_ids: list[int], seed: int) -> list[int]:
    """Continues the same answer wherever it was cut."""
    start = len(prompt_ids)
    return [(seed + position) % VOCAB_SIZE for position in range(start, 40)]


@pytest.fixture(params=["scripted", "one server", "all servers"])
async def policy(request: pytest.FixtureRequest, url: str) -> AsyncIterator[PolicyClient]:
    if request.param == "scripted":
        yield ScriptedPolicy(scripted_answer)
        return
    client = RolloutClient(url) if request.param == "one server" else Servers([url])
    yield client
    await client.close()


def grants(*max_tokens: int) -> list[SegmentGrant]:
    return [
        SegmentGrant(episode=EpisodeId("tag", 0, index, 0), max_tokens=limit) for index, limit in enumerate(max_tokens)
    ]


async def test_one_segment_per_grant_within_its_limit(policy: PolicyClient) -> None:
    segments = await policy.generate([3, 4, 5], grants(1, 4, 9), SAMPLING, [10, 11, 12])
    assert len(segments) == 3
    for segment, limit in zip(segments, (1, 4, 9), strict=True):
        assert 1 <= len(segment.token_ids) <= limit
        assert segment.finish_reason in ("stop", "length")
        if segment.finish_reason == "length":
            assert len(segment.token_ids) == limit


async def test_every_token_has_a_log_probability_and_a_version(policy: PolicyClient) -> None:
    for segment in await policy.generate([3, 4, 5], grants(6, 6), SAMPLING, [10, 11]):
        num_tokens = len(segment.token_ids)
        assert len(segment.logprobs) == num_tokens
        assert all(logprob <= 0 for logprob in segment.logprobs)
        assert segment.spans == [VersionSpan(0, 0, num_tokens)]


async def test_a_single_grant_is_a_list_of_one(policy: PolicyClient) -> None:
    assert len(await policy.generate([3], grants(2), SAMPLING, [1])) == 1


async def test_the_same_seed_gives_the_same_tokens(policy: PolicyClient) -> None:
    first, second = await policy.generate([3, 4], grants(8, 8), SAMPLING, [10, 11])
    (again,) = await policy.generate([3, 4], grants(8), SAMPLING, [11])
    assert again.token_ids == second.token_ids != first.token_ids


async def test_a_cut_answer_continues_under_the_same_seed(policy: PolicyClient) -> None:
    (whole,) = await policy.generate([3, 4], grants(8), SAMPLING, [10])
    (first,) = await policy.generate([3, 4], grants(3), SAMPLING, [10])
    (rest,) = await policy.generate([3, 4, *first.token_ids], grants(5), SAMPLING, [10])
    assert first.token_ids + rest.token_ids == whole.token_ids
