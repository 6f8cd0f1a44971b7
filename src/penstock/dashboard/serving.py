"""Serves the dashboard until it is told to end."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from ipaddress import ip_address
from typing import Any

from penstock.dashboard.access import Access, new_key, with_key
from penstock.dashboard.served_runs import ServedRuns
from penstock.dashboard.web_app import Dashboard, make_app
from penstock.runtime.http_server import CannotListen, bind, listening, url_of

PORT = 8730
"""Port that is taken if it is free and none is given."""


def listener_of(host: str, port: int | None) -> socket.socket:
    """Return a listening socket; without a port, at `PORT` or, if that is taken, at a free one. Raises
    `CannotListen`."""
    if port is not None:
        return bind(host, port)
    try:
        return bind(host, PORT)
    except CannotListen:
        return bind(host, 0)


def address_to_open(host: str, listener: socket.socket) -> str:
    """Return the URL of a server. One that listens on all addresses of this machine is known by the machine's name."""
    address, port = listener.getsockname()[:2]
    return url_of(socket.gethostname(), port) if ip_address(address).is_unspecified else url_of(host, listener)


@asynccontextmanager
async def serving(
    runs: ServedRuns, host: str, listener: socket.socket, key: str | None = None
) -> AsyncIterator[tuple[str, Access]]:
    """Serve during the body; yield the address to open and the rules of access. `key`: one is made without it."""
    address, port = listener.getsockname()[:2]
    access = Access.of(host, address, port, key or new_key())
    dashboard = Dashboard(runs)
    try:
        async with listening(make_app(dashboard, access), listener):
            try:
                yield with_key(address_to_open(host, listener), access), access
            finally:
                dashboard.hubs.close()
    finally:
        dashboard.opened.close()


async def serve(
    runs: ServedRuns,
    host: str,
    listener: socket.socket,
    *,
    key: str | None,
    announce: Callable[[str], Any],
    with_stdin: bool,
) -> None:
    """Serve until a signal, or with `with_stdin` until standard input ends. `announce` is called with the address."""
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, ended.set)
    if with_stdin:

        def read() -> None:
            if not os.read(sys.stdin.fileno(), 65_536):
                loop.remove_reader(sys.stdin)
                ended.set()

        loop.add_reader(sys.stdin, read)
    async with serving(runs, host, listener, key) as (url, _):
        announce(url)
        await ended.wait()
