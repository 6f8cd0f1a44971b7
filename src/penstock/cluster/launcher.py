"""Starts the processes of a run on the nodes of a Ray cluster: each through the host (`host`) in its seat of a pool.

What lives in no pool is started by the local launcher, the controller among that. When a node is gone, so are its hosts
and their processes; whoever is started again gets a slot on a node that lives.
"""

from __future__ import annotations

import asyncio
import secrets
import signal
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from penstock.cluster.calls import call, end_of
from penstock.cluster.host import TOKEN, Host, Household
from penstock.cluster.placement import Pools, Slot, living
from penstock.cluster.records import ASIDE, Depot, records_of
from penstock.cluster.seats import Seat
from penstock.config.errors import ConfigError
from penstock.control.address import Address
from penstock.control.keys import Keys
from penstock.deadline import Stalled, deadline, holding
from penstock.ports import End, Look, ProcessHandle, ProcessSpec
from penstock.store.payloads import POOL, answering
from penstock.supervisor.launcher import LocalLauncher

CONTROLLER = "controller"
LOCAL = "supervisor"
"""Who has what processes of the supervisor's machine write to the pool."""
ALONE = {"RAY_kill_child_processes_on_worker_exit": "0"}
"""Environment of a host: Ray would kill the janitor together with the actor, and what it is there for would stay."""
START_S = 180.0
"""For Ray to start an actor, and for that to import what it needs."""
ASK_S = 5.0
"""For a host to answer: it does nothing else."""
SPAWN_S, CLOSE_S = 30.0, 20.0
"""For all that a process's predecessor left to be ended, too."""
NODES_S = 30.0
"""For Ray to say which nodes there are."""
LOST_S = 10.0
"""That a host may be out of reach, before its process is."""
DEAD_S = 45.0
"""In which Ray finds out that a node is gone, beyond that."""
BETWEEN_LOOKS_S = 0.5


@dataclass(eq=False, slots=True, kw_only=True)
class Remote:
    """A host, as it is seen from here."""

    name: str
    slot: Slot
    actor: Any
    controller: Address | None = None
    """Where it was told that the controller is."""
    gone: str = ""
    """Why it is no more."""

    def __str__(self) -> str:
        return f"host {self.name} on {self.slot.node.address}"

    async def ask(self, method: str, *arguments: Any, seconds: float = ASK_S) -> Any:
        """Raises what it raises; RayError if it cannot be reached; Stalled."""
        asked = getattr(self.actor, method)
        return await call(asked, *arguments, seconds=seconds, what=f"{method} of {self.name}", holder=str(self))

    async def hear_of(self, controller: Address | None) -> None:
        """So that its process does. Raises as `ask` does."""
        if controller != self.controller:
            await self.ask("announce", controller)
            self.controller = controller

    def give_up(self, why: str) -> None:
        """It and its process are no more, whatever they are doing."""
        self.gone = self.gone or why
        ray.kill(self.actor)


@dataclass(eq=False, slots=True, kw_only=True)
class HostedProcess:
    """One process on a node."""

    spec: ProcessSpec
    host: Remote
    facts: Mapping[str, Any]
    end: End | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    waiting: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        return int(self.facts["pid"])


class RayLauncher:
    """`ports.Launcher` on a cluster. An async context manager, within that of the local launcher."""

    def __init__(
        self,
        local: LocalLauncher,
        *,
        pools: Pools,
        seats: Mapping[str, Seat],
        household: Household,
        keys: Keys,
        runtime_dir: Path,
        place_s: float,
    ) -> None:
        """`keys`, `runtime_dir`: of the controller. `place_s`: to find room for what a dead node held."""
        self._local, self._pools, self._seats, self._household = local, pools, seats, household
        self._keys, self._runtime_dir, self._place_s = keys, runtime_dir, place_s
        self._hosts: dict[Seat, Remote] = {}
        self._opening = {seat: asyncio.Lock() for seat in seats.values()}
        """Held by who looks for the host of a seat."""
        self._controller: Address | None = None
        """Where it is, if it has said so."""
        self._replacing = asyncio.Lock()
        self._here = AsyncExitStack()
        """What this machine has beside the local launcher."""

    async def __aenter__(self) -> Self:
        household = self._household
        (household.run_dir / TOKEN).write_text(household.token)
        self._keys.write(self._runtime_dir)
        directories = [household.run_dir / POOL, self._runtime_dir / POOL]
        depot = ray.remote(concurrency_groups={ASIDE: 1})(Depot)  # type: ignore[call-overload]
        place = {**_here(), "name": LOCAL, "namespace": household.namespace}
        self._depot: Any = depot.options(**place).remote(directories, LOCAL)
        await call(self._depot.ping, seconds=START_S, what="its start", holder="Ray on this machine")
        get = partial(records_of, namespace=household.namespace)
        await self._here.enter_async_context(answering(self._runtime_dir, get))
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._close_hosts()
        await self._here.aclose()
        ray.kill(self._depot)
        (self._household.run_dir / TOKEN).unlink(missing_ok=True)

    async def spawn(self, spec: ProcessSpec) -> ProcessHandle:
        seat = self._seats.get(spec.name)
        if seat is None:
            return await self._local.spawn(spec)
        try:
            seconds = START_S + self._place_s * (len(self._seats) + 1)
            async with holding(
                self._opening[seat], seconds, waiter=spec.name, resource="its host", holder="who shares its seat"
            ):
                host = await self._host_of(seat)
            facts = await _spawned(host, spec)
        except (RayError, ConfigError) as error:
            raise OSError(end_of(error) if isinstance(error, RayError) else str(error)) from None
        process = HostedProcess(spec=spec, host=host, facts={**facts, "node": host.slot.node.address})
        process.waiting = asyncio.create_task(self._await_end(process))
        return process

    async def probe(self, process: ProcessHandle) -> str | None:
        if not isinstance(process, HostedProcess):
            missing = await self._local.probe(process)
            if missing is None and process.spec.role == CONTROLLER:
                self._controller = Address.read(self._runtime_dir)
            return missing
        try:
            await process.host.hear_of(self._controller)
            answer: str | None = await process.host.ask("probe", process.pid)
        except (RayError, Stalled):
            return f"{process.host} does not answer"
        return answer

    async def look(self, process: ProcessHandle) -> Look:
        if not isinstance(process, HostedProcess):
            return await self._local.look(process)
        try:
            await process.host.hear_of(self._controller)
            told: Look = await process.host.ask("look", process.pid)
        except (RayError, Stalled):
            return Look()
        return told

    async def signal(self, process: ProcessHandle, signum: int) -> None:
        if not isinstance(process, HostedProcess):
            return await self._local.signal(process, signum)
        if process.end is not None:
            return None
        try:
            await process.host.ask("signal", process.pid, signum)
        except (RayError, Stalled):
            if signum == signal.SIGKILL:
                process.host.give_up(f"{process.host} did not answer")
        return None

    async def wait(self, process: ProcessHandle) -> End:
        if not isinstance(process, HostedProcess):
            return await self._local.wait(process)
        await process.ended.wait()
        assert process.end is not None
        return process.end

    async def sweep(self) -> list[str]:
        return await self._close_hosts() + await self._local.sweep()

    async def _close_hosts(self) -> list[str]:
        hosts, self._hosts = list(self._hosts.values()), {}
        left = await asyncio.gather(*(_close(host) for host in hosts))
        return [f"{what} on {host.slot.node.address}" for host, each in zip(hosts, left, strict=True) for what in each]

    async def _host_of(self, seat: Seat) -> Remote:
        """The one there is, or a new one. RayError, OSError, DoesNotFit."""
        host = self._hosts.get(seat)
        if host is not None and not host.gone and not await _answers_again(host):
            host.give_up(f"{host} is out of reach")
        while host is None or host.gone:
            slot = await self._slot_of(seat)
            names = [name for name, taken in self._seats.items() if taken == seat]
            host = self._hosts[seat] = self._start("+".join(names), slot)
            try:
                await self._open(host)
            except BaseException:
                host.give_up("it could not be opened")
                raise
        return host

    def _start(self, name: str, slot: Slot) -> Remote:
        household, name = self._household, f"{name}-{secrets.token_hex(3)}"
        actor = ray.remote(Host).options(
            **slot.options(), name=name, namespace=household.namespace, runtime_env={"env_vars": ALONE}
        )
        return Remote(name=name, slot=slot, actor=actor.remote(name, household), controller=self._controller)

    async def _open(self, host: Remote) -> None:
        """Returns also if its node is gone meanwhile: then so is the host."""
        opening = asyncio.create_task(host.ask("open", host.controller, self._depot, seconds=START_S))
        try:
            while not opening.done():
                await asyncio.wait([opening], timeout=BETWEEN_LOOKS_S)
                if not opening.done() and not await _is_alive(host.slot):
                    host.give_up("its node is gone")
                    return
            opening.result()
        except ActorUnavailableError:
            if not await _is_lost(host.slot):
                raise
            host.give_up("its node is gone")
        except RayActorError:
            if await _is_alive(host.slot):
                raise
            host.give_up("its node is gone")
        finally:
            opening.cancel()

    async def _slot_of(self, seat: Seat) -> Slot:
        """On a living node: on another one than before, with all that lived beside it, if that is gone."""
        waiter, seconds = f"seat {seat.bundle} of pool {seat.pool}", self._place_s * (len(self._seats) + 1)
        async with holding(self._replacing, seconds, waiter=waiter, resource="its turn", holder="other seats"):
            slot = self._pools.at(seat)
            if await _is_alive(slot):
                return slot
            async with deadline(2 * self._place_s + NODES_S, waiter=waiter, resource="a node", holder="Ray"):
                await asyncio.to_thread(self._pools.replace, slot.part, within_s=self._place_s)
            return self._pools.at(seat)

    async def _await_end(self, process: HostedProcess) -> None:
        """Whatever ends it: it itself, or its host, or that nothing is heard of that any more."""
        host = process.host
        while process.end is None:
            try:
                process.end = await host.actor.wait.remote(process.pid)
            except ActorUnavailableError:
                if not await _answers_again(host):
                    host.give_up(f"{host} is out of reach")
            except RayError as error:
                host.give_up(f"{host} is gone: {end_of(error)}")
                process.end = End(lost=host.gone)
        process.ended.set()


def _here() -> dict[str, Any]:
    """Options of an actor on this machine that takes no room, and is started again when it dies."""
    node_id = ray.get_runtime_context().get_node_id()
    return {
        "num_cpus": 0,
        "max_restarts": -1,
        "scheduling_strategy": NodeAffinitySchedulingStrategy(node_id, soft=False),
    }


async def _spawned(host: Remote, spec: ProcessSpec) -> Mapping[str, Any]:
    """What is known of the process. A host that does not say whether it has started one is given up, and with it what
    it may have started."""
    try:
        facts: Mapping[str, Any] = await host.ask("spawn", spec, seconds=SPAWN_S)
    except (RayError, Stalled):
        host.give_up(f"{host} did not answer")
        raise
    return facts


async def _close(host: Remote) -> Sequence[str]:
    """Leave nothing of it. What its janitor does when it cannot be asked is not known here."""
    left: Sequence[str] = []
    if not host.gone:
        try:
            left = await host.ask("close", seconds=CLOSE_S)
        except Stalled as error:
            left = [str(error)]
        except RayError:
            """It is gone, and its janitor does what it would have done."""
    host.give_up("it was closed")
    return left


async def _is_alive(slot: Slot) -> bool:
    """Whether Ray takes its node for living."""
    async with deadline(NODES_S, waiter="the run", resource="the nodes of the cluster", holder="Ray"):
        return slot.node.node_id in await asyncio.to_thread(living)


async def _is_lost(slot: Slot) -> bool:
    """Whether Ray finds out that its node is gone."""
    for _ in range(int(DEAD_S / BETWEEN_LOOKS_S)):
        if not await _is_alive(slot):
            return True
        await asyncio.sleep(BETWEEN_LOOKS_S)
    return False


async def _answers_again(host: Remote) -> bool:
    """At once, or before long."""
    for _ in range(int(LOST_S / BETWEEN_LOOKS_S)):
        try:
            await host.ask("ping")
            return True
        except ActorUnavailableError:
            await asyncio.sleep(BETWEEN_LOOKS_S)
        except (RayError, Stalled):
            return False
    return False
