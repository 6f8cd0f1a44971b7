"""The control bus over TCP: who is let in, a controller that moves, and a peer that was cut off."""

from __future__ import annotations

import asyncio
import shutil
import stat
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest
import zmq
import zmq.asyncio
from test_bus import HELLO, Counting, finished, request

from penstock.control.bus import CONTROLLER, Bus, Peer, _encoder
from penstock.control.messages import Ack, Welcome
from penstock.control.runtime_files import Address, Keys
from penstock.deadline import Stalled
from penstock.runtime.http_server import CannotListen

LOOPBACK = "127.0.0.1"
REFUSED = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
REFUSED |= zmq.EVENT_DISCONNECTED


@asynccontextmanager
async def listening(directory: Path, controller: Counting) -> AsyncIterator[Bus]:
    bus = Bus(str(directory), controller.handle, host=LOOPBACK, nonce="")
    receiving = asyncio.create_task(bus.run())
    try:
        yield bus
    finally:
        await finished([receiving])
        bus.close()


@asynccontextmanager
async def joined(directory: Path, worker: Counting) -> AsyncIterator[Peer]:
    peer = Peer(str(directory), "env-0", worker.handle)
    peer.resend_s = peer.look_s = 0.02
    receiving = asyncio.create_task(peer.run())
    await peer.join(HELLO, timeout_s=10)
    try:
        yield peer
    finally:
        await finished([receiving])
        peer.close()


def node_of(controllers: Path, name: str = "node") -> Path:
    """The runtime directory of another machine, as its host fills it."""
    node = controllers.parent / f"{controllers.name}-{name}"
    node.mkdir()
    known = Keys.read(controllers)
    assert known is not None
    known.of_members().write(node)
    return node


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """The runtime directory of the controller."""
    directory = tmp_path / "run"
    directory.mkdir()
    Keys.make().write(directory)
    return directory


def test_only_the_owner_reads_the_keys_and_only_the_controller_has_its_secret(run: Path) -> None:
    node = node_of(run)
    for directory, has_secret in ((run, True), (node, False)):
        found = Keys.read(directory)
        assert found is not None
        assert bool(found.controller_secret) is has_secret
        assert stat.S_IMODE((directory / Keys.FILE).stat().st_mode) == 0o600


@pytest.mark.parametrize("directory", ["nothing", "a member's"])
async def test_a_controller_without_its_keys_does_not_listen(run: Path, tmp_path: Path, directory: str) -> None:
    where = tmp_path if directory == "nothing" else node_of(run)
    with pytest.raises(CannotListen, match=f"listen on {LOOPBACK}: {where} has no keys"):
        Bus(str(where), Counting().handle, host=LOOPBACK, nonce="")


async def test_an_address_of_another_machine_is_refused(run: Path) -> None:
    with pytest.raises(CannotListen, match=r"cannot listen on 192\.0\.2\.1: Cannot assign"):
        Bus(str(run), Counting().handle, host="192.0.2.1", nonce="")


@pytest.mark.parametrize("stranger", ["no key", "a key of his own", "the wrong idea of the controller"])
async def test_a_stranger_is_refused_and_disturbs_nobody(run: Path, stranger: str) -> None:
    controller, worker = Counting(), Counting()
    async with listening(run, controller) as bus, joined(run, worker) as peer:
        ours, address, his = Keys.read(run), Address.read(run), Keys.make()
        assert ours is not None
        assert address is not None
        with zmq.asyncio.Context() as context, context.socket(zmq.DEALER) as intruder:
            intruder.setsockopt(zmq.LINGER, 0)
            intruder.setsockopt(zmq.IDENTITY, b"env-0/0")
            if stranger != "no key":
                is_member = stranger == "the wrong idea of the controller"
                intruder.setsockopt(zmq.CURVE_PUBLICKEY, (ours if is_member else his).member.encode())
                intruder.setsockopt(zmq.CURVE_SECRETKEY, (ours if is_member else his).member_secret.encode())
                intruder.setsockopt(zmq.CURVE_SERVERKEY, (his if is_member else ours).controller.encode())
            with intruder.get_monitor_socket(REFUSED) as refused:
                intruder.connect(address.endpoint)
                await intruder.send(_encoder.encode([]))
                async with asyncio.timeout(10):
                    await refused.recv_multipart()
                for number in range(20):
                    assert await peer.request(CONTROLLER, request(number), timeout_s=5) == Ack()
                assert await bus.request("env-0", request(1), timeout_s=5) == Ack()
                intruder.disable_monitor()
    assert (controller.seen, worker.seen) == (list(range(20)), [1])


async def test_somebody_else_in_the_controllers_place_is_told_nothing(run: Path, tmp_path: Path) -> None:
    """Who listens at its address, without its secret, gets no message."""
    node = node_of(run)
    other = tmp_path / "other"
    other.mkdir()
    Keys.make().write(other)
    impostor = Counting()
    async with listening(other, impostor):
        shutil.copy(other / Address.FILE, node / Address.FILE)
        peer = Peer(str(node), "env-0", Counting().handle)
        receiving = asyncio.create_task(peer.run())
        with pytest.raises(Stalled):
            await peer.join(HELLO, timeout_s=0.5)
        await finished([receiving])
        peer.close()
    assert impostor.seen == []


async def test_a_controller_that_comes_back_at_another_port_is_found(run: Path) -> None:
    """The peer follows the address and introduces itself again."""
    node, first, second = node_of(run), Counting(), Counting()
    async with listening(run, first):
        shutil.copy(run / Address.FILE, node / Address.FILE)
        before = Address.read(run)
        async with joined(node, Counting()) as peer:
            await peer.request(CONTROLLER, request(1), timeout_s=5)
            reserved = Bus(str(run), second.handle, host=LOOPBACK, nonce="")  # at another port: the first one is taken
            asking = asyncio.create_task(peer.request(CONTROLLER, request(2), timeout_s=10))
            await asking
            shutil.copy(run / Address.FILE, node / Address.FILE)
            receiving = asyncio.create_task(reserved.run())
            async with asyncio.timeout(10):
                while not second.seen:
                    await peer.join(HELLO, timeout_s=10)
                    with suppress(Stalled):  # it introduced itself to the first controller just before it moved
                        await peer.request(CONTROLLER, request(3), timeout_s=0.5)
            assert Address.read(run) != before
            await finished([receiving])
            reserved.close()
    assert set(first.seen) >= {1, 2}
    assert set(second.seen) == {3}


async def test_a_peer_that_is_there_first_waits_for_the_controller(run: Path) -> None:
    node, controller = node_of(run), Counting()
    peer = Peer(str(node), "env-0", Counting().handle)
    peer.resend_s = peer.look_s = 0.02
    receiving = asyncio.create_task(peer.run())
    joining = asyncio.create_task(peer.join(HELLO, timeout_s=10))
    async with listening(run, controller):
        assert not joining.done()
        shutil.copy(run / Address.FILE, node / Address.FILE)
        assert isinstance(await joining, Welcome)
        await finished([receiving])
        peer.close()


async def test_who_was_cut_off_and_replaced_is_not_heard(run: Path) -> None:
    """Both live, both have the name; the one that introduced himself last keeps it."""
    controller, before, after = Counting(), Counting(), Counting()
    async with listening(run, controller) as bus, joined(run, before) as replaced, joined(run, after) as successor:
        with pytest.raises(Stalled):
            await replaced.request(CONTROLLER, request(1), timeout_s=0.5)
        assert await successor.request(CONTROLLER, request(2), timeout_s=5) == Ack()
        assert await bus.request("env-0", request(3), timeout_s=5) == Ack()
    assert (controller.seen, before.seen, after.seen) == ([2], [], [3])
