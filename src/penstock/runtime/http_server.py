"""Listening sockets and the HTTP server on them, with limits. Torch-free.

uvicorn limits the number of connections and the pause between two requests. The kernel closes a connection when its
client has not read for `UNREAD_S`. `rollout/http.py` sets a deadline for reading a request body.
"""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import uvicorn
from starlette.types import ASGIApp

MAX_CONNECTIONS = 16_384
"""Maximum number of connections. It exceeds the requests an engine can hold. Requests on further ones get a 503."""
IDLE_S = 60
"""Maximum pause between two requests on one connection. Clients keep idle connections for less, so they close first."""
UNREAD_S = 60.0
"""How long a client may leave sent data unread."""
END_S = 1
"""Time limit for open requests to end when the server stops."""


class CannotListen(OSError):
    """A process cannot listen for connections of other processes."""

    self_explanatory = True


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket. Raises `CannotListen`, for example if the port is taken."""
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # accepted connections inherit the option
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(UNREAD_S * 1000))
        listener.bind((host, port))
        listener.listen()
    except OSError as error:
        listener.close()
        raise CannotListen(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    return listener


def url_of(host: str, at: socket.socket | int) -> str:
    """Return the URL of a server. `at` is its listening socket or its port."""
    port = at if isinstance(at, int) else at.getsockname()[1]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


class HttpServer(uvicorn.Server):
    """A uvicorn server with these limits. It leaves signal handling to the process."""

    def __init__(self, app: ASGIApp) -> None:
        _allow_files(2 * MAX_CONNECTIONS)
        super().__init__(
            uvicorn.Config(
                app,
                http="httptools",
                interface="asgi3",
                log_level="warning",
                access_log=False,
                lifespan="off",
                limit_concurrency=MAX_CONNECTIONS,
                timeout_keep_alive=IDLE_S,
                timeout_graceful_shutdown=END_S,
            )
        )

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


def _allow_files(most: int) -> None:
    """Raise the limit of open files to `most`, or as far as the system allows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if resource.RLIM_INFINITY != soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


@asynccontextmanager
async def listening(app: ASGIApp, listener: socket.socket) -> AsyncIterator[None]:
    """Serve `app` while the `async with` body runs."""
    server = HttpServer(app)
    async with asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(server.serve(sockets=[listener]))
        yield
        server.should_exit = True
        await serving
