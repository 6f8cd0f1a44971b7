"""Runs whose processes take themselves to be on several machines: each has an address and directories of its own.

The hosts that processes ask for records are this very process; instead of a cluster's object store they read files.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

sys.path.insert(0, str(Path(__file__).parent.parent / "supervisor"))
import stand_in_run
from spread_process import MACHINE, NETWORK
from stand_in_run import SOURCE, Run

from penstock.config import SupervisorConfig
from penstock.control.address import Address
from penstock.control.keys import Keys
from penstock.ports import PayloadsLost, ProcessSpec
from penstock.processes.layout import prepare, stages
from penstock.processes.pool import POOL
from penstock.store.payloads import answering, read_records
from penstock.supervisor.child import ADDRESS, HOST
from penstock.supervisor.launcher import LocalLauncher
from penstock.supervisor.supervisor import Outcome
from penstock.types import PayloadRef

HERE = Path(__file__).parent
Depot = Callable[[Path, Sequence[PayloadRef]], Awaitable[list[bytes]]]
"""depot(directory, refs) -> what lies there; raises `PayloadsLost`."""
HEAD = "controller"
"""Machines are named for the role that lives there."""


@dataclass
class Machines:
    """Addresses by name, and what travels between them."""

    addresses: Mapping[str, str]
    networks: Mapping[str, str] = field(default_factory=dict)
    """Network namespaces by name."""
    depots: Mapping[str, Depot] = field(default_factory=dict)
    """Who gives what lies on a machine, where that is not read from here."""
    lost: int = 0
    """So many of the next records that workers wrote cannot be had."""
    asked: list[str] = field(default_factory=list)
    """Machines that records were had from."""

    def enter(self, stack: AsyncExitStack, run_dir: Path, runtime_dir: Path, name: str) -> Any:
        """The host of a machine begins."""
        directory = self.directory(runtime_dir, name)
        if name != HEAD:
            directory.mkdir()
            for folder in ("ready", "heartbeats", "errors"):
                (runtime_dir / folder).mkdir(exist_ok=True)
            for shared in ("ready", "heartbeats", "errors", Address.FILE):
                (directory / shared).symlink_to(runtime_dir / shared)
        return stack.enter_async_context(answering(directory, partial(self._get, run_dir, runtime_dir)))

    async def _get(self, run_dir: Path, runtime_dir: Path, name: str, refs: Sequence[PayloadRef]) -> list[bytes]:
        if name == "env" and self.lost:
            self.lost -= 1
            raise PayloadsLost(f"host {name} is gone, and {refs[0].file} with it")
        self.asked.append(name)
        if name in self.depots:
            return await self.depots[name](self.directory(runtime_dir, name) / POOL, refs)
        directory = run_dir if name == HEAD else self.directory(runtime_dir, name)
        return read_records([directory / POOL], refs, host=name)

    def directory(self, runtime_dir: Path, name: str) -> Path:
        """The runtime directory there."""
        return runtime_dir if name == HEAD else runtime_dir / name

    def told(self, spec: ProcessSpec, runtime_dir: Path) -> ProcessSpec:
        """What a process is told of the machine it is on."""
        env = {
            **spec.env,
            ADDRESS: self.addresses[spec.role],
            HOST: spec.role,
            "PENSTOCK_RUNTIME_DIR": str(self.directory(runtime_dir, spec.role)),
            MACHINE: spec.role,
            "PYTHONPATH": f"{HERE}:{SOURCE}",
        }
        network = self.networks.get(spec.role)
        return replace(spec, module="spread_process", env=env | ({NETWORK: network} if network else {}))


class SpreadLauncher(LocalLauncher):
    """The local one, with a host for each machine."""

    def __init__(self, machines: Machines, **places: Any) -> None:
        super().__init__(**places)
        self._machines, self._stack = machines, AsyncExitStack()

    async def __aenter__(self) -> Self:
        await super().__aenter__()
        keys = Keys.make()
        for name in self._machines.addresses:
            await self._machines.enter(self._stack, self._run_dir, self._runtime_dir, name)
            mine = keys if name == HEAD else keys.of_members()
            mine.write(self._machines.directory(self._runtime_dir, name))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()
        await super().__aexit__(kind, error, trace)


class SpreadRun(Run):
    """The quickstart, shorter; made in the process that supervises it."""

    def __init__(self, base: Path, machines: Machines, *, steps: int, ranks: int = 1, **supervisor: Any) -> None:
        """Each of the trainer's `ranks` is on a node of its own."""
        super().__init__(
            base,
            settings=SupervisorConfig(heartbeat_s=0.2, ready_timeout_s=120.0, backoff_s=0.01, **supervisor),
            model={"max_context": 64, "warm_start": {"steps": 20}},
            data={
                "source": "reasoning_gym",
                "dataset": "spell_backward",
                "options": {"min_word_len": 3, "max_word_len": 5},
                "eval_tasks": 8,
            },
            env={
                "name": "single_turn",
                "options": {"prompt": "{metadata[word]}"},
                "group_size": 4,
                "max_new_tokens": 8,
                "workers": 2,
            },
            rollout={"servers": 2},
            scheduler={"max_staleness": 2},
            trainer={"steps": steps, "groups_per_step": 8, "checkpoint_every": 4, "ranks": ranks},
            cluster={"address": "auto", "pools": {"learn": {"roles": ["actor"], "nodes": ranks}}},
        )
        self.machines = machines
        told = [[machines.told(spec, self.runtime_dir) for spec in stage] for stage in stages(self.config)]
        self.stages = tuple(told)
        prepare(self.config, self.run_dir)

    async def supervise(self) -> Outcome:
        before = stand_in_run.LocalLauncher
        stand_in_run.LocalLauncher = partial(SpreadLauncher, self.machines)  # type: ignore[assignment,misc]
        try:
            return await super().supervise()
        finally:
            stand_in_run.LocalLauncher = before  # type: ignore[misc]
