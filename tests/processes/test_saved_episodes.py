"""Unfinished single-turn episodes go on elsewhere, from their tokens, within what is left of their budget."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from stage import Quick, Stage, job, working

from penstock.config import Config
from penstock.control.messages import DataGenerated, GrantRequest
from penstock.ports import SavedEpisode
from penstock.store.payload import PayloadReader
from penstock.types import Sample, Task, nth_seed

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def settings(max_turns: int = 1, **scheduler: Any) -> Config:
    env = {"max_turns": max_turns, "max_new_tokens": 20}
    return Config.model_validate({"env": env, "scheduler": {"segment_length": 4, **scheduler}})


def save(request: GrantRequest) -> SavedEpisode:
    """What the scheduler keeps of a grant request, for the next attempt."""
    assert request.saved is not None
    return SavedEpisode(episode=request.episode._replace(attempt=1), ref=request.saved, ended=False)


def tokens(prompt_ids: list[int], seed: int) -> list[int]:
    """Every token tells its position and its member; never ends by itself."""
    return [6 + (position + 10 * seed) % 90 for position in range(len(prompt_ids), len(prompt_ids) + 200)]


async def play_until_cut(stage: Stage, *, num_cuts: int) -> list[GrantRequest]:
    """Worker env-0 plays two members under versions 0, 1, ...; returns their last requests."""
    await stage.start("env-0", job(1, grant=4, max_new_tokens=20))
    last = [await stage.controller.requests.get() for _ in range(2)]
    for _ in range(num_cuts - 1):
        stage.policy.policy_version += 1
        for request in last:
            await stage.grant("env-0", request, 4)
        last = [await stage.controller.requests.get() for _ in range(2)]
    return sorted(last, key=lambda request: request.episode)


def sampled(sample: Sample) -> list[int]:
    return sample.token_ids[sample.loss_mask == 1].tolist()


async def finish(stage: Stage, name: str) -> DataGenerated:
    """Grant whatever is asked for until the group is whole."""
    generated = asyncio.create_task(stage.controller.generated.get())
    while not generated.done():
        request = asyncio.create_task(stage.controller.requests.get())
        await asyncio.wait([generated, request], return_when=asyncio.FIRST_COMPLETED)
        if request.done():
            stage.policy.policy_version += 1
            await stage.grant(name, request.result(), 4)
        else:
            request.cancel()
    return generated.result()


async def test_a_cut_episode_survives_the_crash_of_its_worker(tmp_path: Path) -> None:
    async with working(tmp_path, answer=tokens, config=settings(global_max_length=18)) as stage:
        requests = await play_until_cut(stage, num_cuts=2)
        assert [(r.unfinished, r.num_tokens) for r in requests] == [(True, 8), (True, 8)]
        before = [PayloadReader(tmp_path).read(r.saved)[0] for r in requests if r.saved]
        stage.kill("env-0")
        stage.policy.policy_version = 7
        await stage.join("env-1")
        await stage.start("env-1", job(1, attempt=1, grant=4, max_new_tokens=20, saved=[save(r) for r in requests]))
        played = await finish(stage, "env-1")
    assert played.ref is not None and played.ref.file.startswith("env-1")
    samples = PayloadReader(tmp_path).read(played.ref)
    for member, (sample, saved) in enumerate(zip(samples, before, strict=True)):
        prompt = int((sample.loss_mask == 0).sum())
        assert sampled(saved) == tokens([0] * prompt, nth_seed(0, member))[:8], "what the first worker generated"
        assert sampled(sample) == tokens([0] * prompt, nth_seed(0, member))[:18], (
            "then what the second did, to the global maximum"
        )
        versions = sample.versions[sample.loss_mask == 1].tolist()
        assert versions[:12] == [0] * 4 + [1] * 4 + [7] * 4 and min(versions[12:]) > 7
        assert sample.truncated
    assert [(e.response_tokens, e.num_turns, e.episode.attempt) for e in played.episodes] == [(18, 1, 1)] * 2


async def test_members_that_ended_are_taken_as_they_are(tmp_path: Path) -> None:
    def short_first(prompt_ids: list[int], seed: int) -> list[int]:
        return tokens(prompt_ids, seed)[: 3 if seed == nth_seed(0, 0) else None]

    async with working(tmp_path, answer=short_first, config=settings()) as stage:
        await stage.start("env-0", job(1, grant=4, max_new_tokens=20))
        cut, ended = await stage.controller.requests.get(), await stage.controller.ended.get()
        stage.kill("env-0")
        (ref,) = ended.saved
        assert ref is not None
        done = SavedEpisode(episode=ended.episodes[0].episode._replace(attempt=1), ref=ref, ended=True)
        await stage.join("env-1")
        await stage.start("env-1", job(1, attempt=1, grant=4, max_new_tokens=20, saved=[done, save(cut)]))
        played = await finish(stage, "env-1")
        prompts = stage.policy.prompts
    assert [(e.response_tokens, e.status, e.reward) for e in played.episodes] == [
        (3, "completed", 1.0),
        (20, "truncated", 0.0),
    ]
    prompt = len(prompts[0])
    assert [len(ids) - prompt for ids in prompts] == [0, 4, 8, 12, 16], "nothing was generated twice"
    assert played.ref is not None
    assert [len(sampled(sample)) for sample in PayloadReader(tmp_path).read(played.ref)] == [3, 20]


async def test_the_segments_already_used_count(tmp_path: Path) -> None:
    config = settings(max_segment_count=3)
    async with working(tmp_path, answer=tokens, config=config) as stage:
        requests = await play_until_cut(stage, num_cuts=2)
        stage.kill("env-0")
        await stage.join("env-1")
        await stage.start("env-1", job(1, attempt=1, grant=4, max_new_tokens=20, saved=[save(r) for r in requests]))
        played = await finish(stage, "env-1")
    assert [(e.response_tokens, e.status) for e in played.episodes] == [(12, "truncated")] * 2


@pytest.mark.parametrize(
    ("config", "saves"),
    [
        (settings(), True),
        (settings(max_turns=2), False),
        (settings(segment_length=None), False),
        (settings(segment_length=None, mode="colocated", over_sampling=2.0), True),
        (settings(segment_length=None, mode="colocated", max_staleness=0), False),
    ],
)
async def test_what_could_go_on_elsewhere_is_saved(tmp_path: Path, config: Config, saves: bool) -> None:
    async with working(tmp_path, answer=tokens, config=config) as stage:
        requests = await play_until_cut(stage, num_cuts=1)
    assert [request.saved is not None for request in requests] == [saves, saves]


async def test_an_unreadable_record_starts_the_episode_over(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with working(tmp_path, answer=tokens, config=settings()) as stage:
        requests = await play_until_cut(stage, num_cuts=1)
        stage.kill("env-0")
        (tmp_path / "env-0-00000.seg").write_bytes(b"")
        await stage.join("env-1")
        await stage.start("env-1", job(1, attempt=1, grant=4, max_new_tokens=20, saved=[save(r) for r in requests]))
        played = await finish(stage, "env-1")
    assert [e.response_tokens for e in played.episodes] == [20, 20]
    assert "train/1/0/1 starts over" in capsys.readouterr().err


async def test_a_world_that_cannot_be_repeated_is_not_gone_on_with(tmp_path: Path) -> None:
    class Fickle(Quick):
        number = 0

        def __init__(self, task: Task) -> None:
            Fickle.number += 1

        def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
            return f"world {Fickle.number // 2}", {}

    async with working(tmp_path, Fickle, answer=tokens, config=settings()) as stage:
        requests = await play_until_cut(stage, num_cuts=1)
        await stage.start("env-0", job(1, attempt=1, grant=4, max_new_tokens=20, saved=[save(r) for r in requests]))
        played = await stage.controller.generated.get()
    assert {e.status for e in played.episodes} == {"failed"}
    assert "the same seed shows another first observation" in str(played.episodes[0].error)
