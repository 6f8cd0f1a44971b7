"""Launchers for the processes of a run: on this machine, or on the nodes of a cluster.

A run joins its cluster and reserves resources there before it has a directory. Resources that cannot be had are refused
like any other wrong setting.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.refusal import Refused
from penstock.config import Config
from penstock.control.runtime_files import Keys
from penstock.deadline import reporting_to
from penstock.ports.process_launcher import Launcher
from penstock.processes.layout import slots_of
from penstock.supervisor.child import ADDRESS, HOST
from penstock.supervisor.launcher import LocalLauncher
from penstock.supervisor.run_directory import OpenRun

if TYPE_CHECKING:
    from penstock.cluster.placement import Pools
    from penstock.cluster.slot_assignments import SlotAssignments


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterResources:
    """Resources of a cluster, reserved for a run."""

    pools: Pools
    assignments: SlotAssignments
    address: str
    """Address at which the nodes reach this machine."""


@contextmanager
def reserving(config: Config) -> Iterator[ClusterResources | None]:
    """Reserve the cluster resources of the run while the body runs; yield None without a cluster. Raises `Refused` or
    `ConfigError`."""
    if config.cluster.address is None:
        yield None
        return
    from penstock.cluster.connection import NotConnected, connected
    from penstock.cluster.placement import place

    assignments = slots_of(config)
    try:
        with (
            connected(config.cluster.address, private=config.cluster.private) as address,
            place(config.cluster, assignments.bundles) as pools,
        ):
            yield ClusterResources(pools=pools, assignments=assignments, address=address)
    except NotConnected as error:
        raise Refused(str(error)) from None


@asynccontextmanager
async def launching(run: OpenRun, resources: ClusterResources | None) -> AsyncIterator[Launcher]:
    """Yield the launcher of a run; no process outlives the body."""
    directories: dict[str, Any] = {"run_dir": run.run_dir, "runtime_dir": run.runtime_dir, "run_id": run.journal.run_id}
    if resources is None:
        async with LocalLauncher(**directories) as local:
            yield local
        return
    from penstock.cluster.node_agent import RunContext
    from penstock.cluster.ray_launcher import RayLauncher
    from penstock.runtime.file_service import serving_files

    nonce, keys = secrets.token_hex(16), Keys.make()
    context = RunContext(
        run_id=run.journal.run_id,
        run_dir=run.run_dir,
        token=secrets.token_hex(16),
        namespace=f"penstock-{run.journal.run_id}-{secrets.token_hex(4)}",
        directory=Path.cwd(),
        nonce=nonce,
        keys=keys.of_members(),
    )
    served = [run.runtime_dir, run.run_dir]  # a worker's file may have the same name as the controller's copy
    with reporting_to(lambda stall: run.journal.note("stall", process="supervisor", **asdict(stall))):
        async with (
            serving_files(served, address=resources.address, secret=nonce) as files,
            LocalLauncher(**directories, environment={ADDRESS: resources.address, HOST: files}, nonce=nonce) as local,
            RayLauncher(
                local,
                pools=resources.pools,
                assignments=resources.assignments.by_process,
                context=context,
                keys=keys,
                place_s=run.config.cluster.place_timeout_s,
            ) as launcher,
        ):
            yield launcher
