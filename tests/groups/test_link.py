"""Whoever does not know the key is told nothing, and whoever is not there is not waited for."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress

import pytest

from penstock.groups import link
from penstock.groups.link import LIFE_BYTES, Forged, Seals, Stranger, connect, exactly, welcome
from penstock.groups.wire import Wire

KEY = b"of the run"
LIFE = bytes(range(LIFE_BYTES))


class Keeper(threading.Thread):
    """Answers one connection with `act`."""

    def __init__(self, act: Callable[[socket.socket], object]) -> None:
        super().__init__(daemon=True)
        self._listener, self._act = socket.create_server(("127.0.0.1", 0)), act
        self.address: tuple[str, int] = self._listener.getsockname()
        self.error: OSError | None = None
        self.start()

    def run(self) -> None:
        with self._listener:
            accepted, _ = self._listener.accept()
        with accepted:
            try:
                self._act(accepted)
            except OSError as error:
                self.error = error


@pytest.fixture
def keeping() -> Iterator[Callable[[Callable[[socket.socket], object]], Keeper]]:
    keepers: list[Keeper] = []

    def keep(act: Callable[[socket.socket], object]) -> Keeper:
        keepers.append(Keeper(act))
        return keepers[-1]

    yield keep
    for keeper in keepers:
        keeper.join(20.0)


def keeps(key: bytes) -> Callable[[socket.socket], None]:
    """Says something once it knows who is there."""

    def act(accepted: socket.socket) -> None:
        life, session = welcome(accepted, key)
        accepted.sendall(life + session)

    return act


def test_both_know_the_key(keeping: Callable[..., Keeper]) -> None:
    keeper = keeping(keeps(KEY))
    found = connect(keeper.address, KEY, LIFE)
    with found.socket as connected:
        assert exactly(connected, LIFE_BYTES) == LIFE
        assert exactly(connected, len(found.session)) == found.session
        assert connected.gettimeout() is None and connected.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE)
    assert keeper.error is None


def test_neither_trusts_a_stranger(keeping: Callable[..., Keeper]) -> None:
    keeper = keeping(keeps(b"of another run"))
    with pytest.raises(Stranger, match=r"127\.0\.0\.1:\d+ does not know the key of this run"):
        connect(keeper.address, KEY, LIFE)
    keeper.join(20.0)
    assert isinstance(keeper.error, Stranger)


def echo(accepted: socket.socket) -> None:
    while said := accepted.recv(1024):
        accepted.sendall(said)


@pytest.mark.parametrize("act", [echo, socket.socket.close], ids=["echoes", "closes"])
def test_who_only_repeats_or_says_nothing_is_a_stranger(
    keeping: Callable[..., Keeper], act: Callable[[socket.socket], object]
) -> None:
    with pytest.raises(OSError, match=r"does not know the key|reset by peer"):
        connect(keeping(act).address, KEY, LIFE)


def test_who_is_silent_is_not_waited_for(keeping: Callable[..., Keeper], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "PROVE_S", 0.2)
    with pytest.raises(TimeoutError):
        connect(keeping(lambda accepted: accepted.recv(1 << 20, socket.MSG_WAITALL)).address, KEY, LIFE)


def test_who_is_slow_is_not_waited_for(keeping: Callable[..., Keeper], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "PROVE_S", 0.5)
    keeper = keeping(keeps(KEY))
    with socket.create_connection(keeper.address) as slow:
        while keeper.is_alive():
            with suppress(OSError):
                slow.sendall(b"x")
            time.sleep(0.1)
    assert isinstance(keeper.error, TimeoutError | Stranger)


def test_a_proof_cannot_be_passed_on(keeping: Callable[..., Keeper]) -> None:
    """By somebody at another address, whom a driver takes for its keeper."""
    keeper = keeping(keeps(KEY))

    def relay(driver: socket.socket) -> None:
        with socket.create_connection(keeper.address) as beyond:
            for one, other, length in (
                (driver, beyond, 48),
                (beyond, driver, 32),
                (driver, beyond, 32),
                (beyond, driver, 32),
            ):
                with suppress(EOFError, OSError):
                    other.sendall(exactly(one, length))

    with pytest.raises(OSError, match=r"does not know the key|reset by peer"):
        connect(keeping(relay).address, KEY, LIFE)
    keeper.join(20.0)
    assert isinstance(keeper.error, Stranger)


@pytest.fixture
def wires() -> Iterator[tuple[Wire, Wire]]:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        yield Wire(ours, Seals(b"session", "driver")), Wire(theirs, Seals(b"session", "keeper"))


def test_sealed_messages_arrive_both_ways(wires: tuple[Wire, Wire]) -> None:
    driver, keeper = wires
    for number in range(3):
        driver.send(number, [b"pickle", bytearray(10)])
        assert keeper.receive() == (number, [b"pickle", bytearray(10)])
        keeper.send(number, [b"answer"])
        assert driver.receive() == (number, [b"answer"])


def test_what_the_other_end_did_not_send_is_refused(wires: tuple[Wire, Wire]) -> None:
    """Changed, repeated, given back, or of somebody who knows no session."""
    driver, keeper = wires
    driver.send(0, [b"pickle"])
    whole = keeper.link.recv(1 << 16)
    driver.link.sendall(whole.replace(b"pickle", b"Pickle"))
    with pytest.raises(Forged):
        keeper.receive()
    driver.link.sendall(whole)
    with pytest.raises(Forged):
        keeper.receive()
    keeper.link.sendall(whole)
    with pytest.raises(Forged):
        driver.receive()
    Wire(driver.link, Seals(b"another", "driver")).send(2, [b"pickle"])
    with pytest.raises(Forged):
        keeper.receive()
