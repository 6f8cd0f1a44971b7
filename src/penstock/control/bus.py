"""The control bus: a ROUTER in the controller, a DEALER in every other process, PUB/SUB for broadcasts.

The sender repeats a request until it is answered or its deadline passes. The receiver acts on each message id once and
repeats its answer, so lost and repeated messages change nothing. All messages to one peer from one turn of the event
loop leave as one frame. Tensors never travel on the bus.

Before anything else, a process introduces itself with `Hello`, which carries a secret of the run and the bus's version.
The controller refuses other runs and versions, and hears no other message from a process that it has not accepted.
`incoming.py` drops malformed frames.

A process that was cut off may come back when another process already has its name. The controller listens only to the
process of that name that introduced itself last.
"""

from __future__ import annotations

import asyncio
import hmac
import itertools
import logging
import secrets
import time
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict, defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import msgspec
import zmq

from penstock.control.incoming import MAX_ENVELOPES, BadFrame, DropLog, Envelope, envelopes_in, sender_of, shown
from penstock.control.messages import VERSION, Ack, AnyMessage, Hello, Refused, Welcome, WhoAreYou
from penstock.control.sockets import LINGER_MS, MAX_FRAME_BYTES, ControllerSockets, PeerSockets
from penstock.deadline import deadline

logger = logging.getLogger(__name__)

Handler = Callable[[str, AnyMessage], Awaitable[AnyMessage | None]]
"""handler(peer, message) -> reply; None stands for `Ack`. An exception in a handler other than `UnknownPeer` and
`ProtocolViolation` is raised in `run`, and the sender gets no answer. So a failing process looks dead to other
processes, and its error does not end them."""

Fault = Callable[[bytes], list[bytes]]
"""Maps a frame that is about to leave to the frames that really leave. Tests use it to lose and repeat messages."""

CONTROLLER = "controller"


class UnknownPeer(RuntimeError):
    """The sender of a message has not introduced itself. A handler raises this; the sender is then asked to introduce
    itself, and gets no answer."""


class PeerLost(RuntimeError):
    """The peer died before it answered."""


class RequestRefused(RuntimeError):
    """The peer understood the request and refused it."""

    self_explanatory = True


class ProtocolViolation(RuntimeError):
    """A peer sent a message that it must not send. A handler raises this. The sender gets a refusal, so a process of
    the run fails and is restarted; this process continues."""


class Unsendable(RuntimeError):
    """A single message exceeds the limit of a frame, or holds a value that cannot be encoded."""


_encoder = msgspec.msgpack.Encoder()
LONGEST_PAUSE = 8
"""Longest pause before a message is sent again, in multiples of the first. A receiver that is slow gets fewer."""
MAX_PEERS = 4096
"""Limit of the names that may join a run."""


class _Endpoint(ABC):
    """The part that both sides share: requests with re-send, stored replies per sender, and batched frames."""

    resend_s = 2.0
    remembered_replies = 4096

    def __init__(self, name: str, handler: Handler, *, fault: Fault | None) -> None:
        self.name = name
        self._handler = handler
        self._fault = fault or (lambda frame: [frame])
        self._drops = DropLog()
        self._ids = itertools.count(time.time_ns())
        self._pending: dict[tuple[str, int], asyncio.Future[AnyMessage]] = {}
        self._answered: defaultdict[str, OrderedDict[int, AnyMessage | None]] = defaultdict(OrderedDict)
        """Answers to the latest messages of each peer, by message id; None while there is no answer."""
        self._outbox: dict[str, list[Envelope]] = {}
        self._flush_scheduled = False
        self._tasks: asyncio.TaskGroup | None = None
        self._context: zmq.Context[Any] = zmq.Context()
        self._context.setsockopt(zmq.LINGER, LINGER_MS)

    async def request(self, peer: str, message: AnyMessage, *, timeout_s: float) -> AnyMessage:
        """Send a message until it is answered, and return the answer. Raises `RequestRefused`, `PeerLost` (see
        `forget`), or after `timeout_s` `Stalled`, which names the peer."""
        loop, id_ = asyncio.get_running_loop(), next(self._ids)
        envelope = Envelope("request", id_, message)
        future: asyncio.Future[AnyMessage] = loop.create_future()
        self._pending[peer, id_] = future
        timer: asyncio.TimerHandle

        def send(pause_s: float) -> None:
            nonlocal timer
            self._post(peer, envelope)
            timer = loop.call_later(pause_s, send, min(2 * pause_s, LONGEST_PAUSE * self.resend_s))

        send(self.resend_s)
        try:
            answer = f"the answer to {type(message).__name__}"
            async with deadline(timeout_s, waiter=self.name, resource=answer, holder=peer):
                reply = await future
        finally:
            timer.cancel()
            del self._pending[peer, id_]
        if isinstance(reply, Refused):
            raise RequestRefused(f"{peer} refused {type(message).__name__}: {reply.reason}")
        return reply

    def forget(self, peer: str) -> None:
        """Give up all requests to `peer`, because its process is gone or replaced. They raise `PeerLost`."""
        for (asked, _), future in self._pending.items():
            if asked == peer and not future.done():
                future.set_exception(PeerLost(f"{peer} died before it answered"))
                future.exception()  # avoids asyncio's warning if the requester was cancelled and never reads it
        self._outbox.pop(peer, None)

    def notify(self, peer: str, message: AnyMessage) -> None:
        """Send a message once, and expect no answer."""
        self._post(peer, Envelope("notify", next(self._ids), message))

    def _post(self, peer: str, envelope: Envelope) -> None:
        self._outbox.setdefault(peer, []).append(envelope)
        if not self._flush_scheduled:
            self._flush_scheduled = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flush_scheduled = False
        outbox, self._outbox = self._outbox, {}
        for peer, envelopes in outbox.items():
            for start in range(0, len(envelopes), MAX_ENVELOPES):
                self._send(peer, envelopes[start : start + MAX_ENVELOPES])

    def _send(self, peer: str, envelopes: Sequence[Envelope]) -> None:
        """Send messages as one frame, or as several if one would be too large or one of them cannot be encoded."""
        try:
            encoded = _encoder.encode(envelopes)
        except (ValueError, TypeError, OverflowError, RecursionError) as error:  # half a surrogate pair, a huge integer
            problem = f"cannot be sent ({error})"
        else:
            if len(encoded) <= MAX_FRAME_BYTES:
                for frame in self._fault(encoded):
                    self._transmit(peer, frame)
                return
            problem = f"has {len(encoded)} bytes, but the bus takes at most {MAX_FRAME_BYTES}"
        if len(envelopes) > 1:
            self._send(peer, envelopes[: len(envelopes) // 2])
            self._send(peer, envelopes[len(envelopes) // 2 :])
        else:
            self._fail_unsendable(peer, envelopes[0], problem)

    def _fail_unsendable(self, peer: str, envelope: Envelope, problem: str) -> None:
        """Fail the request, or answer a request with a refusal."""
        reason = f"{type(envelope.body).__name__} of {self.name} {problem}"
        future = self._pending.get((peer, envelope.id))
        if envelope.kind == "reply":
            self._send(peer, [Envelope("reply", envelope.id, Refused(reason=reason))])
        elif future is not None and not future.done():
            future.set_exception(Unsendable(reason))
        else:
            logger.error("%s", reason)

    @abstractmethod
    def _transmit(self, peer: str, frame: bytes) -> None:
        """Hand a frame to the socket."""

    def _receive(self, peer: str, envelopes: Iterable[Envelope]) -> None:
        for envelope in filter(self._accepts, envelopes):
            if envelope.kind == "reply":
                future = self._pending.get((peer, envelope.id))
                if future is not None and not future.done():
                    future.set_result(envelope.body)
            elif self._is_new(peer, envelope):
                assert self._tasks is not None
                self._tasks.create_task(self._answer(peer, envelope))

    def _accepts(self, envelope: Envelope) -> bool:
        """Return whether to handle the message at all."""
        return True

    def _is_new(self, peer: str, envelope: Envelope) -> bool:
        """Store the message id and return whether it is new. Repeat the answer if there is one already."""
        answered = self._answered[peer]
        if envelope.id in answered:
            reply = answered[envelope.id]
            if reply is not None:
                self._post(peer, Envelope("reply", envelope.id, reply))
            return False
        answered[envelope.id] = None
        if len(answered) > self.remembered_replies:
            answered.popitem(last=False)
        return True

    async def _answer(self, peer: str, envelope: Envelope) -> None:
        try:
            reply = await self._handler(peer, envelope.body) or Ack()
        except UnknownPeer:
            self._answered[peer].pop(envelope.id, None)
            self.notify(peer, WhoAreYou())
            return
        except ProtocolViolation as violation:
            reply = self._refuse(peer, envelope, violation)
        if envelope.kind == "request":
            self._reply(peer, envelope, reply)

    def _refuse(self, peer: str, envelope: Envelope, violation: ProtocolViolation) -> Refused:
        """Count and log a message that breaks the protocol, and return the answer to it."""
        reason = f"{type(envelope.body).__name__} breaks the protocol: {violation}"
        bad = BadFrame("violation", reason)
        self._drops.drop(peer, bad.with_traceback(violation.__traceback__))
        return Refused(reason=reason)

    def _reply(self, peer: str, envelope: Envelope, reply: AnyMessage) -> None:
        self._answered[peer][envelope.id] = reply
        self._post(peer, Envelope("reply", envelope.id, reply))


class Bus(_Endpoint):
    """The controller's side. Peers are addressed by their names."""

    def __init__(
        self,
        directory: str,
        handler: Handler,
        *,
        nonce: str,
        host: str | None = None,
        dropped: Counter[str] | None = None,
        fault: Fault | None = None,
    ) -> None:
        """`nonce`: the secret of the run, which each `Hello` must carry. `host`: the address to listen on for other
        machines; None serves only this machine. `dropped` counts dropped frames by reason. Raises `CannotListen`."""
        super().__init__(CONTROLLER, handler, fault=fault)
        self._nonce, self._drops = nonce, DropLog(dropped)
        try:
            self._sockets = ControllerSockets(self._context, Path(directory), host)
        except BaseException:
            self._context.destroy(linger=0)
            raise
        self._lives: dict[str, str] = {}
        """The process that has each name now: a random id per process."""

    def broadcast(self, message: AnyMessage) -> None:
        """Send a message to every connected peer, without acknowledgement."""
        envelope = [Envelope("notify", next(self._ids), message)]
        self._sockets.publisher.send([_encoder.encode(envelope)])

    async def run(self) -> None:
        """Receive until cancelled; an exception in a handler ends it."""
        async with asyncio.TaskGroup() as self._tasks:
            await self._sockets.router.listen(self._hear)

    def close(self) -> None:
        self._flush()
        self._sockets.close()
        self._context.destroy(linger=LINGER_MS)

    def _hear(self, parts: Sequence[bytes]) -> None:
        try:
            peer, life = sender_of(parts)
            envelopes = envelopes_in(parts[1:])
            if self._admits(peer, life, envelopes):
                self._receive(peer, envelopes)
        except BadFrame as bad:
            self._drops.drop(shown(parts[0]), bad)

    def _admits(self, peer: str, life: str, envelopes: Iterable[Envelope]) -> bool:
        """Return whether to handle these messages: the process has introduced itself, or does so now. Raises
        `BadFrame`."""
        greeting = next((envelope for envelope in envelopes if isinstance(envelope.body, Hello)), None)
        if greeting is not None:
            if reason := self._reason_to_refuse(peer, greeting.body):
                self._answer_stranger(peer, life, Envelope("reply", greeting.id, Refused(reason=reason)))
                raise BadFrame("greeting", reason)
            self._lives[peer] = life
        elif peer not in self._lives:  # usually because this controller is new
            self._answer_stranger(peer, life, Envelope("notify", next(self._ids), WhoAreYou()))
            return False
        if self._lives[peer] != life:
            raise BadFrame("replaced", "another process of its name introduced itself later")
        return True

    def _reason_to_refuse(self, peer: str, hello: AnyMessage) -> str:
        """Return why the process may not join, else an empty string."""
        assert isinstance(hello, Hello)
        if not hmac.compare_digest(hello.nonce.encode(), self._nonce.encode()):
            return f"{peer} belongs to another run"
        if hello.version != VERSION:
            return (
                f"{peer} runs penstock {hello.version or 'of an older version'}, but the run has penstock {VERSION}: "
                "install the same version for all processes of the run"
            )
        if hello.name != peer:
            return f"{peer} introduced itself as {hello.name}"
        if peer not in self._lives and len(self._lives) >= MAX_PEERS:
            return f"{MAX_PEERS} processes have joined the run, which is the limit"
        return ""

    def _answer_stranger(self, peer: str, life: str, envelope: Envelope) -> None:
        """Answer a process that is not accepted. Nothing about it is kept."""
        frame = _encoder.encode([envelope])
        self._sockets.router.send([_identity(peer, life), frame])

    def _transmit(self, peer: str, frame: bytes) -> None:
        if peer in self._lives:
            self._sockets.router.send([_identity(peer, self._lives[peer]), frame])


class Peer(_Endpoint):
    """The side of every other process; its only peer is the controller. Before `Welcome` it accepts only replies, so it
    ignores messages meant for an earlier process of its name. After `WhoAreYou` it has to be welcomed again."""

    look_s = 0.5
    """Seconds between two checks for a new address of the controller, if the address can change."""

    def __init__(self, directory: str, name: str, handler: Handler, *, fault: Fault | None = None) -> None:
        super().__init__(name, handler, fault=fault)
        self._is_welcome = False
        self._sockets = PeerSockets(self._context, Path(directory), _identity(name, secrets.token_hex(8)))

    async def join(self, hello: Hello, *, timeout_s: float) -> Welcome:
        """Introduce this process to the controller. Call it again for a new controller. Raises as `request` does."""
        self._is_welcome = False
        hello = msgspec.structs.replace(hello, version=VERSION)
        reply = await self.request(CONTROLLER, hello, timeout_s=timeout_s)
        if not isinstance(reply, Welcome):
            raise TypeError(f"the controller answered Hello with {type(reply).__name__}")
        return reply

    async def run(self) -> None:
        """Receive until cancelled; an exception in a handler ends it."""
        async with asyncio.TaskGroup() as self._tasks:
            self._tasks.create_task(self._sockets.subscriber.listen(self._hear))
            if self._sockets.keys is not None:  # then a restarted controller can have another address
                self._tasks.create_task(self._follow())
            await self._sockets.dealer.listen(self._hear)

    def _accepts(self, envelope: Envelope) -> bool:
        was_welcome = self._is_welcome
        if isinstance(envelope.body, Welcome | WhoAreYou):
            self._is_welcome = isinstance(envelope.body, Welcome)
        return was_welcome or envelope.kind == "reply"

    def _hear(self, parts: Sequence[bytes]) -> None:
        try:
            self._receive(CONTROLLER, envelopes_in(parts))
        except BadFrame as bad:
            self._drops.drop(CONTROLLER, bad)

    async def _follow(self) -> None:
        while True:
            self._sockets.follow()
            await asyncio.sleep(self.look_s)

    def close(self) -> None:
        self._flush()
        self._context.destroy(linger=LINGER_MS)

    def _transmit(self, peer: str, frame: bytes) -> None:
        self._sockets.dealer.send([frame])


def _identity(name: str, life: str) -> bytes:
    """Return a socket identity that is unique among all processes of this name."""
    return f"{name}/{life}".encode()
