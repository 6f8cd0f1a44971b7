"""Runs whose processes take themselves to be on several machines: each has an address and directories of its own.

The file services of the machines are this very process.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
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
from penstock.control.rank_channel import TrainerAddress
from penstock.control.runtime_files import Address, Keys
from penstock.ports.process_launcher import ProcessSpec
from penstock.processes.layout import prepare, stages
from penstock.runtime.file_service import POOL, FileService
from penstock.runtime.http_server import bind, listening, url_of
from penstock.supervisor.child import ADDRESS, HOST
from penstock.supervisor.launcher import LocalLauncher, LocalProcess
from penstock.supervisor.supervisor import Outcome

HERE = Path(__file__).parent
Serve = Callable[[Sequence[Path], str], AbstractAsyncContextManager[str]]
"""serve(places, secret) -> the URL of a file service, for the length of its body."""
HEAD, TRAINER = "controller", "trainer"
"""Machines are named for the role, or the process, that lives there."""


@dataclass
class Machines:
    """Addresses by name, and what travels between them."""

    addresses: Mapping[str, str]
    networks: Mapping[str, str] = field(default_factory=dict)
    """Network namespaces by name."""
    services: Mapping[str, Serve] = field(default_factory=dict)
    """File services of machines that this process does not see as they see each other."""
    urls: dict[str, str] = field(default_factory=dict)
    """File services by name."""
    lost: int = 0
    """So many of the next records that workers wrote cannot be had."""
    asked: set[str] = field(default_factory=set)
    """Machines that records were had from."""

    async def enter(self, stack: AsyncExitStack, run_dir: Path, runtime_dir: Path, name: str, nonce: str) -> None:
        """The host of a machine begins."""
        directory = self.directory(runtime_dir, name)
        if name != HEAD:
            directory.mkdir()
            for folder in ("ready", "heartbeats", "errors"):
                (runtime_dir / folder).mkdir(exist_ok=True)
            for shared in ("ready", "heartbeats", "errors", Address.FILE):
                (directory / shared).symlink_to(runtime_dir / shared)
            if name != TRAINER:
                trainers = self.directory(runtime_dir, TRAINER) / TrainerAddress.FILE
                (directory / TrainerAddress.FILE).symlink_to(trainers)
        places = [run_dir] if name == HEAD else [directory]
        if name in self.services:
            service = self.services[name](places, nonce)
        else:
            service = self._serving(FileService(places, nonce), name)
        self.urls[name] = await stack.enter_async_context(service)

    @asynccontextmanager
    async def _serving(self, service: FileService, name: str) -> AsyncIterator[str]:
        async def serve(scope: Any, receive: Any, send: Any) -> None:
            if scope["path"].startswith(f"/{POOL}"):
                if name == "env" and self.lost:
                    self.lost -= 1
                    scope = {**scope, "query_string": b""}
                else:
                    self.asked.add(name)
            await service(scope, receive, send)

        listener = bind(self.addresses[name], 0)
        async with listening(serve, listener):
            yield url_of(self.addresses[name], listener)

    def directory(self, runtime_dir: Path, name: str) -> Path:
        """The runtime directory there."""
        return runtime_dir if name == HEAD else runtime_dir / name

    def told(self, spec: ProcessSpec, runtime_dir: Path) -> ProcessSpec:
        """What a process is told of the machine it is on."""
        machine = spec.name if spec.name in self.addresses else spec.role
        env = {
            **spec.env,
            ADDRESS: self.addresses[machine],
            "PENSTOCK_RUNTIME_DIR": str(self.directory(runtime_dir, machine)),
            MACHINE: machine,
            "PYTHONPATH": f"{HERE}:{SOURCE}",
        }
        network = self.networks.get(machine)
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
            await self._machines.enter(self._stack, self.run_dir, self.runtime_dir, name, self.nonce)
            mine = keys if name == HEAD else keys.of_members()
            mine.write(self._machines.directory(self.runtime_dir, name))
        return self

    async def spawn(self, spec: ProcessSpec) -> LocalProcess:
        spec = self._machines.told(spec, self.runtime_dir)
        url = self._machines.urls[spec.env[MACHINE]]
        return await super().spawn(replace(spec, env={**spec.env, HOST: url}))

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._stack.aclose()
        await super().__aexit__(kind, error, trace)


class SpreadRun(Run):
    """The recipe `spell_backward`, shorter; made in the process that supervises it."""

    def __init__(
        self,
        base: Path,
        machines: Machines,
        *,
        steps: int,
        ranks: int = 1,
        model: Mapping[str, Any] | None = None,
        rollout: Mapping[str, Any] | None = None,
        **supervisor: Any,
    ) -> None:
        """Each of the trainer's `ranks` is on a node of its own; several have shards. `model`, `rollout`, `supervisor`:
        more settings."""
        quick = {"heartbeat_s": 0.2, "ready_timeout_s": 120.0, "backoff_s": 0.01}
        super().__init__(
            base,
            settings=SupervisorConfig.model_validate(quick | supervisor),
            model={"max_context": 64, "warm_start": {"steps": 20}, **(model or {})},
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
            rollout={"servers": 2, **(rollout or {})},
            scheduler={"max_staleness": 2},
            trainer={
                "steps": steps,
                "groups_per_step": 8,
                "checkpoint_every": 4,
                "ranks": ranks,
                "distributed": {"strategy": "fsdp" if ranks > 1 else "ddp"},
            },
            cluster={"address": "auto", "pools": {"learn": {"roles": ["actor"], "nodes": ranks}}},
        )
        self.machines = machines
        self.stages = tuple(stages(self.config))
        prepare(self.config, self.run_dir)

    async def supervise(self) -> Outcome:
        before = stand_in_run.LocalLauncher
        stand_in_run.LocalLauncher = partial(SpreadLauncher, self.machines)  # type: ignore[assignment,misc]
        try:
            return await super().supervise()
        finally:
            stand_in_run.LocalLauncher = before  # type: ignore[misc]
