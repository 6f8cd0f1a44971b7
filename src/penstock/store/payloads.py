"""Records of the pool that another process wrote, wherever that was.

On one machine all processes use one directory: nothing travels. On several, workers write to their own machine, and a
process that needs a record asks the host beside it (`Payloads`, over a socket in the runtime directory), which gets it
from the host that has it, and writes it into the asking process's directory: same file, same offset. What transfers are
made of, between hosts, is for them to say (`answer`).
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import zmq
import zmq.asyncio

from penstock.deadline import Stalled, deadline
from penstock.ports import PayloadsLost
from penstock.store.payload import PayloadReader, PayloadWriter, is_whole, whole_record
from penstock.types import PayloadRef, Sample

POOL = "pool"
"""Folder of the run's directory, and of a machine's runtime directory."""
SOCKET = "payloads.sock"
"""In the runtime directory."""
FETCH_S = 60.0
"""For records to come; shorter than what those wait who report them."""
ASK_S = FETCH_S + 5.0
"""For the host to say so, or why they have not: it knows more."""


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """What a process asks the host beside it."""

    refs: list[PayloadRef]
    host: str
    """Who has them."""
    directory: str
    """Where they are to be written."""


class Fetched(msgspec.Struct, frozen=True, kw_only=True):
    """The answer: all of it is there, or why not."""

    error: str = ""
    """Names host and file."""


_encode = msgspec.msgpack.Encoder().encode
_wanted, _fetched = msgspec.msgpack.Decoder(Wanted), msgspec.msgpack.Decoder(Fetched)

Get = Callable[[str, list[PayloadRef]], Awaitable[Sequence[bytes]]]
"""get(host, refs) -> their records; raises `PayloadsLost`."""


class SharedPayloads:
    """`ports.Payloads` on one machine: what others wrote lies in the same directory."""

    def __init__(self, directory: Path) -> None:
        self._reader = PayloadReader(directory)

    async def fetch(self, refs: Sequence[PayloadRef], *, host: str) -> None:
        """It is there."""

    def read(self, ref: PayloadRef) -> list[Sample]:
        return self._reader.read(ref)

    def drop(self, refs: Iterable[PayloadRef]) -> None:
        """Whoever owns the directory sees to that."""

    def close(self) -> None:
        """Nothing is open."""


class FetchedPayloads:
    """`ports.Payloads` on several machines: copies in a directory of this process's own."""

    def __init__(self, directory: Path, *, runtime_dir: Path, name: str) -> None:
        """`runtime_dir`: where the host listens. `name`: of this process, for errors."""
        directory.mkdir(parents=True, exist_ok=True)
        self._directory, self._runtime_dir, self._name = directory, runtime_dir, name
        self._reader = PayloadReader(directory)
        self._context = zmq.asyncio.Context()

    async def fetch(self, refs: Sequence[PayloadRef], *, host: str) -> None:
        missing = await asyncio.to_thread(self._missing, refs)
        if not missing:
            return
        try:
            told = await self._ask(Wanted(refs=missing, host=host, directory=str(self._directory)))
        except Stalled as stalled:
            raise PayloadsLost(str(stalled)) from None
        if told.error:
            raise PayloadsLost(told.error)
        if damaged := await asyncio.to_thread(self._missing, missing):
            raise PayloadsLost(f"{damaged[0].file} of host {host} came damaged at offset {damaged[0].offset}")

    def read(self, ref: PayloadRef) -> list[Sample]:
        return self._reader.read(ref)

    def drop(self, refs: Iterable[PayloadRef]) -> None:
        self._reader.remove({ref.file for ref in refs})

    def close(self) -> None:
        self._context.destroy(linger=0)

    def _missing(self, refs: Sequence[PayloadRef]) -> list[PayloadRef]:
        return [ref for ref in refs if not is_whole(self._directory, ref)]

    async def _ask(self, wanted: Wanted) -> Fetched:
        """Each on a socket of its own: an answer that comes too late finds nobody."""
        files = ", ".join(sorted({ref.file for ref in wanted.refs}))
        with self._context.socket(zmq.REQ) as socket:
            socket.setsockopt(zmq.LINGER, 0)
            socket.connect(f"ipc://{self._runtime_dir}/{SOCKET}")
            resource, holder = f"records of {files} on host {wanted.host}", "the host beside it"
            async with deadline(ASK_S, waiter=self._name, resource=resource, holder=holder):
                await socket.send(_encode(wanted))
                return _fetched.decode(await socket.recv())


@asynccontextmanager
async def answering(runtime_dir: Path, get: Get) -> AsyncIterator[None]:
    """The host's side: processes beside it are served for the length of the body, any number at once."""
    with zmq.asyncio.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        socket.bind(f"ipc://{runtime_dir}/{SOCKET}")
        async with asyncio.TaskGroup() as tasks:
            serving = tasks.create_task(_serve(socket, get))
            try:
                yield
            finally:
                serving.cancel()


async def _serve(socket: zmq.asyncio.Socket, get: Get) -> None:
    """Until cancelled; what is still being fetched then is given up."""

    async def answer(asked: list[bytes]) -> None:
        told = await _fetch(_wanted.decode(asked[-1]), get)
        await socket.send_multipart([*asked[:-1], _encode(told)])

    async with asyncio.TaskGroup() as answers:
        while True:
            answers.create_task(answer(await socket.recv_multipart()))


async def _fetch(wanted: Wanted, get: Get) -> Fetched:
    try:
        async with deadline(FETCH_S, waiter="the host", resource="records", holder=f"host {wanted.host}"):
            records = await get(wanted.host, wanted.refs)
            await asyncio.to_thread(write_records, Path(wanted.directory), wanted.refs, records)
    except (PayloadsLost, Stalled, OSError) as error:
        return Fetched(error=str(error))
    return Fetched()


def read_records(directories: Sequence[Path], refs: Sequence[PayloadRef], *, host: str) -> list[bytes]:
    """As they lie in the first of `directories` that has them whole. Raises `PayloadsLost`, which names the `host`."""
    records = []
    for ref in refs:
        found = (whole_record(directory, ref) for directory in directories)
        record = next((record for record in found if record is not None), None)
        if record is None:
            raise PayloadsLost(f"host {host} has no whole record of {ref.file} at offset {ref.offset}")
        records.append(record)
    return records


def write_records(directory: Path, refs: Sequence[PayloadRef], records: Sequence[bytes]) -> None:
    """Where their references say. What lies between stays a hole."""
    for ref, record in zip(refs, records, strict=True):
        file = os.open(directory / ref.file, os.O_CREAT | os.O_WRONLY, 0o600)
        try:
            if (written := os.pwrite(file, record, ref.offset)) != len(record):
                raise OSError(f"{written} of {len(record)} bytes of {ref.file} could be written; disk full?")
        finally:
            os.close(file)


class PassingWriter:
    """Records that stay only until the controller has them: a file goes once all that was written to it has been
    released. No two processes ever use the same file names, wherever they run."""

    def __init__(self, directory: Path, worker: str, *, max_file_bytes: int = 64 << 20) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        for left in directory.glob(f"{worker}-*.seg"):  # by one that died: others play what it had not handed over
            left.unlink()
        self._directory = directory
        self._writer = PayloadWriter(directory, f"{worker}-{secrets.token_hex(4)}", max_file_bytes=max_file_bytes)
        self._waiting: Counter[str] = Counter()
        """Records that have not been released, by file."""

    def append(self, samples: Sequence[Sample]) -> PayloadRef:
        ref = self._writer.append(samples)
        self._waiting[ref.file] += 1
        return ref

    def release(self, ref: PayloadRef) -> None:
        self._waiting[ref.file] -= 1
        for file in [file for file, count in self._waiting.items() if not count and file != self._writer.file]:
            del self._waiting[file]
            (self._directory / file).unlink(missing_ok=True)

    def close(self) -> None:
        self._writer.close()
