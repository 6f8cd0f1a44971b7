"""Launchers of runs that stand in: on this machine, and on a cluster of it."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from ray_machines import machines

from penstock.cluster.host import Household
from penstock.cluster.launcher import LOCAL, RayLauncher
from penstock.cluster.placement import place
from penstock.cluster.seats import seating
from penstock.config.cluster import ClusterConfig
from penstock.control.keys import Keys
from penstock.ports import ProcessSpec
from penstock.supervisor.child import ADDRESS, HOST
from penstock.supervisor.launcher import LocalLauncher
from penstock.supervisor.runtime import runtime_path

POOLS = {"play": {"roles": ["environment", "rollout"], "slots_per_node": 3, "cpus": 0.01}}


@asynccontextmanager
async def local_launcher(run_dir: Path) -> AsyncIterator[LocalLauncher]:
    run_id = f"test-{secrets.token_hex(4)}"
    async with LocalLauncher(run_dir=run_dir, runtime_dir=runtime_path(run_id), run_id=run_id) as launcher:
        yield launcher


@asynccontextmanager
async def ray_launcher(
    run_dir: Path,
    specs: Sequence[ProcessSpec],
    *,
    pools: Mapping[str, Any] = POOLS,
    place_s: float = 30.0,
) -> AsyncIterator[RayLauncher]:
    machines()
    config = ClusterConfig.model_validate({"pools": pools, "place_timeout_s": place_s})
    seats, keys, run_id = seating(config, specs), Keys.make(), f"test-{secrets.token_hex(4)}"
    household = Household(
        run_id=run_id,
        run_dir=run_dir,
        token=secrets.token_hex(4),
        namespace=run_id,
        directory=Path.cwd(),
        nonce=secrets.token_hex(4),
        keys=keys.of_members(),
    )
    local = LocalLauncher(
        run_dir=run_dir,
        runtime_dir=runtime_path(run_id),
        run_id=run_id,
        nonce=household.nonce,
        environment={ADDRESS: "127.0.0.1", HOST: LOCAL},
    )
    with place(config, seats.bundles) as held:
        async with (
            local,
            RayLauncher(
                local,
                pools=held,
                seats=seats.seats,
                household=household,
                keys=keys,
                runtime_dir=runtime_path(run_id),
                place_s=place_s,
            ) as launcher,
        ):
            yield launcher
