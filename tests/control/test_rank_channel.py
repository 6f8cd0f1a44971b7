"""The channel to ranks, within a machine and as between machines: two threads stand in for two processes."""

from __future__ import annotations

import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from pathlib import Path

import numpy as np
import pytest
import zmq

from penstock.control.rank_channel import RankChannel, RankChannels, TrainerAddress, connect_to_trainer
from penstock.control.runtime_files import Keys
from penstock.control.sockets import connect_as_member
from penstock.deadline import Stalled
from penstock.groups.wire import pack, unpack
from penstock.ticks import heard_by

WAIT_S = 30.0
LOOPBACK = "127.0.0.1"
NAMES = ["rank-0", "rank-1"]


@pytest.fixture(params=[None, LOOPBACK], ids=["one machine", "several machines"])
def host(request: pytest.FixtureRequest, tmp_path: Path) -> str | None:
    if request.param is not None:
        Keys.make().write(tmp_path)
    return request.param


class Echo(threading.Thread):
    """A rank that answers each message with its own name and the message."""

    def __init__(self, directory: Path, name: str) -> None:
        super().__init__(name=name, daemon=True)
        self._directory = directory
        self.start()

    def run(self) -> None:
        with closing(connect_to_trainer(self._directory, self.name)) as channel:
            try:
                while True:
                    channel.send([self.name.encode(), *channel.receive()])
            except (EOFError, ConnectionError):
                return


@pytest.fixture
def echoes(tmp_path: Path) -> Iterator[list[Echo]]:
    """They begin before the trainer listens."""
    ranks = [Echo(tmp_path, name) for name in NAMES]
    yield ranks
    for rank in ranks:
        rank.join(WAIT_S)
        assert not rank.is_alive(), "ranks end with their trainer"


def test_ranks_find_the_trainer_and_each_answers_for_itself(
    tmp_path: Path, host: str | None, echoes: list[Echo]
) -> None:
    with closing(RankChannels(tmp_path, NAMES, host=host)) as channels:
        channels.await_ranks(waiter="trainer-0", seconds=WAIT_S)
        large = {"large": np.arange(100_000)}
        for channel in channels.channels.values():
            channel.send(pack(large))
            channel.send([b"second"])
        for name, channel in channels.channels.items():
            said, *frames = channel.receive()
            assert bytes(said) == name.encode()
            assert np.array_equal(unpack(frames)["large"], large["large"])
            assert [bytes(frame) for frame in channel.receive()] == [name.encode(), b"second"]


def test_a_rank_that_works_makes_the_trainer_tick(tmp_path: Path, host: str | None) -> None:
    class Works(Echo):
        def run(self) -> None:
            with closing(connect_to_trainer(self._directory, self.name)) as channel, suppress(EOFError):
                while True:
                    request = channel.receive()
                    for _ in range(100):  # within a second: one sign of them
                        channel.tick()
                    channel.send(request)

    Works(tmp_path, "rank-0")
    ticks: list[None] = []
    with closing(RankChannels(tmp_path, ["rank-0"], host=host)) as channels, heard_by(lambda: ticks.append(None)):
        channels.await_ranks(waiter="trainer-0", seconds=WAIT_S)
        channel = channels.channels["rank-0"]
        channel.send([b"work"])
        assert [bytes(frame) for frame in channel.receive()] == [b"work"] and len(ticks) == 1


class Cable(threading.Thread):
    """A way to `port` that is cut, once, after `num_bytes` in one direction. It can be used again afterwards."""

    def __init__(self, port: int, num_bytes: int) -> None:
        super().__init__(daemon=True)
        self._listener = socket.create_server((LOOPBACK, 0))
        self._port, self._num_left = port, num_bytes
        self.endpoint = f"tcp://{LOOPBACK}:{self._listener.getsockname()[1]}"
        self.start()

    def run(self) -> None:
        while True:
            near, _ = self._listener.accept()
            far = socket.create_connection((LOOPBACK, self._port))
            for way in ((near, far), (far, near)):
                threading.Thread(target=self._carry, args=way, daemon=True).start()

    def _carry(self, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            num_left = self._num_left
            while data := source.recv(2**16):
                num_left -= len(data)
                if num_left < 0:
                    self._num_left = sys.maxsize
                    break
                target.sendall(data)
        for end in (source, target):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def test_a_call_that_is_lost_on_its_way_ends_the_channel(tmp_path: Path) -> None:
    """The connection works again at once. Even so, the trainer must not wait for an answer to the lost call."""
    Keys.make().write(tmp_path)
    with closing(RankChannels(tmp_path, NAMES[:1], host=LOOPBACK)) as channels:
        endpoints = TrainerAddress.read(tmp_path).endpoints[NAMES[0]]
        ways = [Cable(int(endpoint.rpartition(":")[2]), 1_000_000).endpoint for endpoint in endpoints]
        TrainerAddress(endpoints={NAMES[0]: (ways[0], ways[1])}).write(tmp_path)
        rank = Echo(tmp_path, NAMES[0])
        channels.await_ranks(waiter="trainer-0", seconds=WAIT_S)
        (channel,) = channels.channels.values()
        channel.send([b"first"])
        assert bytes(channel.receive()[1]) == b"first"
        channel.send([bytes(10_000_000)])
        with pytest.raises(EOFError):
            channel.receive()
        channel.ended()
        rank.join(WAIT_S)
        assert not rank.is_alive()


def test_a_message_may_change_once_it_is_sent(tmp_path: Path, host: str | None, echoes: list[Echo]) -> None:
    with closing(RankChannels(tmp_path, NAMES, host=host)) as channels:
        channels.await_ranks(waiter="trainer-0", seconds=WAIT_S)
        content = bytearray(1_000_000)
        for channel in channels.channels.values():
            channel.send([content])
        content[:] = b"x" * len(content)
        for channel in channels.channels.values():
            assert not any(channel.receive()[1])


def test_ranks_follow_a_trainer_that_is_started_again(tmp_path: Path, host: str | None) -> None:
    RankChannels(tmp_path, NAMES, host=host).close()
    ranks = [Echo(tmp_path, name) for name in NAMES]
    with closing(RankChannels(tmp_path, NAMES, host=host)) as channels:
        channels.await_ranks(waiter="trainer-0", seconds=WAIT_S)
        for channel in channels.channels.values():
            channel.send([b"hello"])
            assert bytes(channel.receive()[1]) == b"hello"
    for rank in ranks:
        rank.join(WAIT_S)
        assert not rank.is_alive()


def test_the_trainer_learns_that_a_rank_has_ended(tmp_path: Path, host: str | None) -> None:
    rank: list[RankChannel] = []
    joining = threading.Thread(target=lambda: rank.append(connect_to_trainer(tmp_path, "rank-0")))
    joining.start()
    with closing(RankChannels(tmp_path, ["rank-0"], host=host)) as channels:
        channels.await_ranks(waiter="trainer-0", seconds=WAIT_S)
        joining.join(WAIT_S)
        rank[0].close()
        with pytest.raises(EOFError):
            channels.channels["rank-0"].receive()
        with pytest.raises(ConnectionError):
            channels.channels["rank-0"].send([b""])


def test_ranks_that_do_not_come_are_named(tmp_path: Path, host: str | None) -> None:
    with (
        closing(RankChannels(tmp_path, NAMES, host=host)) as channels,
        pytest.raises(Stalled, match="trainer-0 waited 0 s for its ranks, held by rank-0, rank-1"),
    ):
        channels.await_ranks(waiter="trainer-0", seconds=0)


@pytest.mark.parametrize("knows_the_server", [False, True])
def test_a_process_of_another_run_is_no_rank(tmp_path: Path, *, knows_the_server: bool) -> None:
    ours, theirs = Keys.make(), Keys.make()
    ours.write(tmp_path)
    with closing(RankChannels(tmp_path, ["rank-0"], host=LOOPBACK)) as channels, zmq.Context() as context:
        address = TrainerAddress.read(tmp_path)
        assert address is not None
        with context.socket(zmq.PULL) as calls, context.socket(zmq.PUSH) as answers:
            for socket, endpoint in zip((calls, answers), address.endpoints["rank-0"], strict=True):
                socket.setsockopt(zmq.LINGER, 0)
                server = ours.member if knows_the_server else theirs.member
                connect_as_member(socket, endpoint, theirs, server=server)
            answers.send(b"it was me")
            assert not channels.channels["rank-0"].incoming.poll(1000)
            assert not channels.channels["rank-0"].is_connected
