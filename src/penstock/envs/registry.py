"""Environments by name, by `path/to/file.py:Class`, by `package.module:Class`, or by the id that another library knows
them by (`gym:ID`, `gem:ID`). Listing them imports nothing."""

from __future__ import annotations

import difflib
import functools
import inspect
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from penstock.config import Config, ConfigError, EnvironmentConfig
from penstock.config.atropos import ATROPOS
from penstock.config.imports import NoSuchName, is_file, is_there, load
from penstock.envs.adapter import PACKAGES, adapt_class, adapt_id, check_package
from penstock.envs.discovery import Unreadable, defines, read_file
from penstock.envs.options import check_options
from penstock.envs.origin import origin
from penstock.ports import Environment
from penstock.types import Purpose, Task

_BUILT_IN = {
    "single_turn": ("penstock.envs.single_turn:SingleTurn", "one question, one answer, scored by the task's own rule"),
    "guess_number": ("penstock.envs.guess_number:GuessNumber", "find a number from higher/lower hints, several turns"),
}


_PROGRAMS = {ATROPOS: "groups that Atropos environments play and push, which are programs of their own"}


def available() -> dict[str, str]:
    """Name -> one line of description."""
    return {name: description for name, (_, description) in _BUILT_IN.items()} | _PROGRAMS


def locate(name: str) -> tuple[str, str]:
    """(module or file, class) of a name or an import path, importing neither. Raises `ConfigError`.

    The working directory counts as a place to import from, for the command as for the processes it starts.
    """
    if is_foreign(name):
        return check_package(name)
    if name in _PROGRAMS:
        return "", name
    path = _BUILT_IN[name][0] if name in _BUILT_IN else name
    where, separator, class_name = path.rpartition(":")
    if not separator and is_file(name):
        _check_file(name, name, "")
    if not separator:
        near = difflib.get_close_matches(name, available(), n=1)
        known = f"known are {', '.join(available())}, or file.py:Class, package.module:Class, gym:ID or gem:ID"
        raise ConfigError(f"unknown environment {name!r} in env.name: {f'did you mean {near[0]}?' if near else known}")
    (_check_file if is_file(where) else _check_module)(name, where, class_name)
    return where, class_name


def means(name: str, kind: type) -> bool:
    """Whether an `env.name` means the class `kind`: one that is called the same, in a file or module that is called the
    same, wherever that lies. Nothing is imported."""
    where, _, class_name = (_BUILT_IN[name][0] if name in _BUILT_IN else name).rpartition(":")
    home = Path(where).stem if is_file(where) else where.rpartition(".")[2]
    modules = (sys.modules.get(module) for module in (kind.__module__, "__main__"))
    files = {Path(file).stem for module in modules if (file := getattr(module, "__file__", None))}
    return class_name == kind.__name__ and home in files | {kind.__module__.rpartition(".")[2]}


def is_foreign(name: str) -> bool:
    """Whether that is an id in another library's registry."""
    return name.partition(":")[0] in PACKAGES and ":" in name


def _check_file(name: str, file: str, class_name: str) -> None:
    path = Path(file)
    if not path.is_file():
        raise ConfigError(f"env.name {name!r}: there is no file {path.absolute()}")
    classes = []
    for found in read_file(path):
        if isinstance(found, Unreadable):
            raise ConfigError(f"env.name {name!r} cannot be read: {found.reason}")
        classes.append(found.class_name)
    if not defines(path, class_name):
        there = f"there are {', '.join(classes)}" if classes else "there is none with reset and step, nor with play"
        problem = f"{file} has no class {class_name}" if class_name else f"which class of it? Write {file}:Class"
        raise ConfigError(f"env.name {name!r}: {problem}; {there}")


def _check_module(name: str, module_name: str, class_name: str) -> None:
    try:
        found = is_there(module_name)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"env.name {name!r}: {error}") from None
    if not found:
        raise ConfigError(f"env.name {name!r}: there is no module {module_name} here or among the installed packages")


def is_agent(kind: type) -> bool:
    """Whether it brings its own loop."""
    return hasattr(kind, "play")


def resolve(name: str) -> type[Environment]:
    """The class behind a name or an import path. Raises `ConfigError`, whatever goes wrong in the user's module."""
    where, class_name = locate(name)
    if is_foreign(name):
        return adapt_id(name)
    if name in _PROGRAMS:
        raise ConfigError(f"env.name {name}: its environments are programs of their own, and cannot be made here")
    try:
        found = load(f"{where}:{class_name}")
    except NoSuchName as error:
        raise ConfigError(f"env.name {name!r}: {error}") from None
    except Exception as error:
        raise ConfigError(f"env.name {name!r} cannot be imported: {type(error).__name__}: {error}") from error
    return playable(name, found)


def playable(name: str, found: Any) -> type[Environment]:
    """How `found` is played, which `name` means. Raises `ConfigError` if it cannot be."""
    plays = hasattr(found, "play") or (hasattr(found, "reset") and hasattr(found, "step"))
    if not (isinstance(found, type) and plays):
        raise ConfigError(
            f"env.name {name!r} is not a class with reset(seed) and step(action), nor one with play(llm, seed)"
        )
    _check_play(name, found)
    if getattr(found, "isolated", False) and hasattr(found, "play"):
        raise ConfigError(f"env.name {name!r}: an agent cannot be `isolated`: declare `blocking = True`")
    return adapt_class(found) or found


def _check_play(name: str, found: Any) -> None:
    """A plain `play` would wait on the event loop for an answer that only the event loop can give."""
    plain = hasattr(found, "play") and not inspect.iscoroutinefunction(found.play)
    if plain and not getattr(found, "blocking", False):
        raise ConfigError(
            f"env.name {name!r}: play is a plain function, which would hold up all episodes of its worker while it "
            "waits: make it `async def` with an async client (openai.AsyncOpenAI), or declare `blocking = True` in the "
            "class, and every episode gets a thread"
        )


def maker_by_tag(
    config: Config,
    kinds: Mapping[str, type[Environment]] | None = None,
    maker: Callable[[EnvironmentConfig, type[Environment]], Callable[[Task], Environment]] | None = None,
) -> Callable[[Task], Environment]:
    """Makes the environment that a task's tag asks for; `kinds` are the classes that are known already, by name.
    `maker`: `environment_maker`, or another way."""
    environments, known = config.environments, kinds or {}

    @functools.cache
    def made(tag: str, purpose: Purpose) -> Callable[[Task], Environment]:
        settings = environments.find(tag, purpose)
        return (maker or environment_maker)(settings, known.get(settings.name) or resolve(settings.name))

    return lambda task: made(task.tag, task.purpose)(task)


def environment_maker(
    config: EnvironmentConfig, kind: type[Environment] | None = None
) -> Callable[[Task], Environment]:
    """Makes one environment per episode: `Class(task, **env.options)`, of `kind` if that is known already."""
    found: Any = kind or resolve(config.name)

    def make(task: Task) -> Environment:
        check_options(config.name, found, task, **config.options)
        try:
            environment: Environment = found(task, **config.options)
        except KeyError as error:
            if error.args[:1] and error.args[0] in task.payload:
                raise
            needs = f"{config.name} needs ({place})" if (place := origin(error).place) else f"{config.name} needs"
            raise ConfigError(
                f"data: task {task.task_id} has no {error}, which {needs}; it has {', '.join(task.payload)}"
            ) from None
        return environment

    return make
