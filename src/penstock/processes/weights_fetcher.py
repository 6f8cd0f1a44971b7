"""Published weights for a foreign engine that the run starts, on the machine of the engine. Torch-free.

On the trainer's machine the engine reads the published file where it lies. On other machines a child process with torch
gets the file (`fetching_process.py`). It starts with the first file, and again if it ends.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from penstock.deadline import deadline, holding
from penstock.ports.inference import WeightsOutOfReach
from penstock.processes.layout import RECEIVED
from penstock.rollout import http
from penstock.rollout.bodies import FetchedWeights
from penstock.rollout.engine_client import FETCH
from penstock.runtime import frames
from penstock.runtime.child_process import END_S, ChildProcess
from penstock.supervisor.child import Child
from penstock.supervisor.procfs import boot_id
from penstock.supervisor.runtime import runtime_dirs
from penstock.types import WeightsHandle

ENGINE = "engine"
"""Folder of the runtime directory for what engines read, with a subfolder for each server."""
ANSWERER = "penstock.processes.fetching_process:FetchAnswerer"
MAX_ANSWER_BYTES = 1 << 20
LOST = 503
"""Status of a fetch whose child process ended. The client tries again."""


class FetchRequest(msgspec.Struct, kw_only=True):
    """Weights to get, and what the child knows about this machine."""

    handle: WeightsHandle
    machine: str
    """Boot id of this machine."""
    address: str | None
    """Address of this machine for others."""
    directory: str
    """Directory for received files of this server."""
    received_dirs: list[str]
    """Directories with those of all receivers of this machine."""
    engine_dir: str
    """Directory for the folders that the engine reads."""
    model: str
    """Directory of the model that adapters are added to."""


class FetchResult(msgspec.Struct, kw_only=True):
    """The weights on this machine, or why they are not."""

    fetched: FetchedWeights | None = None
    error: str = ""
    is_wrong: bool = False
    """Whether the bytes that came are not those of the handle."""


class WeightsFetcher:
    """Gets one version after the other for the engine of this process. `close` ends the child."""

    def __init__(self, child: Child, model: Path) -> None:
        """`model`: directory of the model that the engine serves."""
        self._own, self._model = child, model
        self._lock = asyncio.Lock()
        self._child: ChildProcess | None = None
        self._pipe: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    def routes(self) -> list[http.Route]:
        return [http.Route(FETCH, ["POST"], self.begin_weights, body=WeightsHandle, reply=FetchedWeights)]

    async def begin_weights(self, request: Request) -> Response:
        """Get and verify weights. The engine generates meanwhile, with the weights that it has."""
        handle = await http.read_body(request, WeightsHandle)
        return http.answer(await http.unless_disconnected(request.receive, self.fetch(handle)))

    async def fetch(self, handle: WeightsHandle) -> FetchedWeights:
        """Return where the weights lie on this machine. Raises `WeightsOutOfReach`, ValueError if they are damaged,
        `Refused` with status 503 if the child ends, and `Stalled`. A cancelled call ends the child."""
        waiter, resource, limit_s = self._own.name, f"policy_version {handle.policy_version}", handle.receive_limit_s
        async with (
            holding(self._lock, limit_s, waiter=waiter, resource=resource, holder="an earlier version"),
            deadline(limit_s, waiter=waiter, resource=resource, holder="the trainer's machine"),
        ):
            if handle.machine == boot_id() and (size := await asyncio.to_thread(_size, handle.path)) is not None:
                if size != handle.num_bytes:
                    raise ValueError(f"{handle.path} has {size} bytes, expected {handle.num_bytes}")
                return FetchedWeights(path=handle.path, transport="shared_memory")
            result = await self._ask(handle)
        if result.fetched is not None:
            return result.fetched
        raise ValueError(result.error) if result.is_wrong else WeightsOutOfReach(result.error)

    async def _ask(self, handle: WeightsHandle) -> FetchResult:
        own = self._own
        request = FetchRequest(
            handle=handle,
            machine=boot_id(),
            address=own.address,
            directory=str(own.runtime_dir / RECEIVED / own.name),
            received_dirs=[str(path / RECEIVED) for path in runtime_dirs(own.run_id)],
            engine_dir=str(own.runtime_dir / ENGINE / own.name),
            model=str(self._model),
        )
        try:
            reader, writer = await self._piped()
            await frames.write(writer, [msgspec.msgpack.encode(request)])
            (answer,) = await frames.read(reader, max_bytes=MAX_ANSWER_BYTES)
            return msgspec.msgpack.decode(answer, type=FetchResult)
        except (asyncio.IncompleteReadError, ConnectionError):
            end = await self._end()
            raise http.Refused(LOST, f"the process that gets weights to this machine ended: {end}") from None
        except BaseException:
            await self._end()
            raise

    async def _piped(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if self._pipe is None:
            self._child = ChildProcess(ANSWERER)
            self._pipe = await asyncio.open_unix_connection(sock=self._child.pipe)
        return self._pipe

    async def _end(self) -> str:
        """End the child. Return how it ended."""
        child, self._child = self._child, None
        pipe, self._pipe = self._pipe, None
        if child is None:
            return ""
        child.kill()
        if pipe is not None:
            pipe[1].close()
        async with deadline(2 * END_S, waiter=self._own.name, resource="the end of a process", holder="the system"):
            return await asyncio.to_thread(child.wait)

    async def close(self) -> None:
        """End the child."""
        await self._end()


def _size(path: str) -> int | None:
    """Return the size of a file; None if this process does not see it."""
    file = Path(path)
    return file.stat().st_size if file.is_file() else None
