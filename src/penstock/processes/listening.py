"""Sockets, and the HTTP server on them. Torch-free."""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import uvicorn
from starlette.types import ASGIApp

from penstock.config import Config
from penstock.processes.connection import MAX_CONNECTIONS, Connection
from penstock.supervisor.child import Child


def bind(host: str, port: int) -> socket.socket:
    """A listening socket; OSError if the port is taken."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen()
    except OSError:
        listener.close()
        raise
    return listener


def host_of(child: Child, config: Config) -> str:
    """Where a rollout server listens: its machine's address, if there are several machines."""
    return child.address or config.rollout.host


def number_of(child: Child) -> int:
    """Which of the rollout servers this is, from 0 on."""
    return int(child.name.rpartition("-")[2])


def port_of(child: Child, config: Config) -> int:
    """Where that rollout server listens; 0 lets the system choose."""
    return config.rollout.port + number_of(child) if config.rollout.port else 0


def url_of(host: str, at: socket.socket | int) -> str:
    """Where clients find what listens there, or at that port."""
    port = at if isinstance(at, int) else at.getsockname()[1]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


class HttpServer(uvicorn.Server):
    """Leaves signals to the process, and takes as many connections as the system lets it."""

    def __init__(self, app: ASGIApp) -> None:
        _allow_files(2 * MAX_CONNECTIONS)
        super().__init__(
            uvicorn.Config(
                app, http=Connection, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=1
            )
        )

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _allow_files(count: int) -> None:
    """That many at once, or as many as the system has for this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY != soft < count:
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (count if hard == resource.RLIM_INFINITY else min(count, hard), hard)
        )


@asynccontextmanager
async def listening(app: ASGIApp, listener: socket.socket) -> AsyncIterator[None]:
    """Serves for the length of the body."""
    server = HttpServer(app)
    async with asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(server.serve(sockets=[listener]))
        yield
        server.should_exit = True
        await serving
