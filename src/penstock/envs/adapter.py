"""Environments of other libraries, played as they are: Gymnasium's, by id or by class, and GEM's.

They begin with `reset(seed=...)`, and their observations and actions need not be text. An answer that holds no action
never reaches the environment: either it ends the episode, or it costs a turn and what was seen last is shown again.
"""

from __future__ import annotations

import importlib
import random
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from importlib.util import find_spec
from typing import Any, Literal

import numpy as np

from penstock.config import ConfigError
from penstock.envs.options import check_options, misfit
from penstock.types import Task

PACKAGES = {"gym": "gymnasium", "gem": "gem"}
"""What is behind a name like `gym:FrozenLake-v1`; the extras have the names' own beginnings."""
LARGEST_SEED = 2**31
"""Some of these environments seed generators that take no more."""
KEPT = ("__module__", "__qualname__", "blocking", "isolated", "max_concurrent")
"""Of a class that is adapted: where it is found, and how it wants to be called."""

Result = tuple[str, float, bool, bool, dict[str, Any]]


class Adapter:
    """One episode of such an environment. Its own options are `prompt`, `action_names`, `unparsable` and
    `unparsable_reward`; all others are the environment's."""

    make: Callable[..., Any]
    """Of the environment itself."""

    def __init__(
        self,
        task: Task,
        *,
        prompt: str | None = None,
        action_names: Sequence[str] = (),
        unparsable: Literal["again", "end"] = "again",
        unparsable_reward: float = 0.0,
        **arguments: Any,
    ) -> None:
        """`prompt` is a format string over `{observation}` and `{actions}`, which says what an action looks like; every
        observation is shown with it. An answer without an action earns `unparsable_reward` and is followed by the last
        observation `again`, or by the `end`."""
        if unparsable not in ("again", "end"):
            raise ConfigError(f"env.options.unparsable is `again` or `end`, not {unparsable!r}")
        self._env = type(self).make(**arguments)
        self._reader = self._read_spaces(action_names)
        self._prompt = prompt or ("{observation}" if self._reader is None else "{observation}\nAction: {actions}")
        _check_prompt(self._prompt)
        self._unparsable, self._unparsable_reward = unparsable, unparsable_reward
        self._shown = ""

    def _read_spaces(self, action_names: Sequence[str]) -> Any:
        """What reads actions and writes observations; None where both are text."""
        action_space = getattr(self._env, "action_space", None)
        if action_space is None:
            return None
        from penstock.envs.spaces import Actions, check_observations

        check_observations(self._env.observation_space)
        return Actions(action_space, action_names)

    def reset(self, seed: int) -> tuple[str, dict[str, Any]]:
        with self._randomness():
            observation, info = self._env.reset(seed=seed % LARGEST_SEED)
        if self._reader is not None:
            self._env.action_space.seed(seed % LARGEST_SEED)
        return self._show(observation, info), info

    def step(self, action: str) -> Result:
        try:
            understood = action if self._reader is None else self._reader.read(action)
        except ValueError as why:
            ends = self._unparsable == "end"
            said = f"Not an action: {why}.\n{self._shown}"
            return said, self._unparsable_reward, ends, False, {"unparsable": True}
        with self._randomness():
            observation, reward, terminated, truncated, info = self._env.step(understood)
        return self._show(observation, info), float(reward), bool(terminated), bool(truncated), info

    def demonstrate(self) -> str:
        """Some action, as it should be written: it shows the form, not how to play well."""
        if self._reader is not None:
            return str(self._reader.write(self._env.action_space.sample()))
        if not hasattr(self._env, "sample_random_action"):
            raise ConfigError("model.warm_start needs an environment that can show an action: set its steps to 0")
        with self._randomness():
            return str(self._env.sample_random_action())

    def close(self) -> None:
        close = getattr(self._env, "close", None)
        if close is not None:
            close()

    def _show(self, observation: Any, info: dict[str, Any]) -> str:
        text = observation if self._reader is None else _write(observation)
        if not isinstance(text, str):
            return text  # type: ignore[no-any-return] # whoever plays it says what is wrong with that
        text = f"{info.get('prefix', '')}{text}"
        if suffix := info.get("suffix"):
            text = f"{text.rstrip()}\n{suffix}"
        described = "" if self._reader is None else self._reader.description
        self._shown = self._prompt.format(observation=text, actions=described)
        return self._shown

    def _randomness(self) -> AbstractContextManager[None]:
        """Gymnasium's environments draw from generators of their own."""
        return nullcontext()


class GemAdapter(Adapter):
    """GEM's environments seed and use Python's and NumPy's global generators: each episode sees its own states of them,
    so that episodes which take turns do not disturb each other."""

    _alone = threading.Lock()

    def __init__(self, task: Task, **options: Any) -> None:
        self._states: tuple[Any, Any] | None = None
        with self._alone, _restored():
            super().__init__(task, **options)

    @contextmanager
    def _randomness(self) -> Iterator[None]:
        with self._alone, _restored():
            if self._states is not None:
                random.setstate(self._states[0])
                np.random.set_state(self._states[1])
            yield
            self._states = random.getstate(), np.random.get_state()


@contextmanager
def _restored() -> Iterator[None]:
    """The global generators go on as if the body had not been."""
    before = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])


def _check_prompt(prompt: str) -> None:
    try:
        prompt.format(observation="", actions="")
    except (KeyError, IndexError, ValueError) as error:
        raise ConfigError(
            f"env.options.prompt {prompt!r} knows {{observation}} and {{actions}} only: {type(error).__name__} {error}"
        ) from None


def _write(observation: Any) -> str:
    from penstock.envs.spaces import write

    return write(observation)


def check_package(name: str) -> tuple[str, str]:
    """(package, id) of a name like `gym:FrozenLake-v1`, importing nothing. Raises `ConfigError`."""
    kind, _, identifier = name.partition(":")
    package = PACKAGES[kind]
    if find_spec(package) is None:
        raise ConfigError(f"env.name {name!r} needs the package {package}: pip install 'penstock[{kind}]'")
    if not identifier:
        raise ConfigError(f"env.name {name!r} names no environment: write {kind}:ID")
    return package, identifier


def adapt_id(name: str) -> type[Adapter]:
    """The environment behind a name like `gym:FrozenLake-v1` or `gem:game:GuessTheNumber-v0-easy`."""
    package, identifier = check_package(name)
    library = importlib.import_module(package)
    if package == "gem":
        return _gem(name, library, identifier)

    def make(**arguments: Any) -> Any:
        try:
            return _made(library, identifier, arguments)
        except library.error.Error as error:  # a package that this one needs is missing, say
            raise ConfigError(f"env.name {name!r}: {error}") from None

    try:
        library.spec(identifier)
    except library.error.Error as error:
        raise ConfigError(f"env.name {name!r}: {error}") from None
    return _adapting(Adapter, make, identifier)


def _gem(name: str, library: Any, identifier: str) -> type[Adapter]:
    importlib.import_module("gem.envs")  # registers them
    known = importlib.import_module("gem.envs.registration").ENV_REGISTRY
    if identifier not in known:
        near = [each for each in known if identifier.partition("-")[0].lower() in each.lower()]
        raise ConfigError(f"env.name {name!r}: GEM has no {identifier}; there are {', '.join(near or known)}")
    return _adapting(GemAdapter, lambda **arguments: _made(library, identifier, arguments), identifier)


def _made(library: Any, identifier: str, arguments: dict[str, Any]) -> Any:
    try:
        return library.make(identifier, **arguments)
    except TypeError as error:  # only the library knows what takes them
        raise misfit(identifier, arguments, error) from None


def adapt_class(kind: type) -> type[Adapter] | None:
    """How to play `kind`, if it is a subclass of Gymnasium's or GEM's `Env`."""
    for package, adapter in (("gymnasium", Adapter), ("gem", GemAdapter)):
        base = getattr(sys.modules.get(package), "Env", None)  # whoever subclasses it has imported it
        if base is not None and issubclass(kind, base):
            kept = {key: getattr(kind, key) for key in KEPT if hasattr(kind, key)}
            return _adapting(adapter, partial(_made_of, kind), kind.__name__, **kept)
    return None


def _made_of(kind: type, /, **arguments: Any) -> Any:
    check_options(kind.__name__, kind, **arguments)
    return kind(**arguments)


def _adapting(adapter: type[Adapter], make: Callable[..., Any], name: str, **kept: Any) -> type[Adapter]:
    """Called `name`: failures say so."""
    return type(name, (adapter,), {"make": staticmethod(make), **kept})
