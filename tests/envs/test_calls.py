"""Whatever an environment does that it may not, the failure names environment, method and task."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import penstock
from penstock.config import ConfigError
from penstock.envs.calls import ConcurrencyLimit, EpisodeEnvironment, Outcome, in_thread
from penstock.envs.dialogue import EpisodeFailure
from penstock.envs.exception_location import LoggedOnce


class Echo:
    """Returns what it is told to."""

    def __init__(self, *, reset: Any = ("hello", {}), step: Any = ("", 1.0, True, False, {})) -> None:
        self._reset, self._step = reset, step

    def reset(self, seed: int) -> Any:
        return self._reset

    def step(self, action: str) -> Any:
        return self._step() if callable(self._step) else self._step


def environment(make: Callable[[], Any], limit: ConcurrencyLimit | None = None) -> EpisodeEnvironment:
    return EpisodeEnvironment(
        make, name="echo", task_id="t/1", limit=limit or ConcurrencyLimit(), on_error=LoggedOnce()
    )


def raising(error: BaseException) -> Callable[[], Any]:
    def act() -> Any:
        raise error

    return act


@pytest.mark.parametrize(
    ("step", "reason"),
    [
        (None, "returned None, not (observation, reward, terminated, truncated, info)"),
        (("", 1.0, True, {}), "returned ('', 1.0, True, {}), not (observation,"),
        ((b"", 1.0, True, False, {}), "the observation is a bytes, not a string"),
        (("", float("nan"), True, False, {}), "the reward is nan, not a finite number"),
        (("", 10**5000, True, False, {}), "the reward is larger than 1000000, and than any float"),
        (("", 1e308, True, False, {}), "the reward is 1e+308, not a number from"),
        (("", "1", True, False, {}), "the reward is '1', not a finite number"),
        (("", 1.0, "no", False, {}), "terminated is 'no', not a boolean"),
        (("", 1.0, True, None, {}), "truncated is None, not a boolean"),
        (raising(KeyError("answer")), "KeyError: 'answer'"),
        (raising(SystemExit(3)), "SystemExit: 3"),
        (raising(StopIteration()), "RuntimeError: coroutine raised StopIteration"),
        (raising(asyncio.CancelledError()), "CancelledError: "),
        (raising(TimeoutError("its own")), "TimeoutError: its own"),
    ],
)
async def test_a_bad_step_is_blamed(step: Any, reason: str) -> None:
    with pytest.raises(EpisodeFailure) as failure:
        await environment(lambda: Echo(step=step)).step("ok")
    assert str(failure.value).startswith(f"Echo.step of t/1: {reason}")


@pytest.mark.parametrize(
    ("reset", "reason"),
    [
        ("hello", "returned 'hello', not (observation, info)"),
        ((None, None), "the observation is a NoneType, not a string or a list of messages"),
    ],
)
async def test_a_bad_reset_is_blamed(reset: Any, reason: str) -> None:
    with pytest.raises(EpisodeFailure) as failure:
        await environment(lambda: Echo(reset=reset)).reset(1)
    assert str(failure.value) == f"Echo.reset of t/1: {reason}"


def test_what_cannot_be_made_is_blamed() -> None:
    with pytest.raises(EpisodeFailure, match=r"echo.__init__ of t/1: OSError: no sandbox left"):
        environment(raising(OSError("no sandbox left")))


def test_a_wrong_configuration_is_nobodys_failure() -> None:
    with pytest.raises(ConfigError):
        environment(raising(ConfigError("env.options")))


async def test_numbers_of_numpy_will_do() -> None:
    step = ("more", np.float32(0.5), np.bool_(False), np.bool_(True), {"score": 1})
    outcome = await environment(lambda: Echo(step=step)).step("ok")
    assert outcome == Outcome(observation="more", reward=0.5, terminated=False, truncated=True, info={"score": 1})


async def test_what_is_told_beside_may_be_anything() -> None:
    assert await environment(lambda: Echo(reset=("hello", {"level": 2}))).reset(1) == ("hello", {"level": 2})
    assert (await environment(lambda: Echo(step=("", None, True, False, None))).step("ok")).info == {}


async def test_cancelling_is_not_the_environments_doing() -> None:
    class Waits(Echo):
        async def step(self, action: str) -> Any:
            await asyncio.Event().wait()

    playing = asyncio.create_task(environment(Waits).step("ok"))
    await asyncio.sleep(0)
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing


class Closing(Echo):
    """Counts how often it is closed."""

    num_closed = 0

    def close(self) -> None:
        Closing.num_closed += 1
        raise OSError("already gone")


async def test_closing_happens_once_and_harms_nobody(caplog: pytest.LogCaptureFixture) -> None:
    closing = environment(Closing)
    await closing.close()
    await closing.close()
    assert Closing.num_closed == 1
    assert "Closing.close of t/1: OSError: already gone" in caplog.text


class Blocking(Echo):
    """Its steps block a thread, two at once."""

    blocking = True
    max_concurrent = 2
    running = 0
    most = 0
    gate = threading.Event()

    def step(self, action: str) -> Any:
        cls = type(self)
        cls.running += 1
        cls.most = max(cls.most, cls.running)
        self.gate.wait(0.02)
        cls.running -= 1
        return "", 1.0, True, False, {}


async def test_blocking_environments_share_their_slots() -> None:
    limit = ConcurrencyLimit()

    async def play() -> None:
        blocking = environment(Blocking, limit)
        async with blocking.slot():
            await blocking.step("ok")

    async with asyncio.TaskGroup() as tasks:
        for _ in range(8):
            tasks.create_task(play())
    assert Blocking.most == 2


async def test_an_asynchronous_method_of_a_blocking_environment_stays_on_the_loop() -> None:
    class Both(Blocking):
        async def step(self, action: str) -> Any:
            return threading.current_thread().name, 1.0, True, False, {}

    assert (await environment(Both).step("ok")).observation == threading.current_thread().name


async def test_whoever_gives_up_on_a_thread_goes_on() -> None:
    gate = threading.Event()
    started = time.monotonic()
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.02):
            await in_thread(gate.wait, name="hangs")
    assert time.monotonic() - started < 5
    hanging = [thread for thread in threading.enumerate() if thread.name == "hangs"]
    assert [thread.daemon for thread in hanging] == [True], "it keeps no process from ending"
    gate.set()
    hanging[0].join()


async def test_the_line_is_named_and_the_traceback_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    def step() -> Any:
        return {}["absent"]

    log = LoggedOnce()
    for task_id in ("t/1", "t/2"):
        failing = EpisodeEnvironment(
            lambda: Echo(step=step), name="echo", task_id=task_id, limit=ConcurrencyLimit(), on_error=log
        )
        with pytest.raises(EpisodeFailure, match=rf"{task_id}: KeyError: 'absent' \(test_calls\.py:\d+\)$"):
            await failing.step("ok")
    (record,) = caplog.records
    first, *lines = record.getMessage().splitlines()
    assert first == "Echo.step raised:" and lines[-1] == "KeyError: 'absent'"
    package = str(Path(penstock.__file__).parent)
    assert "test_calls.py" in lines[1] and package not in "".join(lines[1:3])


async def test_the_line_is_that_of_who_called_a_library() -> None:
    def step() -> Any:
        return np.concatenate([])

    with pytest.raises(EpisodeFailure, match=r"ValueError: .* \(test_calls\.py:\d+\)$"):
        await environment(lambda: Echo(step=step)).step("ok")
