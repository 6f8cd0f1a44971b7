"""Lookup of environments by name, by `path/to/file.py:Class`, by `package.module:Class`, or by another library's id
(`gym:ID`, `gem:ID`). Listing the environments imports nothing."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from penstock.config import Config, ConfigError, EnvironmentConfig, TagConfig
from penstock.config.environments import ATROPOS
from penstock.config.imports import import_named, is_file
from penstock.config.secret_settings import resolved
from penstock.envs.adapter import PACKAGES, Adapter, adapt_class, adapt_id, check_package
from penstock.envs.discovery import Unreadable, declares, defines, read_file
from penstock.envs.exception_location import origin
from penstock.envs.options import check_exists, check_options, check_written, source_of, suggestion
from penstock.envs.rewards.dataset_rule import unaudited_of
from penstock.envs.rewards.reward import check_reward, reads_in_sandbox
from penstock.ports.environment import Environment, TaskError
from penstock.ports.episode_manager import EpisodeManager
from penstock.types import Purpose, Task

_BUILT_IN = {
    "single_turn": ("penstock.envs.single_turn:SingleTurn", "one question, one answer, scored by the task's own rule"),
    "guess_number": ("penstock.envs.guess_number:GuessNumber", "find a number from higher/lower hints, several turns"),
}


ADAPTER_OPTIONS = [
    name for name, each in inspect.signature(Adapter).parameters.items() if each.kind is inspect.Parameter.KEYWORD_ONLY
]
EXECUTING = ("rg", "math", "code", "eval")
"""Families of GEM environments that execute or parse answers. Their games, `qa` and `logic` compare text."""
_PROGRAMS = {ATROPOS: "groups that Atropos environments play and push, which are programs of their own"}


def available() -> dict[str, str]:
    """Return a one-line description for each name."""
    return {name: description for name, (_, description) in _BUILT_IN.items()} | _PROGRAMS


def locate(name: str) -> tuple[str, str]:
    """Return (module or file, class) of a name or an import path, without importing the module or running the file.
    Raises `ConfigError` if there is no such environment.

    Modules may also lie in the working directory, for the command and for the processes that it starts.
    """
    if is_foreign(name):
        return check_package(name)
    if name in _PROGRAMS:
        return "", name
    path = _BUILT_IN[name][0] if name in _BUILT_IN else name
    where, separator, class_name = path.rpartition(":")
    if not separator and is_file(name):
        check_exists("env.name", name, name)
        _check_file(name, name, "")
    if not separator:
        known = f"known are {', '.join(available())}, or file.py:Class, package.module:Class, gym:ID or gem:ID"
        raise ConfigError(f"unknown environment {name!r} in env.name: {suggestion(name, available(), known)}")
    check_exists("env.name", name, where)
    if is_file(where):
        _check_file(name, where, class_name)
    return where, class_name


def check_environment(key: str, settings: EnvironmentConfig) -> None:
    """Raise `ConfigError` if the environment at config key `key`, or its reward, does not exist or does not accept its
    options, or if an option names an environment variable that is not set. Nothing is imported."""
    where = locate(settings.name)
    resolved(settings.options, f"{key}.options")
    resolved(settings.reward_options, f"{key}.reward_options")
    if not is_foreign(settings.name) and settings.name not in _PROGRAMS:
        check_written(f"{key}.options", where, settings.options, num_given=1, extra=ADAPTER_OPTIONS)
    if settings.manager is not None:
        file, _, class_name = settings.manager.rpartition(":")
        if not file:
            raise ConfigError(f"{key}.manager {settings.manager!r}: write file.py:Class or package.module:Class")
        check_exists(f"{key}.manager", settings.manager, file)
        resolved(settings.manager_options, f"{key}.manager_options")
        check_written(f"{key}.manager_options", (file, class_name), settings.manager_options, num_given=0)
    if settings.reward is not None:
        check_reward(f"{key}.reward_options", settings.reward, settings.reward_options)


def needs_sandbox(key: str, settings: TagConfig) -> list[str]:
    """Return which settings of the environment at config key `key` need a sandbox, and why. Nothing is imported."""
    where, class_name = locate(settings.name)
    file = None if is_foreign(settings.name) or settings.name in _PROGRAMS else source_of(where)
    found = [f"data.dataset {name}: its rule may execute an answer" for name in unaudited_of(settings)]
    if settings.reward == "code":
        found.append("reward code: it runs programs of the policy")
    elif settings.reward is not None and reads_in_sandbox(settings.reward):
        found.append(f"reward {settings.reward}: it reads text of the policy and does not set `confined = False`")
    if file is not None and declares(file, class_name, "needs_sandbox"):
        found.append(f"name {settings.name}: it runs programs of the policy")
    return [reason if reason.startswith("data.") and key == "env" else f"{key}.{reason}" for reason in found]


def executes_answers(name: str) -> bool:
    """Return whether the name is a GEM environment that scores an answer by executing or parsing it as code, in the
    environment worker."""
    return name.startswith(tuple(f"gem:{family}:" for family in EXECUTING))


def means(name: str, kind: type) -> bool:
    """Return whether an `env.name` refers to the class `kind`. Only the names of the class and of its file or module
    are compared, not their location. Nothing is imported."""
    where, _, class_name = (_BUILT_IN[name][0] if name in _BUILT_IN else name).rpartition(":")
    home = Path(where).stem if is_file(where) else where.rpartition(".")[2]
    modules = (sys.modules.get(module) for module in (kind.__module__, "__main__"))
    files = {Path(file).stem for module in modules if (file := getattr(module, "__file__", None))}
    return class_name == kind.__name__ and home in files | {kind.__module__.rpartition(".")[2]}


def is_foreign(name: str) -> bool:
    """Return whether the name is an id in another library's registry, like `gym:ID`."""
    return name.partition(":")[0] in PACKAGES and ":" in name


def _check_file(name: str, file: str, class_name: str) -> None:
    classes = []
    for found in read_file(Path(file)):
        if isinstance(found, Unreadable):
            raise ConfigError(f"env.name {name!r} cannot be read: {found.reason}")
        classes.append(found.class_name)
    if not defines(Path(file), class_name):
        there = f"there are {', '.join(classes)}" if classes else "there is none with reset and step, nor with play"
        problem = f"{file} has no class {class_name}" if class_name else f"which class of it? Write {file}:Class"
        raise ConfigError(f"env.name {name!r}: {problem}; {there}")


def is_agent(kind: type) -> bool:
    """Return whether the class is an agent with its own loop."""
    return hasattr(kind, "play")


def resolve(name: str) -> type[Environment]:
    """Return the class for a name or an import path. Raises `ConfigError`, also for any exception of the user's
    module."""
    where, class_name = locate(name)
    if is_foreign(name):
        return adapt_id(name)
    if name in _PROGRAMS:
        raise ConfigError(f"env.name {name}: its environments are programs of their own, and cannot be made here")
    return playable(name, import_named("env.name", f"{where}:{class_name}", wanted="a class"))


def playable(name: str, found: Any) -> type[Environment]:
    """Return the class that plays `found`, the object that `name` refers to: `found` itself or an adapter. Raises
    `ConfigError` if it is not a valid environment or agent."""
    plays = is_agent(found) or (hasattr(found, "reset") and hasattr(found, "step"))
    if not (isinstance(found, type) and plays):
        raise ConfigError(
            f"env.name {name!r} is not a class with reset(seed) and step(action), or with play(llm, seed)"
        )
    play = getattr(found, "play", None)
    if play is not None and not getattr(found, "blocking", False) and not inspect.iscoroutinefunction(play):
        raise ConfigError(
            f"env.name {name!r}: play is a plain function, which would hold up all episodes of its worker while it "
            "waits: make it `async def` with an async client (openai.AsyncOpenAI), or declare `blocking = True` in the "
            "class, and every episode gets a thread"
        )
    if play is not None and getattr(found, "isolated", False):
        raise ConfigError(f"env.name {name!r}: an agent cannot be `isolated`: declare `blocking = True`")
    return adapt_class(found) or found


def managers_of(config: Config, kinds: Mapping[str, type[Environment]]) -> dict[str, Callable[..., EpisodeManager]]:
    """Return the classes of the user's own managers, by `env.manager`. `kinds`: environment classes by name. Raises
    `ConfigError`, also for any exception of the user's module."""
    found = {}
    for key, settings in config.environments.by_key.items():
        if (name := settings.manager) is None:
            continue
        if is_agent(kinds[settings.name]):
            raise ConfigError(f"{key}.manager {name!r}: {settings.name} is an agent, which has its own loop")
        manager: Any = import_named(f"{key}.manager", name, wanted="a class with play(episode)")
        if not inspect.iscoroutinefunction(getattr(manager, "play", None)):
            raise ConfigError(f"{key}.manager {name!r} is not a class with `async def play(self, episode)`")
        try:
            inspect.signature(manager).bind(**settings.manager_options)
        except TypeError as error:
            raise ConfigError(f"{key}.manager_options do not fit {name}: {error}") from None
        found[name] = manager
    return found


def maker_by_tag(
    config: Config,
    kinds: Mapping[str, type[Environment]] | None = None,
    maker: Callable[[EnvironmentConfig, type[Environment]], Callable[[Task], Environment]] | None = None,
) -> Callable[[Task], Environment]:
    """Return a function that makes the environment for a task, as the task's tag selects it. `kinds`: classes that are
    known already, by name. `maker`: a replacement for `environment_maker`."""
    environments, known = config.environments, kinds or {}

    @functools.cache
    def made(tag: str, purpose: Purpose) -> Callable[[Task], Environment]:
        settings = environments.find(tag, purpose)
        return (maker or environment_maker)(settings, known.get(settings.name) or resolve(settings.name))

    return lambda task: made(task.tag, task.purpose)(task)


def environment_maker(config: EnvironmentConfig, cls: type[Environment] | None = None) -> Callable[[Task], Environment]:
    """Return a function that makes one environment per episode: `Class(task, **env.options)`. `cls`: the class, if it
    is known already."""
    found: Any = cls or resolve(config.name)
    options = resolved(config.options, "env.options")

    def make(task: Task) -> Environment:
        check_options(config.name, found, task, **config.options)
        try:
            environment: Environment = found(task, **options)
        except KeyError as error:
            if error.args[:1] and error.args[0] in task.payload:
                raise
            source = f" of data.source {config.data.source}" if isinstance(config, TagConfig) else ""
            place = origin(error).place
            where = f"{config.name} ({place})" if place else config.name
            raise TaskError(
                f"data: {where} finds no {error}; task {task.task_id}{source} has "
                f"{', '.join(task.payload) or 'only a seed'}"
            ) from None
        return environment

    return make
