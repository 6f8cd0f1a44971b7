"""Blocking calls, each in a thread of its own that keeps no process from ending."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class _End:
    """How a call ended. Exceptions travel as values: a future refuses to carry some of them."""

    result: Any = None
    error: BaseException | None = None


async def in_thread(function: Callable[..., Any], *args: Any, name: str) -> Any:
    """What it returns. A thread cannot be stopped: whoever gives up waiting leaves it behind, until it ends or the
    process does."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[_End] = loop.create_future()

    def tell(end: _End) -> None:
        if not ended.done():
            ended.set_result(end)

    def work() -> None:
        try:
            end = _End(result=function(*args))
        except BaseException as error:
            end = _End(error=error)
        with suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(tell, end)

    threading.Thread(target=work, name=name, daemon=True).start()
    end = await ended
    if end.error is not None:
        raise end.error
    return end.result
