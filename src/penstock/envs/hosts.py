"""Processes for code that may hang or crash: a few of them, each with an object of its own, replaced when they fail.

A call that is given up takes its process with it; whoever comes next gets a new one. Nobody else notices. Processes
see the end of their pipe when the one that started them is gone, however that ended.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any

import msgspec

from penstock.config import ConfigError
from penstock.deadline import deadline, take_place
from penstock.envs.hosted import LENGTH, Answer, Call, Make, Raised, Request, frame
from penstock.envs.origin import Origin, RaisedElsewhere

START_S = 60.0
"""To start a process, and for it to import what it is to hold."""
END_S = 10.0
"""For a process that was killed to be gone."""


class HostLost(RuntimeError):
    """The process ended before it had answered."""


class HostedError(RaisedElsewhere):
    """What the object raised."""

    def __init__(self, raised: Raised) -> None:
        super().__init__(f"{raised.kind}: {raised.message}", Origin(raised.place, raised.trace))


class Host:
    """One process."""

    def __init__(self, process: Process) -> None:
        self._process = process
        self._answers = msgspec.msgpack.Decoder(Answer)
        self._killed = False

    @property
    def is_sound(self) -> bool:
        """It lives, and no call to it was given up."""
        return not self._killed and not self.is_gone

    @property
    def is_gone(self) -> bool:
        """The process has ended."""
        return self._process.returncode is not None

    @classmethod
    async def start(cls) -> Host:
        """Imports as this process does."""
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "penstock.envs.hosted",
            stdin=PIPE,
            stdout=PIPE,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
            start_new_session=True,
        )
        return cls(process)

    async def make(self, maker: str, *args: Any) -> None:
        """Hold `maker(*args)`."""
        await self._ask(Make(maker=maker, args=list(args)))

    async def call(self, method: str, *args: Any) -> Any:
        """What the method returned. Whoever gives up waiting has ended the process. Raises `HostedError`, `HostLost`,
        or ConfigError."""
        return await self._ask(Call(method=method, args=list(args)))

    async def _ask(self, request: Request) -> Any:
        try:
            answer = await self._answer_to(request)
        except BaseException:
            self.kill()
            raise
        if isinstance(answer, Raised):
            raise ConfigError(answer.message) if answer.is_config else HostedError(answer)
        return answer.value

    async def _answer_to(self, request: Request) -> Answer:
        requests, answers = self._process.stdin, self._process.stdout
        assert requests is not None and answers is not None, "both are pipes"
        try:
            requests.write(frame(request))
            await requests.drain()
            prefix = await answers.readexactly(LENGTH.size)
            answer: Answer = self._answers.decode(await answers.readexactly(*LENGTH.unpack(prefix)))
            return answer
        except (asyncio.IncompleteReadError, ConnectionError):
            raise HostLost(f"its process ended: {await self._end()}") from None

    async def _end(self) -> str:
        async with deadline(END_S, waiter="penstock.envs.hosts", resource="the end of a process", holder="the system"):
            await self._process.communicate()  # its pipes too
        code = self._process.returncode
        assert code is not None, "it has ended"
        return signal.Signals(-code).name if code < 0 else f"exit {code}"

    def kill(self) -> None:
        """End it, and whatever it started that stayed in its session."""
        self._killed = True
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def close(self) -> None:
        """End it, unless it was killed or died before, and wait until it has ended."""
        if self.is_sound:
            self.kill()
        await self._end()


class Hosts:
    """At most `limit` processes, started as they are needed, kept as long as they are sound."""

    def __init__(self, limit: int, *, prepare: Callable[[Host], Awaitable[None]]) -> None:
        """`prepare`: has a new one make its object. It has plenty of time, and costs no episode any."""
        self._free = asyncio.Semaphore(limit)
        self._limit, self._prepare = limit, prepare
        self._idle: list[Host] = []
        self._lost: list[Host] = []
        """That were killed, or died."""

    @asynccontextmanager
    async def one(self, *, waiter: str) -> AsyncIterator[Host]:
        """For the length of the body: nobody else has it."""
        host = await self.take(waiter=waiter)
        try:
            yield host
        finally:
            self.give_back(host)

    async def take(self, *, waiter: str) -> Host:
        """A process, until it is given back."""
        await take_place(self._free, waiter=waiter, resource="a process", holder=f"{self._limit} others")
        try:
            while self._idle:
                host = self._idle.pop()
                if host.is_sound:
                    return host
                self._lost.append(host)
            return await self._start()
        except BaseException:
            self._free.release()
            raise

    async def _start(self) -> Host:
        self._lost = [host for host in self._lost if not host.is_gone]
        async with deadline(START_S, waiter="penstock.envs.hosts", resource="a new process", holder="what it imports"):
            host = await Host.start()
            try:
                await self._prepare(host)
            except BaseException:
                self._lost.append(host)
                raise
        return host

    def give_back(self, host: Host) -> None:
        self._free.release()
        (self._idle if host.is_sound else self._lost).append(host)

    async def close(self) -> None:
        """End those that nobody has. Who still has one kills it, or it ends with this process."""
        for host in (*self._idle, *self._lost):
            await host.close()
