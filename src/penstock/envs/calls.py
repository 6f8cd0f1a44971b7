"""Calls into environments, which are user code: on the event loop, in threads or in other processes.

An exception or an invalid return value of an environment becomes an `EpisodeFailure` that names the environment, method
and task.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, AbstractContextManager, asynccontextmanager, contextmanager
from functools import partial
from typing import Any, TypeVar

from penstock.config import ConfigError
from penstock.deadline import deadline, permit
from penstock.envs.dialogue import EpisodeFailure, Message, Style, checked
from penstock.envs.exception_location import OnError, described
from penstock.envs.rewards.reward import check_number
from penstock.envs.worker_calls import awaited
from penstock.ports.environment import Endpoint, Observation
from penstock.ports.episode_manager import Outcome
from penstock.samples import Credit
from penstock.sendable import sendable

logger = logging.getLogger(__name__)

T = TypeVar("T")

CLOSE_S = 5.0
"""Time limit of an environment's `close`."""
MAX_ROLE_CHARACTERS = 200
SHOWN_CHARACTERS = 120
"""Characters of an invalid return value shown in its error message."""


class ConcurrencyLimit:
    """Limit on concurrent calls into environments of one class or into one reward, as it sets it in
    `max_concurrent`."""

    def __init__(self) -> None:
        self._free: dict[int, tuple[object, asyncio.Semaphore]] = {}

    @asynccontextmanager
    async def slot(self, limited: object, *, waiter: str) -> AsyncIterator[None]:
        """Hold a slot of `limited`, a class or an object, during the body. Wait for one if all are taken."""
        limit: int | None = getattr(limited, "max_concurrent", None)
        if limit is None:
            yield
            return
        _, free = self._free.setdefault(id(limited), (limited, asyncio.Semaphore(limit)))
        name = getattr(limited, "__name__", type(limited).__name__)
        async with permit(free, waiter=waiter, resource=f"a slot of {name}", holder=f"{limit} others (max_concurrent)"):
            yield


class EpisodeEnvironment:
    """The environment of one episode.

    A class with `blocking = True` gets a thread per call. A class with `isolated = True` gets its own process. All
    other classes run on the event loop and must not block it. A class may limit its concurrent calls, or processes,
    with `max_concurrent`.
    """

    def __init__(
        self, make: Callable[[], Any], *, name: str, task_id: str, limit: ConcurrencyLimit, on_error: OnError
    ) -> None:
        """`on_error`: called with each exception that the environment raises, except `ConfigError`, cancellation and
        interrupts."""
        self._task_id, self._limit = task_id, limit
        self._on_error = on_error
        self._name = name
        self._closed = False
        self._env: Any = None
        with self._blamed("__init__"):
            self._env = make()
        self._name = getattr(self._env, "class_name", type(self._env).__name__)
        with self._blamed("__init__"):
            self.style = Style.of(self._env)

    @property
    def is_agent(self) -> bool:
        """Whether the environment is an agent with its own loop."""
        return hasattr(self._env, "play")

    @property
    def is_isolated(self) -> bool:
        """Whether the environment runs in its own process, for which the episode has to wait."""
        return getattr(self._env, "has_own_process", False) is True

    def holder(self, method: str) -> str:
        """Return the name of a method for stall reports: the method holds the awaited resource while it runs."""
        return f"{self._name}.{method}"

    def slot(self) -> AbstractAsyncContextManager[None]:
        """Return a context that holds a slot for a call. Every call needs one. The wait does not count against the
        episode's time."""
        return self._limit.slot(type(self._env), waiter=self._task_id)

    async def enter(self) -> None:
        """Wait for a process, if the environment is isolated."""
        if self.is_isolated:
            await self._env.enter()

    async def reset(self, seed: int) -> tuple[Observation, Mapping[str, Any]]:
        """Return the first observation and its `info`."""
        with self._blamed("reset"):
            observation, info = _unpack(await call_async(self._env, "reset", seed), "observation, info")
            return observation, info

    async def step(self, action: str) -> Outcome:
        with self._blamed("step"):
            return make_outcome(await call_async(self._env, "step", action))

    async def play(self, llm: Endpoint, seed: int) -> float | None:
        """Let the agent play, and return its reward. None leaves the reward to `env.reward`."""
        with self._blamed("play"):
            return check_reward(await call_async(self._env, "play", llm, seed))

    @property
    def gives_credit(self) -> bool:
        """Whether the environment is an agent that says what each conversation earns."""
        return hasattr(self._env, "credit")

    async def credit(self, reward: float, conversations: Sequence[Sequence[Message]]) -> list[Credit]:
        """Return the agent's own rewards of its conversations."""
        with self._blamed("credit"):
            return _credits(await call_async(self._env, "credit", reward, conversations), len(conversations))

    async def close(self) -> None:
        """Close the environment, once, if it has a `close`. Errors and timeouts are logged and do not fail the
        episode."""
        if self._closed or not hasattr(self._env, "close"):
            return
        self._closed = True
        try:
            async with deadline(CLOSE_S, waiter=self._task_id, resource="its end", holder=self.holder("close")):
                with self._blamed("close"):
                    await call_async(self._env, "close")
        except (EpisodeFailure, TimeoutError) as error:
            logger.warning("%s", error)

    def _blamed(self, method: str) -> AbstractContextManager[None]:
        holder = self.holder(method)
        return blamed(f"{holder} of {self._task_id}", partial(self._on_error, holder))


@contextmanager
def blamed(
    where: str,
    on_error: Callable[[BaseException], None],
    *,
    is_ours: Callable[[BaseException], bool] = lambda error: False,
) -> Iterator[None]:
    """Turn any exception of the user's code into an `EpisodeFailure` that says `where`. User code may raise any
    exception. `ConfigError`, interrupts and cancellation of this task pass through, and so do exceptions that the code
    did not raise itself (`is_ours`)."""
    try:
        yield
    except (ConfigError, KeyboardInterrupt, GeneratorExit):
        raise
    except EpisodeFailure as error:
        if is_ours(error):
            raise
        raise EpisodeFailure(f"{where}: {error}") from None
    except BaseException as error:
        if is_ours(error):
            raise
        if isinstance(error, asyncio.CancelledError) and (task := asyncio.current_task()) and task.cancelling():
            raise  # the task itself is being cancelled; the code may also raise CancelledError on its own
        on_error(error)
        raise EpisodeFailure(f"{where}: {described(error)}") from error


async def call_async(env: object, method: str, *args: Any) -> Any:
    """Call a method and return its result, awaited if necessary. A plain method of a `blocking` environment runs in a
    thread."""
    function = getattr(env, method)
    if getattr(env, "blocking", False) and not inspect.iscoroutinefunction(function):
        result = await in_thread(function, *args, name=f"{type(env).__name__}.{method}")
    else:
        result = function(*args)
    return await awaited(result)


async def in_thread(function: Callable[..., Any], *args: Any, name: str) -> Any:
    """Return the result of the function, run in a new daemon thread. A thread cannot be stopped: if the caller is
    cancelled, the thread runs on until it ends or the process does."""
    ended: Future[tuple[Any, BaseException | None]] = Future()
    ended.set_running_or_notify_cancel()  # from now on a cancelled caller leaves the future as it is

    def work() -> None:
        try:
            ended.set_result((function(*args), None))
        except BaseException as error:  # passed as a value, because asyncio's futures do not accept all exceptions
            ended.set_result((None, error))

    threading.Thread(target=work, name=name, daemon=True).start()
    result, error = await asyncio.wrap_future(ended)
    if error is not None:
        raise error
    return result


def _unpack(result: object, form: str) -> Sequence[Any]:
    """Return the parts of a result: a tuple of `form`, which begins with the observation and ends with `info`. An
    `info` that is not a mapping becomes an empty one. Raises `EpisodeFailure` for another form."""
    if not isinstance(result, tuple | list) or len(result) != len(form.split(", ")):
        raise EpisodeFailure(f"returned {repr(result)[:SHOWN_CHARACTERS]}, not ({form})")
    return [checked(result[0]), *result[1:-1], result[-1] if isinstance(result[-1], Mapping) else {}]


def make_outcome(result: object) -> Outcome:
    """Return the result of an environment's `step`, checked. Raises `EpisodeFailure` for another form."""
    said, reward, terminated, truncated, info = _unpack(result, "observation, reward, terminated, truncated, info")
    for name, flag in (("terminated", terminated), ("truncated", truncated)):
        if type(flag).__name__ not in ("bool", "bool_"):  # Python's or NumPy's
            raise EpisodeFailure(f"{name} is {flag!r}, not a boolean")
    return Outcome(said, check_reward(reward), bool(terminated), bool(truncated), info)


def _credits(found: object, num_conversations: int) -> list[Credit]:
    """Return one credit per conversation: a number, or (number, role). Raises `EpisodeFailure` for another form."""
    if not isinstance(found, list | tuple) or len(found) != num_conversations:
        shown = repr(found)[:SHOWN_CHARACTERS]
        raise EpisodeFailure(
            f"returned {shown}, not a list of one reward for each of {num_conversations} conversations"
        )
    credits = []
    for each in found:
        reward, role = each if isinstance(each, list | tuple) and len(each) == 2 else (each, "")
        number = check_reward(reward)
        if number is None or not isinstance(role, str):
            raise EpisodeFailure(
                f"returned {repr(each)[:SHOWN_CHARACTERS]} for a conversation, not a reward or (reward, role)"
            )
        credits.append(Credit(number, sendable(role, MAX_ROLE_CHARACTERS)))
    return credits


def check_reward(reward: object) -> float | None:
    """Return the reward as a float, or None if there is none. Raises `EpisodeFailure` unless it is a usable number."""
    try:
        return None if reward is None else check_number("the reward", reward)
    except ValueError as error:
        raise EpisodeFailure(str(error)) from None
