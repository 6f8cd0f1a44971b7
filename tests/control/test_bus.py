"""Real ZeroMQ sockets, within a machine and between machines; messages lost and repeated on purpose."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace

from penstock.control.bus import (
    CONTROLLER,
    Bus,
    Fault,
    Handler,
    Peer,
    PeerLost,
    RequestRefused,
    UnknownPeer,
    Unsendable,
)
from penstock.control.messages import (
    Ack,
    AnyMessage,
    Cancel,
    GrantRequest,
    Heartbeat,
    Hello,
    Refused,
    RewardComputed,
    Welcome,
)
from penstock.control.runtime_files import Keys
from penstock.deadline import Stalled
from penstock.types import EpisodeId, EpisodeSummary, GroupAttempt


class Counting:
    """Counts what it is given, by episode."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.cancelled = asyncio.Event()

    async def handle(self, peer: str, message: AnyMessage) -> AnyMessage | None:
        match message:
            case Hello():
                return Welcome(server_urls=[])
            case GrantRequest(episode=episode):
                if episode.group < 0:
                    raise ValueError("a negative group")
                self.seen.append(episode.group)
            case Heartbeat(progress=progress):
                self.seen.append(progress)
            case Cancel():
                self.cancelled.set()
        return None


@pytest.fixture(params=["ipc", "tcp"])
def directory(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """What decides between them is whether there are keys."""
    if request.param == "tcp":
        Keys.make().write(tmp_path)
    return tmp_path


def bus_in(directory: Path, handler: Handler, *, fault: Fault | None = None) -> Bus:
    return Bus(str(directory), handler, host="127.0.0.1" if Keys.read(directory) else None, fault=fault, nonce="")


HELLO = Hello(role="env", name="env-0", nonce="", pid=0)


def request(number: int) -> GrantRequest:
    return GrantRequest(episode=EpisodeId("train", number, 0, 0), unfinished=False, num_tokens=0)


@asynccontextmanager
async def connected(
    directory: Path, *, controller: Counting, peer: Counting, fault: Fault | None = None
) -> AsyncIterator[tuple[Bus, Peer]]:
    bus = bus_in(directory, controller.handle, fault=fault)
    other = Peer(str(directory), "env-0", peer.handle, fault=fault)
    bus.resend_s = other.resend_s = 0.02
    tasks = [asyncio.create_task(bus.run()), asyncio.create_task(other.run())]
    await other.join(HELLO, timeout_s=5)
    try:
        yield bus, other
    finally:
        await finished(tasks)
        other.close()
        bus.close()


async def test_requests_are_answered_both_ways(directory: Path) -> None:
    controller, worker = Counting(), Counting()
    async with connected(directory, controller=controller, peer=worker) as (bus, peer):
        assert await peer.request(CONTROLLER, request(1), timeout_s=5) == Ack()
        assert await bus.request("env-0", request(2), timeout_s=5) == Ack()
    assert (controller.seen, worker.seen) == ([1], [2])


async def test_lost_and_repeated_frames_change_nothing(directory: Path) -> None:
    rng = random.Random(0)

    def unreliable(frame: bytes) -> list[bytes]:
        return [frame] * rng.choice([0, 0, 1, 2, 3])

    controller, worker = Counting(), Counting()
    async with connected(directory, controller=controller, peer=worker, fault=unreliable) as (_, peer):
        for number in range(40):
            await peer.request(CONTROLLER, request(number), timeout_s=10)
    assert controller.seen == list(range(40))


async def test_a_talkative_peer_does_not_make_others_forgotten(directory: Path) -> None:
    sent: list[bytes] = []

    def keep(frame: bytes) -> list[bytes]:
        sent.append(frame)
        return [frame]

    controller = Counting()
    async with connected(directory, controller=controller, peer=Counting()) as (bus, loud):
        bus.remembered_replies = 2
        quiet = Peer(str(directory), "env-1", Counting().handle, fault=keep)
        receiving = asyncio.create_task(quiet.run())
        await quiet.join(replace(HELLO, name="env-1"), timeout_s=5)
        await quiet.request(CONTROLLER, request(0), timeout_s=5)
        for number in range(1, 9):
            await loud.request(CONTROLLER, request(number), timeout_s=5)
        quiet._transmit(CONTROLLER, sent[1])  # late, and once more
        await quiet.request(CONTROLLER, request(9), timeout_s=5)
        await finished([receiving])
        quiet.close()
    assert controller.seen == list(range(10))


async def test_a_message_that_cannot_be_encoded_fails_alone(directory: Path) -> None:
    controller, worker = Counting(), Counting()
    async with connected(directory, controller=controller, peer=worker) as (_, peer):
        for bad in ("\ud800", 10**30):
            summary = EpisodeSummary(episode=EpisodeId("t", 1, 0, 0), status="failed", info={"said": bad})
            ended = RewardComputed(episodes=[summary], saved=[])
            asked = [peer.request(CONTROLLER, each, timeout_s=5) for each in (request(1), ended, request(2))]
            one, refused, two = await asyncio.gather(*asked, return_exceptions=True)
            assert (one, two) == (Ack(), Ack())
            assert isinstance(refused, Unsendable) and "RewardComputed of env-0 cannot be sent" in str(refused)


async def test_what_is_queued_in_one_turn_leaves_as_one_frame(directory: Path) -> None:
    frames: list[bytes] = []

    def watch(frame: bytes) -> list[bytes]:
        frames.append(frame)
        return [frame]

    controller, worker = Counting(), Counting()
    async with connected(directory, controller=controller, peer=worker, fault=watch) as (_, peer):
        await asyncio.gather(*(peer.request(CONTROLLER, request(n), timeout_s=5) for n in range(50)))
    assert sorted(controller.seen) == list(range(50))
    assert len(frames) < 10


async def test_a_refusal_reaches_the_sender(directory: Path) -> None:
    async def refuse(peer: str, message: AnyMessage) -> AnyMessage:
        if isinstance(message, Hello):
            return Welcome(server_urls=[])
        return Refused(reason="a negative group")

    bus, peer = bus_in(directory, refuse), Peer(str(directory), "env-0", Counting().handle)
    receiving = [asyncio.create_task(bus.run()), asyncio.create_task(peer.run())]
    await peer.join(HELLO, timeout_s=5)
    with pytest.raises(RequestRefused, match="a negative group"):
        await peer.request(CONTROLLER, request(-1), timeout_s=5)
    await finished(receiving)
    peer.close()
    bus.close()


async def test_who_fails_answers_nothing(directory: Path) -> None:
    controller = Counting()
    bus, peer = bus_in(directory, controller.handle), Peer(str(directory), "env-0", Counting().handle)
    receiving = [asyncio.create_task(bus.run()), asyncio.create_task(peer.run())]
    await peer.join(HELLO, timeout_s=5)
    with pytest.raises(Stalled):
        await peer.request(CONTROLLER, request(-1), timeout_s=0.5)
    assert receiving[0].done(), "a failing handler ends the controller's loop"
    assert controller.seen == []
    receiving[1].cancel()
    await asyncio.gather(*receiving, return_exceptions=True)
    peer.close()
    bus.close()


async def test_silence_is_reported_with_names(directory: Path) -> None:
    peer = Peer(str(directory), "env-0", Counting().handle)
    receiving = asyncio.create_task(peer.run())
    with pytest.raises(Stalled, match=r"env-0 waited 0.05 s for the answer to GrantRequest, held by controller"):
        await peer.request(CONTROLLER, request(1), timeout_s=0.05)
    receiving.cancel()
    await asyncio.gather(receiving, return_exceptions=True)
    peer.close()


async def test_broadcasts_reach_everyone(directory: Path) -> None:
    controller, worker = Counting(), Counting()
    async with connected(directory, controller=controller, peer=worker) as (bus, peer):
        await peer.request(CONTROLLER, request(1), timeout_s=5)
        async with asyncio.timeout(5):
            while not worker.cancelled.is_set():  # a subscription takes a moment to reach the sender
                bus.broadcast(Cancel(attempts=[GroupAttempt(1, 0)]))
                await asyncio.sleep(0.01)
        assert not controller.cancelled.is_set(), "a broadcast does not come back"


async def test_a_restarted_peer_is_not_taken_for_its_past(directory: Path) -> None:
    controller = Counting()
    bus = bus_in(directory, controller.handle)
    receiving = asyncio.create_task(bus.run())
    for _ in range(2):
        peer = Peer(str(directory), "env-0", Counting().handle)
        listening = asyncio.create_task(peer.run())
        await peer.join(HELLO, timeout_s=5)
        await peer.request(CONTROLLER, request(5), timeout_s=5)
        listening.cancel()
        await asyncio.gather(listening, return_exceptions=True)
        peer.close()
    assert controller.seen == [5, 5]
    receiving.cancel()
    await asyncio.gather(receiving, return_exceptions=True)
    bus.close()


async def test_a_new_controller_asks_who_somebody_is(directory: Path) -> None:
    """Once, however often the peer is heard; then what it had asked is answered."""
    known: set[str] = set()
    seen: list[str] = []
    introduced: list[str] = []

    async def handle(peer: str, message: AnyMessage) -> AnyMessage | None:
        if isinstance(message, Hello):
            known.add(peer)
            return Welcome(server_urls=[])
        if peer not in known:
            raise UnknownPeer(peer)
        seen.append(type(message).__name__)
        return None

    async def introduce(_: str, message: AnyMessage) -> AnyMessage | None:
        introduced.append(type(message).__name__)
        await peer.join(HELLO, timeout_s=5)
        return None

    bus, peer = bus_in(directory, handle), Peer(str(directory), "env-0", introduce)
    bus.resend_s = peer.resend_s = 0.02
    receiving = [asyncio.create_task(bus.run()), asyncio.create_task(peer.run())]
    await peer.join(HELLO, timeout_s=5)
    known.clear()
    for number in range(5):
        peer.notify(CONTROLLER, Heartbeat(progress=number, cpu_s=0.0))
    assert await peer.request(CONTROLLER, request(1), timeout_s=5) == Ack()
    assert (known, seen, introduced) == ({"env-0"}, ["GrantRequest"], ["WhoAreYou"])
    await finished(receiving)
    peer.close()
    bus.close()


async def test_whoever_waits_for_a_dead_peer_hears_of_it(directory: Path) -> None:
    bus = bus_in(directory, Counting().handle)
    receiving = [asyncio.create_task(bus.run())]
    waiting = asyncio.create_task(bus.request("env-0", request(1), timeout_s=5))
    await asyncio.sleep(0)
    bus.forget("env-0")
    with pytest.raises(PeerLost, match="env-0 died before it answered"):
        await waiting
    await finished(receiving)
    bus.close()


async def test_what_was_meant_for_a_predecessor_is_not_heard(directory: Path) -> None:
    """It waits in the socket of a peer that is not there, and arrives with the next one of that name."""
    controller, worker = Counting(), Counting()
    async with connected(directory, controller=controller, peer=worker) as (bus, _):
        newcomer = Counting()
        other = Peer(str(directory), "env-0", newcomer.handle)
        receiving = [asyncio.create_task(other.run())]
        stale = asyncio.create_task(bus.request("env-0", request(7), timeout_s=5))
        await asyncio.sleep(0.1)
        bus.forget("env-0")
        await asyncio.gather(stale, return_exceptions=True)
        await other.join(HELLO, timeout_s=5)
        assert await bus.request("env-0", request(8), timeout_s=5) == Ack()
        assert newcomer.seen == [8]
        await finished(receiving)
        other.close()


async def finished(tasks: list[asyncio.Task[None]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
