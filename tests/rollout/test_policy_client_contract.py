"""What every PolicyClient keeps: run over the scripted fake and over the real clients and our server."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, Protocol

import pytest
from scripted_policy import ScriptedPolicy
from tiny_policy import VOCAB_SIZE, Held, until

from penstock.ports.environment import PolicyClient
from penstock.rollout.client import RolloutClient
from penstock.rollout.runner import EngineRunner
from penstock.rollout.servers import Servers
from penstock.rollout.session import HttpSession
from penstock.rollout.sglang_client import SGLangClient
from penstock.samples import Segment, VersionSpan
from penstock.types import EpisodeId, Sampling, SegmentGrant

SAMPLING = Sampling(temperature=1.0, max_new_tokens=16)
LONG = 90
NOTHING = Segment(token_ids=[], logprobs=[], spans=[], finish_reason="abort")


def scripted_answer(prompt_ids: list[int], seed: int) -> list[int]:
    """Continues the same answer wherever it was cut."""
    start = len(prompt_ids)
    return [(seed + position) % VOCAB_SIZE for position in range(start, 94)]


class Releasable(PolicyClient, Protocol):
    """A PolicyClient whose server can give way."""

    async def release(self) -> None: ...

    async def resume(self) -> None: ...


async def made(kind: str, url: str) -> AsyncIterator[Any]:
    if kind == "scripted":
        yield ScriptedPolicy(scripted_answer)
    elif kind == "all servers":
        servers = Servers([url])
        yield servers
        await servers.close()
    else:
        session = HttpSession()
        yield RolloutClient(url, session) if kind == "one server" else SGLangClient(url, session)
        await session.close()


@pytest.fixture(params=["scripted", "one server", "all servers", "as SGLang"])
async def policy(request: pytest.FixtureRequest, url: str) -> AsyncIterator[PolicyClient]:
    async for client in made(request.param, url):
        yield client


@pytest.fixture(params=["scripted", "one server", "all servers"])
async def releasable(request: pytest.FixtureRequest, url: str) -> AsyncIterator[Releasable]:
    async for client in made(request.param, url):
        yield client


@pytest.fixture
def generating(releasable: Releasable, runner: EngineRunner) -> Callable[[], object]:
    """Is anything being generated?"""
    return lambda: releasable.num_sampled if isinstance(releasable, ScriptedPolicy) else runner.engine.num_active


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


async def test_giving_way_ends_requests_with_what_they_have(
    releasable: Releasable, generating: Callable[[], object], held: Held
) -> None:
    seeds = [10, 11, 12, 13]

    async def ask(prompt_ids: list[int], limit: int, seeds: list[int]) -> list[Segment]:
        return await releasable.generate(prompt_ids, grants(*[limit] * len(seeds)), SAMPLING, seeds)

    running = asyncio.create_task(ask([3, 4], LONG, seeds))
    await until(generating)
    await releasable.release()
    parts = await running
    assert "abort" in {part.finish_reason for part in parts}
    async with asyncio.timeout(60):  # requests in between are refused at once
        assert await ask([3, 4], LONG, seeds) == [NOTHING] * len(seeds)
        assert await ask([3, 4, 5], 1, [10]) == [NOTHING]
    await releasable.release()
    await releasable.resume()
    await releasable.resume()
    held.let_go.set()
    for part, whole, seed in zip(parts, await ask([3, 4], LONG, seeds), seeds, strict=True):
        assert len(part.logprobs) == len(part.token_ids)
        assert [span.end for span in part.spans[-1:]] == [len(part.token_ids)][: len(part.spans)]
        if part.finish_reason != "abort":
            assert part.token_ids == whole.token_ids
            continue
        assert len(part.token_ids) < len(whole.token_ids)
        (rest,) = await ask([3, 4, *part.token_ids], LONG - len(part.token_ids), [seed])
        assert part.token_ids + rest.token_ids == whole.token_ids
