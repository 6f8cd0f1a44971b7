"""Runs made of stand-ins, in this process or in their own (`python stand_in_run.py DIRECTORY NAME=STAND_IN ...`)."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import penstock
from penstock.config import Config, SupervisorConfig
from penstock.observe import jsonl
from penstock.ports.process_launcher import ProcessSpec
from penstock.supervisor import procfs
from penstock.supervisor.launcher import LocalLauncher
from penstock.supervisor.run_directory import open_run, reopen_run
from penstock.supervisor.supervisor import Outcome, Supervisor

HERE = Path(__file__).parent
SOURCE = Path(penstock.__file__).parents[1]
DEFAULTS = SupervisorConfig()
PATIENCE_S = 120.0


def until(condition: Callable[[], object], seconds: float = PATIENCE_S) -> None:
    """Wait for it. Raises AssertionError if that takes longer."""
    give_up = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < give_up, "waited in vain"
        time.sleep(0.01)


def state_of(run: Run) -> dict[str, Any]:
    """What is recorded of a run."""
    path = run.run_dir / "state.json"
    return dict(json.loads(path.read_text())) if path.exists() else {"status": "none"}


def spec(
    name: str, stand_in: str, *, ready_s: float = 20.0, grace_s: float = 5.0, env: Mapping[str, str] | None = None
) -> ProcessSpec:
    return ProcessSpec(
        name=name,
        role=name.split("-")[0],
        module=f"stand_ins.{stand_in}",
        ready_s=ready_s,
        grace_s=grace_s,
        env={"PYTHONPATH": os.pathsep.join([str(HERE), str(SOURCE)]), **(env or {})},
    )


class Run:
    """One run in `base`; `supervisor` is there once it is being supervised."""

    def __init__(
        self, base: Path, *stages: list[ProcessSpec], settings: SupervisorConfig = DEFAULTS, **sections: Any
    ) -> None:
        """`sections`: other settings of the run."""
        run_id = f"test-{zlib.crc32(str(base).encode()):08x}"
        self.config = Config(runs_dir=str(base), run_id=run_id, supervisor=settings, **sections)
        self.run_dir, self.stages = base / run_id, stages
        self.run_dir.mkdir(parents=True, exist_ok=True)
        self.supervisor: Supervisor | None = None

    @property
    def runtime_dir(self) -> Path:
        """Of its latest life."""
        return Path(jsonl.read_json(self.run_dir / "state.json")["runtime_dir"])

    async def supervise(self) -> Outcome:
        """One life of the run: the first, or the next."""
        is_new = not (self.run_dir / "state.json").exists()
        with open_run(self.config) if is_new else reopen_run(self.run_dir, []) as run:
            async with LocalLauncher(
                run_dir=run.run_dir, runtime_dir=run.runtime_dir, run_id=run.journal.run_id
            ) as launcher:
                self.supervisor = Supervisor(
                    run_dir=run.run_dir,
                    stages=self.stages,
                    launcher=launcher,
                    journal=run.journal,
                    settings=run.config.supervisor,
                )
                return await self.supervisor.run()

    def living(self) -> list[int]:
        """Everything of this run that still runs: what it recorded, and whatever refers to its directory."""
        mark = f"PENSTOCK_RUN_ID={self.run_dir.name}".encode()
        escapees = {int(path.name.partition("-")[2]) for path in self.run_dir.glob("escapee-*")}
        alive = [stat.pid for stat in procfs.table() if stat.state not in "ZX"]
        return [pid for pid in alive if pid in escapees or mark in procfs.environment(pid)]


if __name__ == "__main__":
    run_dir, *words = sys.argv[1:]
    stages = [[spec(*word.split("="))] for word in words]
    asyncio.run(Run(Path(run_dir), *stages).supervise())
