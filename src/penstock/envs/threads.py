"""Blocking calls, each in its own daemon thread, which does not keep the process from ending."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any


async def in_thread(function: Callable[..., Any], *args: Any, name: str) -> Any:
    """Return the result of the function, run in a new thread. A thread cannot be stopped: if the caller is cancelled,
    the thread runs on until it ends or the process does."""
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
