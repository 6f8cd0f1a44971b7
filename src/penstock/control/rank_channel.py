"""The channel between the trainer and its rank processes: messages of a few frames, in order, in both directions.

Within a machine the channel is `ipc` in the runtime directory, which only the run's user can enter. Between machines it
is TCP with CURVE, where both ends prove that they own the members' key of the run. Each end notices at once that the
other process has ended, and after `SILENT_MS` that its machine is silent. A lost connection is not restored. A rank
that works tells the trainer that it makes progress.
"""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import zmq
from zmq.auth.thread import ThreadAuthenticator

from penstock.control.runtime_files import Keys, RuntimeFile
from penstock.control.sockets import EVERY, NEVER, Members, connect_as_member, listen_as
from penstock.deadline import Stalled
from penstock.runtime.http_server import CannotListen
from penstock.ticks import tick

LOOK_MS = 200
"""Milliseconds between two checks whether the other end is connected."""
SILENT_MS = 20_000
"""Time without a sign of life from the other machine after which the connection is given up. The supervisor gives up
earlier, since it knows the reason better."""
TICK_S, TICK = 1.0, b"progress"
"""Least seconds between two signs of progress, and the frame of such a sign. No call or answer is this frame."""
FOLLOW_S = 0.5
"""Seconds between two reads of the trainer's address."""
CONNECT_S = 20.0
"""Seconds that a rank waits for its connection to the trainer before it connects again."""


class TrainerAddress(RuntimeFile, frozen=True, kw_only=True):
    """The addresses at which the trainer listens for its ranks. The file lies in its runtime directory and in those of
    other machines."""

    FILE: ClassVar[str] = "trainer.json"

    endpoints: dict[str, tuple[str, str]]
    """(endpoint for calls, endpoint for answers) by the name of the rank's process."""


class RankChannel:
    """One end of a channel. One thread may send while another one receives."""

    def __init__(self, context: zmq.Context[Any]) -> None:
        self.outgoing, self.incoming = context.socket(zmq.PUSH), context.socket(zmq.PULL)
        self._lock = threading.Lock()
        self._left = False
        self._ticked_at = -TICK_S
        for socket in (self.outgoing, self.incoming):
            socket.setsockopt(zmq.LINGER, 0)
            socket.setsockopt(zmq.SNDHWM, 0)
            socket.setsockopt(zmq.RCVHWM, 0)
        self.outgoing.setsockopt(zmq.IMMEDIATE, 1)  # writable only while the other end is connected

    @property
    def is_connected(self) -> bool:
        """Return whether the other end is connected and takes messages."""
        with self._lock:
            return not self.outgoing.closed and bool(self.outgoing.poll(0, zmq.POLLOUT))

    def send(self, frames: Sequence[Any]) -> None:
        """Send a copy of a message. Raises ConnectionError when the other end is gone."""
        with self._lock:
            try:
                self.outgoing.send_multipart(frames, zmq.NOBLOCK)
            except zmq.ZMQError:
                raise ConnectionError("the other end is gone") from None

    def tick(self) -> None:
        """Tell the other end that this one makes progress, at most every `TICK_S`."""
        now = time.monotonic()
        if now - self._ticked_at >= TICK_S:
            self._ticked_at = now
            with suppress(ConnectionError):  # the other end is gone: the next `receive` raises
                self.send([TICK])

    def receive(self) -> list[Any]:
        """Wait for the next message. A sign of progress becomes a tick of this process. Raises EOFError when the other
        end is gone, or after `leave`."""
        while not self._left:
            if self.incoming.poll(LOOK_MS):
                frames = [frame.buffer for frame in self.incoming.recv_multipart(copy=False)]
                if len(frames) > 1 or frames[0] != TICK:
                    return frames
                tick()
            if not self.is_connected and not self.incoming.poll(0):
                break
        raise EOFError("the other end is gone")

    def leave(self) -> None:
        """Make `receive` end."""
        self._left = True

    def ended(self) -> str:
        """Close the channel, which the other end notices. Return what is known about how the other process ended."""
        self.close()
        return "its process has ended, or its machine is out of reach"

    def close(self) -> None:
        """Close the channel. Only the receiving thread may call this."""
        with self._lock:
            self.outgoing.close()
            self.incoming.close()


class RankChannels:
    """The trainer's ends, one for each rank."""

    def __init__(self, directory: Path, names: Sequence[str], *, host: str | None) -> None:
        """Listen, and write the address to `directory`, the runtime directory. `host`: the address to listen on for
        other machines, for which `directory` holds the keys; None for only this machine. Raises `CannotListen`."""
        self._context: zmq.Context[Any] = zmq.Context()
        self._guard: ThreadAuthenticator | None = None
        self.channels = {name: RankChannel(self._context) for name in names}
        try:
            if names:
                self._listen(directory, host)
        except zmq.ZMQError as error:
            self.close()
            raise CannotListen(f"the trainer cannot listen for its ranks: {error.strerror}") from error
        except BaseException:
            self.close()
            raise

    def await_ranks(self, *, waiter: str, seconds: float) -> None:
        """Block until all ranks are connected. Raises `Stalled`, which names the missing ranks."""
        give_up = time.monotonic() + seconds
        while absent := [name for name, channel in self.channels.items() if not channel.is_connected]:
            if time.monotonic() > give_up:
                raise Stalled(waiter=waiter, resource="its ranks", holder=", ".join(absent), seconds=seconds)
            time.sleep(LOOK_MS / 1000)

    def close(self) -> None:
        """Close all channels. Afterwards no thread may use them."""
        for channel in self.channels.values():
            channel.close()
        if self._guard is not None:
            self._guard.stop()
        self._context.term()

    def _listen(self, directory: Path, host: str | None) -> None:
        life, keys = secrets.token_hex(3), Keys.read(directory)
        if host is not None and keys is None:
            raise CannotListen(f"the trainer cannot listen on {host}: {directory} has no keys of the run")
        if keys is not None:
            self._guard = ThreadAuthenticator(self._context)
            self._guard.start()
            self._guard.configure_curve_callback(EVERY, Members(keys.member))

        def listen(socket: zmq.Socket[Any], name: str) -> str:
            if host is not None and keys is not None:
                return listen_as(socket, host, public=keys.member, secret=keys.member_secret, dead_ms=SILENT_MS)
            socket.bind(f"ipc://{directory}/{name}-{life}")
            return socket.getsockopt_string(zmq.LAST_ENDPOINT)

        endpoints = {
            name: (listen(channel.outgoing, f"{name}.calls"), listen(channel.incoming, f"{name}.answers"))
            for name, channel in self.channels.items()
        }
        TrainerAddress(endpoints=endpoints).write(directory)


def connect_to_trainer(directory: Path, name: str) -> RankChannel:
    """Block until the channel of rank `name` is connected to the trainer, and return it. Follow the trainer's address
    in `directory` when it changes."""
    while True:
        address = TrainerAddress.read(directory)
        if address is None or name not in address.endpoints:
            time.sleep(FOLLOW_S)
            continue
        channel, give_up = RankChannel(zmq.Context.instance()), time.monotonic() + CONNECT_S
        accepted = channel.incoming.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        _connect(channel, address.endpoints[name], Keys.read(directory))
        while not (is_whole := channel.is_connected and bool(accepted.poll(0))):
            if TrainerAddress.read(directory) != address or time.monotonic() > give_up:
                break
            time.sleep(LOOK_MS / 1000)
        channel.incoming.disable_monitor()
        accepted.close()
        if is_whole:
            return channel
        channel.close()


def _connect(channel: RankChannel, endpoints: tuple[str, str], keys: Keys | None) -> None:
    for socket, endpoint in zip((channel.incoming, channel.outgoing), endpoints, strict=True):
        if keys is None:
            socket.connect(endpoint)
        else:
            connect_as_member(socket, endpoint, keys, server=keys.member, dead_ms=SILENT_MS, reconnect_ms=NEVER)
