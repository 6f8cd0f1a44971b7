"""Another user of the machine cannot take the place of a server of a run, also while the server is dead."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from ordinary_user import UID

from penstock.config import Config
from penstock.observe import jsonl
from penstock.ports.process_launcher import ProcessSpec
from penstock.processes.layout import stages
from penstock.runtime.held_port import HeldPort
from penstock.runtime.http_server import bind
from penstock.supervisor.launcher import LocalLauncher

NEIGHBOUR = f"""
import itertools, os, socket, sys
port, hosts = int(sys.argv[1]), sys.argv[2:]
os.setgroups([])
os.setgid({UID})
os.setuid({UID})
for first, host, *options in itertools.product((None, "::", "::1", "0.0.0.0", "127.0.0.2"), hosts, (0, 1), (0, 1)):
    with (
        socket.socket(socket.AF_INET6 if first and ":" in first else socket.AF_INET) as other,
        socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as listener,
    ):
        if first:
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, options[0])
            other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, options[1])
            if ":" in first:
                other.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            try:
                other.bind((first, port))
            except OSError:
                continue
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, options[0])
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, options[1])
        try:
            listener.bind((host, port))
            listener.listen()
        except OSError:
            continue
        print(first, host, *options)
"""
"""Tries every way to listen where connections to the port arrive, also after a first socket that binds the port at
another address, and says which ones it was allowed."""
SERVER = """
import asyncio
from penstock.runtime.http_server import bind, listening, url_of
from penstock.supervisor.child import Child

async def app(scope, receive, send):
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b""})

async def serve(child):
    stop, listener = child.stop_event(), bind("127.0.0.1", child.port, held=True)
    async with listening(app, listener):
        child.report_ready(url_of("127.0.0.1", listener))
        await stop.wait()

child = Child.from_environment()
child.run(lambda: serve(child))
"""
pytestmark = pytest.mark.skipif(not hasattr(socket, "SO_REUSEPORT"), reason="needs SO_REUSEPORT")
needs_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can act as another user")


def taken_by_neighbour(port: int) -> str:
    """Return the ways in which another user could listen where connections to 127.0.0.1 arrive."""
    words = [sys.executable, "-I", "-c", NEIGHBOUR, str(port), "127.0.0.1", "0.0.0.0", "::", "::ffff:127.0.0.1"]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, check=True).stdout


def is_refused(port: int, host: str = "127.0.0.1") -> bool:
    """Return whether a client is refused at once."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as client:
        client.settimeout(1.0)
        try:
            client.connect((host, port))
        except ConnectionRefusedError:
            return True
        return False


@pytest.fixture
def closing() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


@needs_root
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::", "::1"])
def test_another_user_cannot_take_a_held_port(closing: ExitStack, host: str) -> None:
    port = closing.enter_context(HeldPort(host, 0)).port
    reached = "::1" if host == "::1" else "127.0.0.1"
    assert taken_by_neighbour(port) == ""
    with bind(host, port, held=True) as listener:
        assert taken_by_neighbour(port) == ""
        assert is_refused(port, reached), "a server that is not ready refuses its clients"
        listener.listen()
        assert taken_by_neighbour(port) == ""
        assert not is_refused(port, reached)
    assert is_refused(port, reached), "a dead server refuses its clients"
    assert taken_by_neighbour(port) == ""


def test_a_taken_port_is_not_held(closing: ExitStack) -> None:
    listener = closing.enter_context(bind("127.0.0.1", 0))
    held = closing.enter_context(HeldPort("127.0.0.1", 0))
    for port in (listener.getsockname()[1], held.port):
        with pytest.raises(OSError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use"):
            HeldPort("127.0.0.1", port)


def test_the_next_run_holds_a_port_with_connections_that_are_ending(closing: ExitStack) -> None:
    with HeldPort("127.0.0.1", 0) as held, bind("127.0.0.1", held.port, held=True) as listener:
        port = held.port
        listener.listen()
        closing.enter_context(socket.create_connection(("127.0.0.1", port)))
        with socket.create_connection(("127.0.0.1", port)):
            for _ in range(2):
                listener.accept()[0].close()
    assert closing.enter_context(HeldPort("127.0.0.1", port)).port == port
    closing.enter_context(bind("127.0.0.1", port, held=True)).listen()
    assert not is_refused(port)


@pytest.mark.integration
async def test_a_restarted_server_has_the_port_that_no_other_user_could_take(tmp_path: Path) -> None:
    (tmp_path / "served.py").write_text(SERVER)
    spec = ProcessSpec(
        name="rollout-0", role="rollout", module="served", ready_s=9.0, grace_s=1.0, serves_at=("127.0.0.1", 0),
        env={"PYTHONPATH": str(tmp_path)},
    )  # fmt: skip
    ports = []
    async with LocalLauncher(run_dir=tmp_path, runtime_dir=tmp_path / "runtime", run_id="r") as launcher:
        for _ in range(2):
            process = await launcher.spawn(spec)
            while await process.probe():  # noqa: ASYNC110 - it asks for /health
                await asyncio.sleep(0.01)
            url = jsonl.read_json(tmp_path / "runtime" / "ready" / "rollout-0.json")["url"]
            ports.append(urlsplit(url).port)
            await process.signal(signal.SIGKILL)
            await process.wait()
            assert is_refused(ports[-1])
        assert os.getuid() != 0 or taken_by_neighbour(ports[0]) == ""
    assert ports[0] == ports[1]


def test_servers_that_a_run_starts_have_held_ports() -> None:
    def places(**rollout: object) -> list[object]:
        specs = [spec for stage in stages(Config.model_validate({"rollout": rollout})) for spec in stage]
        return [spec.serves_at for spec in specs if spec.role == "rollout"]

    assert places(servers=2) == [("127.0.0.1", 0)] * 2
    assert places(servers=2, port=4000) == [("127.0.0.1", 4000), ("127.0.0.1", 4001)]
    assert places(urls=["http://127.0.0.1:4000"]) == [None]
