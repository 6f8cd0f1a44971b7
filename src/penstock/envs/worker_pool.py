"""A pool of worker processes for code that may hang or crash. Each process holds its own object and is replaced when it
fails.

A cancelled call kills its worker process, and the next caller gets a new one. Workers end with the process that started
them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import msgspec

from penstock.config import ConfigError
from penstock.deadline import acquire_permit, deadline
from penstock.envs.exception_location import Origin, RaisedElsewhere
from penstock.envs.worker_calls import Answer, Call, ObjectWorker, Raised, encode, shown
from penstock.runtime import frames
from penstock.runtime.child_process import END_S, ChildProcess
from penstock.sandbox import Box

START_S = 60.0
"""Time limit for a process to start and to create its object."""
MAX_ANSWER_BYTES = 256 << 20
"""Default limit of one answer. A process that sends more is killed, and its call fails."""
ANSWERER = f"{ObjectWorker.__module__}:{ObjectWorker.__name__}"
logger = logging.getLogger(__name__)
_answers = msgspec.msgpack.Decoder(Answer)
OpenBox = Callable[[], Box | None]
"""Opens a sandbox for a process; None: the process needs none. It blocks."""


class ProcessLost(RuntimeError):
    """The worker process ended before it answered."""


class WorkerProcess:
    """One process, called by one caller at a time."""

    def __init__(
        self,
        child: ChildProcess,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        *,
        max_answer_bytes: int = MAX_ANSWER_BYTES,
    ) -> None:
        self._child, self._reader, self._writer, self._max_bytes = child, reader, writer, max_answer_bytes
        self._killed = False

    @property
    def is_sound(self) -> bool:
        """Whether the process runs and was not killed after a failed or cancelled call."""
        return not self._killed and not self.is_gone

    @property
    def is_gone(self) -> bool:
        """Whether the process has ended."""
        return self._child.is_gone

    @classmethod
    async def start(cls, open_box: OpenBox | None = None, *, max_answer_bytes: int = MAX_ANSWER_BYTES) -> WorkerProcess:
        """Start a process with the same import paths as this one, in the sandbox that `open_box` opens."""
        if open_box is None:
            child = ChildProcess(ANSWERER)
        else:
            async with deadline(START_S, waiter="penstock.envs", resource="a sandbox", holder="the system"):
                child = await asyncio.to_thread(lambda: ChildProcess(ANSWERER, box=open_box()))
        try:
            reader, writer = await asyncio.open_unix_connection(sock=child.pipe)
            return cls(child, reader, writer, max_answer_bytes=max_answer_bytes)
        except BaseException:
            child.kill()
            raise

    async def call(self, method: str, *args: Any) -> Any:
        """Call a method of the object and return its result. The first call creates the object (see `Call`). A failed
        or cancelled call kills the process. Raises `RaisedElsewhere` or ConfigError if the method raised, and
        `ProcessLost` if the process ended or sent a malformed answer."""
        try:
            answer = await self._answer_to(Call(method=method, args=list(args)))
        except BaseException:
            self.kill()
            raise
        match answer:
            case Raised(is_config=True):
                raise ConfigError(shown(answer.message))
            case Raised():
                place, trace = shown(answer.origin.place), shown(answer.origin.trace)
                raise RaisedElsewhere(f"{shown(answer.kind)}: {shown(answer.message)}", Origin(place, trace))
        return answer.value

    async def _answer_to(self, call: Call) -> Answer:
        try:
            await frames.write(self._writer, encode(call))
            answer: Answer = _answers.decode((await frames.read(self._reader, max_bytes=self._max_bytes))[0])
            return answer
        except (frames.MalformedMessage, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
            raise ProcessLost(f"its process sent a malformed answer: {error}") from None
        except (asyncio.IncompleteReadError, ConnectionError):
            raise ProcessLost(f"its process ended: {await self._end()}") from None

    async def _end(self) -> str:
        async with deadline(2 * END_S, waiter="penstock.envs", resource="the end of a process", holder="the system"):
            return await asyncio.to_thread(self._child.wait)

    def kill(self) -> None:
        """Kill the process and all its descendants in the same session."""
        if not self._killed:
            self._killed = True
            self._writer.close()
            self._child.kill()

    async def close(self) -> None:
        """Kill the process and wait until it has ended."""
        self.kill()
        await self._end()


class WorkerPool:
    """At most `limit` processes, started on demand and reused as long as they are sound."""

    def __init__(
        self,
        limit: int,
        maker: str,
        *args: Any,
        open_box: OpenBox | None = None,
        max_answer_bytes: int = MAX_ANSWER_BYTES,
    ) -> None:
        """`maker`: `package.module:function`, which creates the object of each process from `args`. That time does not
        count against any episode. `open_box`: opens the sandbox of each process."""
        self._open_box, self._max_answer_bytes = open_box, max_answer_bytes
        self._free = asyncio.Semaphore(limit)
        self._limit, self._maker, self._args = limit, maker, args
        self._idle: list[WorkerProcess] = []
        self._lost: list[WorkerProcess] = []
        """Processes that were killed or have ended, and are not yet collected."""

    @asynccontextmanager
    async def one(self, *, waiter: str) -> AsyncIterator[WorkerProcess]:
        """Lend a process during the body."""
        worker = await self.take(waiter=waiter)
        try:
            yield worker
        finally:
            self.give_back(worker)

    async def take(self, *, waiter: str) -> WorkerProcess:
        """Wait for a process and return it. The caller must give it back."""
        await acquire_permit(self._free, waiter=waiter, resource="a process", holder=f"{self._limit} others")
        try:
            while self._idle:
                worker = self._idle.pop()
                if worker.is_sound:
                    return worker
                self._discard(worker)
            return await self._start()
        except BaseException:
            self._free.release()
            raise

    async def _start(self) -> WorkerProcess:
        lost, self._lost = self._lost, []
        async with deadline(START_S, waiter="penstock.envs", resource="a new process", holder="what it imports"):
            for worker in lost:
                await _collect(worker)
            worker = await WorkerProcess.start(self._open_box, max_answer_bytes=self._max_answer_bytes)
            try:
                await worker.call(self._maker, *self._args)
            except BaseException:
                self._discard(worker)
                raise
        return worker

    def give_back(self, worker: WorkerProcess) -> None:
        self._free.release()
        if worker.is_sound:
            self._idle.append(worker)
        else:
            self._discard(worker)

    def _discard(self, worker: WorkerProcess) -> None:
        worker.kill()
        self._lost.append(worker)

    async def close(self) -> None:
        """End all processes that are not lent out. A lent process is killed by its borrower, or ends with this
        process."""
        for worker in (*self._idle, *self._lost):
            await _collect(worker)


async def _collect(worker: WorkerProcess) -> None:
    """End a process. How it ended concerns no later caller, so an error is logged."""
    try:
        await worker.close()
    except Exception:
        logger.exception("a worker process did not end as expected")
