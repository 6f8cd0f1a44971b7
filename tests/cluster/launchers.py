"""Launchers of runs that stand in: on this machine, and on a cluster of it. As a program (`python launchers.py RUN_DIR
ADDRESS`) a supervisor with a process on that cluster, until the test ends it."""

from __future__ import annotations

import asyncio
import secrets
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "supervisor"))
from stand_in_run import spec as stand_in

from penstock.cluster.connection import connected
from penstock.cluster.node_agent import RunContext
from penstock.cluster.placement import place
from penstock.cluster.ray_launcher import RayLauncher
from penstock.cluster.slot_assignments import assign_slots
from penstock.config.cluster import ClusterConfig
from penstock.control.runtime_files import Keys
from penstock.ports.process_launcher import ProcessSpec
from penstock.runtime.file_service import serving_files
from penstock.supervisor.child import ADDRESS, HOST
from penstock.supervisor.launcher import LocalLauncher
from penstock.supervisor.runtime import runtime_path

POOL = {"slots_per_node": 3, "cpus": 0.01}


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
    pool: Mapping[str, Any] = POOL,
    place_s: float = 30.0,
    in_turns: bool = False,
) -> AsyncIterator[RayLauncher]:
    """All live in `pool`, but a controller."""
    config = ClusterConfig.model_validate({"pools": {"all": pool}, "place_timeout_s": place_s})
    seated = [replace(spec, pool="all") for spec in specs if spec.role != "controller"]
    slots, keys = assign_slots(config, seated, split=[], in_turns=in_turns), Keys.make()
    run_id = f"test-{secrets.token_hex(4)}"
    runtime_dir = runtime_path(run_id)
    context = RunContext(
        run_id=run_id,
        run_dir=run_dir,
        token=secrets.token_hex(4),
        namespace=run_id,
        directory=Path.cwd(),
        nonce=secrets.token_hex(4),
        keys=keys.of_members(),
    )
    with place(config, slots.bundles) as held:
        async with (
            serving_files([runtime_dir, run_dir], address="127.0.0.1", secret=context.nonce) as files,
            LocalLauncher(
                run_dir=run_dir,
                runtime_dir=runtime_dir,
                run_id=run_id,
                nonce=context.nonce,
                environment={ADDRESS: "127.0.0.1", HOST: files},
            ) as local,
            RayLauncher(
                local,
                pools=held,
                assignments=slots.by_process,
                context=context,
                keys=keys,
                place_s=place_s,
            ) as launcher,
        ):
            yield launcher


async def supervise(run_dir: Path) -> None:
    """Says so once its process is ready."""
    spec = stand_in("env-0", "breeds")
    async with ray_launcher(run_dir, [spec]) as launcher:
        process = await launcher.spawn(spec)
        while await process.probe():  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        print(process.pid, flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    with connected(sys.argv[2], private=True):
        asyncio.run(supervise(Path(sys.argv[1])))
