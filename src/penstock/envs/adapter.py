"""Adapters for the environments of other libraries: Gymnasium (by id or by class) and GEM.

These environments start with `reset(seed=...)`, and their observations and actions need not be text. An answer without
an action never reaches the environment. It either ends the episode, or costs a turn and the policy sees the last
observation again.
"""

from __future__ import annotations

import importlib
import random
import re
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
"""Package for each prefix of a name like `gym:FrozenLake-v1`. Penstock's pip extras have the same names as the
prefixes."""
LARGEST_SEED = 2**31
"""Upper bound (exclusive) of seeds: some of these environments use generators that accept no larger seed."""
HIGHLIGHTED = re.compile(r"\x1b\[[\d;]*m(.*?)\x1b\[0m")
"""Text with a colour, as terminals show it."""
KEPT = ("__module__", "__qualname__", "blocking", "isolated", "max_concurrent")
"""Attributes copied from an adapted class: its location, and how to call it."""

Result = tuple[str, float, bool, bool, dict[str, Any]]


class Adapter:
    """One episode of another library's environment. The adapter takes the options `prompt`, `action_names`, `render`,
    `unparsable` and `unparsable_reward`; all other options go to the environment."""

    make: Callable[..., Any]
    """Creates the wrapped environment."""

    def __init__(
        self,
        task: Task,
        *,
        prompt: str | None = None,
        action_names: Sequence[str] = (),
        render: Literal["ansi"] | None = None,
        unparsable: Literal["again", "end"] = "again",
        unparsable_reward: float = 0.0,
        **arguments: Any,
    ) -> None:
        """`prompt`: a format string with `{observation}` and `{actions}`, used for every observation. `{actions}` is a
        description of a valid action. `action_names`: names for a discrete space's actions, in order. `render`: `ansi`
        shows the text that a Gymnasium environment draws, with brackets around what it highlights, instead of the
        observation. `unparsable`: what follows an answer without an action, the last observation (`again`) or the `end`
        of the episode. `unparsable_reward`: the reward of such an answer."""
        if unparsable not in ("again", "end"):
            raise ConfigError(f"env.options.unparsable is `again` or `end`, not {unparsable!r}")
        if render not in (None, "ansi"):
            raise ConfigError(f"env.options.render is `ansi`, not {render!r}")
        self._renders = render is not None
        self._env = type(self).make(**arguments, **({"render_mode": render} if render else {}))
        self._check_rendering()
        self._reader = self._read_spaces(action_names)
        self._prompt = prompt or ("{observation}" if self._reader is None else "{observation}\nAction: {actions}")
        try:
            self._prompt.format(observation="", actions="")
        except (KeyError, IndexError, ValueError) as error:
            raise ConfigError(
                f"env.options.prompt {self._prompt!r} can contain only {{observation}} and {{actions}}: "
                f"{type(error).__name__} {error}"
            ) from None
        self._unparsable, self._unparsable_reward = unparsable, unparsable_reward
        self._shown = ""

    def _check_rendering(self) -> None:
        modes = getattr(self._env, "metadata", {}).get("render_modes", ())
        if self._renders and "ansi" not in modes:
            raise ConfigError(f"env.options.render ansi: {self._env} draws only {', '.join(modes) or 'nothing'}")

    def _read_spaces(self, action_names: Sequence[str]) -> Any:
        """Return the `Actions` that read the policy's answers; None if observations and actions are text already, as in
        an environment without spaces. (GEM's Sokoban lists its actions in `action_space`.)"""
        action_space = getattr(self._env, "action_space", None)
        if action_space is None or not hasattr(self._env, "observation_space"):
            return None
        from penstock.envs.spaces import Actions, check_observations  # needs Gymnasium

        if not self._renders:
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
        """Return a random action in the right form. It shows how to write an action, not how to play well."""
        if self._reader is not None:
            return str(self._reader.write(self._env.action_space.sample()))
        try:
            with self._randomness():
                return str(self._env.sample_random_action())
        except (AttributeError, NotImplementedError):
            reason = "model.warm_start needs an environment that can show an action: set its steps to 0"
            raise ConfigError(reason) from None

    def close(self) -> None:
        if hasattr(self._env, "close"):
            self._env.close()

    def _show(self, observation: Any, info: dict[str, Any]) -> str:
        text: Any
        if self._renders:
            text = HIGHLIGHTED.sub(r"[\1]", str(self._env.render())).strip("\n")
        else:
            text = observation if self._reader is None else self._reader.write_observation(observation)
        if not isinstance(text, str):
            return text  # type: ignore[no-any-return] # the caller reports the wrong type
        text = f"{info.get('prefix', '')}{text}"
        if suffix := info.get("suffix"):
            text = f"{text.rstrip()}\n{suffix}"
        described = "" if self._reader is None else self._reader.description
        self._shown = self._prompt.format(observation=text, actions=described)
        return self._shown

    def _randomness(self) -> AbstractContextManager[None]:
        """Return a context for calls that use random numbers. Gymnasium's environments have their own generators and
        need none."""
        return nullcontext()


class GemAdapter(Adapter):
    """One episode of a GEM environment. GEM seeds and uses the global generators of Python and NumPy. Each episode gets
    its own states of them, so that interleaved episodes do not disturb each other."""

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
    """Restore the global generators after the body."""
    before = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(before[0])
        np.random.set_state(before[1])


def check_package(name: str) -> tuple[str, str]:
    """Return (package, id) of a name like `gym:FrozenLake-v1`, without importing anything. Raises `ConfigError` if the
    package is not installed or the id is empty."""
    kind, _, identifier = name.partition(":")
    package = PACKAGES[kind]
    if find_spec(package) is None:
        raise ConfigError(f"env.name {name!r} needs the package {package}: pip install 'penstock[{kind}]'")
    if not identifier:
        raise ConfigError(f"env.name {name!r} names no environment: write {kind}:ID")
    return package, identifier


def adapt_id(name: str) -> type[Adapter]:
    """Return the adapter class for a name like `gym:FrozenLake-v1` or `gem:game:GuessTheNumber-v0-easy`. Raises
    `ConfigError` if the library has no such environment."""
    package, identifier = check_package(name)
    library = importlib.import_module(package)
    errors: Any = (library.error.Error,) if package == "gymnasium" else ()

    def make(**arguments: Any) -> Any:
        try:
            return library.make(identifier, **arguments)
        except TypeError as error:  # only the library knows which arguments fit
            raise misfit(identifier, arguments, error) from None
        except (ImportError, *errors) as error:  # for example, a dependency of the environment is missing
            raise ConfigError(f"env.name {name!r}: {error}") from None

    if package == "gem":
        importlib.import_module("gem.envs")  # registers GEM's environments
        known = importlib.import_module("gem.envs.registration").ENV_REGISTRY
        if identifier not in known:
            near = [each for each in known if identifier.partition("-")[0].lower() in each.lower()]
            raise ConfigError(f"env.name {name!r}: GEM has no {identifier}; there are {', '.join(near or known)}")
        return _adapting(GemAdapter, make, identifier)
    try:
        library.spec(identifier)
    except errors as error:
        raise ConfigError(f"env.name {name!r}: {error}") from None
    return _adapting(Adapter, make, identifier)


def adapt_class(kind: type) -> type[Adapter] | None:
    """Return the adapter class for `kind`, if it is a subclass of Gymnasium's or GEM's `Env`; else None."""
    for package, adapter in (("gymnasium", Adapter), ("gem", GemAdapter)):
        base = getattr(sys.modules.get(package), "Env", None)  # None if not imported: then no subclass exists
        if base is not None and issubclass(kind, base):
            kept = {key: getattr(kind, key) for key in KEPT if hasattr(kind, key)}
            return _adapting(adapter, partial(_made_of, kind), kind.__name__, **kept)
    return None


def _made_of(kind: type, /, **arguments: Any) -> Any:
    check_options(kind.__name__, kind, **arguments)
    return kind(**arguments)


def _adapting(adapter: type[Adapter], make: Callable[..., Any], name: str, **kept: Any) -> type[Adapter]:
    """Return a subclass of `adapter` with the class name `name`. Error messages show this name."""
    return type(name, (adapter,), {"make": staticmethod(make), **kept})
