"""Managers of the user's own: what the policy sees, what is trained, and how an episode ends."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_ports import leased
from scripted_policy import ScriptedPolicy
from test_manager import Always

from penstock.config import Config, ConfigError, load_config
from penstock.envs.agents import LEAVE_S, PausableTimeout
from penstock.envs.calls import EpisodeEnvironment
from penstock.envs.demonstrations import demonstrations
from penstock.envs.dialogue import EpisodeFailure
from penstock.envs.guess_number import GuessNumber
from penstock.envs.manager import EnvManager
from penstock.envs.registry import check_environment, environment_maker, managers_of
from penstock.model.chat import ChatTokenizer
from penstock.ports.episode_manager import Answer, EpisodeManager, ManagedEpisode
from penstock.ports.work import Work
from penstock.rollout.session import RolloutError
from penstock.samples import Trajectory
from penstock.simulator.clock import run_virtual
from penstock.types import Sampling, Task

EXAMPLE = Path(__file__).parent.parent.parent / "examples" / "own_manager" / "run.yaml"
TASK = Task(task_id="seed/train/0", tag="train", index=0)


class Counting:
    """Shows how often it was asked, and ends at "end"."""

    def __init__(self, task: Task) -> None:
        self._num_steps = 0

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        return "0", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._num_steps += 1
        if action == "lose":
            raise RuntimeError("lost")
        return str(self._num_steps), 1.0, action == "end", False, {"state": self._num_steps}


class LatestOnly:
    """Shows the latest observation, without history. `also` is called with each answer."""

    def __init__(self, *, also: Callable[[ManagedEpisode, Answer], None] = lambda episode, answer: None) -> None:
        self._also = also

    async def play(self, episode: ManagedEpisode) -> None:
        observation, _ = await episode.reset()
        while True:
            answer = await episode.answer([{"role": "user", "content": str(observation)}])
            outcome = await episode.step(answer)
            self._also(episode, answer)
            if outcome.terminated or outcome.truncated:
                return
            observation = outcome.observation


def played_by(
    chat: ChatTokenizer, answers: list[list[int]], manager: Callable[[], EpisodeManager], **env: Any
) -> EnvManager:
    tree = {"env": {"max_turns": 4, "max_new_tokens": 8, "manager": "m.py:M", **env}, "model": {"max_context": 96}}
    config, policy = Config.model_validate(tree), ScriptedPolicy(answers, policy_version=3)
    return EnvManager(config, make=Counting, policy=policy, grants=Always(), chat=chat, managers={"m.py:M": manager})


def one(deadline_s: float = 20.0) -> Work:
    return leased(range(1), max_tokens=8, sampling=Sampling(max_new_tokens=8), deadline_s=deadline_s)


def play(
    chat: ChatTokenizer, answers: list[str], manager: Callable[[], EpisodeManager], **env: Any
) -> tuple[Trajectory, EnvManager]:
    said = [[*chat.encode(answer), chat.eos_ids[0]] for answer in answers]
    played, ended = played_by(chat, said, manager, **env), list[Trajectory]()
    run_virtual(played.play(one(), lambda trajectory, text: ended.append(trajectory)))
    (trajectory,) = ended
    return trajectory, played


def test_a_manager_decides_what_the_policy_sees(chat: ChatTokenizer) -> None:
    trajectory, _ = play(chat, ["a", "b", "end"], LatestOnly)
    assert (trajectory.status, trajectory.stop_reason, trajectory.reward) == ("completed", "terminated", 3.0)
    samples = trajectory.formulate("branches")
    shown = [chat.decode(sample.token_ids[sample.loss_mask == 0].tolist()) for sample in samples]
    said = [chat.decode(sample.token_ids[sample.loss_mask == 1].tolist()) for sample in samples]
    assert [text.count(number) for text, number in zip(shown, "012", strict=True)] == [1, 1, 1]
    assert said == ["a", "b", "end"]
    assert [[turn.reward for turn in sample.turns] for sample in samples] == [[1.0]] * 3
    states = [turn.state for turn in trajectory.turns]
    assert states[0] is None and len({*states}) == 3  # named by the environment after each step


def test_a_history_goes_on_with_the_recorded_tokens(chat: ChatTokenizer) -> None:
    class Whole:
        async def play(self, episode: ManagedEpisode) -> None:
            observation, _ = await episode.reset()
            messages: list[dict[str, Any]] = []
            for _ in range(2):
                messages.append({"role": "user", "content": str(observation)})
                answer = await episode.answer(messages)
                messages.append({"role": "assistant", "content": answer.text})
                observation = (await episode.step(answer)).observation

    trajectory, _ = play(chat, ["a", "end"], Whole)
    (sample,) = trajectory.formulate("branches")
    assert [turn.reward for turn in sample.turns] == [1.0, 1.0]


def test_a_manager_decides_what_is_trained(chat: ChatTokenizer) -> None:
    def but_the_first(episode: ManagedEpisode, answer: Answer) -> None:
        episode.train_only(answer, [False] + [True] * (len(answer.token_ids) - 1))
        episode.earn(answer, 0.5)

    trajectory, played = play(chat, ["ab", "end"], lambda: LatestOnly(also=but_the_first))
    first, second = trajectory.formulate("branches")
    assert chat.decode(first.token_ids[first.loss_mask == 1].tolist()) == "b"
    assert chat.decode(second.token_ids[second.loss_mask == 1].tolist()) == "nd"
    assert trajectory.reward == 3.0 and [sample.turns[0].reward for sample in (first, second)] == [1.5, 1.5]
    assert played.counts()["manager_masked_tokens"] == 2
    assert trajectory.num_tokens == sum(len(turn.token_ids) for turn in trajectory.turns)


@pytest.mark.parametrize(
    ("env", "stop_reason", "turns"), [({"max_turns": 2}, "max_turns", 2), ({"max_new_tokens": 1}, "max_length", 4)]
)
def test_an_episode_ends_at_its_limits(chat: ChatTokenizer, env: dict[str, Any], stop_reason: str, turns: int) -> None:
    trajectory, _ = play(chat, ["aa"] * 4, LatestOnly, **env)
    assert trajectory.status == "truncated" and len(trajectory.turns) == turns
    assert trajectory.stop_reason == ("max_turns" if turns == 4 else stop_reason)
    assert trajectory.reward == (0.0 if env.get("max_new_tokens") else 2.0)  # a cut answer earns nothing


async def test_calls_that_a_manager_leaves_behind_end_with_its_episode(chat: ChatTokenizer) -> None:
    late: list[asyncio.Task[Any]] = []
    is_over = asyncio.Event()
    asked = [{"role": "user", "content": "more"}]

    class LeavesTasks:
        async def play(self, episode: ManagedEpisode) -> None:
            observation, _ = await episode.reset()
            answer = await episode.answer([{"role": "user", "content": str(observation)}])
            late.append(asyncio.create_task(episode.answer(asked)))

            async def later() -> None:
                await is_over.wait()
                await episode.answer(asked)

            late.append(asyncio.create_task(later()))
            await asyncio.sleep(0)
            await episode.step(answer)

    answers, ended = [[*chat.encode("a"), chat.eos_ids[0]], chat.encode("b" * 8)], list[Trajectory]()
    played = played_by(chat, answers, LeavesTasks)
    await played.play(one(), lambda trajectory, text: ended.append(trajectory))
    is_over.set()
    cut, refused = await asyncio.gather(*late, return_exceptions=True)
    assert isinstance(cut, asyncio.CancelledError) and "the episode has ended" in str(refused)
    assert [chat.decode(turn.token_ids) for turn in ended[0].turns] == ["a"]


async def test_the_clock_of_an_episode_stands_while_one_of_its_waits_lasts() -> None:
    """Two waits overlap. The end of the first one does not start the clock again."""
    timeout, first, second = PausableTimeout(5.0, waiter="an episode"), asyncio.Event(), asyncio.Event()

    async def waits() -> None:
        await asyncio.gather(timeout.paused(first.wait()), timeout.paused(second.wait()))

    async def nothing() -> None:
        """There is no access to close."""

    running = asyncio.create_task(timeout.run(waits(), nothing))
    for _ in range(3):
        await asyncio.sleep(0)
    first.set()
    for _ in range(3):
        await asyncio.sleep(0)
    assert timeout._timer is not None and timeout._timer.when() is None
    second.set()
    await running


class Idle:
    async def play(self, episode: ManagedEpisode) -> None:
        await episode.reset()


class IgnoresFaults:
    """What the environment raises is lost on it."""

    async def play(self, episode: ManagedEpisode) -> None:
        await episode.reset()
        answer = await episode.answer([{"role": "user", "content": "0"}])
        with suppress(Exception):
            await episode.step(answer, "lose")


class Careless:
    """It fails after it was told that no turn is left."""

    async def play(self, episode: ManagedEpisode) -> None:
        observation, _ = await episode.reset()
        try:
            while True:
                await episode.answer([{"role": "user", "content": str(observation)}])
        except Exception:
            raise KeyError("after the last turn") from None


class Long:
    async def play(self, episode: ManagedEpisode) -> None:
        await episode.answer([{"role": "user", "content": "x" * 99_999}])


class Broken:
    async def play(self, episode: ManagedEpisode) -> None:
        await episode.reset()
        raise KeyError("notes")


def test_a_reset_twice_takes_one_process(chat: ChatTokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    entered: list[EpisodeEnvironment] = []

    async def enter(self: EpisodeEnvironment) -> None:
        entered.append(self)

    class Twice:
        async def play(self, episode: ManagedEpisode) -> None:
            await episode.reset()
            await LatestOnly().play(episode)

    monkeypatch.setattr(EpisodeEnvironment, "enter", enter)
    trajectory, _ = play(chat, ["end"], Twice)
    assert (trajectory.reward, trajectory.error, len(entered)) == (1.0, None, 1)


@pytest.mark.parametrize("messages", [[{"role": "user", "content": "again"}], []])
async def test_a_manager_that_never_gives_up_holds_up_no_other(chat: ChatTokenizer, messages: list[Any]) -> None:
    class TriesForEver:
        async def play(self, episode: ManagedEpisode) -> None:
            await episode.reset()
            while True:
                with suppress(Exception):
                    await episode.answer(messages)

    ended: list[Trajectory] = []
    played = played_by(chat, [[*chat.encode("a"), chat.eos_ids[0]]], TriesForEver, max_turns=1)
    await played.play(one(deadline_s=0.2), lambda trajectory, text: ended.append(trajectory))
    assert ended[0].status == "failed" and "Stalled" in (ended[0].error or "")


def of_another_episode(episode: ManagedEpisode, answer: Answer) -> None:
    episode.earn(replace(answer, turn=7), 1.0)


def wrong_flags(episode: ManagedEpisode, answer: Answer) -> None:
    episode.train_only(answer, [True])


@pytest.mark.parametrize(
    ("manager", "message"),
    [
        (Idle, "m.py:M.play asked the policy for no answer"),
        (Broken, "m.py:M.play of t: KeyError: 'notes'"),
        (lambda: LatestOnly(also=of_another_episode), "answer 7 is none that this episode has given"),
        (IgnoresFaults, "Counting.step of t: RuntimeError: lost"),
        (Careless, "KeyError: 'after the last turn'"),
        (Long, "has 99999 characters, and model.max_context has room for"),
        (lambda: LatestOnly(also=wrong_flags), "train_only: 1 flags for an answer of 2 tokens"),
        (lambda: LatestOnly(also=lambda episode, answer: episode.earn(answer, float("inf"))), "the reward is inf"),
        (lambda: Broken(1), "TypeError"),  # type: ignore[call-arg]
    ],
)
def test_a_bad_manager_fails_its_episode(chat: ChatTokenizer, manager: Any, message: str) -> None:
    trajectory, _ = play(chat, ["a"] * 4, manager)
    assert trajectory.status == "failed" and message in (trajectory.error or "")


@pytest.mark.parametrize(
    ("env", "message"),
    [
        ({"manager": "nowhere.py:Notes"}, "env.manager '.*nowhere.py:Notes': there is no file"),
        ({"manager": "Notes"}, "write file.py:Class or package.module:Class"),
    ],
)
def test_a_manager_that_does_not_exist_is_refused(env: dict[str, Any], message: str) -> None:
    settings = load_config(EXAMPLE).env.model_copy(update=env)
    with pytest.raises(ConfigError, match=message):
        check_environment("env", settings)


def test_options_that_a_manager_does_not_take_are_refused() -> None:
    config = load_config(EXAMPLE, ["env.manager_options={size: 3}"])
    with pytest.raises(ConfigError, match=r"env.manager_options do not fit .*Notes: got an unexpected keyword"):
        managers_of(config, {"guess_number": GuessNumber})


def test_an_agent_has_no_manager() -> None:
    class Agent:
        async def play(self, llm: Any, seed: int) -> float:
            return 0.0

    config = load_config(EXAMPLE)
    with pytest.raises(ConfigError, match="guess_number is an agent, which has its own loop"):
        managers_of(config, {"guess_number": Agent})  # type: ignore[dict-item]


def test_demonstrations_are_what_the_manager_shows(chat: ChatTokenizer) -> None:
    """Each answer of the expert after the prompt that the manager makes for it."""
    config = load_config(EXAMPLE)
    (manager,) = managers_of(config, {"guess_number": GuessNumber}).values()
    numbers = itertools.count()
    shown = demonstrations(
        lambda: Task(task_id=f"seed/train/{(index := next(numbers))}", tag="train", index=index),
        make=environment_maker(config.env),
        max_turns=lambda task: config.env.max_turns,
        chat=chat,
        seed=0,
        manager=lambda task: manager(),
    )
    examples = list(itertools.islice(shown, 30))
    first_prompt = chat.prompt([{"role": "user", "content": "1-15 > <"}])
    for token_ids, mask in examples:
        said = [token for token, own in zip(token_ids, mask, strict=True) if own]
        prompt_ids = token_ids[: -len(said)]
        assert chat.decode(said).isdigit() and said[-1] == chat.eos_ids[0]
        if chat.decode(said) == "8":
            assert prompt_ids == first_prompt
    later = [chat.decode(token_ids) for token_ids, _ in examples if token_ids[: len(first_prompt)] != first_prompt]
    assert any(">8" in text for text in later) and any("<8" in text for text in later)


def test_the_example_plays(chat: ChatTokenizer) -> None:
    """And its samples are trained by state: equal notes are equal states."""
    config = load_config(EXAMPLE)
    managers = managers_of(config, {"guess_number": GuessNumber})
    policy = ScriptedPolicy([[*chat.encode(guess), chat.eos_ids[0]] for guess in ("8", "4", "2", "1")])
    ended: list[Trajectory] = []
    played = EnvManager(
        config,
        make=environment_maker(config.env),
        policy=policy,
        grants=Always(),
        chat=chat,
        managers=managers,
    )
    work = leased(range(1), max_tokens=4, sampling=Sampling(max_new_tokens=4), deadline_s=20.0)
    run_virtual(played.play(work, lambda trajectory, text: ended.append(trajectory)))
    (trajectory,) = ended
    assert trajectory.status in ("completed", "truncated") and 1 <= len(trajectory.turns) <= 4
    assert all(np.count_nonzero(sample.loss_mask) for sample in trajectory.formulate("branches"))


def test_a_manager_that_ignores_its_cancellation_is_left_behind(
    chat: ChatTokenizer, caplog: pytest.LogCaptureFixture
) -> None:
    class Stubborn:
        may_end = False

        async def play(self, episode: ManagedEpisode) -> None:
            while not Stubborn.may_end:
                with suppress(asyncio.CancelledError):
                    await asyncio.sleep(3600.0)

    async def main() -> tuple[Trajectory, float]:
        ended: list[Trajectory] = []
        await played_by(chat, [], Stubborn).play(one(), lambda trajectory, text: ended.append(trajectory))
        Stubborn.may_end = True  # else it would keep this loop from ending
        return ended[0], asyncio.get_running_loop().time()

    trajectory, seconds = run_virtual(main())
    assert trajectory.status == "failed" and "waited 20 s for the end of play" in (trajectory.error or "")
    assert seconds == 20.0 + LEAVE_S and "is left behind" in caplog.text


class AsksAtOnce:
    """Four answers at once, with `gather` or a task group."""

    together: Callable[..., Any]

    async def play(self, episode: ManagedEpisode) -> None:
        observation, _ = await episode.reset()
        calls = [episode.answer([{"role": "user", "content": f"{observation}{number}"}]) for number in range(4)]
        await self.together(calls)


class Gathers(AsksAtOnce):
    async def together(self, calls: list[Any]) -> None:
        await asyncio.gather(*calls)


class Groups(AsksAtOnce):
    async def together(self, calls: list[Any]) -> None:
        async with asyncio.TaskGroup() as tasks:
            for call in calls:
                tasks.create_task(call)


@pytest.mark.parametrize("manager", [Gathers, Groups])
def test_turns_that_run_out_for_several_answers_end_the_episode(
    chat: ChatTokenizer, manager: Callable[[], EpisodeManager]
) -> None:
    trajectory, _ = play(chat, ["a", "b"], manager, max_turns=2, reward="exact")
    assert (trajectory.error, trajectory.stop_reason) == (None, "max_turns") and len(trajectory.turns) == 2


@pytest.mark.parametrize("manager", [Gathers, Groups])
def test_a_server_that_fails_several_answers_is_not_the_managers_fault(
    chat: ChatTokenizer, manager: Callable[[], EpisodeManager], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def lost(*_: Any) -> None:
        raise RolloutError("http://server", "lost")

    monkeypatch.setattr(ScriptedPolicy, "generate", lost)
    trajectory, _ = play(chat, [], manager, max_turns=4)
    assert trajectory.status == "failed" and (trajectory.error or "").startswith("RolloutError: ")


def test_a_manager_that_ignores_its_cancellation_gets_no_answer_afterwards(chat: ChatTokenizer) -> None:
    heard: list[str] = []

    class AsksOn:
        async def play(self, episode: ManagedEpisode) -> None:
            try:
                await asyncio.sleep(3600.0)
            except asyncio.CancelledError:
                try:
                    await episode.answer([{"role": "user", "content": "still there?"}])
                except EpisodeFailure as error:
                    heard.append(str(error))

    trajectory, _ = play(chat, ["a"], AsksOn)
    assert trajectory.status == "failed" and not trajectory.turns and heard == ["the episode has ended"]
