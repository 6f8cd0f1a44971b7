"""Connections to an engine that asks for no key, on a loopback port that another user could take before the engine."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import aiohttp

from penstock.deadline import deadline
from penstock.rollout.session import KEEP_ALIVE_S

if TYPE_CHECKING:
    from aiohttp.client_proto import ResponseHandler
    from aiohttp.client_reqrep import ClientRequest
    from aiohttp.tracing import Trace

TABLE = Path("/proc/net/tcp")
"""The kernel's table of IPv4 sockets. Linux lists the listening ones first."""
LISTENS = "0A"
LOOK_S = 30.0
"""Time limit for reading the table."""


def listening_user(address: str, port: int) -> int | None:
    """Return the user who listens at exactly this IPv4 address and port, or None. Connections to the address reach no
    other listener then."""
    wanted = f"{int.from_bytes(socket.inet_aton(address), sys.byteorder):08X}:{port:04X}"
    with TABLE.open() as table:
        for row in table:
            _, local, _, state, _, _, _, user, *_ = row.split()
            if (local, state) == (wanted, LISTENS):
                return int(user)
    return None


class OwnPortConnector(aiohttp.TCPConnector):
    """Connects only where a process of this user listens. It looks before and after it opens a connection, and not for
    each request."""

    def __init__(self, address: str, port: int) -> None:
        super().__init__(limit=0, keepalive_timeout=KEEP_ALIVE_S)
        self._place = address, port

    async def _create_connection(
        self, req: ClientRequest, traces: list[Trace], timeout: aiohttp.ClientTimeout
    ) -> ResponseHandler:
        await self._check_user()
        protocol = await super()._create_connection(req, traces, timeout)
        try:
            await self._check_user()
        except aiohttp.ClientConnectionError:
            protocol.close()
            raise
        return protocol

    async def _check_user(self) -> None:
        """Raise ClientConnectionError unless this user listens. The table is read on a thread, because other users can
        make it long."""
        address, port = self._place
        async with deadline(LOOK_S, waiter="the auth proxy", resource="the table of sockets", holder="the kernel"):
            user = await asyncio.to_thread(listening_user, address, port)
        if user is None:
            raise aiohttp.ClientConnectionError(f"no process listens at {address}:{port}")
        if user != os.geteuid():
            raise aiohttp.ClientConnectionError(
                f"a process of another user (uid {user}) listens at {address}:{port}, which was free when the engine "
                "started; nothing was sent to it"
            )
