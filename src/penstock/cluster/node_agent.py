"""The node agent: an actor in slots of a pool, which starts and watches processes on its node for the supervisor.

An agent serves the process of its slots, or several processes that take turns there. It contains a local launcher, the
same class that runs on the supervisor's machine.

When the actor ends, its processes end too, through the death pipe and the agent's own janitor. This holds for any
cause: the node, Ray, or the end of the run's supervisor. An agent also ends itself when it cannot reach the
supervisor's machine any more. The supervisor then considers it lost, and its processes would otherwise run beside their
replacements.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ray

from penstock.cluster.connection import call
from penstock.control.rank_channel import TrainerAddress
from penstock.control.runtime_files import Keys, RuntimeFile
from penstock.deadline import warn_if_stalled
from penstock.ports.process_launcher import ProcessSpec
from penstock.runtime.file_service import serving_files
from penstock.supervisor.child import ADDRESS, HOST
from penstock.supervisor.launcher import LocalLauncher, LocalProcess
from penstock.supervisor.runtime import runtime_path

TOKEN = "cluster-token"
"""File in the run directory, written by the supervisor. An agent that reads it knows that it sees the run directory."""
VISIBLE_S = 10.0
"""Limit for a file that one machine writes to a shared file system to appear on another machine."""
POLL_S = 0.2
STALL_WARNING_S = 600.0
PING_EVERY_S, PING_S = 2.0, 5.0
UNREACHABLE_S = 20.0
"""Time without an answer from the supervisor's machine after which an agent ends itself. By default the supervisor
takes longer to start replacements (`supervisor.silent_s`, and Ray's limit for nodes)."""
MIN_MISSED = 2
"""Fewest missed answers in a row before an agent ends itself. So an agent that was itself stopped for `UNREACHABLE_S`
pings once more."""

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunContext:
    """Settings that all node agents of a run share."""

    run_id: str
    run_dir: Path
    token: str
    """Content of the file `TOKEN` in the run directory."""
    namespace: str
    """Ray namespace of the actors."""
    directory: Path
    """Working directory of the run's command. Processes start there too if it exists on their node."""
    nonce: str = field(repr=False)
    keys: Keys = field(repr=False)


class SupervisorProbe:
    """An actor on the supervisor's machine. Its answer tells an agent that the machine can be reached."""

    def ping(self) -> None:
        """Answer, which shows that the machine can be reached."""


class NodeAgent:
    """The actor. Call `open` first, and once; the other methods serve its processes."""

    def __init__(self, name: str, context: RunContext) -> None:
        self._name, self._context = name, context
        self._runtime_dir = runtime_path(context.run_id)
        self._processes: dict[int, LocalProcess] = {}
        self._closing = asyncio.Event()
        self._left: list[str] = []

    async def open(self, probe: Any) -> None:
        """Start the file service, the local launcher and the watch over the supervisor's machine. `probe` is the actor
        there. Raises OSError."""
        address = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        await _check_run_dir(self._context, address)
        with suppress(OSError):
            os.chdir(self._context.directory)
        try:  # Ray starts actors, and so what they start, with a lower priority than its own
            os.setpriority(os.PRIO_PROCESS, 0, os.getpriority(os.PRIO_PROCESS, os.getppid()))
        except OSError as error:
            logger.warning("%s keeps Ray's low priority (%s): start Ray with RAY_worker_niceness=0", self._name, error)
        opened = asyncio.get_running_loop().create_future()
        self._living = asyncio.create_task(self._live(probe, address, opened))
        with warn_if_stalled(STALL_WARNING_S, waiter=self._name, resource="its opening", holder="this machine"):
            await asyncio.wait([self._living, opened], return_when=asyncio.FIRST_COMPLETED)
        if self._living.done():
            self._living.result()

    async def ping(self) -> None:
        """Answer, which shows that the agent can be reached."""

    async def announce(self, addresses: Sequence[RuntimeFile]) -> None:
        """Write the current addresses of the controller and of the trainer for this agent's processes."""
        for address in addresses:
            address.write(self._runtime_dir)

    async def trainer_address(self) -> TrainerAddress | None:
        """Return where the trainer on this node listens for ranks; None before it listens."""
        return TrainerAddress.read(self._runtime_dir)

    async def spawn(self, spec: ProcessSpec, addresses: Sequence[RuntimeFile]) -> dict[str, Any]:
        """Start a process. Returns its identity. Raises OSError."""
        await self.announce(addresses)
        process = await self._launcher.spawn(spec)
        self._processes[process.pid] = process
        return process.facts

    async def call_process(self, pid: int, method: str, *arguments: Any) -> Any:
        """Call a method of a process: `probe`, `look`, `signal` or `wait`."""
        return await getattr(self._processes[pid], method)(*arguments)

    async def close(self) -> list[str]:
        """End all processes of the agent and remove its runtime directory. Returns the things that it could not
        remove."""
        self._closing.set()
        with warn_if_stalled(STALL_WARNING_S, waiter=self._name, resource="the end of its process", holder="this node"):
            await asyncio.wait([self._living])
        return self._left

    async def _live(self, probe: Any, address: str, opened: asyncio.Future[None]) -> None:
        context = self._context
        async with (
            serving_files([self._runtime_dir], address=address, secret=context.nonce) as files,
            LocalLauncher(
                run_dir=context.run_dir,
                runtime_dir=self._runtime_dir,
                run_id=context.run_id,
                nonce=context.nonce,
                environment={ADDRESS: address, HOST: files},
                keeps_journal=False,
            ) as self._launcher,
        ):
            context.keys.write(self._runtime_dir)
            opened.set_result(None)
            watching = asyncio.create_task(self._watch(probe))
            await self._closing.wait()
            watching.cancel()
            self._left = await self._launcher.sweep()

    async def _watch(self, probe: Any) -> None:
        """End this actor, and with it its processes, once `probe` has been out of reach for `UNREACHABLE_S`."""
        now, missed = asyncio.get_running_loop().time, 0
        answered = now()
        while missed < MIN_MISSED or now() < answered + UNREACHABLE_S:
            await asyncio.sleep(PING_EVERY_S)
            try:
                await call(probe.ping, seconds=PING_S, what="an answer", holder="the supervisor's machine")
                answered, missed = now(), 0
            except Exception:  # any error counts as a missed answer
                missed += 1
        logger.error("%s ends: the supervisor's machine has been unreachable for %g s", self._name, UNREACHABLE_S)
        os._exit(1)


async def _check_run_dir(context: RunContext, address: str) -> None:
    """Check that this node sees the run directory of the supervisor's machine. Raises OSError."""
    for _ in range(int(VISIBLE_S / POLL_S)):
        with suppress(OSError):
            if (context.run_dir / TOKEN).read_text() == context.token:
                return
        await asyncio.sleep(POLL_S)
    raise OSError(
        f"node {address} does not see {context.run_dir} as the supervisor's machine does: runs_dir must be a directory "
        "that all nodes of cluster.pools share"
    )
