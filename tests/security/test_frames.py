"""Malformed frames at real sockets and pipes: they are counted and dropped, and the good peer is answered."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import msgspec
import pytest
import zmq
import zmq.asyncio
from frame_mutations import bad_messages, identities
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.control import bus as buses
from penstock.control.bus import CONTROLLER, Bus, Peer, ProtocolViolation, RequestRefused
from penstock.control.incoming import Envelope
from penstock.control.messages import Ack, AnyMessage, Heartbeat, Hello, Refused, TaskRequest, Welcome, WhoAreYou
from penstock.runtime import frames
from penstock.runtime.frames import MalformedMessage
from penstock.samples import Sample
from penstock.store.payload_files import PayloadError, PayloadReader, PayloadWriter, check_ref, decode, encode, is_whole
from penstock.types import PayloadRef

NONCE = "the nonce of the run"
HELLO = Hello(role="env", name="env-0", nonce=NONCE, pid=1)
LIFE = b"0123456789abcdef"


async def handle(peer: str, message: AnyMessage) -> AnyMessage | None:
    if isinstance(message, TaskRequest) and message.capacity < 0:
        raise ProtocolViolation("a negative capacity")
    return Welcome(server_urls=[]) if isinstance(message, Hello) else None


@asynccontextmanager
async def running(directory: Path) -> AsyncIterator[tuple[Bus, Peer, Counter[str]]]:
    """A bus with one good peer, and the counts of dropped frames."""
    dropped: Counter[str] = Counter()
    bus = Bus(str(directory), handle, nonce=NONCE, dropped=dropped)
    peer = Peer(str(directory), "env-0", handle)
    tasks = [asyncio.create_task(bus.run()), asyncio.create_task(peer.run())]
    try:
        await peer.join(HELLO, timeout_s=20)
        yield bus, peer, dropped
        assert not any(task.done() for task in tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        peer.close()
        bus.close()


@asynccontextmanager
async def dealer(directory: Path, identity: bytes) -> AsyncIterator[zmq.asyncio.Socket]:
    """A raw socket, as any process of this user can open one."""
    context = zmq.asyncio.Context()
    raw = context.socket(zmq.DEALER)
    raw.setsockopt(zmq.IDENTITY, identity)
    raw.connect(f"ipc://{directory}/control.sock")
    try:
        yield raw
    finally:
        raw.close(linger=5000)
        context.term()


async def until_dropped(dropped: Counter[str], number: int) -> None:
    async with asyncio.timeout(30):
        while dropped.total() < number:  # noqa: ASYNC110 - it is a real bus
            await asyncio.sleep(0.005)
    assert dropped.total() == number


def frame(message: AnyMessage, *, id_: int = 1) -> bytes:
    return msgspec.msgpack.encode([Envelope("request", id_, message)])


async def test_mutated_frames_are_dropped_and_a_good_peer_is_answered(tmp_path: Path) -> None:
    async with running(tmp_path) as (bus, peer, dropped):
        names, messages = identities(1), list(bad_messages(2000, 1))
        for start in range(0, len(messages), 25):
            async with dealer(tmp_path, next(names)) as raw:
                for parts in messages[start : start + 25]:
                    await raw.send_multipart(parts)
            assert await peer.request(CONTROLLER, TaskRequest(capacity=1), timeout_s=20) == Ack()
        assert (
            dropped["content"] > 100
            and dropped["identity"] > 100
            and set(dropped) <= {"content", "identity", "parts", "replaced", "greeting"}
        )
        assert set(bus._lives) == {"env-0"} and set(bus._answered) == {"env-0"}, "strangers leave nothing behind"


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        ([b"\xc1"], "content"),
        ([b"\x91" * 100_000], "content"),
        ([], "parts"),
        ([frame(Ack()), frame(Ack())], "parts"),
        ([frame(Heartbeat(progress=1, cpu_s=0.0))], "replaced"),
        (
            [frame(msgspec.structs.replace(HELLO, nonce="a guess"))],
            "greeting",
        ),
    ],
)
async def test_each_rule_has_its_count(tmp_path: Path, parts: list[bytes], reason: str) -> None:
    async with running(tmp_path) as (_, peer, dropped), dealer(tmp_path, b"env-0/" + LIFE) as raw:
        for _ in range(3):
            await raw.send_multipart(parts or [b"", b""])
        await until_dropped(dropped, 3)
        assert dropped == {reason: 3}
        assert await peer.request(CONTROLLER, TaskRequest(capacity=1), timeout_s=20) == Ack()


async def test_no_message_is_heard_before_a_greeting(tmp_path: Path) -> None:
    async with running(tmp_path) as (bus, _, dropped), dealer(tmp_path, b"env-1/" + LIFE) as raw:
        await raw.send(frame(TaskRequest(capacity=1)))
        (answer,) = msgspec.msgpack.decode(await asyncio.wait_for(raw.recv(), 20), type=list[Envelope])
        assert answer.body == WhoAreYou() and "env-1" not in bus._lives and not dropped


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"nonce": "a guess"}, "belongs to another run"),
        ({"version": "0.0.1"}, "env-1 runs penstock 0.0.1, but the run has penstock"),
        ({"version": ""}, "of an older version"),
        ({"name": "trainer-0"}, "introduced itself as trainer-0"),
    ],
)
async def test_a_process_that_does_not_belong_is_told_so(tmp_path: Path, change: dict[str, str], expected: str) -> None:
    hello = msgspec.structs.replace(HELLO, **{"name": "env-1", "version": buses.VERSION, **change})
    async with running(tmp_path) as (bus, _, dropped), dealer(tmp_path, b"env-1/" + LIFE) as raw:
        await raw.send(frame(hello))
        (answer,) = msgspec.msgpack.decode(await asyncio.wait_for(raw.recv(), 20), type=list[Envelope])
        assert isinstance(answer.body, Refused) and expected in answer.body.reason
        assert dropped == {"greeting": 1} and "env-1" not in bus._lives


async def test_a_message_against_the_protocol_is_refused_and_the_bus_goes_on(tmp_path: Path) -> None:
    async with running(tmp_path) as (_, peer, dropped):
        with pytest.raises(RequestRefused, match="breaks the protocol: a negative capacity"):
            await peer.request(CONTROLLER, TaskRequest(capacity=-1), timeout_s=20)
        assert dropped == {"violation": 1}
        assert await peer.request(CONTROLLER, TaskRequest(capacity=1), timeout_s=20) == Ack()


@pytest.mark.parametrize(
    "sent",
    [
        struct.pack(">I", 0),
        struct.pack(">I", 2**32 - 1),
        struct.pack(">IQ", 1, 2**64 - 1),
        struct.pack(">IQ", 1, 1001),
        struct.pack(">IQQ", 2, 600, 600),
    ],
)
def test_a_pipe_refuses_messages_that_are_too_large(sent: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(sent)
        with pytest.raises(MalformedMessage):
            frames.receive(ours, max_bytes=1000)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=200))
def test_a_pipe_survives_any_bytes(sent: bytes) -> None:
    ours, theirs = socket.socketpair()
    with ours:
        with theirs:
            theirs.sendall(sent)
        with suppress(EOFError, MalformedMessage):
            assert sum(map(len, frames.receive(ours, max_bytes=1000))) <= 1000


SAMPLE = Sample(
    group=1, episode=0, reward=1.0, truncated=False, token_ids=[1, 2, 3], loss_mask=[0, 1, 1],
    logprobs=[0.0, -1.0, -1.0], versions=[-1, 0, 0],
)  # fmt: skip


@pytest.mark.parametrize(
    "name", ["/etc/passwd", "../secret-00000.seg", "a/b-00000.seg", "..", "", "env-0-00000.seg\n", "%2e%2e-00000.seg"]
)
def test_no_reference_leaves_the_pool(tmp_path: Path, name: str) -> None:
    (pool := tmp_path / "pool").mkdir()
    ref = PayloadRef(file=name, offset=0, length=8, checksum=0)
    with pytest.raises(PayloadError, match="is not the name of a pool file"):
        PayloadReader(pool).read(ref)
    assert not is_whole(pool, ref)


@pytest.mark.parametrize(("offset", "length"), [(-1, 8), (0, -1), (0, 0), (0, 2**40), (2**62, 8)])
def test_no_reference_leaves_its_file(offset: int, length: int) -> None:
    with pytest.raises(PayloadError, match="has no record of"):
        check_ref(PayloadRef(file="env-0-00000.seg", offset=offset, length=length, checksum=0))


def test_a_worker_names_only_its_own_files() -> None:
    for name in ("env-0-00000.seg", "env-0-0123abcd-00000.seg"):
        check_ref(PayloadRef(file=name, offset=0, length=1, checksum=0), worker="env-0")
    for name in ("env-1-00000.seg", "env-0-x-00000.seg", "env-00-00000.seg"):
        with pytest.raises(PayloadError, match="does not belong to env-0"):
            check_ref(PayloadRef(file=name, offset=0, length=1, checksum=0), worker="env-0")


def test_a_link_in_the_pool_is_not_followed(tmp_path: Path) -> None:
    writer = PayloadWriter(tmp_path, "env-0")
    ref = writer.append([SAMPLE])
    writer.close()
    (tmp_path / "env-0-00000.seg").rename(tmp_path / "elsewhere")
    (tmp_path / "env-0-00000.seg").symlink_to(tmp_path / "elsewhere")
    with pytest.raises(PayloadError, match="cannot be read"):
        PayloadReader(tmp_path).read(ref)


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=300), st.integers(0, 200))
def test_a_record_of_any_bytes_is_read_or_refused(sent: bytes, place: int) -> None:
    record = bytearray(encode([SAMPLE], bytearray()))
    record[place : place + len(sent)] = sent
    with suppress(PayloadError):
        decode(memoryview(bytes(record)))
