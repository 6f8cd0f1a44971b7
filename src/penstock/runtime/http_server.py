"""Listening sockets and the HTTP server on them, with limits. Torch-free.

uvicorn limits the pause between two requests, and `bounded_connections.py` the number of connections and the heads of
requests. The kernel closes a connection when its client has not read for `UNREAD_S`. `rollout/http.py` sets a deadline
for reading a request body.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

import uvicorn
from starlette.types import ASGIApp

from penstock.runtime.bounded_connections import BoundedConnection, Connections
from penstock.runtime.open_files import allow_files

MAX_CONNECTIONS = 16_384
"""Maximum number of connections. It exceeds the requests an engine can hold. A further one closes an idle one."""
IDLE_S = 60
"""Maximum pause between two requests on one connection. Clients keep idle connections for less, so they close first."""
UNREAD_S = 60.0
"""How long a client may leave sent data unread."""
END_S = 1
"""Time limit for open requests to end when the server stops."""


class CannotListen(OSError):
    """A process cannot listen for connections of other processes."""

    self_explanatory = True


def bind(host: str, port: int, *, held: bool = False) -> socket.socket:
    """Return a listening socket. Raises `CannotListen`, for example if the port is taken.

    `held`: the process that started this one keeps the port (`held_port.py`). Then the socket listens only once it is
    served, so that clients are refused until then.
    """
    listener = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if hasattr(socket, "TCP_USER_TIMEOUT"):  # accepted connections inherit the option
            listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, round(UNREAD_S * 1000))
        if held:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        listener.bind((host, port))
        if not held:
            listener.listen()
    except OSError as error:
        listener.close()
        raise CannotListen(f"cannot listen on {host}:{port}: {error.strerror or error}") from None
    return listener


def url_of(host: str, at: socket.socket | int) -> str:
    """Return the URL of a server. `at` is its listening socket or its port.

    Of a socket, it names the address and not `host`: a name like localhost also stands for addresses where another
    user may listen.
    """
    host, port = (host, at) if isinstance(at, int) else at.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"


class HttpServer(uvicorn.Server):
    """A uvicorn server with these limits. It leaves signal handling to the process."""

    def __init__(self, app: ASGIApp) -> None:
        files = allow_files(2 * MAX_CONNECTIONS + 2)
        super().__init__(
            uvicorn.Config(
                app,
                http=BoundedConnection,
                ws="none",  # a protocol for websockets would take over connections without these limits
                interface="asgi3",
                log_level="warning",
                access_log=False,
                lifespan="off",
                proxy_headers=False,
                timeout_keep_alive=IDLE_S,
                timeout_graceful_shutdown=END_S,
            )
        )
        self.server_state = Connections(most=min(MAX_CONNECTIONS, files // 2 - 1))

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def listening(app: ASGIApp, listener: socket.socket) -> AsyncIterator[None]:
    """Serve `app` while the `async with` body runs."""
    server = HttpServer(app)
    listener.listen()  # clients that come before the server runs have to wait
    async with asyncio.TaskGroup() as tasks:
        serving = tasks.create_task(server.serve(sockets=[listener]))
        yield
        server.should_exit = True
        await serving
