"""Where the processes of a run are started: on this machine, or on the nodes of a cluster.

A cluster is joined, and room in it taken, before the run has a directory: what cannot be had is refused like any other
setting.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.cli.preflight import Refused
from penstock.config import Config
from penstock.control.keys import Keys
from penstock.deadline import reporting_to
from penstock.ports import Launcher
from penstock.processes.layout import seating_of
from penstock.supervisor.child import ADDRESS, HOST
from penstock.supervisor.launcher import LocalLauncher
from penstock.supervisor.run_directory import OpenRun

if TYPE_CHECKING:
    from penstock.cluster.placement import Pools
    from penstock.cluster.seats import Seating


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """In a cluster, held for a run."""

    pools: Pools
    seating: Seating
    address: str
    """At which the nodes reach this machine."""


@contextmanager
def room(config: Config) -> Iterator[Room | None]:
    """What the run needs of its cluster, for the length of the body; None if it has none. Raises `Refused`,
    `ConfigError`."""
    if config.cluster.address is None:
        yield None
        return
    from penstock.cluster.connection import NotConnected, connected
    from penstock.cluster.placement import place

    seats = seating_of(config)
    try:
        with connected(config.cluster.address) as address, place(config.cluster, seats.bundles) as pools:
            yield Room(pools=pools, seating=seats, address=address)
    except NotConnected as error:
        raise Refused(str(error)) from None


@asynccontextmanager
async def launching(run: OpenRun, held: Room | None) -> AsyncIterator[Launcher]:
    """For the length of the body, which leaves nothing."""
    if held is None:
        async with LocalLauncher(**_places(run)) as local:
            yield local
        return
    from penstock.cluster.host import Household
    from penstock.cluster.launcher import LOCAL, RayLauncher

    nonce, keys = secrets.token_hex(16), Keys.make()
    household = Household(
        run_id=run.run_id,
        run_dir=run.run_dir,
        token=secrets.token_hex(16),
        namespace=f"penstock-{run.run_id}-{secrets.token_hex(4)}",
        directory=Path.cwd(),
        nonce=nonce,
        keys=keys.of_members(),
    )
    here = {ADDRESS: held.address, HOST: LOCAL}
    with reporting_to(lambda stall: run.record.note("stall", process="supervisor", **asdict(stall))):
        async with (
            LocalLauncher(**_places(run), environment=here, nonce=nonce) as local,
            RayLauncher(
                local,
                pools=held.pools,
                seats=held.seating.seats,
                household=household,
                keys=keys,
                runtime_dir=run.runtime_dir,
                place_s=run.config.cluster.place_timeout_s,
            ) as launcher,
        ):
            yield launcher


def _places(run: OpenRun) -> dict[str, Any]:
    return {"run_dir": run.run_dir, "runtime_dir": run.runtime_dir, "run_id": run.run_id}
