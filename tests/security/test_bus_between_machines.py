"""Strangers of the network at the sockets that connect machines: none is let in, and none keeps others out."""

from __future__ import annotations

import asyncio
import resource
import socket
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path

import pytest
import zmq
import zmq.asyncio

from penstock.control.bus import CONTROLLER, Bus, Peer
from penstock.control.messages import Ack, AnyMessage, Hello, TaskRequest, Welcome
from penstock.control.runtime_files import Address, Keys
from penstock.control.sockets import connect_as_member, listen_as

LOOPBACK, NONCE = "127.0.0.1", "the nonce of the run"
GARBAGE = (b"", b"\x00" * 64, b"\xff" * 10, b"GET / HTTP/1.1\r\n\r\n", b"\xff\0\0\0\0\0\0\0\1\x7f\3\0NULL" + bytes(48))
"""The last one begins a connection of ZeroMQ without keys."""
CONNECTIONS, AT_ONCE = 2000, 1000


async def handle(peer: str, message: AnyMessage) -> AnyMessage | None:
    return Welcome(server_urls=[]) if isinstance(message, Hello) else None


@pytest.fixture
def few_files() -> Iterator[None]:
    """The limit that most systems give to a process."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (1024, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.usefixtures("few_files")
async def test_a_bus_answers_its_members_among_thousands_of_connections_of_strangers(tmp_path: Path) -> None:
    """Half of them speak no CURVE, and half have keys of another run."""
    ours, theirs = Keys.make(), Keys.make()
    ours.write(tmp_path)
    bus, peer = Bus(str(tmp_path), handle, nonce=NONCE, host=LOOPBACK), Peer(str(tmp_path), "env-0", handle)
    tasks = [asyncio.create_task(bus.run()), asyncio.create_task(peer.run())]
    address = Address.read(tmp_path)
    assert address is not None
    port = int(address.endpoint.rpartition(":")[2])
    for _ in range(0, CONNECTIONS, AT_ONCE):
        with zmq.Context() as context, ExitStack() as opened:
            for number in range(AT_ONCE // 2):
                raw = opened.enter_context(socket.create_connection((LOOPBACK, port), timeout=20))
                with suppress(ConnectionError):
                    raw.sendall(GARBAGE[number % len(GARBAGE)])
                intruder = opened.enter_context(context.socket(zmq.DEALER))
                intruder.setsockopt(zmq.LINGER, 0)
                connect_as_member(intruder, address.endpoint, theirs, server=ours.controller)
                intruder.send(b"let me in")
            await peer.join(Hello(role="env", name="env-0", nonce=NONCE, pid=1), timeout_s=20)
            assert await peer.request(CONTROLLER, TaskRequest(capacity=1), timeout_s=20) == Ack()
    assert set(bus._lives) == {"env-0"} and not any(task.done() for task in tasks)
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    peer.close()
    bus.close()


def test_a_socket_whose_authenticator_is_gone_lets_in_no_one() -> None:
    """By itself ZeroMQ would then accept every key."""
    ours, theirs = Keys.make(), Keys.make()
    with zmq.Context() as context, context.socket(zmq.PULL) as answers, context.socket(zmq.PUSH) as intruder:
        endpoint = listen_as(answers, LOOPBACK, public=ours.member, secret=ours.member_secret)
        intruder.setsockopt(zmq.LINGER, 0)
        with intruder.get_monitor_socket(zmq.EVENT_DISCONNECTED | zmq.EVENT_HANDSHAKE_SUCCEEDED) as decided:
            connect_as_member(intruder, endpoint, theirs, server=ours.member)
            intruder.send(b"a pickle")
            assert decided.poll(10_000)
            was_heard = answers.poll(200)
            intruder.disable_monitor()
    assert not was_heard
