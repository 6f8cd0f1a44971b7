"""Conversion of text and conversations to tokens, bounded in size and time.

A tokenizer needs seconds for some megabytes, and a chat template is the model's own program. Neither may hold up the
event loop, on which the server answers `/health`. So long texts and all templates run in a few threads that all
servers of a process share. Python cannot end a thread: a template that never ends keeps its thread. Once all threads
are taken, conversations fail at their deadline. Requests with token ids or short text need no thread.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from queue import SimpleQueue
from typing import Any, TypeVar

import msgspec

from penstock.deadline import deadline
from penstock.rollout import bodies
from penstock.rollout.text import Tokenizer

MAX_BATCH = 1024
"""Maximum number of prompts in one body."""
INLINE_CHARACTERS = 2**14
"""Total length of the texts that are tokenised on the event loop, in about a millisecond."""
TEXT_S = 20.0
"""Time limit for the tokens of a body."""
NUM_THREADS = 4

T = TypeVar("T")


class PromptText:
    """Makes the tokens of prompts. Refuses text that is too long for the context before it is tokenised."""

    def __init__(self, tokenizer: Tokenizer, *, max_context: int) -> None:
        self._tokenizer = tokenizer
        self._max_characters = max_context * tokenizer.longest_token
        self._reason = f"{max_context} tokens of at most {tokenizer.longest_token} characters"

    async def tokenised(self, body: bodies.GenerateBody) -> bodies.GenerateBody:
        """Return the body with `input_ids` instead of `text`. Raises ValueError for text that cannot be a prompt."""
        if body.text is None or body.input_ids is not None:
            return body
        texts = [body.text] if isinstance(body.text, str) else body.text
        if not 0 < len(texts) <= MAX_BATCH:
            raise ValueError(f"a batch has between 1 and {MAX_BATCH} prompts, not {len(texts)}")
        longest = max(map(len, texts))
        if longest > self._max_characters:
            raise self._too_long(f"a text of {longest} characters")
        encode = partial(_each, self._tokenizer.encode, texts)
        ids: list[Any] = encode() if sum(map(len, texts)) <= INLINE_CHARACTERS else await in_thread(encode)
        return msgspec.structs.replace(body, text=None, input_ids=ids[0] if isinstance(body.text, str) else ids)

    async def rendered(self, render: Callable[[], list[int]], *parts: object) -> list[int]:
        """Return the tokens of a conversation that consists of `parts`. Raises ValueError if it is too long."""

        def checked() -> list[int]:
            if has_more_characters(parts, self._max_characters):
                raise self._too_long(f"a conversation of more than {self._max_characters} characters")
            return render()

        return await in_thread(checked)

    def _too_long(self, what: str) -> ValueError:
        return ValueError(f"{what} cannot fit into the context of {self._reason}: shorten it")


def has_more_characters(value: object, most: int) -> bool:
    """Return whether a JSON value has more than `most` characters: those of its strings and keys, and one for each
    other value."""
    left, count = [value], 0
    while left and count <= most:
        match left.pop():
            case str() as text:
                count += len(text)
            case dict() as fields:
                left += [*fields, *fields.values()]
                count += not fields
            case list() | tuple() as values:
                left += values
                count += not values
            case _:
                count += 1
    return count > most


def _each(encode: Callable[[str], list[int]], texts: Sequence[str]) -> list[list[int]]:
    return [encode(text) for text in texts]


async def in_thread(work: Callable[[], T]) -> T:
    """Return the result of `work`, which runs in one of a few threads. Raises Stalled after `TEXT_S` seconds."""
    future: Future[T] = Future()
    _THREADS.add(partial(_settle, future, work))
    async with deadline(TEXT_S, waiter="server", resource="the tokens of a prompt", holder="its text"):
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
