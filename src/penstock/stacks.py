"""Stacks of all tasks and threads of this process, to explain why it makes no progress."""

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
"""Most different stacks in a report. Tasks and threads with equal stacks share one entry."""
MAX_FRAMES = 25
"""Most frames of a stack in a report: the innermost frames."""


def stacks() -> list[str]:
    """Return the stacks of all tasks of the running loop, then of all other threads.

    Each entry names its tasks or threads, then has one line per frame, with the innermost frame last.
    """
    names_by_stack: dict[str, list[str]] = {}
    for task in asyncio.all_tasks():
        names_by_stack.setdefault(_text(_awaited(task.get_coro())), []).append(f"task {task.get_name()}")
    threads = {thread.ident: thread.name for thread in threading.enumerate()}
    for ident, frame in sys._current_frames().items():
        if ident != threading.get_ident():
            inside_out = [each for each, _ in traceback.walk_stack(frame)]
            names_by_stack.setdefault(_text(reversed(inside_out)), []).append(f"thread {threads.get(ident, ident)}")
    entries = [f"{_first(names)}\n{stack}" for stack, names in names_by_stack.items()]
    left_out = [f"{len(entries) - MAX_STACKS} more stacks"] if len(entries) > MAX_STACKS else []
    return entries[:MAX_STACKS] + left_out


def unwound(error: BaseException) -> str:
    """Return the traceback of `error`: one line per frame, with the frame that raised it last."""
    return _text(frame for frame, _ in traceback.walk_tb(error.__traceback__))


def _awaited(awaitable: Any) -> Iterator[FrameType]:
    """Yield the frames of a coroutine and of the awaitables that it awaits, as far as they are Python code."""
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


def _first(names: list[str]) -> str:
    return f"{names[0]} and {len(names) - 1} others" if len(names) > 1 else names[0]
