"""Environments of Gymnasium and GEM, unmodified: what is seen and done as text, and how their episodes end."""

from __future__ import annotations

import asyncio
import os
import random
from importlib.util import find_spec
from typing import Any

import gymnasium
import numpy as np
import pytest
from fake_ports import leased
from gymnasium.spaces import Box, Dict, Discrete, MultiBinary, MultiDiscrete, Text, Tuple
from scripted_policy import ScriptedPolicy

from penstock.config import Config, ConfigError, EnvConfig
from penstock.envs.adapter import LARGEST_SEED, GemAdapter
from penstock.envs.calls import ConcurrencyLimit, EpisodeEnvironment
from penstock.envs.dialogue import EpisodeFailure
from penstock.envs.exception_location import LoggedOnce
from penstock.envs.isolated import making
from penstock.envs.manager import EnvManager
from penstock.envs.registry import environment_maker, locate, resolve
from penstock.envs.spaces import Actions, check_observations, write
from penstock.model.chat import ChatTokenizer
from penstock.samples import Trajectory
from penstock.types import Sampling, SegmentGrant, Task

TASK = Task(task_id="seed/train/0", tag="train", index=0)
SEED = 2**40 + 7


class Corridor(gymnasium.Env[int, int]):
    """Three steps to the right; remembers whether it was closed."""

    closed: list[bool] = []  # noqa: RUF012 - of all of them

    def __init__(self, length: int = 3) -> None:
        self.observation_space, self.action_space = Discrete(length + 1), Discrete(2)
        self._length = length

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        assert seed == SEED % LARGEST_SEED
        self._place = 0
        return self._place, {}

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        self._place = max(self._place + (1 if action == 1 else -1), 0)
        return self._place, float(self._place == self._length), self._place == self._length, False, {}

    def close(self) -> None:
        self.closed.append(True)


class Limited(Corridor):
    """Counts its steps itself."""

    def __init__(self, max_steps: int) -> None:
        super().__init__()
        self._left = max_steps

    def step(self, action: int) -> tuple[int, float, bool, bool, dict[str, Any]]:
        self._left -= 1
        observation, reward, terminated, _, info = super().step(action)
        return observation, reward, terminated, self._left == 0, info


def made(name: str, **options: Any) -> Any:
    return environment_maker(EnvConfig(name=name, options=options))(TASK)


def test_a_gymnasium_environment_is_played_by_its_id() -> None:
    lake = made("gym:FrozenLake-v1", is_slippery=False, action_names=["left", "down", "right", "up"])
    assert lake.reset(SEED) == ("0\nAction: one of left, down, right, up", {"prob": 1})
    observation, reward, terminated, truncated, _ = lake.step("up or down? I go right.")
    assert (observation.splitlines()[0], reward, terminated, truncated) == ("1", 0.0, False, False)
    assert lake.step("down")[2:4] == (True, False), "a hole ends it"


def test_a_time_limit_truncates_and_an_end_terminates() -> None:
    limited = made("gym:FrozenLake-v1", is_slippery=False, max_episode_steps=2)
    limited.reset(SEED)
    assert [limited.step("0")[2:4] for _ in range(2)] == [(False, False), (False, True)]
    corridor = made(f"{__name__}:Corridor")
    corridor.reset(SEED)
    assert [corridor.step("1")[1:4] for _ in range(3)] == [(0.0, False, False), (0.0, False, False), (1.0, True, False)]
    limited = made(f"{__name__}:Limited", max_steps=2)
    limited.reset(SEED)
    assert [limited.step("0")[2:4] for _ in range(2)] == [(False, False), (False, True)]


@pytest.mark.parametrize(("policy", "ends"), [("again", False), ("end", True)])
def test_an_answer_without_an_action_never_reaches_the_environment(policy: str, ends: bool) -> None:
    corridor = made(f"{__name__}:Corridor", unparsable=policy, unparsable_reward=-0.5)
    corridor.reset(SEED)
    observation, reward, terminated, truncated, _ = corridor.step("forward, 7 times")
    assert "an action is a whole number from 0 to 1" in observation and observation.splitlines()[1] == "0"
    assert (reward, terminated, truncated) == (-0.5, ends, False)


def test_what_it_shows_to_do_is_what_it_would_read(chat: ChatTokenizer) -> None:
    for name in ("gym:Blackjack-v1", "gym:Pendulum-v1", "gem:game:GuessTheNumber-v0-easy"):
        once, again = made(name), made(name)
        assert once.reset(SEED) == again.reset(SEED)
        action = once.demonstrate()
        assert action == again.demonstrate()
        assert not once.step(action)[4].get("unparsable")


@pytest.mark.parametrize(
    ("space", "answer", "action"),
    [
        (Discrete(4), "2 or 3? 3", 3),
        (Discrete(3, start=-1), "-1", -1),
        (MultiDiscrete([3, 5]), "I take 2 and 4", [2, 4]),
        (MultiBinary(3), "0 1 1", [0, 1, 1]),
        (Box(-2.0, 2.0, (2,), np.float32), "[0.5, -1e-1]", [0.5, -0.1]),
        (Text(8), "go", "go"),
    ],
)
def test_actions_are_read_from_the_end_of_an_answer(space: gymnasium.Space[Any], answer: str, action: Any) -> None:
    actions = Actions(space)
    np.testing.assert_array_equal(actions.read(answer), np.asarray(action, dtype=space.dtype))
    np.testing.assert_array_equal(actions.read(actions.write(actions.read(answer))), actions.read(answer))


@pytest.mark.parametrize(
    ("space", "answer"),
    [
        (Discrete(4), "4"),
        (Discrete(4), "none"),
        (Discrete(4), "1.5"),
        (MultiDiscrete([3, 5]), "2"),
        (Box(-2.0, 2.0, (2,), np.float32), "0.5 3"),
        (Text(2), "too long"),
    ],
)
def test_what_is_no_action_is_refused(space: gymnasium.Space[Any], answer: str) -> None:
    with pytest.raises(ValueError, match="an action is"):
        Actions(space).read(answer)


def test_observations_are_written_as_python_would() -> None:
    assert write((7, np.int64(10), np.float32(0.123456))) == "(7, 10, 0.1235)"
    assert write({"place": np.asarray([1.0, -2.5]), "bag": ("key",)}) == "place: [1, -2.5]\nbag: (key)"
    check_observations(Dict({"place": Box(-1, 1, (3,)), "what": Tuple((Discrete(2), Text(5)))}))


def test_what_has_no_textual_form_is_refused_with_a_remedy() -> None:
    with pytest.raises(ConfigError, match=r"observation space .*ObservationWrapper"):
        check_observations(Box(0, 255, (64, 64, 3), np.uint8))
    with pytest.raises(ConfigError, match=r"action space .*ActionWrapper"):
        Actions(Dict({"move": Discrete(2)}))
    with pytest.raises(ConfigError, match=r"action_names \['left'\] do not fit"):
        made("gym:FrozenLake-v1", action_names=["left"])


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("gym:FrozenLaek-v1", "FrozenLake"),
        ("gem:game:GuessTheNumber-v9", "game:GuessTheNumber-v0-easy"),
        ("gym:", "names no environment"),
    ],
)
def test_an_unknown_id_is_one_clear_error(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(name)


def test_an_option_that_nobody_takes_is_named() -> None:
    with pytest.raises(ConfigError, match="slipery"):
        made("gym:FrozenLake-v1", slipery=False)


def test_a_prompt_may_say_what_is_seen_and_what_can_be_done() -> None:
    corridor = made(f"{__name__}:Corridor", prompt="place {observation}; {actions}?")
    assert corridor.reset(SEED)[0] == "place 0; a whole number from 0 to 1?"
    with pytest.raises(ConfigError, match=r"only \{observation\} and \{actions\}: KeyError 'place'"):
        made(f"{__name__}:Corridor", prompt="{place}")


def test_locating_one_imports_nothing() -> None:
    assert locate("gem:game:GuessTheNumber-v0-easy") == ("gem", "game:GuessTheNumber-v0-easy")


def test_a_map_is_shown_as_text_with_the_place_of_the_player() -> None:
    env = resolve("gym:FrozenLake-v1")(TASK, render="ansi", is_slippery=False, prompt="{observation}\n{actions}")
    observation, _ = env.reset(0)
    assert observation.startswith("[S]FFF\nFHFH\nFFFH\nHFFG\n")
    seen = env.step("1")[0]
    assert "\n[F]HFH\n" in seen and "\x1b" not in seen
    with pytest.warns(UserWarning, match="ansi"), pytest.raises(ConfigError, match=r"render ansi: .*Blackjack"):
        resolve("gym:Blackjack-v1")(TASK, render="ansi")
    with pytest.raises(ConfigError, match=r"env\.options\.render is `ansi`, not 'human'"):
        resolve("gym:FrozenLake-v1")(TASK, render="human")


LACKING = ("Wordle", "Hangman", "WordSearch")
"""Families of GEM that need nltk, and its data."""
UNSHOWN = ("Sudoku", "TowerofHanoi")
"""Families that show no action."""


@pytest.mark.parametrize(
    "family",
    (
        *("GuessTheNumber", "Mastermind", "Minesweeper", "FifteenPuzzle", "Sudoku", "TowerofHanoi", "Game2048"),
        *("Sokoban", "Crosswords", "Wordle", "Hangman", "WordSearch"),
    ),
)
def test_every_family_of_gems_games_is_played(family: str) -> None:
    make = resolve(f"gem:game:{family}-v0-easy")
    if family in LACKING and find_spec("nltk") is None:
        with pytest.raises(ConfigError, match="nltk"):
            make(TASK)
        return
    env = make(TASK)
    observation, _ = env.reset(7)
    assert len(observation) > 20
    if family in UNSHOWN:
        with pytest.raises(ConfigError, match="set its steps to 0"):
            env.demonstrate()
    said, reward, *_ = env.step("up" if family in UNSHOWN else env.demonstrate())
    assert isinstance(said, str) and isinstance(reward, float)


def test_gem_environments_that_take_turns_do_not_disturb_each_other() -> None:
    """They all draw from the global generators."""
    name = "gem:game:Game2048-v0-easy"

    def walk(*games: Any) -> list[list[str]]:
        seen = [[game.reset(SEED)[0]] for game in games]
        for _ in range(5):
            for game, shown in zip(games, seen, strict=True):
                shown.append(game.step(r"\boxed{left}")[0])
        return seen

    random.seed(5)
    expected = random.Random(5).random()
    (alone,) = walk(made(name))
    assert walk(made(name), made(name)) == [alone, alone]
    assert issubclass(resolve(name), GemAdapter)
    assert random.random() == expected, "nobody else hears of it"


def test_an_episode_of_a_gymnasium_class_is_played_and_closed(chat: ChatTokenizer) -> None:
    Corridor.closed.clear()
    end = [chat.eos_ids[0]]
    config = Config.model_validate({"env": {"name": f"{__name__}:Corridor", "max_turns": 3}})
    ended: list[Trajectory] = []
    manager = EnvManager(
        config,
        make=environment_maker(config.env),
        policy=ScriptedPolicy([chat.encode("1") + end] * 3, policy_version=1),
        grants=Grants(),
        chat=chat,
    )
    work = leased(range(1), max_tokens=8, sampling=Sampling(max_new_tokens=8), deadline_s=5.0, env_seed=SEED)
    asyncio.run(manager.play(work, lambda trajectory, text: ended.append(trajectory)))
    (trajectory,) = ended
    assert (trajectory.reward, trajectory.status, len(trajectory.turns)) == (1.0, "completed", 3)
    assert Corridor.closed == [True]


class Elsewhere(Corridor):
    """Its steps say which process they are made in."""

    isolated = True
    max_concurrent = 1

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[int, dict[str, Any]]:
        observation, info = super().reset(seed=seed)
        return observation, info | {"pid": os.getpid()}


class Threaded(Corridor):
    blocking = True
    max_concurrent = 2


async def test_a_class_keeps_its_name_and_how_it_wants_to_be_called() -> None:
    kind: Any = resolve(f"{__name__}:Threaded")
    assert (kind.__name__, kind.blocking, kind.max_concurrent) == ("Threaded", True, 2)
    make = environment_maker(EnvConfig(name=f"{__name__}:Corridor"))
    world = EpisodeEnvironment(
        lambda: make(TASK), name="corridor", task_id="t/1", limit=ConcurrencyLimit(), on_error=LoggedOnce()
    )
    with pytest.raises(EpisodeFailure, match=r"^Corridor\.reset of t/1: AssertionError"):
        await world.reset(SEED + 1)
    assert resolve("gym:FrozenLake-v1").__name__ == "FrozenLake-v1"


@pytest.mark.integration
async def test_an_isolated_class_is_adapted_in_its_own_process() -> None:
    name = f"{__name__}:Elsewhere"
    config = Config.model_validate({"env": {"name": name}, "dump": {"columns": [["pid", "bigint"]]}})
    async with making(config, {name: resolve(name)}) as make:
        environment: Any = make(TASK)
        await environment.enter()
        observation, info = await environment.reset(SEED)
        step = await environment.step("1")
        await environment.close()
    assert observation.splitlines()[0] == "0" and info["pid"] != os.getpid()
    assert step[1:4] == [0.0, False, False]


class Grants:
    """Grants at once."""

    async def request(self, so_far: Trajectory, *, unfinished: bool, num_tokens: int) -> SegmentGrant:
        return SegmentGrant(episode=so_far.episode, max_tokens=8)
