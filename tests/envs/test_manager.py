"""One trajectory per lease, whatever the environment does; tokens in, tokens out."""

from __future__ import annotations

import asyncio
import itertools
import math
import re
import threading
from collections.abc import Callable
from functools import partial
from typing import Any, ClassVar

import numpy as np
import pytest
from fake_ports import leased
from scripted_policy import ScriptedPolicy

from penstock.config import Config
from penstock.envs.episode import MOST_INFO
from penstock.envs.guess_number import GuessNumber
from penstock.envs.manager import EnvManager
from penstock.model import text_threads
from penstock.model.chat import ChatTokenizer
from penstock.model.text_threads import INLINE_CHARACTERS
from penstock.ports.environment import Environment
from penstock.ports.work import Work
from penstock.samples import Trajectory
from penstock.simulator.clock import run_virtual
from penstock.types import EpisodeId, Sampling, SegmentGrant, Task


class Always:
    """Grants at once; remembers who asked."""

    def __init__(self, max_tokens: int = 100) -> None:
        self.max_tokens = max_tokens
        self.asked: list[tuple[bool, int]] = []

    async def request(self, so_far: Trajectory, *, unfinished: bool, num_tokens: int) -> SegmentGrant:
        assert num_tokens == so_far.summary().response_tokens
        self.asked.append((unfinished, num_tokens))
        return SegmentGrant(episode=so_far.episode, max_tokens=self.max_tokens)

    def generated(self, episode: EpisodeId, *, num_tokens: int) -> None:
        """Nobody else waits."""


def work(size: int = 2, *, max_new_tokens: int = 8, grant: int = 8, deadline_s: float = 5.0, seed: int = 7) -> Work:
    sampling = Sampling(max_new_tokens=max_new_tokens)
    return leased(range(size), max_tokens=grant, sampling=sampling, deadline_s=deadline_s, env_seed=seed)


class Echo:
    """Reward 1 for saying `ok`; `fault` may break it."""

    def __init__(self, task: Task, *, fault: Callable[[], Any] | None = None, observation: Any = "say ok") -> None:
        self._fault, self._observation = fault, observation

    def reset(self, seed: int) -> tuple[Any, dict[str, Any]]:
        return self._observation, {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        reward = self._fault() if self._fault else float(action == "ok")
        return "", reward, True, False, {}


def play(
    chat: ChatTokenizer,
    answers: list[str] | Callable[[list[int], int], list[int]],
    *,
    make: Callable[[Task], Environment] = Echo,
    grants: Always | None = None,
    config: Config | None = None,
    job: Work | None = None,
) -> list[Trajectory]:
    if callable(answers):
        policy = ScriptedPolicy(answers, policy_version=3)
    else:
        end = [chat.eos_ids[0]]
        policy = ScriptedPolicy([chat.encode(answer) + end for answer in answers], policy_version=3)
    manager = EnvManager(config or Config(), make=make, policy=policy, grants=grants or Always(), chat=chat)
    ended: list[Trajectory] = []
    run_virtual(manager.play(job or work(), lambda trajectory, text: ended.append(trajectory)))
    return sorted(ended, key=lambda trajectory: trajectory.episode)


def test_members_are_rewarded_one_by_one(chat: ChatTokenizer) -> None:
    colder = leased(range(2), max_tokens=8, sampling=Sampling(max_new_tokens=8, temperature=0.7), deadline_s=5.0)
    right, wrong = play(chat, ["ok", "no"], job=colder)
    assert right.flatten().temperature == wrong.flatten().temperature == 0.7
    assert (right.reward, right.status, wrong.reward) == (1.0, "completed", 0.0)
    assert [t.episode.episode for t in (right, wrong)] == [0, 1]
    sample = right.flatten()
    assert sample.loss_mask.sum() == 3 and set(sample.versions[sample.loss_mask == 1]) == {3}
    assert chat.decode(sample.token_ids[sample.loss_mask == 1].tolist()) == "ok"


def boom() -> float:
    raise KeyError("answer")


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda task: Echo(task, fault=boom), "KeyError: 'answer'"),
        (lambda task: Echo(task, fault=lambda: float("nan")), "reward is nan, not a finite number"),
        (lambda task: Echo(task, fault=lambda: "1"), "reward is '1', not a finite number"),
        (lambda task: Echo(task, observation=None), "observation is a NoneType, not a string"),
        (lambda task: Echo(task, observation="x" * 600), "prompt_too_long"),
        (lambda task: Echo(task, observation="<|end|>" * 10**6), "prompt_too_long: 7000000 characters exceed"),
    ],
)
def test_a_bad_environment_is_data_not_a_crash(
    chat: ChatTokenizer, make: Callable[[Task], Environment], message: str
) -> None:
    trajectories = play(chat, ["ok", "ok"], make=make)
    assert len(trajectories) == 2
    for trajectory in trajectories:
        assert trajectory.status == "failed" and trajectory.error is not None and message in trajectory.error
        assert trajectory.summary().is_final == ("prompt_too_long" in message)


@pytest.mark.parametrize(("size", "room"), [(0, 8), (2, 8), (5, 5), (9, 1), (10, 0)])
def test_an_answer_has_the_room_that_its_prompt_leaves(chat: ChatTokenizer, size: int, room: int) -> None:
    empty = len(chat.prompt([{"role": "user", "content": ""}]))
    config = Config.model_validate({"model": {"max_context": empty + 10}, "env": {"max_new_tokens": 8}})
    policy = lambda prompt, seed: chat.encode("x" * 100)  # noqa: E731
    make = partial(Echo, observation="o" * size)
    found = play(chat, policy, make=make, config=config)
    assert [each.num_tokens for each in found] == [room] * 2
    assert {each.status for each in found} == {"truncated" if room else "failed"}


class ShowsLong(Echo):
    """Its second observation is a text that takes long to tokenise."""

    LONG = "a<|end|>" * (INLINE_CHARACTERS // 8 + 1)

    def __init__(self, task: Task, *, first: str) -> None:
        super().__init__(task, observation=first)

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return self.LONG, 0.0, False, False, {}


@pytest.mark.parametrize("first", ["short", ShowsLong.LONG])
async def test_a_long_observation_holds_up_no_other_episode(
    chat: ChatTokenizer, monkeypatch: pytest.MonkeyPatch, first: str
) -> None:
    """Whether it comes first or later: it is tokenised in another thread than the one of the event loop."""
    converters = []

    def noted(convert: Callable[..., list[int]]) -> Callable[..., list[int]]:
        def converted(messages: Any, **settings: Any) -> list[int]:
            if len(messages[-1]["content"]) > INLINE_CHARACTERS:
                converters.append(threading.current_thread().name)
            return convert(messages, **settings)

        return converted

    for name in ("prompt", "continuation"):
        monkeypatch.setattr(chat, name, noted(getattr(chat, name)))
    config = Config.model_validate({"model": {"max_context": 2**18}, "env": {"max_turns": 2}})
    policy = ScriptedPolicy(lambda ids, seed: [chat.eos_ids[0]], policy_version=0)
    make = partial(ShowsLong, first=first)
    manager = EnvManager(config, make=make, policy=policy, grants=Always(), chat=chat)
    ended: list[Trajectory] = []
    await manager.play(work(), lambda trajectory, text: ended.append(trajectory))
    assert [(each.stop_reason, len(each.turns)) for each in ended] == [("max_turns", 2)] * 2
    assert len(converters) == (2 if first == "short" else 3)
    assert all(name.startswith("prompt-text-") for name in converters)


async def test_a_text_that_takes_too_long_fails_its_own_episodes(
    chat: ChatTokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = threading.Event()
    monkeypatch.setattr(text_threads, "TEXT_S", 0.05)
    monkeypatch.setattr(chat, "prompt", lambda messages: gate.wait() and [])
    config = Config.model_validate({"model": {"max_context": 2**18}})
    policy = ScriptedPolicy(lambda ids, seed: [chat.eos_ids[0]], policy_version=0)
    make = partial(ShowsLong, first=ShowsLong.LONG)
    manager = EnvManager(config, make=make, policy=policy, grants=Always(), chat=chat)
    ended: list[Trajectory] = []
    await manager.play(work(), lambda trajectory, text: ended.append(trajectory))
    gate.set()
    assert [each.status for each in ended] == ["failed"] * 2
    assert "s for the tokens of a prompt" in str(ended[0].error)


def test_an_environment_that_hangs_is_cut_at_its_deadline(chat: ChatTokenizer) -> None:
    class Hangs(Echo):
        async def step(self, action: str) -> Any:  # type: ignore[override]
            await asyncio.Event().wait()

    trajectories = play(chat, ["ok", "ok"], make=Hangs, job=work(deadline_s=0.05))  # type: ignore[arg-type]
    assert [t.status for t in trajectories] == ["failed", "failed"]
    assert "train/1/0/0 of t waited" in str(trajectories[0].error)
    assert "for its next observation, held by Hangs.step" in str(trajectories[0].error)


def test_a_long_answer_asks_for_segments_within_one_budget(chat: ChatTokenizer) -> None:
    grants = Always(max_tokens=3)
    seen: list[int] = []

    def next_letters(prompt: list[int], sample: int) -> list[int]:
        seen.append(len(prompt))
        return chat.encode("abcdefghijklmnop")

    (trajectory,) = play(chat, next_letters, grants=grants, job=work(1, max_new_tokens=8, grant=3))
    lengths = [len(segment.token_ids) for segment in trajectory.turns[0].segments]
    assert lengths == [3, 3, 2], "the cumulative budget is pinned"
    assert grants.asked == [(True, 3), (True, 6)]
    assert [later - seen[0] for later in seen] == [0, 3, 6], "each segment continues from the recorded tokens"
    assert trajectory.status == "truncated"


@pytest.mark.parametrize(("penalize", "reward"), [(True, 0.0), (False, 0.5)])
def test_an_answer_that_never_ends_earns_nothing(chat: ChatTokenizer, penalize: bool, reward: float) -> None:
    config = Config.model_validate({"env": {"penalize_truncation": penalize}})
    (trajectory,) = play(
        chat, ["a" * 20], make=lambda task: Echo(task, fault=lambda: 0.5), config=config, job=work(1, max_new_tokens=8)
    )
    assert (trajectory.status, trajectory.reward) == ("truncated", reward)


def test_turns_keep_the_tokens_of_the_past(chat: ChatTokenizer) -> None:
    prompts: list[list[int]] = []

    def halve(prompt: list[int], sample: int) -> list[int]:
        prompts.append(prompt)
        guess = "8" if len(prompts) == 1 else "4"
        return [*chat.encode(guess), chat.eos_ids[0]]

    config = Config.model_validate({"env": {"max_turns": 4}})
    (trajectory,) = play(
        chat, halve, make=lambda task: GuessNumber(task, limit=15, max_guesses=3), config=config, job=work(1, seed=1)
    )
    assert len(trajectory.turns) == len(prompts)
    for earlier, later in itertools.pairwise(prompts):
        assert later[: len(earlier)] == earlier
    flat = trajectory.flatten()
    assert flat.token_ids[: len(prompts[-1])].tolist() == prompts[-1]
    assert flat.loss_mask.sum() == 2 * len(prompts)


def test_out_of_turns_is_truncated(chat: ChatTokenizer) -> None:
    config = Config.model_validate({"env": {"max_turns": 2}})
    job = work(1, seed=3)
    (trajectory,) = play(
        chat,
        lambda prompt, sample: [*chat.encode("99"), chat.eos_ids[0]],
        make=lambda task: GuessNumber(task, max_guesses=9),
        config=config,
        job=job,
    )
    assert trajectory.status == "truncated" and len(trajectory.turns) == 2


def test_members_of_a_group_meet_the_same_world() -> None:
    task = Task(task_id="t", tag="train", index=0)
    games = [GuessNumber(task, limit=1000) for _ in range(4)]
    for game in games:
        game.reset(42)
    assert len({game._secret for game in games}) == 1


def test_the_games_expert_always_finds_the_number() -> None:
    game = GuessNumber(Task(task_id="t", tag="train", index=0), limit=15, max_guesses=4)
    for seed in range(50):
        game.reset(seed)
        reward, done = 0.0, False
        while not done:
            _, reward, done, _, _ = game.step(game.demonstrate())
        assert reward == 1.0


class Slow(Echo):
    """Every step takes its time, and there is always another."""

    async def step(self, action: str) -> Any:  # type: ignore[override]
        await asyncio.sleep(3.0)
        return "again", 0.0, False, False, {}


@pytest.mark.parametrize(("turn_timeout_s", "num_turns"), [(None, 4), (4.0, 4), (2.0, 1)])
def test_a_turn_has_a_deadline_of_its_own(chat: ChatTokenizer, turn_timeout_s: float | None, num_turns: int) -> None:
    config = Config.model_validate({"env": {"max_turns": 8, "turn_timeout_s": turn_timeout_s}})
    (trajectory,) = play(chat, ["ok"] * 8, make=Slow, config=config, job=work(1, deadline_s=10.0))  # type: ignore[arg-type]
    assert trajectory.status == "failed" and len(trajectory.turns) == num_turns
    assert f"waited {2 if turn_timeout_s == 2.0 else 1} s for its next observation" in str(trajectory.error)


class Ending(Echo):
    """Ends as it is told."""

    def __init__(self, task: Task, *, terminated: bool, truncated: bool) -> None:
        super().__init__(task)
        self._end = terminated, truncated

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "", 1.0, *self._end, {}


class Surrogates(Echo):
    """Observes half an escape, as `json.loads` reads it."""

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        return "a\ud800", {}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "b\udfff", 1.0, False, False, {}


def test_text_that_no_tokenizer_takes_is_replaced(chat: ChatTokenizer) -> None:
    config = Config.model_validate({"env": {"max_turns": 3}})
    (trajectory,) = play(chat, ["ok"] * 3, make=Surrogates, job=work(1), config=config)
    assert (trajectory.error, trajectory.stop_reason) == (None, "max_turns")
    shown = [chat.decode(turn.observation_ids) for turn in trajectory.turns]
    assert "a?" in shown[0] and "b?" in shown[1]


class Floods(Echo):
    """Observes more text than a context can hold, which would take long to tokenise."""

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        return "<|end|>" * 10**6, 1.0, False, False, {}


def test_a_flood_of_text_ends_its_episode_at_once(chat: ChatTokenizer) -> None:
    (trajectory,) = play(
        chat, ["ok", "ok"], make=Floods, job=work(1), config=Config.model_validate({"env": {"max_turns": 3}})
    )
    assert (trajectory.status, trajectory.stop_reason) == ("truncated", "max_length")


@pytest.mark.parametrize(
    ("terminated", "truncated", "answer", "status", "stop_reason"),
    [
        (True, False, "ok", "completed", "terminated"),
        (True, True, "ok", "completed", "terminated"),
        (False, True, "ok", "truncated", "truncated"),
        (False, False, "ok", "truncated", "max_turns"),
        (True, False, "a" * 20, "truncated", "max_length"),
    ],
)
def test_why_an_episode_went_no_further(
    chat: ChatTokenizer, terminated: bool, truncated: bool, answer: str, status: str, stop_reason: str
) -> None:
    (trajectory,) = play(
        chat, [answer], make=lambda task: Ending(task, terminated=terminated, truncated=truncated), job=work(1)
    )
    summary = trajectory.summary()
    assert (summary.status, summary.stop_reason) == (trajectory.status, trajectory.stop_reason) == (status, stop_reason)


class Measured:
    """Tells metrics in each of three turns."""

    metric_kinds: ClassVar[dict[str, str]] = {"calls": "sum", "depth": "max"}

    def __init__(self, metrics: list[Any]) -> None:
        self._metrics = iter(metrics)

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        return "?", {"metrics": {"seen": 1}}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        metrics = next(self._metrics, None)
        return "!", 0.0, metrics is None, False, {} if metrics is None else {"metrics": metrics}


def measured(chat: ChatTokenizer, *metrics: Any) -> Trajectory:
    config = Config.model_validate({"env": {"max_turns": 5, "max_new_tokens": 8}})
    make = lambda task: Measured(list(metrics))  # noqa: E731
    return play(chat, lambda prompt, seed: [chat.eos_ids[0]], make=make, config=config, job=work(1))[0]


@pytest.mark.parametrize("own", [False, True])
def test_a_filter_of_the_user_gets_the_whole_info(chat: ChatTokenizer, own: bool) -> None:
    class Telling(Echo):
        def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
            return "", 1.0, True, False, {"depth": np.int64(3), "metrics": {"a": 1}}

    filters = [{"name": "my_filters:Solved"}] if own else ["zero_variance"]
    config = Config.model_validate({"scheduler": {"group_filter": filters}})
    (found, _) = play(chat, ["ok", "ok"], make=Telling, config=config)
    assert found.summary().info == ({"depth": 3} if own else {}) and found.metrics == {"a": 1.0}


def test_metrics_of_steps_become_those_of_the_episode(chat: ChatTokenizer) -> None:
    whole = measured(chat, {"calls": 1, "depth": np.int64(2), "right": True}, {"calls": 2, "depth": 1, "right": False})
    assert whole.error is None
    assert whole.metrics == {"seen": 1.0, "calls": 3.0, "depth": 2.0, "right": 0.5}
    assert whole.summary().metrics == whole.metrics


@pytest.mark.parametrize(
    ("metrics", "reason"),
    [
        ([1], r"info\['metrics'\] is a list, not a mapping"),
        ({"a": "b"}, r"info\['metrics'\]\['a'\] is 'b', not a finite number"),
        ({"a": math.nan}, "not a finite number"),
        ({3: 1.0}, "'3' is no short name"),
        ({"x" * 65: 1.0}, "is no short name"),
        ({f"m{n}": 1.0 for n in range(65)}, "more than 64"),
    ],
)
def test_metrics_of_another_form_fail_the_episode(chat: ChatTokenizer, metrics: Any, reason: str) -> None:
    whole = measured(chat, metrics)
    assert whole.status == "failed" and re.search(reason, whole.error or "")


def test_an_info_with_many_keys_is_cut(chat: ChatTokenizer) -> None:
    class Wide(Echo):
        def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
            return "", 1.0, True, False, {f"key{n}": "x" * 10 for n in range(5000)}

    config = Config.model_validate({"scheduler": {"group_filter": [{"name": "my_filters:Solved"}]}})
    (found, _) = play(chat, ["ok", "ok"], make=Wide, config=config)
    info = found.summary().info
    assert len(info) == MOST_INFO and info["key9"] == "x" * 10
