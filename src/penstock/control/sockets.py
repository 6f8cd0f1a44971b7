"""The sockets of the control bus.

Within a machine they are `ipc` in the runtime directory, which only the run's user can enter. Between machines they are
TCP with CURVE, if that directory holds keys; the controller ignores processes without the keys. A silent connection is
closed and opened again, so after a cut cable the bus continues as soon as the cable works.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

import zmq
from zmq.auth.asyncio import AsyncioAuthenticator

from penstock.control.runtime_files import Address, Keys
from penstock.runtime.http_server import CannotListen
from penstock.runtime.open_files import allow_files

LINGER_MS = 200
PING_MS, DEAD_MS = 2000, 10_000
"""Time between two heartbeats of an idle connection, and time without a sign of life until it is given up."""
CONNECT_MS = 5000
HANDSHAKE_MS = 3000
"""Time for a connection to prove that it belongs to the run. Until then ZeroMQ keeps all that a stranger sends."""
RECONNECT_MS, RECONNECT_MOST_MS = 100, 2000
NEVER = -1
MAX_FRAME_BYTES = 64 << 20
"""Limit of a frame of the bus. The largest message is one task with its data, or the scheduler's state at a checkpoint:
a few megabytes. Senders divide larger batches, and ZeroMQ closes the connection of a process that sends more."""
MAX_FILES = 65_536
"""Number of files that a process may open that listens for other machines, if the system allows it. Each connection is
one, also that of a stranger, until the time for its handshake is over."""
EVERY = "*"
"""The domain of every socket that listens for other machines. The authenticator of this process checks its clients."""
MAX_WAITING = 1024
"""Number of connections that may wait until they are accepted."""
MAX_AT_ONCE = 256
"""Number of messages that are read in one turn of the event loop, so that a fast sender does not hold up other work."""


class FrameSocket:
    """A ZeroMQ socket in an event loop. It neither waits for room in a queue nor makes a future for each message."""

    def __init__(self, socket: zmq.Socket[Any]) -> None:
        self._socket = socket
        self._may_read = asyncio.Event()

    def send(self, parts: Sequence[bytes]) -> None:
        """Send a message. A message that finds a full queue counts as lost."""
        with suppress(zmq.ZMQError):
            self._socket.send_multipart(parts, zmq.NOBLOCK)
        self._may_read.set()  # ZeroMQ's descriptor is silent about what arrived while something was sent

    async def listen(self, hear: Callable[[list[bytes]], None]) -> NoReturn:
        """Call `hear` with each message, until cancelled."""
        loop, descriptor = asyncio.get_running_loop(), int(self._socket.getsockopt(zmq.FD))
        loop.add_reader(descriptor, self._may_read.set)
        try:
            while True:
                self._may_read.clear()
                for _ in range(MAX_AT_ONCE):
                    try:
                        parts = self._socket.recv_multipart(zmq.NOBLOCK)
                    except zmq.Again:
                        await self._may_read.wait()
                        break
                    hear(parts)
                else:
                    await asyncio.sleep(0)
        finally:
            loop.remove_reader(descriptor)


class ControllerSockets:
    """The controller's sockets: ROUTER for requests, PUB for broadcasts."""

    def __init__(self, context: zmq.Context[Any], directory: Path, host: str | None) -> None:
        """`host`: the address to listen on for other machines; None for only this machine. With a `host`, `directory`
        holds the keys, and the address is written there. Raises `CannotListen`."""
        router, publisher = context.socket(zmq.ROUTER), context.socket(zmq.PUB)
        for socket in (router, publisher):
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
            socket.setsockopt(zmq.BACKLOG, MAX_WAITING)
        router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._guard: AsyncioAuthenticator | None = None
        if host is None:
            router.bind(f"ipc://{directory}/control.sock")
            publisher.bind(f"ipc://{directory}/broadcast.sock")
        else:
            self._bind(context, directory, host, router, publisher)
        self.router, self.publisher = FrameSocket(router), FrameSocket(publisher)

    def close(self) -> None:
        if self._guard is not None:
            self._guard.stop()

    def _bind(self, context: zmq.Context[Any], directory: Path, host: str, *sockets: zmq.Socket[Any]) -> None:
        keys = Keys.read(directory)
        if keys is None or not keys.controller_secret:
            raise CannotListen(f"the controller cannot listen on {host}: {directory} has no keys of the run")
        self._guard = AsyncioAuthenticator(context)
        self._guard.start()
        self._guard.configure_curve_callback(EVERY, Members(keys.member))
        try:
            endpoint, broadcast = (
                listen_as(socket, host, public=keys.controller, secret=keys.controller_secret) for socket in sockets
            )
        except zmq.ZMQError as error:
            self._guard.stop()
            raise CannotListen(f"the controller cannot listen on {host}: {error.strerror}") from error
        Address(endpoint=endpoint, broadcast=broadcast).write(directory)


class Members:
    """Accepts the public key of the run's members, in the callback that ZeroMQ expects."""

    def __init__(self, member: str) -> None:
        self._member = member.encode()

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._member


class PeerSockets:
    """The sockets of every other process: DEALER for requests, SUB for broadcasts, connected to the controller."""

    def __init__(self, context: zmq.Context[Any], directory: Path, identity: bytes) -> None:
        self._directory, self.keys = directory, Keys.read(directory)
        self._dealer, self._subscriber = context.socket(zmq.DEALER), context.socket(zmq.SUB)
        for socket in (self._dealer, self._subscriber):
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self._dealer.setsockopt(zmq.IDENTITY, identity)
        self._subscriber.setsockopt(zmq.SUBSCRIBE, b"")
        self._address: Address | None = None
        if self.keys is None:
            self._dealer.connect(f"ipc://{directory}/control.sock")
            self._subscriber.connect(f"ipc://{directory}/broadcast.sock")
        self.follow()
        self.dealer, self.subscriber = FrameSocket(self._dealer), FrameSocket(self._subscriber)

    def follow(self) -> None:
        """Connect to the controller's address if it is new or has changed."""
        address = Address.read(self._directory)
        if self.keys is None or address is None or address == self._address:
            return
        before, self._address = self._address, address
        if before is not None:
            self._dealer.disconnect(before.endpoint)
            self._subscriber.disconnect(before.broadcast)
        for socket, endpoint in ((self._dealer, address.endpoint), (self._subscriber, address.broadcast)):
            connect_as_member(socket, endpoint, self.keys, server=self.keys.controller)


def listen_as(socket: zmq.Socket[Any], host: str, *, public: str, secret: str, dead_ms: int = DEAD_MS) -> str:
    """Listen on a port that the system chooses, and prove to each client that this process owns the key `public`.
    Return the endpoint."""
    allow_files(MAX_FILES)
    _across_machines(socket, dead_ms)
    socket.setsockopt(zmq.HANDSHAKE_IVL, HANDSHAKE_MS)
    socket.setsockopt_string(zmq.ZAP_DOMAIN, EVERY)
    socket.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # else ZeroMQ lets in every key once no authenticator answers
    socket.setsockopt(zmq.CURVE_SERVER, 1)
    socket.setsockopt(zmq.CURVE_PUBLICKEY, public.encode())
    socket.setsockopt(zmq.CURVE_SECRETKEY, secret.encode())
    socket.bind(f"tcp://{f'[{host}]' if ':' in host else host}:*")
    return socket.getsockopt_string(zmq.LAST_ENDPOINT)


def connect_as_member(
    socket: zmq.Socket[Any],
    endpoint: str,
    keys: Keys,
    *,
    server: str,
    dead_ms: int = DEAD_MS,
    reconnect_ms: int = RECONNECT_MS,
) -> None:
    """Connect to a server that owns the public key `server`, as a process of the run. `reconnect_ms`: how soon a lost
    connection is tried again; `NEVER`: not at all."""
    _across_machines(socket, dead_ms)
    socket.setsockopt(zmq.RECONNECT_IVL, reconnect_ms)
    socket.setsockopt(zmq.CURVE_SERVERKEY, server.encode())
    socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.member.encode())
    socket.setsockopt(zmq.CURVE_SECRETKEY, keys.member_secret.encode())
    socket.connect(endpoint)


def _across_machines(socket: zmq.Socket[Any], dead_ms: int) -> None:
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.HEARTBEAT_IVL, PING_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, dead_ms)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_MS)
    socket.setsockopt(zmq.HANDSHAKE_IVL, DEAD_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MOST_MS)
