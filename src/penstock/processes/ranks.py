"""The keeper of those ranks of the trainer that live on another node than its own.

Starts a process for each connection that proves to be the trainer's, and knows nothing of what it does. The processes
of a trainer end with its connections; what is left of them is ended before its successor's are started. Never imports
torch.
"""

from __future__ import annotations

import asyncio
import json
import logging
import secrets
import signal
import socket
import subprocess
import threading
import time
from pathlib import Path
from typing import NoReturn

from penstock.config import Config
from penstock.control.keys import Keys
from penstock.deadline import Stalled
from penstock.groups.link import LIFE_BYTES, Link, connect, place_of, welcome
from penstock.groups.spawned import start_process
from penstock.observe.jsonl import write_json
from penstock.processes.layout import trainer_nodes
from penstock.processes.listening import bind
from penstock.supervisor.child import Child
from penstock.supervisor.failure import describe_code

logger = logging.getLogger(__name__)

FOLDER = "ranks"
"""Of the run's directory: where each keeper listens."""
FIND_SHARE = 0.75
"""Of the time in which a process has to be ready: for the trainer to find all keepers, which may have to be started
again on another node."""
ASK_EVERY_S = 0.2
MAX_UNKNOWN = 64
"""Connections at once that have not yet shown that they are the trainer's."""


async def serve(child: Child) -> None:
    stop = child.stop_event()
    assert child.address is not None  # else there are no other nodes
    with bind(child.address, 0) as listener:
        async with asyncio.TaskGroup() as tasks:
            keeping = tasks.create_task(Keeper(_key(child)).keep(listener))
            _tell(child, listener)
            child.report_ready()
            await stop.wait()
            keeping.cancel()


class Keeper:
    """Has the processes of one trainer's life at a time; they are of its own group, and end with it."""

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._unknown = threading.BoundedSemaphore(MAX_UNKNOWN)
        self._lock = threading.Lock()
        self._life, self._processes = b"", list[subprocess.Popen[bytes]]()

    async def keep(self, listener: socket.socket) -> NoReturn:
        """A process for whoever has the key."""
        listener.setblocking(False)
        while True:
            try:
                link, _ = await asyncio.get_running_loop().sock_accept(listener)
            except OSError as error:
                logger.warning("a connection could not be taken: %s", error)
                await asyncio.sleep(ASK_EVERY_S)
                continue
            if self._unknown.acquire(blocking=False):
                threading.Thread(target=self._hold, args=(link,), daemon=True).start()
            else:
                logger.warning("refused a connection of %s: %d others are not known yet", place_of(link), MAX_UNKNOWN)
                link.close()

    def _hold(self, link: socket.socket) -> None:
        """One process, to its end."""
        driver = place_of(link)
        with link:
            try:
                life, session = welcome(link, self._key)
            except (OSError, EOFError) as error:
                logger.warning("refused a connection of %s: %s", driver, error)
                return
            finally:
                self._unknown.release()
            process = self._start(link, life, session)
        if (code := process.wait()) not in (0, -signal.SIGTERM):
            logger.warning("a rank of the trainer at %s has ended: %s", driver, describe_code(code))

    def _start(self, link: socket.socket, life: bytes, session: bytes) -> subprocess.Popen[bytes]:
        """Once nothing of another life holds memory any more."""
        with self._lock:
            if life != self._life:
                for process in self._processes:
                    process.kill()
                for process in self._processes:
                    process.wait()
                self._life, self._processes = life, []
            self._processes.append(start_process(link, start_new_session=False, session=session))
            return self._processes[-1]


def connected_ranks(child: Child, config: Config) -> list[Link]:
    """The trainer's side: to its processes on other nodes, by their numbers. Blocks. Raises `Stalled`."""
    seconds, links = FIND_SHARE * config.supervisor.ready_timeout_s, list[Link]()
    life = secrets.token_bytes(LIFE_BYTES)
    give_up = time.monotonic() + seconds
    try:
        for number, node in enumerate(trainer_nodes(config)[1:], start=1):
            keeper = child.run_dir / FOLDER / f"ranks-{number}"
            for _ in node.numbers:
                links.append(_connected(child, keeper, life, give_up=give_up, seconds=seconds))
    except BaseException:
        for link in links:
            link.socket.close()
        raise
    return links


def _connected(child: Child, keeper: Path, life: bytes, *, give_up: float, seconds: float) -> Link:
    """As soon as it listens where its file says: that may still be its predecessor's."""
    while True:
        try:
            host, port = json.loads(keeper.read_text())
            return connect((host, port), _key(child), life)
        except OSError as error:
            if time.monotonic() > give_up:
                holder = f"{keeper.name} ({error})"
                raise Stalled(waiter=child.name, resource="its ranks", holder=holder, seconds=seconds) from None
        time.sleep(ASK_EVERY_S)


def _tell(child: Child, listener: socket.socket) -> None:
    """The trainer where this process listens; a trainer that is started later still finds it."""
    file = child.run_dir / FOLDER / child.name
    file.parent.mkdir(exist_ok=True)
    write_json(file, listener.getsockname()[:2])


def _key(child: Child) -> bytes:
    keys = Keys.read(child.runtime_dir)
    assert keys is not None  # else the run is on one machine
    return keys.member_secret.encode()
