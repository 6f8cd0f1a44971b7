"""Unfinished single-turn episodes go on elsewhere, from their tokens, within what is left of their budget."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from fake_ports import leased
from hypothesis import given
from hypothesis import strategies as st
from stage import Quick, Stage, job, working

from penstock.config import Config
from penstock.control.messages import DataGenerated, GrantRequest, NewTask
from penstock.ports.work import PartialRollout, Work
from penstock.processes.group_progress import GroupProgress
from penstock.processes.partial_rollouts import PartialRollouts, piece
from penstock.samples import ROOT, Sample, Segment, Trajectory, Turn, VersionSpan
from penstock.scheduler.active_group import ActiveGroup
from penstock.scheduler.ledger import Ledger
from penstock.scheduler.scheduler import Scheduler
from penstock.seeding import nth_seed
from penstock.store.payload_files import PayloadReader
from penstock.types import EpisodeId, GroupAttempt, PayloadRef, Sampling, Task

LETTERS = "abcdefghijklmnopqrstuvwxyz"


def settings(max_turns: int = 1, **scheduler: Any) -> Config:
    env = {"max_turns": max_turns, "max_new_tokens": 20}
    return Config.model_validate({"env": env, "scheduler": {"segment_length": 4, **scheduler}})


def save(*requests: GrantRequest, attempt: int = 1) -> list[PartialRollout]:
    """What the scheduler keeps of grant requests, for the next attempt."""
    group = active_group(attempt)
    for request in requests:
        assert request.saved is not None
        group.keep_tokens(request.episode.episode, request.saved)
    return list(group.partial_rollouts.values())


def active_group(attempt: int) -> ActiveGroup:
    task = Task(task_id="t", tag="train", index=0)
    return ActiveGroup(number=1, task=task, size=2, ledger=Ledger(), admitted_at=0.0, attempt=attempt)


def tokens(prompt_ids: list[int], seed: int) -> list[int]:
    """Every token tells its position and its member; never ends by itself."""
    return [6 + (position + 10 * seed) % 90 for position in range(len(prompt_ids), len(prompt_ids) + 200)]


async def play_until_cut(stage: Stage, *, num_cuts: int) -> list[GrantRequest]:
    """Worker env-0 plays two members under versions 0, 1, ...; returns their requests, in order."""
    await stage.start("env-0", job(1, grant=4, max_new_tokens=20))
    return await cut_again(stage, "env-0", num_cuts=num_cuts)


async def cut_again(stage: Stage, name: str, *, num_cuts: int) -> list[GrantRequest]:
    requests = [await stage.controller.requests.get() for _ in range(2)]
    for _ in range(num_cuts - 1):
        stage.policy.policy_version += 1
        for request in requests[-2:]:
            await stage.grant(name, request, 4)
        requests += [await stage.controller.requests.get() for _ in range(2)]
    return sorted(requests, key=lambda request: request.episode)


def pieces(pool: Path, saved: PartialRollout) -> list[Sample]:
    return [sample for ref in saved.refs for sample in PayloadReader(pool).read(ref)]


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
        assert [(r.unfinished, r.num_tokens) for r in requests] == [(True, 4), (True, 8)] * 2
        before = [pieces(tmp_path, saved) for saved in save(*requests)]
        stage.kill("env-0")
        stage.policy.policy_version = 7
        await stage.join("env-1")
        await stage.start("env-1", job(1, attempt=1, grant=4, max_new_tokens=20, saved=save(*requests)))
        played = await finish(stage, "env-1")
    assert played.ref is not None and played.ref.file.startswith("env-1")
    samples = PayloadReader(tmp_path).read(played.ref)
    for member, (sample, saved) in enumerate(zip(samples, before, strict=True)):
        prompt = int((sample.loss_mask == 0).sum())
        answer = tokens([0] * prompt, nth_seed(0, member))
        assert sampled(Sample.joined(saved)) == answer[:8], "what the first worker generated"
        assert sampled(sample) == answer[:18], "then what the second did, to the global maximum"
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
        group = active_group(attempt=1)
        (summary,) = ended.episodes
        group.keep_tokens(0, ref, msgspec.structs.replace(summary, info={"level": 2}))
        done = group.partial_rollouts[0]
        await stage.join("env-1")
        await stage.start("env-1", job(1, attempt=1, grant=4, max_new_tokens=20, saved=[done, *save(cut)]))
        played = await finish(stage, "env-1")
        prompts = stage.policy.prompts
    assert [(e.response_tokens, e.status, e.reward) for e in played.episodes] == [
        (3, "completed", 1.0),
        (20, "truncated", 0.0),
    ]
    first = played.episodes[0]
    assert (first.stop_reason, first.info) == ("terminated", {"level": 2})
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
        await stage.start("env-1", job(1, attempt=1, grant=4, max_new_tokens=20, saved=save(*requests)))
        played = await finish(stage, "env-1")
    assert [(e.response_tokens, e.status) for e in played.episodes] == [(12, "truncated")] * 2


@pytest.mark.parametrize(
    ("config", "saves"),
    [
        (settings(), True),
        (settings(max_turns=2), False),
        (settings(segment_length=None), False),
        (settings(segment_length=None, tuning="auto"), True),
        (settings(segment_length=None, tuning={"mode": "auto", "may": ["max_running"]}), False),
        (settings(segment_length=None, mode="colocated", over_sampling=2.0), True),
        (settings(segment_length=None, mode="colocated", max_staleness=0), False),
    ],
)
async def test_what_could_go_on_elsewhere_is_saved(tmp_path: Path, config: Config, saves: bool) -> None:
    async with working(tmp_path, answer=tokens, config=config) as stage:
        requests = await play_until_cut(stage, num_cuts=1)
    assert [request.saved is not None for request in requests] == [saves, saves]


def test_an_agents_cut_answer_is_not_saved() -> None:
    """Its program cannot go on in another process."""
    part = Segment(token_ids=[7], logprobs=[-1.0], spans=[VersionSpan(0, 0, 1)], finish_reason="length")
    work = leased(range(2), max_tokens=4, sampling=Sampling(max_new_tokens=20))
    group, pool = GroupProgress(work=work, saves_cut=True), RecordingPool()
    for parent, num_saved in ((ROOT, 0), (None, 1)):
        turn = Turn(observation_ids=[1], segments=[part], parent=parent)
        so_far = Trajectory(episode=work.episodes[0], task_id="t", turns=[turn], reward=0.0, status="completed")
        PartialRollouts(settings(), pool).save_cut(group, so_far)  # type: ignore[arg-type]
        assert len(pool.saved) == num_saved


class RecordingPool:
    """Keeps what is appended to it."""

    def __init__(self) -> None:
        self.writer, self.saved = self, list[Sample]()

    def append(self, samples: list[Sample]) -> None:
        self.saved += samples


async def test_every_token_is_saved_once_whoever_plays(tmp_path: Path) -> None:
    async with working(tmp_path, answer=tokens, config=settings()) as stage:
        first = await play_until_cut(stage, num_cuts=2)
        stage.kill("env-0")
        for name in ("env-1", "env-2"):
            await stage.join(name)
        await stage.start("env-1", job(1, attempt=1, grant=4, max_new_tokens=20, saved=save(*first)))
        second = await cut_again(stage, "env-1", num_cuts=2)
        stage.kill("env-1")
        chains = save(*first, *second, attempt=2)
        await stage.start("env-2", job(1, attempt=2, grant=4, max_new_tokens=20, saved=chains))
        played = await finish(stage, "env-2")
        observation = stage.policy.prompts[0]
    for chain in chains:
        written = [sample.loss_mask.tolist() for sample in pieces(tmp_path, chain)]
        assert written == [[0] * len(observation) + [1] * 4, [1] * 4, [1] * 4, [1] * 4]
    assert played.ref is not None
    for member, sample in enumerate(PayloadReader(tmp_path).read(played.ref)):
        assert sampled(sample) == tokens(observation, nth_seed(0, member))[:20]


async def test_nothing_new_is_not_saved(tmp_path: Path) -> None:
    async with working(tmp_path, answer=tokens, config=settings()) as stage:
        await stage.policy.release()
        requests = await play_until_cut(stage, num_cuts=2)
        assert [(r.unfinished, r.num_tokens, r.saved) for r in requests] == [(True, 0, None)] * 4
        await stage.policy.resume()
        for request in requests[1::2]:
            await stage.grant("env-0", request, 4)
        (first, second) = await cut_again(stage, "env-0", num_cuts=1)
        assert [sampled(Sample.joined(pieces(tmp_path, saved))) for saved in save(first, second)] == [
            tokens(stage.policy.prompts[0], nth_seed(0, member))[:4] for member in range(2)
        ]


async def lose_cut_answers(stage: Stage) -> list[GrantRequest]:
    """Worker env-0 saves two pieces of each, and is lost with its file; env-1 is there."""
    requests = await play_until_cut(stage, num_cuts=2)
    stage.kill("env-0")
    (stage.directory / "env-0-00000.seg").write_bytes(b"")
    await stage.join("env-1")
    return requests


async def test_an_unreadable_cut_episode_starts_over_with_its_whole_budget(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with working(tmp_path, answer=tokens, config=settings(max_segment_count=3)) as stage:
        lost = await lose_cut_answers(stage)
        stage.policy.policy_version = 7
        await stage.start("env-1", job(1, attempt=1, grant=1, max_new_tokens=20, saved=save(*lost)))
        played = await finish(stage, "env-1")
    assert "train/1/0/1 starts over: pool file env-0-00000.seg" in capsys.readouterr().err
    assert [e.response_tokens for e in played.episodes] == [12, 12], "three segments' worth, though the first was short"
    assert {e.version_min for e in played.episodes} == {7}, "nothing is left of what was lost"


async def test_an_episode_that_started_over_is_saved_anew(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with working(tmp_path, answer=tokens, config=settings()) as stage:
        lost = await lose_cut_answers(stage)
        await stage.start("env-1", job(1, attempt=1, grant=4, max_new_tokens=20, saved=save(*lost)))
        anew = await cut_again(stage, "env-1", num_cuts=2)
        stage.kill("env-1")
        await stage.join("env-2")
        stage.policy.policy_version = 7
        chains = save(*lost, *anew, attempt=2)
        await stage.start("env-2", job(1, attempt=2, grant=4, max_new_tokens=20, saved=chains))
        played = await finish(stage, "env-2")
    assert capsys.readouterr().err.count("starts over") == 2, "both members, once"
    assert played.ref is not None
    for sample in PayloadReader(tmp_path).read(played.ref):
        versions = sample.versions[sample.loss_mask == 1].tolist()
        assert max(versions[:8]) < 7 and len(versions) == 20, "what env-1 saved is gone on with"


@pytest.mark.parametrize("num_members", [1, 2])
async def test_a_lost_record_of_an_ended_member_fails_its_group(tmp_path: Path, num_members: int) -> None:
    async with working(tmp_path, answer=tokens, config=settings()) as stage:
        lost = PayloadRef(file="gone-00000.seg", offset=0, length=8, checksum=1)
        saved = [
            PartialRollout(episode=EpisodeId("train", 1, member, 1), refs=(lost,), ended=True)
            for member in range(num_members)
        ]
        await stage.start("env-0", job(1, attempt=1, grant=4, max_new_tokens=20, saved=saved))
        whole = num_members == 2
        report = await (stage.controller.generated if whole else stage.controller.ended).get()
        assert not stage.policy.prompts, "nothing is played of it"
        await stage.start("env-0", job(1, attempt=2, grant=4, max_new_tokens=20))
        played = await finish(stage, "env-0")
    assert [(e.episode.episode, e.episode.attempt, e.status) for e in report.episodes] == [
        (member, 1, "failed") for member in range(num_members)
    ]
    error = "the group of train/1/0/1 starts over: pool file gone-00000.seg"
    assert error in str(report.episodes[0].error)
    assert [(e.episode.attempt, e.response_tokens) for e in played.episodes] == [(2, 20), (2, 20)]


async def test_a_lost_record_of_a_member_that_its_group_can_spare_is_reported_and_the_others_play(
    tmp_path: Path,
) -> None:
    async with working(tmp_path, answer=tokens, config=settings()) as stage:
        lost = PayloadRef(file="gone-00000.seg", offset=0, length=8, checksum=1)
        saved = [PartialRollout(episode=EpisodeId("train", 1, 0, 1), refs=(lost,), ended=True)]
        members = {"members": (0, 1, 2), "group_size": 2, "redundancy": 1}
        await stage.start("env-0", job(1, attempt=1, grant=4, max_new_tokens=20, saved=saved, **members))
        report = await stage.controller.ended.get()
        played = await finish(stage, "env-0")
    assert [(e.episode.episode, e.status) for e in report.episodes] == [(0, "failed")]
    assert [(e.episode.episode, e.response_tokens) for e in played.episodes] == [(1, 20), (2, 20)]


async def test_the_scheduler_plays_the_whole_group_again_for_a_lost_record(tmp_path: Path) -> None:
    scheduler = Scheduler(settings(), now=lambda: 0.0, log_decision=lambda *_: None)
    scheduler.add_worker("env-0", 64)
    scheduler.mark_served(0)
    scheduler.admit_tasks([Task(task_id="t", tag="train", index=0)])
    (first,) = [assignment.item for assignment in await scheduler.next_assignments()]
    assert isinstance(first, Work)
    lost = PayloadRef(file="gone-00000.seg", offset=0, length=8, checksum=1)
    ended = Trajectory(episode=first.episodes[0], task_id="t", turns=[], reward=1.0, status="completed")
    scheduler.members.end_members(GroupAttempt(first.group, first.attempt), [ended.summary()], [lost])
    scheduler.add_worker("env-1", 64)
    scheduler.remove_worker("env-0")
    (again,) = [assignment.item for assignment in await scheduler.next_assignments()]
    assert isinstance(again, Work) and [saved.refs for saved in again.saved] == [(lost,)]
    async with working(tmp_path, answer=tokens, config=settings()) as stage:
        await stage.start("env-0", NewTask(work=again))
        report = await stage.controller.ended.get()
    scheduler.members.end_members(report.episodes[0].episode.group_attempt, report.episodes, report.saved)
    (third,) = [assignment.item for assignment in await scheduler.next_assignments()]
    assert isinstance(third, Work)
    assert (third.attempt, third.members, third.saved) == (2, first.members, ())
    scheduler.ledger.check()


segments = st.integers(1, 4).flatmap(
    lambda length: st.builds(
        Segment,
        token_ids=st.lists(st.integers(0, 99), min_size=length, max_size=length),
        logprobs=st.lists(st.floats(-9, 0, width=32), min_size=length, max_size=length),
        spans=st.integers(0, 5).map(lambda version: [VersionSpan(version, 0, length)]),
        finish_reason=st.just("length"),
    )
)


@given(st.lists(segments, min_size=1, max_size=8), st.sets(st.integers(1, 7)))
def test_the_pieces_of_an_answer_are_the_answer(segments: list[Segment], cuts: set[int]) -> None:
    turn = Turn(observation_ids=[1, 2], segments=segments)
    episode = EpisodeId("train", 1, 0, 0)
    whole = Trajectory(episode=episode, task_id="t", turns=[turn], reward=0.0, status="aborted")
    starts = sorted({0} | {cut for cut in cuts if cut < len(segments)})
    ends = [*starts[1:], len(segments)]
    written = [
        piece(replace(whole, turns=[replace(turn, segments=segments[:end])]), start=start)
        for start, end in zip(starts, ends, strict=True)
    ]
    assert [bool(part.loss_mask[0]) for part in written] == [False] + [True] * (len(written) - 1)
    joined, expected = Sample.joined(written), whole.flatten()
    for name in ("token_ids", "loss_mask", "logprobs", "versions"):
        np.testing.assert_array_equal(getattr(joined, name), getattr(expected, name), strict=True)
    assert joined.turns == expected.turns


async def test_a_world_that_cannot_be_repeated_is_not_gone_on_with(tmp_path: Path) -> None:
    class Fickle(Quick):
        number = 0

        def __init__(self, task: Task) -> None:
            Fickle.number += 1

        def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
            return f"world {Fickle.number // 2}", {}

    async with working(tmp_path, Fickle, answer=tokens, config=settings()) as stage:
        requests = await play_until_cut(stage, num_cuts=1)
        await stage.start("env-0", job(1, attempt=1, grant=4, max_new_tokens=20, saved=save(*requests)))
        played = await stage.controller.generated.get()
    assert {e.status for e in played.episodes} == {"failed"}
    assert "the same seed gives another first observation" in str(played.episodes[0].error)
