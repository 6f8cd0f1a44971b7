"""Connections of HTTP clients that keep no memory and no descriptor without a request. Torch-free.

uvicorn's settings do not suffice. None bounds the size of a head. `timeout_keep_alive` starts after the first answer
and ends with the next byte, so a silent client and one with half a head stay. `limit_concurrency` keeps the
connections that it answers with 503, and silent ones count, so silent clients lock out the requests of others.

uvicorn keeps any number of requests of a connection that wait for the answers before theirs. It logs a line for each
invalid request. It ignores an upgrade to another protocol, and parses the body of such a request as the next request.
"""

from __future__ import annotations

import asyncio
from typing import Any

import httptools
from uvicorn import Config
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol
from uvicorn.server import ServerState

MAX_HEADERS = 128
"""Maximum number of headers of a request, with the trailers of its body."""
MAX_HEAD_BYTES = 65_536
"""Maximum size of a request line with its headers, and of the trailers of a chunked body. Longer ones get a 431."""
HEAD_S = 10.0
"""Time limit for the head of a request, from the start of the connection, or from its first byte on a later request."""
TOO_LARGE = b"HTTP/1.1 431 Request Header Fields Too Large\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
WRONG = b"this server accepts only valid requests of HTTP/1.1, and no upgrade to another protocol"
BAD_REQUEST = (
    b"HTTP/1.1 400 Bad Request\r\nContent-Type: text/plain\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s"
    % (len(WRONG), WRONG)
)


class Connections(ServerState):
    """The connections of one server. `waiting` holds those without a request in progress, in the order they came."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most
        self.waiting: dict[BoundedConnection, None] = {}


class BoundedConnection(HttpToolsProtocol):
    """One connection. Beyond `Connections.most`, the one that has waited longest without a request is closed."""

    def __init__(
        self,
        config: Config,
        server_state: Connections,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._waiting = server_state.waiting
        self._most = server_state.most
        self._head_timer: asyncio.TimerHandle | None = None
        self._head_bytes = 0  # since the last head, or the last part of a body: also counts trailers

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._waiting[self] = None
        self._start_head_timer()
        if len(self.connections) > self._most:  # this one is the last choice, so there is always one to close
            longest = next(iter(self._waiting))
            del self._waiting[longest]
            longest.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_waiting()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        while data and not self.transport.is_closing():
            part = data[: MAX_HEAD_BYTES - self._head_bytes]
            self._head_bytes += len(part)
            self._parse(part)
            data = data[len(part) :]
            if self._head_bytes >= MAX_HEAD_BYTES:
                self._refuse(TOO_LARGE)
        if self._head_timer is None and self in self._waiting:
            self._start_head_timer()

    def _parse(self, part: bytes) -> None:
        """Parse received bytes. Log no invalid request, because a client can send any number of them."""
        self._unset_keepalive_if_required()
        try:
            self.parser.feed_data(part)
        except httptools.HttpParserError:  # invalid bytes, or an error that a callback raised
            self._refuse(BAD_REQUEST)

    def on_header(self, name: bytes, value: bytes) -> None:
        """Take in a header. Raises HttpParserError for too many: short ones take forty times their bytes in memory."""
        if len(self.headers) >= MAX_HEADERS:
            self._refuse(TOO_LARGE)
            raise httptools.HttpParserError
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Start the request, or keep it until the one before it is answered.

        Raises HttpParserError if another request waits already, or if this one asks for another protocol.
        """
        self._head_bytes = 0
        self._stop_waiting()
        if self.pipeline or self.parser.should_upgrade():
            raise httptools.HttpParserError
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        self._head_bytes = 0
        super().on_body(body)

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.cycle.response_complete and not self.transport.is_closing():
            self.cycle.scope["headers"] = []  # an idle connection keeps nothing of its last request
            self._waiting[self] = None

    def _start_head_timer(self) -> None:
        self._head_timer = self.loop.call_later(HEAD_S, self.transport.close)

    def _stop_waiting(self) -> None:
        self._waiting.pop(self, None)
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _refuse(self, answer: bytes) -> None:
        """Close the connection. Send `answer` first, unless the answer to an earlier request is due."""
        is_answered = self.cycle is None or self.cycle.response_complete
        if is_answered and not self.transport.is_closing():
            self.transport.write(answer)
        self.transport.close()
