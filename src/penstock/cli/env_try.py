"""`penstock env try`: one episode in the terminal, run by the same manager as in training.

Exit codes: 0 the episode ended, 1 it failed, 2 wrong settings.
"""

from __future__ import annotations

import asyncio
import inspect
import signal
import threading
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager
from functools import partial
from types import FrameType
from typing import Any, Literal, NoReturn

from rich.text import Text

from penstock.cli.preflight import check_sandbox
from penstock.cli.refusal import refusing
from penstock.cli.train import no_held_out_tasks
from penstock.config import Config, ConfigError, EnvironmentConfig, default_config, load_config
from penstock.data.items import NothingLeft
from penstock.data.sources import open_tasks
from penstock.envs.exception_location import origin
from penstock.envs.isolated import making
from penstock.envs.manager import EnvManager
from penstock.envs.policy_stubs import Chance, Demonstrator, Endpoint, Person, PlayedBy, Player
from penstock.envs.registry import is_agent, managers_of, resolve
from penstock.envs.rewards.scorer import Scorers
from penstock.model.chat import byte_tokenizer
from penstock.observe.tables import open_console
from penstock.observe.visible_text import visible
from penstock.ports.environment import Environment
from penstock.ports.work import Work
from penstock.processes.env import gateway_for_agents
from penstock.samples import Trajectory
from penstock.scheduler.leases import env_seed
from penstock.types import EpisodeId, Sampling, SegmentGrant, Task

PolicyName = Literal["random", "scripted", "human", "openai"]

BY_NAME = ("env.max_turns=100",)
"""Settings for an environment that is named without a configuration; single_turn keeps its one turn."""
UNBOUNDED = 1_000_000
"""Tokens: larger than any episode, because no local model generates here."""
PERSON_S = 86_400.0
"""Seconds that a person may take for an episode."""
LABEL_WIDTH = 13


@refusing
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
    """Run one episode and return the exit code. `name` is a value of `env.name`, or a configuration file."""
    config = settings_of(name, overrides)
    check_sandbox(config)
    try:
        tasks = open_tasks(config)
    except NothingLeft:  # a run would hold out all rows
        tasks = open_tasks(settings_of(name, [*overrides, *no_held_out_tasks(config)]))
    if (chosen := tasks.task(task)) is None:
        raise ConfigError(f"data: there is no task {task}: the source has fewer")
    seed = env_seed(config, chosen) if seed is None else seed
    config = unbounded(config, config.environments.of_task(chosen), is_person=policy == "human")
    endpoint = Endpoint(base_url=base_url, model=model) if policy == "openai" else None
    return asyncio.run(Trial(config, policy=policy, seed=seed, endpoint=endpoint).run(chosen))


def settings_of(name: str, overrides: Sequence[str]) -> Config:
    """Return the configuration, as training would use it."""
    if name.endswith((".yaml", ".yml")):
        return load_config(name, overrides)
    resolve(name)
    return default_config([*(BY_NAME if name != "single_turn" else ()), f"env.name={name}", *overrides])


def unbounded(config: Config, played: EnvironmentConfig, *, is_person: bool) -> Config:
    """Return `config` with `played` as its only environment and without token limits. A person also gets more time for
    the episode."""
    own = {name: getattr(played, name) for name in EnvironmentConfig.model_fields}
    if is_person:
        own["episode_timeout_s"] = PERSON_S
    env = config.env.model_copy(update={**own, "mixture": {}, "max_new_tokens": UNBOUNDED})
    limits = dict.fromkeys(("segment_length", "max_segment_count", "global_max_length"))
    scheduler = config.scheduler.model_copy(update=limits)
    model = config.model.model_copy(update={"max_context": UNBOUNDED * (env.max_turns + 1)})
    return config.model_copy(update={"env": env, "scheduler": scheduler, "model": model})


class Trial:
    """Runs one episode and shows it in the terminal."""

    def __init__(self, config: Config, *, policy: PolicyName | None, seed: int, endpoint: Endpoint | None) -> None:
        self._config, self._seed, self._endpoint = config, seed, endpoint
        self._terminal = Terminal(scorer=config.env.reward)
        self._kind = resolve(config.env.name)
        has_expert = hasattr(self._kind, "demonstrate")
        self._policy: PolicyName = policy or ("scripted" if has_expert else "random")
        if self._policy == "scripted" and not has_expert:
            raise ConfigError("--policy scripted: the environment has no demonstrate(): choose another policy")
        self._env: Environment | None = None
        """The environment; None until it is made."""

    async def run(self, task: Task) -> int:
        """Run one episode and return the exit code."""
        heading = f"{self._config.env.name}   task {task.task_id}   seed {self._seed}   policy {self._policy}"
        self._terminal.show("environment", heading, "bold")
        try:
            trajectory = await self._play(task)
        finally:
            if self._endpoint is not None:
                await self._endpoint.close()
        self._terminal.conclude(trajectory, self._config.env)
        return int(trajectory.status == "failed")

    async def _play(self, task: Task) -> Trajectory:
        ended: list[Trajectory] = []
        config, env, chat = self._config, self._config.env, byte_tokenizer()
        work = Work(
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
        async with (
            making(config, {env.name: self._kind}, whole_info=True) as make,
            gateway_for_agents(config, [self._kind], chat) as gateway,
            aclosing(Scorers(config)) as scorers,
        ):
            manager = EnvManager(
                config,
                make=lambda task: self._watched(make(task)),
                policy=PlayedBy(self._player(), chat),
                grants=UnlimitedGrants(),
                chat=chat,
                gateway=gateway,
                scorers=scorers,
                managers=managers_of(config, {env.name: self._kind}),
                on_error=self._terminal.raised,
            )
            await manager.play(work, lambda trajectory, _: ended.append(trajectory))
        return ended[0]

    def _watched(self, env: Environment) -> Any:
        self._env = env
        return ShownEnv(env, self._terminal, seconds=self._config.env.episode_timeout_s)

    def _player(self) -> Player:
        player: Player
        match self._policy:
            case "random":
                player = Chance(self._seed)
            case "scripted":
                player = Demonstrator(lambda: self._env)
            case "human":
                player = Person()
            case "openai":
                assert self._endpoint is not None
                player = self._endpoint
        return ShownPlayer(player, self._terminal) if is_agent(self._kind) else player


class UnlimitedGrants:
    """`Grants` of the EnvManager for a single episode: every request is granted."""

    async def request(self, so_far: Trajectory, *, unfinished: bool, num_tokens: int) -> SegmentGrant:
        return SegmentGrant(episode=so_far.episode, max_tokens=UNBOUNDED)

    def generated(self, episode: EpisodeId, *, num_tokens: int) -> None:
        """Do nothing: no other episode waits for a slot."""


class ShownEnv:
    """An environment or agent that shows its results in the terminal. A call that blocks the process is interrupted, so
    that the traceback shows where it hangs. All other attributes are those of the wrapped environment."""

    def __init__(self, env: Any, terminal: Terminal, *, seconds: float) -> None:
        self._env, self._terminal, self._seconds = env, terminal, seconds

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._env, name)
        return partial(self._call, "play", show=self._show_reward) if name == "play" else found

    @property
    def class_name(self) -> str:
        """Return the class name of the environment."""
        return str(getattr(self._env, "class_name", type(self._env).__name__))

    def reset(self, seed: int) -> Any:
        return self._call("reset", seed, show=partial(self._show, "reset", 2))

    def step(self, action: str) -> Any:
        self._terminal.acted(action)
        return self._call("step", action, show=partial(self._show, "step", 5))

    def _show_reward(self, reward: Any) -> None:
        self._terminal.stepped(reward, True, False, {})

    def _show(self, method: str, length: int, result: Any) -> None:
        if not isinstance(result, tuple | list) or len(result) != length:
            self._terminal.returned(method, result)
            return
        if method == "step":
            self._terminal.stepped(*result[1:])
        self._terminal.observed(result[0])

    def _call(self, method: str, *args: Any, show: Callable[[Any], None]) -> Any:
        with interrupted_after(self._seconds, f"{self.class_name}.{method} has not returned after {self._seconds:g} s"):
            result = getattr(self._env, method)(*args)
            if inspect.isawaitable(result):
                return self._show_later(result, show)
            show(result)
            return result

    async def _show_later(self, result: Awaitable[Any], show: Callable[[Any], None]) -> Any:
        found = await result
        show(found)
        return found


@contextmanager
def interrupted_after(seconds: float, reason: str) -> Iterator[None]:
    """Raise TimeoutError inside the body after `seconds`. In threads other than the main thread, do nothing: such calls
    have the deadline of their lease."""

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


class ShownPlayer:
    """A policy that shows its observations and actions. For an agent, they are all that can be shown."""

    def __init__(self, player: Player, terminal: Terminal) -> None:
        self._player, self._terminal = player, terminal

    async def act(self, said: Sequence[str]) -> str:
        self._terminal.observed(said[-1])
        action = await self._player.act(said)
        self._terminal.acted(action)
        return action


class Terminal:
    """Prints an episode."""

    def __init__(self, *, scorer: str | None) -> None:
        """`scorer`: the reward that scores the episode instead of the environment; None if the environment does."""
        self._console, self._scorer = open_console(), scorer

    def observed(self, observation: object) -> None:
        self.show("observation", observation if isinstance(observation, str) else repr(observation))

    def acted(self, action: str) -> None:
        self.show("action", action, "cyan")

    def stepped(self, reward: object, terminated: object, truncated: object, info: object) -> None:
        given = f"scored by {self._scorer or 'a reward worker'}" if self._scorer or reward is None else repr(reward)
        end = "   terminated" * bool(terminated) + "   truncated" * bool(truncated)
        self.show("reward", given + end, "green" if end else "")
        if info:
            self.show("info", repr(info), "dim")

    def returned(self, method: str, result: object) -> None:
        self.show(f"{method} gave", repr(result), "red")

    def raised(self, called: str, error: BaseException) -> None:
        """Print an exception, as `OnError` of the EnvManager."""
        if trace := origin(error).trace:
            self.show(f"{called.partition(' ')[0].rpartition('.')[2]} raised", trace, "red")

    def conclude(self, trajectory: Trajectory, env: EnvironmentConfig) -> None:
        """Print the trajectory that would be trained. Afterwards, print nothing: a thread may still hang in a call."""
        summary = trajectory.summary()
        limit = f" by env.max_turns {env.max_turns}" if summary.stop_reason == "max_turns" else ""
        self.show(
            "trajectory",
            f"{summary.status}{limit}   reward {summary.reward:g}   {summary.num_turns} turns   "
            f"{summary.prompt_tokens} bytes of observations, {summary.response_tokens} of actions   "
            f"{summary.seconds:.2f} s",
            "bold",
        )
        if summary.error is not None:
            self.show("error", summary.error, "bold red")
        self._console.quiet = True

    def show(self, label: str, text: str, style: str = "") -> None:
        for number, line in enumerate(visible(text).splitlines() or [""]):
            begin = f"{'' if number else label:{LABEL_WIDTH}} │ "
            self._console.print(Text.assemble((begin, "dim"), (line, style)), soft_wrap=True)
