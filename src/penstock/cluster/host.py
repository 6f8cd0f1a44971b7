"""The supervisor's deputy on a node: an actor in a slot of a pool, which does there for one process of a run what the
local launcher does for all of them on the supervisor's machine, by being one.

Whatever ends the actor (its node, Ray, the end of the run's supervisor) ends the process: through the death pipe, and
through the janitor of this very host.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray

from penstock.cluster.calls import call
from penstock.cluster.payloads import POOL, READ_S, Courier, Record, read_records
from penstock.ports import End, Look, ProcessSpec
from penstock.supervisor.launcher import LocalLauncher, LocalProcess
from penstock.supervisor.runtime import runtime_path
from penstock.types import PayloadRef

ADDRESS, HOST = "PENSTOCK_ADDRESS", "PENSTOCK_HOST"
"""Environment variables: where a process is reached by other machines, and who started it there."""
ALONE = {"RAY_kill_child_processes_on_worker_exit": "0"}
"""Environment of a host: Ray would kill the janitor together with the actor, and what it is there for would stay."""
TOKEN = "cluster-token"
"""In the run directory, written there by the supervisor."""
SEEN_S = 10.0
"""For what one machine writes to a shared file system to be seen on another."""
BETWEEN_LOOKS_S = 0.2


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
    nonce: str = field(repr=False)
    environment: Mapping[str, str] = field(repr=False)
    """Of all processes."""
    files: Mapping[str, bytes] = field(repr=False)
    """That every process finds in its runtime directory."""


async def read_from(host: str, refs: Sequence[PayloadRef], *, namespace: str) -> Sequence[Record]:
    """Records that `host` has. RayError, OSError, Stalled."""
    actor = await asyncio.to_thread(ray.get_actor, host, namespace)
    records: Sequence[Record] = await call(actor.read, refs, seconds=READ_S, what="records", holder=f"host {host}")
    return records


class Depot:
    """An actor on the supervisor's machine: gives others the records that its processes have in the pool."""

    def __init__(self, pool: Path) -> None:
        self._pool = pool

    def read(self, refs: Sequence[PayloadRef]) -> list[Record]:
        return read_records(self._pool, refs)


class Host:
    """An actor. It is opened once, before anything else."""

    def __init__(self, name: str, household: Household) -> None:
        self._name, self._household = name, household
        self._runtime_dir = runtime_path(f"{household.run_id}.{secrets.token_hex(3)}")
        self._processes: dict[int, LocalProcess] = {}

    async def open(self, files: Mapping[str, bytes]) -> None:
        """`files`: what every process finds in its runtime directory by now. Raises `Unshared`, OSError."""
        household, address = self._household, ray.util.get_node_ip_address()
        await _see(household.run_dir, household.token, address)
        self._launcher = LocalLauncher(
            run_dir=household.run_dir,
            runtime_dir=self._runtime_dir,
            run_id=household.run_id,
            nonce=household.nonce,
            environment={**household.environment, ADDRESS: address, HOST: self._name},
            keeps_record=False,
        )
        await self._launcher.__aenter__()
        self.write({**household.files, **files})
        self._courier = Courier(runtime_dir=self._runtime_dir, pool=self._runtime_dir / POOL, read=self._read_from)

    async def spawn(self, spec: ProcessSpec) -> dict[str, Any]:
        """Returns what is known of it, its pid among that. OSError."""
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

    async def tell(self, files: Mapping[str, bytes]) -> None:
        """The processes find these in their runtime directory, instead of what they found there before."""
        self.write(files)

    async def read(self, refs: Sequence[PayloadRef]) -> list[Record]:
        """What the process here has written to the pool."""
        return await asyncio.to_thread(read_records, self._runtime_dir / POOL, refs)

    async def close(self) -> list[str]:
        """Leave nothing; returns what resisted."""
        await self._courier.close()
        leftovers = await self._launcher.sweep()
        await self._launcher.__aexit__(None, None, None)
        return leftovers

    def write(self, files: Mapping[str, bytes]) -> None:
        write_files(self._runtime_dir, files)

    async def _read_from(self, host: str, refs: Sequence[PayloadRef]) -> Sequence[Record]:
        return await read_from(host, refs, namespace=self._household.namespace)


def write_files(directory: Path, files: Mapping[str, bytes]) -> None:
    """Each whole or not at all, for their owner alone."""
    for name, content in files.items():
        unfinished = directory / f".{name}.{os.getpid()}"
        with os.fdopen(os.open(unfinished, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600), "wb") as file:
            file.write(content)
        unfinished.replace(directory / name)


async def _see(run_dir: Path, token: str, address: str) -> None:
    for _ in range(int(SEEN_S / BETWEEN_LOOKS_S)):
        with suppress(OSError):
            if (run_dir / TOKEN).read_text() == token:
                return
        await asyncio.sleep(BETWEEN_LOOKS_S)
    raise Unshared(
        f"node {address} does not see {run_dir}: on a cluster runs_dir is a directory that all its nodes share"
    )
