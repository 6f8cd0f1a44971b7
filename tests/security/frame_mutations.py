"""Frames of the control bus that no process should accept, made from real ones; the same ones for the same seed."""

from __future__ import annotations

import random
from collections.abc import Iterator

import msgspec

from penstock.control.incoming import Envelope
from penstock.control.messages import (
    Ack,
    AnyMessage,
    Cancel,
    DataGenerated,
    EpisodesGenerated,
    Goodbye,
    GrantRequest,
    Heartbeat,
    Hello,
    Refused,
    RewardComputed,
    TaskRequest,
    Welcome,
    WhoAreYou,
)
from penstock.types import EpisodeId, EpisodeSummary, GroupAttempt, PayloadRef

EPISODE = EpisodeId("train", 1, 0, 0)
REF = PayloadRef(file="env-0-00000.seg", offset=0, length=64, checksum=7)
SUMMARY = EpisodeSummary(episode=EPISODE, status="completed")
MESSAGES: list[AnyMessage] = [
    Ack(),
    Refused(reason="no"),
    Hello(role="env", name="env-0", nonce="a guess", pid=1),
    Goodbye(),
    Welcome(server_urls=["http://127.0.0.1:1"]),
    WhoAreYou(),
    Heartbeat(progress=1, cpu_s=0.1, counters={"tokens": 1.0}),
    TaskRequest(capacity=8),
    Cancel(attempts=[GroupAttempt(1, 0)]),
    GrantRequest(episode=EPISODE, unfinished=True, num_tokens=3, saved=REF),
    EpisodesGenerated(episodes=[EPISODE], num_tokens=[3]),
    RewardComputed(episodes=[SUMMARY], saved=[REF]),
    DataGenerated(group=1, ref=REF, episodes=[SUMMARY]),
]
NAMES = (b"env-0", b"trainer-0", b"rollout-0", b"controller", b"stranger", b"../env-0", b"", b"\xff\xfe", b"x" * 200)


def identities(seed: int) -> Iterator[bytes]:
    """Yield identities forever: names of the run with a guessed life, and broken ones. None begins with a zero byte,
    which ZeroMQ keeps for itself, and none is longer than it allows."""
    draw = random.Random(seed)
    while True:
        name, life = draw.choice(NAMES), draw.randbytes(8).hex().encode()
        made = draw.choice([name + b"/" + life, name, name + b"/", name + b"/" + life.upper(), draw.randbytes(12)])
        yield (made.lstrip(b"\0") or b"x")[:255]


def bad_messages(count: int, seed: int) -> Iterator[list[bytes]]:
    """Yield `count` messages, as the parts that follow the identity."""
    draw = random.Random(seed)
    encoder = msgspec.msgpack.Encoder()
    for number in range(count):
        body = MESSAGES[number % len(MESSAGES)]
        frame = encoder.encode([Envelope(draw.choice(["notify", "request", "reply"]), draw.getrandbits(63), body)])
        yield draw.choice([_cut, _flipped, _nested, _random, _extended, _many_parts, _huge_numbers, _whole])(
            draw, frame
        )


def _whole(draw: random.Random, frame: bytes) -> list[bytes]:
    return [frame]


def _cut(draw: random.Random, frame: bytes) -> list[bytes]:
    return [frame[: draw.randrange(len(frame))]]


def _flipped(draw: random.Random, frame: bytes) -> list[bytes]:
    changed = bytearray(frame)
    for _ in range(draw.randint(1, 8)):
        changed[draw.randrange(len(changed))] = draw.randrange(256)
    return [bytes(changed)]


def _nested(draw: random.Random, frame: bytes) -> list[bytes]:
    return [b"\x91" * draw.choice([10, 1000, 100_000])]


def _random(draw: random.Random, frame: bytes) -> list[bytes]:
    return [draw.randbytes(draw.randrange(300))]


def _extended(draw: random.Random, frame: bytes) -> list[bytes]:
    return [frame + draw.randbytes(draw.randint(1, 20))]


def _many_parts(draw: random.Random, frame: bytes) -> list[bytes]:
    return [frame] * draw.choice([2, 3, 100])


def _huge_numbers(draw: random.Random, frame: bytes) -> list[bytes]:
    """Lists, maps and texts of lengths that do not follow."""
    return [draw.choice([b"\xdd", b"\xdf", b"\xdb", b"\xc6", b"\xc9"]) + b"\xff\xff\xff\xff" + frame]
