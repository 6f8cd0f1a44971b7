"""The supervisor's deputy on a node: an actor in slots of a pool, which does there for the process that lives in them,
or the several that take turns there, what the local launcher does on the supervisor's machine, by being one.

Whatever ends the actor (its node, Ray, the end of the run's supervisor) ends its processes: through the death pipe, and
through the janitor of this very host. It ends itself when it no longer reaches the supervisor's machine: there it is
taken for lost, and its processes would go on beside their successors.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import ray

from penstock.cluster.calls import call
from penstock.cluster.records import Depot, Record, records_of
from penstock.control.address import Address
from penstock.control.keys import Keys
from penstock.deadline import patient
from penstock.ports import End, Look, ProcessSpec
from penstock.store.payloads import POOL, answering
from penstock.supervisor.child import ADDRESS, HOST
from penstock.supervisor.launcher import LocalLauncher, LocalProcess
from penstock.supervisor.runtime import runtime_path
from penstock.types import PayloadRef

TOKEN = "cluster-token"
"""In the run directory, written there by the supervisor."""
SEEN_S = 10.0
"""For what one machine writes to a shared file system to be seen on another."""
BETWEEN_LOOKS_S = 0.2
PATIENCE_S = 600.0
BETWEEN_ASKS_S, ANSWER_S = 2.0, 5.0
ALONE_S = 20.0
"""Without an answer from the supervisor's machine. There it takes longer by default until successors are started
(`supervisor.silent_s`, and Ray's bound for nodes)."""
MISSED = 2
"""Answers in a row, at least: a host that was itself held up for so long asks once more."""

logger = logging.getLogger(__name__)


class Unshared(OSError):
    """A node does not see the run directory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Household:
    """What the hosts of a run have in common."""

    run_id: str
    run_dir: Path
    token: str
    """Found in the run directory by whoever sees it."""
    namespace: str
    """Of the actors, in Ray."""
    directory: Path
    """Where the run was begun; processes begin there too, where it exists."""
    nonce: str = field(repr=False)
    keys: Keys = field(repr=False)


class Host:
    """An actor. It is opened once, before anything else; all else is for its processes."""

    def __init__(self, name: str, household: Household) -> None:
        self._name, self._household = name, household
        self._runtime_dir = runtime_path(f"{household.run_id}.{secrets.token_hex(3)}")
        self._processes: dict[int, LocalProcess] = {}
        self._opened, self._closing = asyncio.Event(), asyncio.Event()
        self._left: list[str] = []

    async def open(self, controller: Address | None, depot: Any) -> None:
        """`depot`: an actor on the supervisor's machine. Raises `Unshared`, OSError."""
        household, address = self._household, ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        await _see(household.run_dir, household.token, address)
        with suppress(OSError):
            os.chdir(household.directory)
        self._launcher = LocalLauncher(
            run_dir=household.run_dir,
            runtime_dir=self._runtime_dir,
            run_id=household.run_id,
            nonce=household.nonce,
            environment={ADDRESS: address, HOST: self._name},
            keeps_record=False,
        )
        self._living = asyncio.create_task(self._live(controller, depot))
        opened = asyncio.create_task(self._opened.wait())
        with patient(PATIENCE_S, waiter=self._name, resource="its opening", holder="this machine"):
            await asyncio.wait([self._living, opened], return_when=asyncio.FIRST_COMPLETED)
        opened.cancel()
        if self._living.done():
            self._living.result()

    async def ping(self) -> None:
        """It can be reached."""

    async def announce(self, controller: Address) -> None:
        """Its processes hear where the controller is now."""
        controller.write(self._runtime_dir)

    async def spawn(self, spec: ProcessSpec) -> dict[str, Any]:
        """Returns who it is. OSError."""
        process = await self._launcher.spawn(spec)
        self._processes[process.pid] = process
        return process.facts

    async def probe(self, pid: int) -> str | None:
        return await self._launcher.probe(self._processes[pid])

    async def look(self, pid: int) -> Look:
        return await self._launcher.look(self._processes[pid])

    async def signal(self, pid: int, signum: int) -> None:
        await self._launcher.signal(self._processes[pid], signum)

    async def wait(self, pid: int) -> End:
        return await self._launcher.wait(self._processes[pid])

    async def read(self, refs: Sequence[PayloadRef]) -> list[Record]:
        """See `Depot`."""
        return await asyncio.to_thread(Depot([self._runtime_dir / POOL], self._name).read, refs)

    async def close(self) -> list[str]:
        """Leave nothing; returns what resisted."""
        self._closing.set()
        with patient(PATIENCE_S, waiter=self._name, resource="the end of its process", holder="this machine"):
            await asyncio.wait([self._living])
        return self._left

    async def _live(self, controller: Address | None, depot: Any) -> None:
        get = partial(records_of, namespace=self._household.namespace)
        async with self._launcher, answering(self._runtime_dir, get):
            self._household.keys.write(self._runtime_dir)
            if controller is not None:
                controller.write(self._runtime_dir)
            self._opened.set()
            watching = asyncio.create_task(self._watch(depot))
            await self._closing.wait()
            watching.cancel()
            self._left = await self._launcher.sweep()

    async def _watch(self, depot: Any) -> None:
        """Ends this process, and so its own, once `depot` has been out of reach for `ALONE_S`."""
        now, missed = asyncio.get_running_loop().time, 0
        heard = now()
        while missed < MISSED or now() < heard + ALONE_S:
            await asyncio.sleep(BETWEEN_ASKS_S)
            try:
                await call(depot.ping, seconds=ANSWER_S, what="an answer", holder="the supervisor's machine")
                heard, missed = now(), 0
            except Exception:  # whatever it is, it is no answer
                missed += 1
        logger.error("%s ends: the supervisor's machine has been out of reach for %g s", self._name, ALONE_S)
        os._exit(1)


async def _see(run_dir: Path, token: str, address: str) -> None:
    for _ in range(int(SEEN_S / BETWEEN_LOOKS_S)):
        with suppress(OSError):
            if (run_dir / TOKEN).read_text() == token:
                return
        await asyncio.sleep(BETWEEN_LOOKS_S)
    raise Unshared(
        f"node {address} does not see {run_dir} as it is here: runs_dir must be a directory that all nodes of "
        "cluster.pools share"
    )
