"""Environments by name, or by `package.module:Class`. Listing them imports nothing."""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import inspect
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from penstock.config import ConfigError, EnvConfig
from penstock.ports import Environment
from penstock.types import Task

_BUILT_IN = {
    "single_turn": ("penstock.envs.single_turn:SingleTurn", "one question, one answer, scored by the task's own rule"),
    "guess_number": ("penstock.envs.guess_number:GuessNumber", "find a number from higher/lower hints, several turns"),
}


def available() -> dict[str, str]:
    """Name -> one line of description."""
    return {name: description for name, (_, description) in _BUILT_IN.items()}


def locate(name: str) -> tuple[str, str]:
    """(module, class) of a name or an import path, importing neither. Raises `ConfigError`.

    The working directory counts as a place to import from, for the command as for the processes it starts.
    """
    path = _BUILT_IN[name][0] if name in _BUILT_IN else name
    module_name, separator, class_name = path.partition(":")
    if not separator:
        near = difflib.get_close_matches(name, _BUILT_IN, n=1)
        hint = f"did you mean {near[0]}?" if near else f"known are {', '.join(_BUILT_IN)}, or package.module:Class"
        raise ConfigError(f"unknown environment {name!r} in env.name: {hint}")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    try:
        found = importlib.util.find_spec(module_name)
    except (ImportError, ValueError) as error:
        raise ConfigError(f"env.name {name!r}: {error}") from None
    if found is None:
        raise ConfigError(f"env.name {name!r}: there is no module {module_name} here or among the installed packages")
    return module_name, class_name


def is_agent(name: str) -> bool:
    """Whether it brings its own loop. Raises `ConfigError` like `resolve`."""
    return hasattr(resolve(name), "play")


def resolve(name: str) -> type[Environment]:
    """The class behind a name or an import path. Raises `ConfigError`, whatever goes wrong in the user's module."""
    module_name, class_name = locate(name)
    try:
        found: Any = getattr(importlib.import_module(module_name), class_name)
    except Exception as error:
        raise ConfigError(f"env.name {name!r} cannot be imported: {type(error).__name__}: {error}") from error
    plays = hasattr(found, "play") or (hasattr(found, "reset") and hasattr(found, "step"))
    if not (isinstance(found, type) and plays):
        raise ConfigError(
            f"env.name {name!r} is not a class with reset(seed) and step(action), nor one with play(llm, seed)"
        )
    _check_play(name, found)
    return found


def _check_play(name: str, found: Any) -> None:
    """A plain `play` would wait on the event loop for an answer that only the event loop can give."""
    plain = hasattr(found, "play") and not inspect.iscoroutinefunction(found.play)
    if plain and not getattr(found, "blocking", False):
        raise ConfigError(
            f"env.name {name!r}: play is a plain function, which would hold up all episodes of its worker while it "
            "waits: make it `async def` with an async client (openai.AsyncOpenAI), or declare `blocking = True` in the "
            "class, and every episode gets a thread"
        )


def environment_maker(config: EnvConfig) -> Callable[[Task], Environment]:
    """Makes one environment per episode: `Class(task, **env.options)`."""
    found: Any = resolve(config.name)

    def make(task: Task) -> Environment:
        try:
            environment: Environment = found(task, **config.options)
        except TypeError as error:
            raise ConfigError(f"env.options {dict(config.options)} do not fit {config.name}: {error}") from None
        return environment

    return make
