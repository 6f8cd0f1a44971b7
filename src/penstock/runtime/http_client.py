"""Protection of a run's HTTP clients against hostile servers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import aiohttp
from aiohttp.client_proto import ResponseHandler

C = TypeVar("C", bound=aiohttp.BaseConnector)

MOST_UNREAD = 4
"""Most replies of a connection that wait to be read, before the connection is ended. One request is open on each
connection, and gets one reply; a few interim replies (1xx) may come before."""
MAX_MESSAGE_CHARS = 500
"""A longer error message of a server is cut."""


class _Connection(ResponseHandler):
    """A connection that ends when the server sends replies without requests. They would be parsed and kept while the
    connection is idle."""

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        if len(self._buffer) > MOST_UNREAD and self.transport is not None:
            self.transport.abort()


def guarded(connector: C) -> C:
    """Let a connector end connections on which servers say more than they were asked for."""
    connection: Callable[..., ResponseHandler] = _Connection
    connector._factory = partial(connection, loop=connector._loop)
    return connector


def short(message: str, most: int = MAX_MESSAGE_CHARS) -> str:
    """Return an error message, cut if it is long: it may repeat what a server sent."""
    return message if len(message) <= most else f"{message[:most]}..."
