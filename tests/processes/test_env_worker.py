"""An environment worker on a real bus: every NEW_TASK is answered, whatever environments, grants and cancels do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
from stage import Quick, job, working

from penstock.config import Config
from penstock.control.messages import Cancel
from penstock.processes import env_worker
from penstock.store.payload_files import PayloadReader
from penstock.types import GroupAttempt, Task


class Unbuildable(Quick):
    def __init__(self, task: Task) -> None:
        raise OSError("no sandbox left")


class OneByOne(Quick):
    """Members end one at a time, when told to."""

    gates: list[asyncio.Event]

    def __init__(self, task: Task) -> None:
        self._gate = asyncio.Event()
        self.gates.append(self._gate)

    async def step(self, action: str) -> Any:  # type: ignore[override]
        await self._gate.wait()
        return "", 1.0, True, False, {}


async def until(condition: Callable[[], bool]) -> None:
    """It comes to pass while members play."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0)


async def test_a_group_that_ends_at_once_is_one_report(tmp_path: Path) -> None:
    async with working(tmp_path) as stage:
        await stage.start("env-0", job(1, members=range(8), group_size=8))
        played = await stage.controller.generated.get()
        assert stage.controller.reports == ["Hello", "TaskRequest", "DataGenerated"]
    assert [episode.reward for episode in played.episodes] == [1.0] * 8
    assert played.ref is not None
    assert [sample.episode for sample in PayloadReader(tmp_path).read(played.ref)] == list(range(8))


async def test_an_environment_that_cannot_be_built_is_reported(tmp_path: Path) -> None:
    async with working(tmp_path, Unbuildable) as stage:
        for attempt in range(3):
            await stage.start("env-0", job(1, attempt=attempt))
            played = await stage.controller.generated.get()
            assert played.ref is None
            assert {episode.status for episode in played.episodes} == {"failed"}
            assert "no sandbox left" in str(played.episodes[0].error)


async def test_a_grant_after_the_cancel_hurts_nobody(tmp_path: Path) -> None:
    async with working(tmp_path, answer="a long answer") as stage:
        await stage.start("env-0", job(1, grant=2))
        waiting = [await stage.controller.requests.get() for _ in range(2)]
        assert [request.num_tokens for request in waiting] == [2, 2]
        await stage.tell("env-0", Cancel(attempts=[GroupAttempt(1, 0), GroupAttempt(5, 0)]))
        for request in waiting:
            await stage.grant("env-0", request, 2)
        await stage.start("env-0", job(2))
        assert (await stage.controller.generated.get()).group == 2
        assert stage.controller.generated.empty()


async def test_a_probe_is_kept_until_its_group_is_whole(tmp_path: Path) -> None:
    async with working(tmp_path) as stage:
        await stage.start("env-0", job(1, members=[0], group_size=4))
        probe = await stage.controller.ended.get()
        assert [(e.episode.episode, e.reward, e.response_tokens) for e in probe.episodes] == [(0, 1.0, 3)]
        assert probe.saved == [None]
        await stage.start("env-0", job(1, members=[1, 2, 3], group_size=4))
        played = await stage.controller.generated.get()
        assert [episode.episode.episode for episode in played.episodes] == [0, 1, 2, 3]
        assert played.ref is not None
        assert [sample.episode for sample in PayloadReader(tmp_path).read(played.ref)] == [0, 1, 2, 3]
        assert stage.controller.reports.count("RewardComputed") == 1


async def test_members_that_end_early_are_reported_as_they_do(tmp_path: Path) -> None:
    OneByOne.gates = []
    config = Config.model_validate({"scheduler": {"segment_length": 8}})
    async with working(tmp_path, OneByOne, config=config) as stage:  # type: ignore[arg-type]
        await stage.start("env-0", job(1, members=range(4), group_size=4))
        await until(lambda: stage.policy.num_sampled == 12)
        for member in (2, 3):
            OneByOne.gates[member].set()
        two = await stage.controller.ended.get()
        OneByOne.gates[0].set()
        one = await stage.controller.ended.get()
        OneByOne.gates[1].set()
        whole = await stage.controller.generated.get()
    assert [[e.episode.episode for e in report.episodes] for report in (two, one, whole)] == [[2, 3], [0], [0, 1, 2, 3]]
    reader = PayloadReader(tmp_path)
    saved = [reader.read(ref)[0].episode for ref in two.saved + one.saved if ref is not None]
    assert saved == [2, 3, 0], "each in a record of its own"


async def test_a_failed_member_ends_its_groups_attempt(tmp_path: Path) -> None:
    class SecondFails(OneByOne):
        async def step(self, action: str) -> Any:  # type: ignore[override]
            await self._gate.wait()
            raise OSError("lost the sandbox")

    OneByOne.gates = []
    async with working(tmp_path, SecondFails) as stage:  # type: ignore[arg-type]
        await stage.start("env-0", job(1))
        await until(lambda: stage.policy.num_sampled == 6)
        OneByOne.gates[1].set()
        failed = await stage.controller.ended.get()
        assert [(e.episode.episode, e.status) for e in failed.episodes] == [(1, "failed")]
        assert "lost the sandbox" in str(failed.episodes[0].error) and failed.saved == [None]
        for gate in OneByOne.gates:
            gate.set()
        await stage.start("env-0", job(1, attempt=1))
        await until(lambda: len(OneByOne.gates) == 4)
        for gate in OneByOne.gates:
            gate.set()
        played = await stage.controller.generated.get()
        assert {e.episode.attempt for e in played.episodes} == {1}
        assert stage.controller.generated.empty() and stage.controller.ended.empty()


async def test_a_group_does_without_its_slowest_member(tmp_path: Path) -> None:
    OneByOne.gates = []
    async with working(tmp_path, OneByOne) as stage:  # type: ignore[arg-type]
        await stage.start("env-0", job(1, members=range(3), redundancy=1))
        await until(lambda: stage.policy.num_sampled == 9)
        for member in (2, 0):
            OneByOne.gates[member].set()
        played = await stage.controller.generated.get()
        assert [episode.episode.episode for episode in played.episodes] == [0, 2]
        assert played.ref is not None
        assert [sample.episode for sample in PayloadReader(tmp_path).read(played.ref)] == [0, 2]
        await until(lambda: stage.workers["env-0"].num_surplus_tokens == 3)


class Breaking(OneByOne):
    """The first of them that may go on do not."""

    num_broken: int

    async def step(self, action: str) -> Any:  # type: ignore[override]
        await self._gate.wait()
        Breaking.num_broken -= 1
        if Breaking.num_broken >= 0:
            raise OSError("lost the sandbox")
        return "", 1.0, True, False, {}


@pytest.mark.parametrize(("num_broken", "is_whole"), [(1, True), (2, False)])
async def test_a_group_does_without_as_many_broken_members_as_it_has_more(
    tmp_path: Path, num_broken: int, is_whole: bool
) -> None:
    OneByOne.gates, Breaking.num_broken = [], num_broken
    config = Config.model_validate({"scheduler": {"segment_length": 8}})
    async with working(tmp_path, Breaking, config=config) as stage:  # type: ignore[arg-type]
        await stage.start("env-0", job(1, members=range(3), redundancy=1))
        await until(lambda: stage.policy.num_sampled == 9)
        OneByOne.gates[1].set()
        first = await stage.controller.ended.get()
        assert [(e.episode.episode, e.status) for e in first.episodes] == [(1, "failed")]
        assert first.saved == [None], "nobody goes on from it"
        OneByOne.gates[0].set()
        second = await stage.controller.ended.get()
        assert [(e.episode.episode, e.status == "failed") for e in second.episodes] == [(0, not is_whole)]
        assert [saved is not None for saved in second.saved] == [is_whole]
        OneByOne.gates[2].set()
        if is_whole:
            played = await stage.controller.generated.get()
            assert [episode.episode.episode for episode in played.episodes] == [0, 2] and played.ref is not None
        else:
            await stage.start("env-0", job(1, members=range(3), redundancy=1, attempt=1))
            await until(lambda: len(OneByOne.gates) == 6)
        assert stage.controller.generated.empty()


async def test_a_cancel_that_overtakes_its_group_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(env_worker, "REMEMBERED_CANCELS", 2)
    async with working(tmp_path) as stage:
        await stage.tell("env-0", Cancel(attempts=[GroupAttempt(1, 2), GroupAttempt(1, 1)]))
        for attempt in (0, 2):
            await stage.start("env-0", job(1, attempt=attempt))
        assert not stage.policy.prompts
        await stage.start("env-0", job(1, attempt=3))
        assert {e.episode.attempt for e in (await stage.controller.generated.get()).episodes} == {3}
        await stage.tell("env-0", Cancel(attempts=[GroupAttempt(group, 0) for group in (2, 3, 4)]))
        for group in (3, 4, 2):
            await stage.start("env-0", job(group))
        assert (await stage.controller.generated.get()).group == 2, "remembered for a while, not for ever"
        assert stage.controller.generated.empty()


async def test_a_newer_attempt_and_a_cancel_drop_what_was_kept(tmp_path: Path) -> None:
    async with working(tmp_path) as stage:
        await stage.start("env-0", job(1, members=[0], group_size=2))
        await stage.controller.ended.get()
        await stage.start("env-0", job(1, members=[1], group_size=2, attempt=1))
        report = await stage.controller.ended.get()
        assert [str(e.episode) for e in report.episodes] == ["train/1/1/1"]
        await stage.tell("env-0", Cancel(attempts=[GroupAttempt(1, 1)]))
        await stage.start("env-0", job(1, members=[0], group_size=2, attempt=2))
        report = await stage.controller.ended.get()
        assert [str(e.episode) for e in report.episodes] == ["train/1/0/2"]
        assert stage.controller.generated.empty()


async def test_a_closed_worker_reports_nothing_and_plays_nothing(tmp_path: Path) -> None:
    OneByOne.gates = []
    async with working(tmp_path, OneByOne) as stage:
        await stage.start("env-0", job(1))
        await until(lambda: len(OneByOne.gates) == 2)
        for gate in OneByOne.gates:
            gate.set()
        stage.workers["env-0"].close()
        await stage.start("env-0", job(2))
        assert stage.controller.generated.empty() and len(OneByOne.gates) == 2


async def gated(answer: str, payload: Mapping[str, Any]) -> float:
    """A reward that waits to be told."""
    gate = asyncio.Event()
    OneByOne.gates.append(gate)
    await gate.wait()
    return 0.5


async def test_the_controller_hears_when_only_rewards_are_missing(tmp_path: Path) -> None:
    OneByOne.gates = []
    config = Config.model_validate({"env": {"reward": f"{__name__}:gated"}})
    async with working(tmp_path, config=config) as stage:
        await stage.start("env-0", job(1, members=range(4), group_size=4))
        generated = await stage.controller.generating_ended.get()
        assert [str(episode) for episode in generated.episodes] == [f"train/1/{member}/0" for member in range(4)]
        assert generated.num_tokens == [3] * 4
        for gate in OneByOne.gates:
            gate.set()
        played = await stage.controller.generated.get()
        assert [episode.reward for episode in played.episodes] == [0.5] * 4
        assert stage.controller.reports == ["Hello", "TaskRequest", "EpisodesGenerated", "DataGenerated"]
        assert stage.workers["env-0"].telemetry().counters == {
            "episodes": 4,
            "surplus_tokens": 0,
            "drifts": 0,
            "branches": 0,
            "off_branch_tokens": 0,
            "manager_masked_tokens": 0,
            "unread_calls": 0,
            "refused_requests": 0,
            "scored": 4,
        }


async def test_turns_are_samples_of_their_own_if_that_is_asked_for(tmp_path: Path) -> None:
    class Twice(Quick):
        def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
            return "again", 1.0, False, False, {}

    config = Config.model_validate({"env": {"formulation": "step", "max_turns": 2}})
    async with working(tmp_path, Twice, config=config) as stage:
        await stage.start("env-0", job(1))
        for _ in range(2):
            await stage.grant("env-0", await stage.controller.requests.get(), 8)
        played = await stage.controller.generated.get()
    assert [episode.num_turns for episode in played.episodes] == [2, 2]
    assert played.ref is not None
    samples = PayloadReader(tmp_path).read(played.ref)
    assert [(sample.episode, sample.reward) for sample in samples] == [(0, 2.0), (0, 2.0), (1, 2.0), (1, 2.0)]
