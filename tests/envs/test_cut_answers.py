"""Answers that are cut: by their grant, by a server that gives way; budgets hold over all of it."""

from __future__ import annotations

import asyncio
from typing import Any

from fake_ports import leased
from scripted_policy import ScriptedPolicy

from penstock.config import Config
from penstock.envs.manager import EnvManager
from penstock.model.chat import ChatTokenizer
from penstock.ports.work import Work
from penstock.samples import Trajectory, VersionSpan
from penstock.simulator.clock import run_virtual
from penstock.types import NO_VERSION, Sampling, SegmentGrant

LETTERS = "abcdefghijklmnopqrstuvwxyz"


class Turns:
    """Says its name for a number of turns, then ends; each turn earns 1."""

    made = 0

    def __init__(self, num_turns: int = 1) -> None:
        self._left = num_turns
        Turns.made += 1

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        return f"world {seed}", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._left -= 1
        return "go on", 1.0, self._left == 0, False, {}


class Grants:
    """Grants at once, after whatever `between` does; remembers who asked with what."""

    def __init__(self, max_tokens: int = 100, between: Any = None) -> None:
        self._max_tokens, self._between = max_tokens, between
        self.asked: list[tuple[bool, int]] = []

    async def request(self, so_far: Trajectory, *, unfinished: bool, num_tokens: int) -> SegmentGrant:
        self.asked.append((unfinished, num_tokens))
        if self._between:
            await self._between()
        return SegmentGrant(episode=so_far.episode, max_tokens=self._max_tokens)


def settings(*, max_turns: int = 1, max_new_tokens: int = 20, **scheduler: Any) -> Config:
    env = {"max_turns": max_turns, "max_new_tokens": max_new_tokens}
    return Config.model_validate({"env": env, "scheduler": scheduler})


def work(config: Config, *, size: int = 1, grant: int) -> Work:
    return leased(range(size), max_tokens=grant, sampling=Sampling(max_new_tokens=config.env.max_new_tokens))


class Stage:
    """A policy that says the alphabet, however it is cut, in as many turns as the environment wants."""

    def __init__(self, chat: ChatTokenizer, config: Config, grants: Grants, *, answer: str = LETTERS) -> None:
        self._end = [*chat.encode(answer), chat.eos_ids[0]]
        self._prompt_ends = chat.prompt([{"role": "user", "content": "x"}])[-1]
        self.policy = ScriptedPolicy(self._go_on)
        self._chat, self._config, self._grants = chat, config, grants

    def _go_on(self, prompt_ids: list[int], seed: int) -> list[int]:
        """What follows the tokens after the last opening of the assistant's turn."""
        said = prompt_ids[::-1].index(self._prompt_ends)
        return self._end[said:]

    async def play(self, work: Work, *, num_turns: int = 1) -> list[Trajectory]:
        ended: list[Trajectory] = []
        manager = EnvManager(
            self._config,
            make=lambda task: Turns(num_turns),
            policy=self.policy,
            grants=self._grants,
            chat=self._chat,
        )
        await manager.play(work, lambda trajectory, text: ended.append(trajectory))
        return ended


def lengths(trajectory: Trajectory) -> list[list[int]]:
    return [[len(segment.token_ids) for segment in turn.segments] for turn in trajectory.turns]


async def test_the_segments_of_an_answer_are_bounded(chat: ChatTokenizer) -> None:
    config, grants = settings(segment_length=4, max_segment_count=3), Grants(4)
    (trajectory,) = await Stage(chat, config, grants).play(work(config, grant=4))
    assert lengths(trajectory) == [[4, 4, 4]]
    assert (trajectory.status, trajectory.reward) == ("truncated", 0.0)
    assert grants.asked == [(True, 4), (True, 8)]


async def test_the_scheduler_alone_decides_how_long_a_segment_is(chat: ChatTokenizer) -> None:
    """Tuning changes the length of segments in mid-run, and workers do not hear of it."""
    config, grants = settings(segment_length=4), Grants(9)
    (trajectory,) = await Stage(chat, config, grants, answer=LETTERS[:15]).play(work(config, grant=6))
    assert lengths(trajectory) == [[6, 9, 1]] and trajectory.status == "completed"


async def test_an_answer_that_ends_in_its_last_segment_is_finished(chat: ChatTokenizer) -> None:
    config = settings(segment_length=4, max_segment_count=3)
    (trajectory,) = await Stage(chat, config, Grants(4), answer=LETTERS[:11]).play(work(config, grant=4))
    assert lengths(trajectory) == [[4, 4, 4]]
    assert (trajectory.status, trajectory.reward) == ("completed", 1.0)


async def test_the_length_of_an_episode_is_bounded_over_all_its_turns(chat: ChatTokenizer) -> None:
    config = settings(max_turns=5, segment_length=4, global_max_length=18)
    grants = Grants(4)
    stage = Stage(chat, config, grants, answer=LETTERS[:6])
    (trajectory,) = await stage.play(work(config, grant=4), num_turns=5)
    assert lengths(trajectory) == [[4, 3], [4, 3], [4]], "the last grant is cut to what is left"
    assert (trajectory.status, trajectory.reward) == ("truncated", 2.0)
    assert grants.asked == [(True, 4), (False, 7), (True, 11), (False, 14)]


async def test_an_episode_that_used_up_its_length_gets_no_further_turn(chat: ChatTokenizer) -> None:
    config, grants = settings(max_turns=5, global_max_length=14), Grants()
    stage = Stage(chat, config, grants, answer=LETTERS[:6])
    (trajectory,) = await stage.play(work(config, grant=20), num_turns=5)
    assert lengths(trajectory) == [[7], [7]]
    assert (trajectory.status, trajectory.reward) == ("truncated", 2.0)
    assert grants.asked == [(False, 7)]


async def test_segments_inside_turns_leave_the_environment_parked(chat: ChatTokenizer) -> None:
    config, grants = settings(max_turns=3, segment_length=4), Grants(4)
    Turns.made = 0
    stage = Stage(chat, config, grants, answer=LETTERS[:9])
    (trajectory,) = await stage.play(work(config, grant=4), num_turns=3)
    assert lengths(trajectory) == [[4, 4, 2]] * 3
    assert (trajectory.status, trajectory.reward, Turns.made) == ("completed", 3.0, 1)
    assert [unfinished for unfinished, _ in grants.asked] == [True, True, False, True, True, False, True, True]
    flat = trajectory.flatten()
    assert flat.token_ids[: len(stage.policy.prompts[-1])].tolist() == stage.policy.prompts[-1]


async def test_a_server_that_gives_way_cuts_and_does_not_count(chat: ChatTokenizer) -> None:
    config = settings(segment_length=8, max_segment_count=2)
    grants = Grants(8, between=lambda: stage.policy.resume())
    stage = Stage(chat, config, grants, answer=LETTERS[:15])
    playing = asyncio.create_task(stage.play(work(config, size=2, grant=8)))
    async with asyncio.timeout(60):
        while stage.policy.num_sampled < 2 * 3:  # noqa: ASYNC110
            await asyncio.sleep(0)
        await stage.policy.release()
        trajectories = await playing
    for trajectory in trajectories:
        assert lengths(trajectory) == [[3, 8, 5]], "its budget is what it was before"
        assert [s.finish_reason for s in trajectory.turns[0].segments] == ["abort", "length", "stop"]
        assert (trajectory.status, trajectory.reward) == ("completed", 1.0)
    assert grants.asked == [(True, 3), (True, 3), (True, 11), (True, 11)]


async def test_a_server_that_gave_way_is_asked_once_per_grant(chat: ChatTokenizer) -> None:
    config = settings(segment_length=4, max_segment_count=2)
    granted = asyncio.Semaphore(0)
    grants = Grants(4, between=granted.acquire)
    stage = Stage(chat, config, grants, answer=LETTERS[:7])
    await stage.policy.release()
    playing = asyncio.create_task(stage.play(work(config, size=3, grant=4)))
    async with asyncio.timeout(60):
        for num_rounds in range(1, 4):
            while len(grants.asked) < 3 * num_rounds:  # noqa: ASYNC110
                await asyncio.sleep(0)
            for _ in range(20):
                await asyncio.sleep(0)
            assert len(stage.policy.prompts) == 1 + 3 * (num_rounds - 1), "nobody asks again before the next grant"
            if num_rounds == 3:
                await stage.policy.resume()
            for _ in range(3):
                granted.release()
        for _ in range(3):
            granted.release()
        trajectories = await playing
    assert grants.asked == [(True, 0)] * 9 + [(True, 4)] * 3
    assert {tuple(prompt[: len(stage.policy.prompts[0])]) for prompt in stage.policy.prompts} == {
        tuple(stage.policy.prompts[0])
    }
    for trajectory in trajectories:
        assert lengths(trajectory) == [[4, 4]], "segments without a token leave nothing, and do not count"
        summary = trajectory.summary()
        assert (summary.status, summary.num_turns, summary.response_tokens) == ("completed", 1, 8)
        assert (summary.version_min, summary.version_max) == (0, 0)
        assert len(trajectory.flatten().token_ids) == summary.prompt_tokens + 8


async def test_an_episode_that_has_no_token_yet_is_a_prompt(chat: ChatTokenizer) -> None:
    class Watching(Grants):
        async def request(self, so_far: Trajectory, *, unfinished: bool, num_tokens: int) -> SegmentGrant:
            self.summary, self.flat = so_far.summary(), so_far.flatten()
            await stage.policy.resume()
            return await super().request(so_far, unfinished=unfinished, num_tokens=num_tokens)

    config, grants = settings(), Watching(20)
    stage = Stage(chat, config, grants, answer="abc")
    await stage.policy.release()
    (trajectory,) = await stage.play(work(config, grant=20))
    assert (grants.summary.num_turns, grants.summary.response_tokens, grants.summary.version_min) == (1, 0, NO_VERSION)
    assert grants.flat.token_ids.tolist() == stage.policy.prompts[0] and not grants.flat.loss_mask.any()
    assert lengths(trajectory) == [[4]] and trajectory.status == "completed"


def test_a_server_that_gave_way_costs_the_lease_nothing(chat: ChatTokenizer) -> None:
    async def play() -> list[Trajectory]:
        async def phase_of_training() -> None:
            await asyncio.sleep(1000)
            await stage.policy.resume()

        config = settings()
        stage = Stage(chat, config, Grants(20, between=phase_of_training), answer="abc")
        await stage.policy.release()
        return await stage.play(work(config, size=2, grant=20))

    assert [(t.status, lengths(t)) for t in run_virtual(play())] == [("completed", [[4]])] * 2


async def test_spans_follow_the_versions(chat: ChatTokenizer) -> None:
    async def update() -> None:
        stage.policy.policy_version += 2

    config, grants = settings(segment_length=4), Grants(4, between=update)
    stage = Stage(chat, config, grants, answer=LETTERS[:9])
    (trajectory,) = await stage.play(work(config, grant=4))
    spans = [segment.spans for segment in trajectory.turns[0].segments]
    assert spans == [[VersionSpan(0, 0, 4)], [VersionSpan(2, 0, 4)], [VersionSpan(4, 0, 2)]]
    flat = trajectory.flatten()
    assert flat.versions[flat.loss_mask == 1].tolist() == [0] * 4 + [2] * 4 + [4] * 2


def test_waiting_for_a_grant_costs_the_lease_nothing(chat: ChatTokenizer) -> None:
    config = settings(segment_length=4)
    grants = Grants(4, between=lambda: asyncio.sleep(1000))
    (trajectory,) = run_virtual(Stage(chat, config, grants, answer="abcdef").play(work(config, grant=4)))
    assert trajectory.status == "completed"
