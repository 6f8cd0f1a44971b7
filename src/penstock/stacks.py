"""Where everybody is: the stacks of all tasks and threads of this process, for people who ask why nothing happens."""

from __future__ import annotations

import asyncio
import sys
import threading
import traceback
from collections.abc import Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

MAX_STACKS = 40
"""Different ones; whatever waits at the same place is told together."""
MAX_FRAMES = 25
"""The innermost ones of a stack."""


def stacks() -> list[str]:
    """Of every task of the running loop, then of every other thread: who is there, then a line per frame, the
    innermost last."""
    places: dict[str, list[str]] = {}
    for task in asyncio.all_tasks():
        places.setdefault(_text(_awaited(task.get_coro())), []).append(f"task {task.get_name()}")
    names = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        if ident != threading.get_ident():
            inside_out = [each for each, _ in traceback.walk_stack(frame)]
            places.setdefault(_text(reversed(inside_out)), []).append(f"thread {names.get(ident, ident)}")
    told = [f"{_together(who)}\n{place}" for place, who in places.items()]
    left_out = [f"{len(told) - MAX_STACKS} more stacks"] if len(told) > MAX_STACKS else []
    return told[:MAX_STACKS] + left_out


def unwound(error: BaseException) -> str:
    """A line per frame that it came through, up to where it was raised."""
    return _text(frame for frame, _ in traceback.walk_tb(error.__traceback__))


def _awaited(awaitable: Any) -> Iterator[FrameType]:
    """The frames of a coroutine and of what it awaits, as far as these are Python's."""
    while awaitable is not None:
        frame = _attribute(awaitable, "cr_frame", "gi_frame", "ag_frame")
        if frame is not None:
            yield frame
        awaitable = _attribute(awaitable, "cr_await", "gi_yieldfrom", "ag_await")


def _attribute(thing: Any, *names: str) -> Any:
    return next((getattr(thing, name) for name in names if hasattr(thing, name)), None)


def _text(frames: Iterable[FrameType]) -> str:
    return "\n".join([f"  {_place(frame)}" for frame in frames][-MAX_FRAMES:])


def _place(frame: FrameType) -> str:
    path = "/".join(Path(frame.f_code.co_filename).parts[-3:])
    return f"{path}:{frame.f_lineno} in {frame.f_code.co_name}"


def _together(who: list[str]) -> str:
    return f"{who[0]} and {len(who) - 1} others" if len(who) > 1 else who[0]
