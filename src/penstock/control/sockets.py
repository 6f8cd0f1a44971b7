"""The sockets of the control bus: within a machine `ipc` in the runtime directory, which only the run's user enters;
between machines TCP with CURVE, if that directory holds keys. Whoever has none of them is not heard.

A connection on which nothing comes is given up and made anew, so a cut cable costs no more than the time it is cut.
"""

from __future__ import annotations

from pathlib import Path

import zmq
import zmq.asyncio
from zmq.auth.asyncio import AsyncioAuthenticator

from penstock.control.address import Address
from penstock.control.keys import Keys

LINGER_MS = 200
PING_MS, DEAD_MS = 2000, 10_000
"""Between two signs of life of an idle connection; without any, until it is given up."""
CONNECT_MS = 5000
RECONNECT_MS, RECONNECT_MOST_MS = 100, 2000


class CannotListen(RuntimeError):
    """The controller is to listen for other machines, and cannot."""

    self_explanatory = True


class ControllerSockets:
    """ROUTER for requests, PUB for broadcasts; the address to listen on, or None to stay on this machine."""

    def __init__(self, context: zmq.asyncio.Context, directory: Path, host: str | None) -> None:
        """Between machines `directory` holds the keys, and gets the address."""
        self.router, self.publisher = context.socket(zmq.ROUTER), context.socket(zmq.PUB)
        self.router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self._guard: AsyncioAuthenticator | None = None
        for socket in (self.router, self.publisher):
            socket.setsockopt(zmq.LINGER, LINGER_MS)
        if host is None:
            self.router.bind(f"ipc://{directory}/control.sock")
            self.publisher.bind(f"ipc://{directory}/broadcast.sock")
        else:
            self._bind(context, directory, host)

    def close(self) -> None:
        if self._guard is not None:
            self._guard.stop()

    def _bind(self, context: zmq.asyncio.Context, directory: Path, host: str) -> None:
        keys = Keys.read(directory)
        if keys is None or not keys.controller_secret:
            raise CannotListen(f"the controller is to listen on {host}, and {directory} does not hold its keys")
        self._guard = AsyncioAuthenticator(context)
        self._guard.start()
        self._guard.configure_curve_callback("*", Members(keys.member))
        for socket in (self.router, self.publisher):
            _across_machines(socket)
            socket.setsockopt(zmq.CURVE_SERVER, 1)
            socket.setsockopt(zmq.CURVE_PUBLICKEY, keys.controller.encode())
            socket.setsockopt(zmq.CURVE_SECRETKEY, keys.controller_secret.encode())
            try:
                socket.bind(f"tcp://{f'[{host}]' if ':' in host else host}:*")
            except zmq.ZMQError as error:
                self._guard.stop()
                raise CannotListen(f"the controller cannot listen on {host}: {error.strerror}") from error
        endpoint, broadcast = (socket.getsockopt_string(zmq.LAST_ENDPOINT) for socket in (self.router, self.publisher))
        Address(endpoint=endpoint, broadcast=broadcast, public_key=keys.controller).write(directory)


class Members:
    """Says whose public keys are the run's, as ZeroMQ asks."""

    def __init__(self, member: str) -> None:
        self._member = member.encode()

    def callback(self, domain: str, key: bytes) -> bool:
        return key == self._member


class PeerSockets:
    """DEALER for requests, SUB for broadcasts; connected to wherever the controller is now."""

    def __init__(self, context: zmq.asyncio.Context, directory: Path, identity: bytes) -> None:
        self._directory, self._keys = directory, Keys.read(directory)
        self.dealer, self.subscriber = context.socket(zmq.DEALER), context.socket(zmq.SUB)
        self.dealer.setsockopt(zmq.LINGER, LINGER_MS)
        self.dealer.setsockopt(zmq.IDENTITY, identity)
        self.subscriber.setsockopt(zmq.SUBSCRIBE, b"")
        self._address: Address | None = None
        if self._keys is None:
            self.dealer.connect(f"ipc://{directory}/control.sock")
            self.subscriber.connect(f"ipc://{directory}/broadcast.sock")
        else:
            self.follow()

    @property
    def may_move(self) -> bool:
        """Whether the controller can be elsewhere once it was started again."""
        return self._keys is not None

    def follow(self) -> None:
        """Connect to where the controller is, if it was elsewhere or unknown before."""
        address = Address.read(self._directory)
        if self._keys is None or address is None or address == self._address:
            return
        before, self._address = self._address, address
        if before is not None:
            self.dealer.disconnect(before.endpoint)
            self.subscriber.disconnect(before.broadcast)
        for socket, endpoint in ((self.dealer, address.endpoint), (self.subscriber, address.broadcast)):
            _across_machines(socket)
            socket.setsockopt(zmq.CURVE_SERVERKEY, self._keys.controller.encode())
            socket.setsockopt(zmq.CURVE_PUBLICKEY, self._keys.member.encode())
            socket.setsockopt(zmq.CURVE_SECRETKEY, self._keys.member_secret.encode())
            socket.connect(endpoint)


def _across_machines(socket: zmq.asyncio.Socket) -> None:
    socket.setsockopt(zmq.IPV6, 1)
    socket.setsockopt(zmq.HEARTBEAT_IVL, PING_MS)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, DEAD_MS)
    socket.setsockopt(zmq.CONNECT_TIMEOUT, CONNECT_MS)
    socket.setsockopt(zmq.HANDSHAKE_IVL, DEAD_MS)
    socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
    socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MOST_MS)
