"""The proxy in front of SGLang sends nothing to a program of another user that took the engine's port."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator

import aiohttp
import pytest
from ordinary_user import UID

from penstock.processes import own_port
from penstock.processes.foreign_server import auth_proxy
from penstock.processes.own_port import OwnPortConnector, listening_user
from penstock.rollout.app import ApiKeys, App
from penstock.rollout.claim import Claim
from penstock.rollout.http import Route, answer
from penstock.runtime.http_server import bind, listening

NEIGHBOUR = f"""
import os, socket, sys
os.setgroups([])
os.setgid({UID})
os.setuid({UID})
listener = socket.create_server(("127.0.0.1", 0))
print(listener.getsockname()[1], flush=True)
sys.stdin.read()
listener.setblocking(False)
received = []
try:
    while True:
        connection, _ = listener.accept()
        connection.settimeout(0.2)
        received.append(connection.recv(1000))
except BlockingIOError:
    print(received)
"""
"""Listens, and says at the end what each connection brought."""
SOON = aiohttp.ClientTimeout(total=5)
KEYS = ApiKeys(generation="play", admin="rule")
pytestmark = pytest.mark.skipif(not own_port.TABLE.exists(), reason="needs Linux's table of sockets")
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")


@pytest.fixture
async def neighbour() -> AsyncIterator[Process]:
    process = await asyncio.create_subprocess_exec(sys.executable, "-I", "-c", NEIGHBOUR, stdin=PIPE, stdout=PIPE)
    yield process
    if process.returncode is None:
        process.kill()
        await process.wait()


async def port_of(neighbour: Process) -> int:
    assert neighbour.stdout is not None
    return int(await neighbour.stdout.readline())


async def received_by(neighbour: Process) -> str:
    said, _ = await neighbour.communicate(b"")
    return said.decode().strip()


@needs_root
async def test_another_user_in_place_of_the_engine_gets_no_connection(neighbour: Process) -> None:
    port = await port_of(neighbour)
    assert listening_user("127.0.0.1", port) == UID
    headers = {"Authorization": "Bearer play"}
    proxy = auth_proxy(port, "own", "/model_info", host="127.0.0.1", port=0, keys=KEYS, claim=Claim())
    async with proxy as url, aiohttp.ClientSession(url, headers=headers, timeout=SOON) as session:
        for path in ("/health", "/generate", "/model_info"):
            async with session.get(path) as reply:
                assert reply.status == 502
                assert f"another user (uid {UID}) listens at 127.0.0.1:{port}" in await reply.text()
    assert await received_by(neighbour) == "[]"


@needs_root
async def test_another_user_who_comes_between_gets_a_connection_without_a_byte(
    neighbour: Process, monkeypatch: pytest.MonkeyPatch
) -> None:
    port, users = await port_of(neighbour), iter([os.geteuid(), UID])
    monkeypatch.setattr(own_port, "listening_user", lambda *_: next(users))
    async with aiohttp.ClientSession(connector=OwnPortConnector("127.0.0.1", port)) as session:
        with pytest.raises(aiohttp.ClientConnectionError, match="another user"):
            await session.get(f"http://127.0.0.1:{port}/generate", headers={"Authorization": "Bearer play"})
    assert await received_by(neighbour) == "[b'']"


async def test_the_engine_gets_requests_without_the_key_over_checked_connections(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    looks, headers = [], []

    def look(address: str, port: int) -> int | None:
        looks.append(port)
        return listening_user(address, port)

    async def generate(request):  # type: ignore[no-untyped-def]
        headers.append(dict(request.headers))
        return answer({})

    monkeypatch.setattr(own_port, "listening_user", look)
    listener = bind("127.0.0.1", 0)
    port: int = listener.getsockname()[1]
    engine = listening(App([Route("/generate", ["GET"], generate, "public")], ApiKeys()), listener)
    proxy = auth_proxy(port, "own", "/model_info", host="127.0.0.1", port=0, keys=KEYS, claim=Claim())
    async with engine, proxy as url, aiohttp.ClientSession(url, headers={"Authorization": "Bearer play"}) as session:
        for _ in range(3):
            async with session.get("/generate") as reply:
                assert reply.status == 200
    assert looks == [port, port], "one connection serves all requests"
    assert [each["authorization"] for each in headers] == ["Bearer own"] * 3, "the key of the engine, not the client's"


def test_only_a_listener_has_a_listening_user() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        assert listening_user("127.0.0.1", port) is None
        held.listen()
        assert listening_user("127.0.0.1", port) == os.geteuid()
        assert listening_user("127.0.0.2", port) is None
        with socket.create_connection(("127.0.0.1", port)) as client:
            assert listening_user(*client.getsockname()) is None
