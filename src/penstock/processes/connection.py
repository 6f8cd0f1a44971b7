"""Connections that nobody can hold for ever: a client that sends or reads too slowly, or too many of them, lose theirs.

uvicorn bounds only the pause between two requests. Bodies have a deadline of their own (`rollout/http.py`), since only
whoever reads one knows that it is wanted; here it is the headers before, what follows a refused body, and answers that
are not fetched.
"""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

HEADERS_S = 10.0
"""From a connection, or the first byte of a further request, to its last header."""
REST_S = 5.0
"""For the rest of a body that was answered before its end."""
FETCH_S = 60.0
"""For a client to read on, once what was sent fills its buffers."""
LAST_CHANCE_S = 1.0
"""After that: perhaps it was this process that was held up, and what it waits for has come meanwhile."""
MAX_HEADER_BYTES = 64 * 2**10
MAX_CONNECTIONS = 16_384
"""More than an engine could hold requests. One more takes the place of the one that has waited longest for its headers;
if there is none it is refused."""


class Connection(HttpToolsProtocol):
    """One of them."""

    sending: asyncio.TimerHandle | None = None
    """Ends the patience with what the client sends."""
    _fetching: asyncio.TimerHandle | None = None
    """Ends the patience with what the client reads."""
    _in_headers = True
    _in_body = False
    _num_header_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._expect(HEADERS_S)
        if len(self.connections) > MAX_CONNECTIONS:
            waiting = [each for each in self.connections if isinstance(each, Connection) and each.in_headers_until]
            longest = min(waiting, key=lambda each: each.in_headers_until, default=self)
            longest.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._expect(None)
        self._stop_fetching()
        super().connection_lost(exc)

    @property
    def in_headers_until(self) -> float:
        """On the loop's clock; 0 while no headers are awaited."""
        return self.sending.when() if self._in_headers and self.sending is not None else 0.0

    def data_received(self, data: bytes) -> None:
        if self._in_headers:
            self._num_header_bytes += len(data)
        super().data_received(data)
        if self._in_headers and self._num_header_bytes > MAX_HEADER_BYTES:
            self.transport.abort()

    def on_message_begin(self) -> None:
        super().on_message_begin()
        if not self._in_headers:
            self._in_headers, self._num_header_bytes = True, 0
            self._expect(HEADERS_S)

    def on_headers_complete(self) -> None:
        self._in_headers, self._in_body = False, True
        self._expect(None)
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_body = False
        self._expect(None)
        super().on_message_complete()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self._in_body and self.cycle.response_complete:
            self._expect(REST_S)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._fetching = self.loop.call_later(FETCH_S, self.transport.abort)

    def resume_writing(self) -> None:
        self._stop_fetching()
        super().resume_writing()

    def _expect(self, seconds: float | None) -> None:
        """What comes next from the client is to be whole by then."""
        if self.sending is not None:
            self.sending.cancel()
        self.sending = None if seconds is None else self.loop.call_later(seconds, self._last_chance)

    def _last_chance(self) -> None:
        self.sending = self.loop.call_later(LAST_CHANCE_S, self.transport.abort)

    def timeout_keep_alive_handler(self) -> None:
        close = super().timeout_keep_alive_handler
        self.timeout_keep_alive_task = self.loop.call_later(LAST_CHANCE_S, close)

    def _stop_fetching(self) -> None:
        if self._fetching is not None:
            self._fetching.cancel()
            self._fetching = None
