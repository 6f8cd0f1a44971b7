"""Threads for the conversion of text to tokens.

A tokenizer needs seconds for some megabytes, and a chat template is the model's own program. Neither may hold up an
event loop: then a server does not answer, and a worker falls silent and is killed. So long texts and templates run in a
few threads that the whole process shares. Python cannot end a thread: a template that never ends keeps its thread. Once
all threads are taken, long texts fail at their deadline.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import TypeVar

from penstock.deadline import deadline

INLINE_CHARACTERS = 2**14
"""Total length of the texts that are tokenised on the event loop, in some milliseconds."""
TEXT_S = 20.0
"""Time limit for the tokens of a prompt, or of all prompts of one request."""
NUM_THREADS = 4

T = TypeVar("T")


async def in_text_thread(work: Callable[[], T], *, waiter: str) -> T:
    """Return the result of `work`, which runs in one of a few threads. Raises Stalled after `TEXT_S` seconds."""
    future: Future[T] = Future()
    _THREADS.add(partial(_settle, future, work))
    async with deadline(TEXT_S, waiter=waiter, resource="the tokens of a prompt", holder="its text"):
        return await asyncio.wrap_future(future)


def _settle(future: Future[T], work: Callable[[], T]) -> None:
    """Run `work` for its future, unless the caller has given up. A panic of a Rust library is a BaseException."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error if isinstance(error, Exception) else RuntimeError(repr(error)))


class _Threads:
    """Daemon threads, which do not hold up the end of the process. They start when they are first needed."""

    def __init__(self, number: int) -> None:
        self._jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()
        self._number, self._started = number, False

    def add(self, job: Callable[[], None]) -> None:
        if not self._started:
            self._started = True
            for number in range(self._number):
                threading.Thread(target=self._run, name=f"prompt-text-{number}", daemon=True).start()
        self._jobs.put(job)

    def _run(self) -> None:
        while True:
            self._jobs.get()()


_THREADS = _Threads(NUM_THREADS)
