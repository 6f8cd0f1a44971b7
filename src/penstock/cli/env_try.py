"""`penstock env try`: one episode, played in the terminal by the manager that plays for training.

Exit codes: 0 the episode came to an end, 1 it failed, 2 wrong settings.
"""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, Literal, NoReturn

from rich.text import Text

from penstock.cli.console import open_console
from penstock.cli.refusal import refuse
from penstock.config import Config, ConfigError, EnvironmentConfig, default_config, load_config
from penstock.data.items import NothingLeft
from penstock.data.sources import open_tasks
from penstock.envs.isolated import making
from penstock.envs.manager import EnvManager
from penstock.envs.origin import origin
from penstock.envs.players import Chance, Demonstrator, Endpoint, Person, PlayedBy, Player
from penstock.envs.registry import is_agent, resolve
from penstock.envs.rewards.scorer import scoring
from penstock.envs.watched import Told, Watched
from penstock.model.spelled import byte_tokenizer
from penstock.ports import Environment, Work
from penstock.processes.env import gateway_for_agents
from penstock.scheduler.seeds import Seeds
from penstock.supervisor.child import CONFIG_ERROR, leaf
from penstock.types import EpisodeId, Sampling, SegmentGrant, Task, Trajectory

PolicyName = Literal["random", "scripted", "human", "openai"]

BY_NAME = ("data.source=seeds", "env.max_turns=100")
"""Settings of an environment that is named without a configuration; single_turn has no tasks but those of a dataset."""
UNBOUNDED = 1_000_000
"""Tokens: who plays here is no model."""
PERSON_S = 86_400.0
"""A person may think for long."""
LABEL_WIDTH = 13
NO_EXPERT = "the environment has no demonstrate(), which --policy scripted asks: give another policy"


def try_environment(
    name: str,
    overrides: Sequence[str],
    *,
    policy: PolicyName | None,
    task: int,
    seed: int | None,
    base_url: str | None,
    model: str | None,
) -> int:
    """Returns the exit code. `name` is what `env.name` takes, or a configuration file."""
    terminal = Terminal()
    try:
        config = settings_of(name, overrides)
        problem = _task(config, task)
        seed = Seeds(config).of_environment(problem) if seed is None else seed
        config = unbounded(config, config.environments.of_task(problem), patient=policy == "human")
        endpoint = Endpoint(base_url=base_url, model=model) if policy == "openai" else None
        theatre = Theatre(config, terminal, policy=policy, seed=seed, endpoint=endpoint)
        return asyncio.run(theatre.play(problem))
    except Exception as error:
        cause = leaf(error)
        if isinstance(cause, ConfigError):
            return refuse(cause, CONFIG_ERROR)
        raise


def settings_of(name: str, overrides: Sequence[str]) -> Config:
    """As for training."""
    if name.endswith((".yaml", ".yml")):
        return load_config(name, overrides)
    resolve(name)
    return default_config([*(BY_NAME if name != "single_turn" else ()), f"env.name={name}", *overrides])


def unbounded(config: Config, played: EnvironmentConfig, *, patient: bool) -> Config:
    """With `played` alone, and without counting tokens. `patient`: nor seconds."""
    own = {name: getattr(played, name) for name in EnvironmentConfig.model_fields}
    env = config.env.model_copy(update={**own, "mixture": {}, "max_new_tokens": UNBOUNDED})
    if patient:
        env = env.model_copy(update={"episode_timeout_s": PERSON_S})
    limits = dict.fromkeys(("segment_length", "max_segment_count", "global_max_length"))
    scheduler = config.scheduler.model_copy(update=limits)
    model = config.model.model_copy(update={"max_context": UNBOUNDED * (env.max_turns + 1)})
    return config.model_copy(update={"env": env, "scheduler": scheduler, "model": model})


def _task(config: Config, index: int) -> Task:
    """As in a run, unless all rows would be held out there: here nobody needs them."""
    try:
        tasks = open_tasks(config)
    except NothingLeft:
        tasks = open_tasks(holding_nothing_out(config))
    task = tasks.task(index)
    if task is None:
        raise ConfigError(f"data: there is no task {index}: the source has fewer")
    return task


def holding_nothing_out(config: Config) -> Config:
    """With every row to be played."""
    data = config.data.model_copy(update={"eval_tasks": 0})
    mixture = {
        tag: entry.model_copy(update={"data": entry.data.model_copy(update={"eval_tasks": 0})})
        for tag, entry in config.env.mixture.items()
    }
    env = config.env.model_copy(update={"mixture": mixture})
    return config.model_copy(update={"data": data, "env": env})


class Theatre:
    """Plays one episode before an audience."""

    def __init__(
        self, config: Config, terminal: Terminal, *, policy: PolicyName | None, seed: int, endpoint: Endpoint | None
    ) -> None:
        self._config, self._terminal = config, terminal
        terminal.scorer = config.env.reward
        self._seed, self._endpoint = seed, endpoint
        self._kind = resolve(config.env.name)
        self._policy: PolicyName = policy or ("scripted" if hasattr(self._kind, "demonstrate") else "random")
        if self._policy == "scripted" and not hasattr(self._kind, "demonstrate"):
            raise ConfigError(NO_EXPERT)
        self._env: Environment | None = None
        """Once it is made."""

    async def play(self, task: Task) -> int:
        """Returns the exit code."""
        self._terminal.title(self._config.env.name, task, seed=self._seed, policy=self._policy)
        try:
            trajectory = await self._play(task)
        finally:
            if self._endpoint is not None:
                await self._endpoint.close()
        self._terminal.conclude(trajectory, self._config.env)
        return int(trajectory.status == "failed")

    async def _play(self, task: Task) -> Trajectory:
        ended: list[Trajectory] = []
        config, chat = self._config, byte_tokenizer()
        async with (
            making(config, {config.env.name: self._kind}, whole_info=True) as make,
            gateway_for_agents(config, [self._kind], chat) as gateway,
            scoring(config) as scorers,
        ):
            manager = EnvManager(
                config,
                make=lambda task: self._watched(make(task)),
                policy=PlayedBy(self._player(), chat),
                grants=Granting(),
                chat=chat,
                gateway=gateway,
                scorers=scorers,
                on_error=self._terminal.raised,
            )
            await manager.play(self._work(task), lambda trajectory, _: ended.append(trajectory))
        return ended[0]

    def _watched(self, env: Environment) -> Any:
        self._env = env
        return Impatient(env, self._terminal, seconds=self._config.env.episode_timeout_s)

    def _player(self) -> Player:
        players: dict[PolicyName, Callable[[], Player]] = {
            "random": lambda: Chance(self._seed),
            "scripted": lambda: Demonstrator(lambda: self._env),
            "human": Person,
        }
        player = self._endpoint or players[self._policy]()
        return Overheard(player, self._terminal) if is_agent(self._kind) else player

    def _work(self, task: Task) -> Work:
        env = self._config.env
        return Work(
            task=task,
            group=0,
            attempt=0,
            group_size=1,
            members=(0,),
            max_tokens=(env.max_new_tokens,),
            env_seed=self._seed,
            sampling_seed=self._seed,
            deadline_s=env.episode_timeout_s,
            sampling=Sampling(max_new_tokens=env.max_new_tokens),
        )


class Granting:
    """`Grants` of the EnvManager: there is nobody else."""

    async def request(self, so_far: Trajectory, *, unfinished: bool, num_tokens: int) -> SegmentGrant:
        return SegmentGrant(episode=so_far.episode, max_tokens=UNBOUNDED)

    def generated(self, episode: EpisodeId, *, num_tokens: int) -> None:
        """Nobody waits for its place."""


class Impatient(Watched):
    """Interrupts an environment that holds up everything, and so shows where it hangs."""

    def __init__(self, env: Any, terminal: Terminal, *, seconds: float) -> None:
        super().__init__(env, terminal)
        self._seconds = seconds

    def _call(self, method: str, *args: Any, told: Told) -> Any:
        with interrupted_after(self._seconds, f"{self.class_name}.{method} has not returned after {self._seconds:g} s"):
            return super()._call(method, *args, told=told)


@contextmanager
def interrupted_after(seconds: float, reason: str) -> Iterator[None]:
    """Raise TimeoutError from whatever the body does then. Calls in threads have the deadline of their lease."""

    def interrupt(signum: int, frame: FrameType | None) -> NoReturn:
        raise TimeoutError(reason)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGALRM, interrupt)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


class Overheard:
    """A player whose words are shown; of an agent nothing else can be seen."""

    def __init__(self, player: Player, terminal: Terminal) -> None:
        self._player, self._terminal = player, terminal

    async def act(self, said: Sequence[str]) -> str:
        self._terminal.observed(said[-1])
        action = await self._player.act(said)
        self._terminal.acted(action)
        return action


class Terminal:
    """The audience, and what it prints."""

    def __init__(self) -> None:
        self._console = open_console()
        self.scorer: str | None = None
        """Gives the reward in the end, instead of the environment."""

    def title(self, name: str, task: Task, *, seed: int, policy: str) -> None:
        self._show("environment", f"{name}   task {task.task_id}   seed {seed}   policy {policy}", "bold")

    def observed(self, observation: object) -> None:
        self._show("observation", observation if isinstance(observation, str) else repr(observation))

    def acted(self, action: str) -> None:
        self._show("action", action, "cyan")

    def stepped(self, reward: object, terminated: object, truncated: object, info: object) -> None:
        given = f"scored by {self.scorer}" if self.scorer else f"{reward!r}"
        ends = [word for word, flag in (("terminated", terminated), ("truncated", truncated)) if flag]
        self._show("reward", "   ".join([given, *ends]), "green" if ends else "")
        if info:
            self._show("info", repr(info), "dim")

    def returned(self, method: str, result: object) -> None:
        self._show(f"{method} gave", repr(result), "red")

    def raised(self, called: str, error: BaseException) -> None:
        """`OnError` of the EnvManager."""
        if trace := origin(error).trace:
            self._show(f"{called.partition(' ')[0].rpartition('.')[2]} raised", trace, "red")

    def conclude(self, trajectory: Trajectory, env: EnvironmentConfig) -> None:
        """What would be trained."""
        summary = trajectory.summary()
        limit = f" by env.max_turns {env.max_turns}" if summary.stop_reason == "max_turns" else ""
        self._show(
            "trajectory",
            f"{summary.status}{limit}   reward {summary.reward:g}   {summary.num_turns} turns   "
            f"{summary.prompt_tokens} bytes shown, {summary.response_tokens} said   {summary.seconds:.2f} s",
            "bold",
        )
        if summary.error is not None:
            self.failed(summary.error)

    def failed(self, error: str) -> None:
        self._show("error", error, "bold red")

    def _show(self, label: str, text: str, style: str = "") -> None:
        for number, line in enumerate(text.splitlines() or [""]):
            begin = f"{'' if number else label:{LABEL_WIDTH}} │ "
            self._console.print(Text.assemble((begin, "dim"), (line, style)), soft_wrap=True)
