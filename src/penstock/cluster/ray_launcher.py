"""The launcher of processes on the nodes of a Ray cluster. The node agent in the slot of a process starts it.

The local launcher starts the processes that have no pool; the controller is one of them. When a node is gone, its
agents and their processes are gone too. A restarted process gets a slot on a living node.
"""

from __future__ import annotations

import asyncio
import secrets
import signal
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import ray
from ray.exceptions import ActorUnavailableError, RayActorError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from penstock.cluster.connection import call, end_of
from penstock.cluster.node_agent import TOKEN, NodeAgent, RunContext, SupervisorProbe
from penstock.cluster.placement import Pools, Slot, living
from penstock.cluster.slot_assignments import SlotAssignment
from penstock.config.invalid_settings import ConfigError
from penstock.control.rank_channel import TrainerAddress
from penstock.control.runtime_files import Address, Keys, RuntimeFile
from penstock.deadline import Stalled, deadline, holding
from penstock.ports.process_launcher import End, Look, ProcessHandle, ProcessSpec
from penstock.supervisor.launcher import LocalLauncher

TRAINER = "trainer"
PROBE_NAME = "supervisor"
"""Name of the actor on the supervisor's machine."""
AGENT_ENVIRONMENT = {"RAY_kill_child_processes_on_worker_exit": "0"}
"""Environment of a node agent. Without it Ray kills the janitor together with the actor, and the processes that the
janitor should kill would survive."""
START_S = 180.0
"""Limit for Ray to start an actor, and for the actor to import its modules."""
CALL_S = 5.0
"""Limit for an agent to answer; an agent has no other work."""
SPAWN_S, CLOSE_S = 30.0, 20.0
"""Limits for starting a process and for closing an agent. Both include the time to kill what earlier processes left."""
NODES_S = 30.0
"""Limit for Ray to list the nodes."""
LOST_S = 10.0
"""Time that an agent may be out of reach before its processes count as lost."""
DEAD_S = 45.0
"""Further time in which Ray notices that a node is gone."""
POLL_S = 0.5


@dataclass(eq=False, slots=True, kw_only=True)
class NodeAgentHandle:
    """A node agent, as the launcher sees it."""

    name: str
    slot: Slot
    actor: Any
    runtime_dir: Path
    """The controller's runtime directory. It holds the addresses of the controller and of the trainer."""
    known: dict[str, RuntimeFile] = field(default_factory=dict)
    """Addresses that the agent knows, by the names of their files."""
    lost: str = ""
    """Why the agent is lost; empty while it lives."""

    def __str__(self) -> str:
        return f"node agent {self.name} on {self.slot.held.node.address}"

    async def call(self, method: str, *arguments: Any, limit_s: float = CALL_S) -> Any:
        """Call a method of the agent. Raises what the method raises, `Stalled`, and `RayError` if the agent is out of
        reach."""
        remote = getattr(self.actor, method)
        return await call(remote, *arguments, seconds=limit_s, what=f"{method} of {self.name}", holder=str(self))

    async def spawn(self, spec: ProcessSpec) -> RayProcess:
        """Start a process. Kill an agent that does not answer; this also kills the process that it may have started."""
        news = self._unknown_addresses()
        try:
            facts = await self.call("spawn", spec, list(news.values()), limit_s=SPAWN_S)
        except (RayError, Stalled):
            self.kill(f"{self} did not answer")
            raise
        self.known |= news
        process = RayProcess(spec=spec, agent=self, facts={**facts, "node": self.slot.held.node.address})
        process.following = asyncio.create_task(process.follow())
        return process

    async def send_addresses(self) -> None:
        """Send the addresses that are new to the agent, for its processes. Raises the same errors as `call`."""
        if news := self._unknown_addresses():
            await self.call("announce", list(news.values()))
            self.known |= news

    async def fetch_trainer_address(self) -> None:
        """Store the address of the trainer on this node, for all other agents. Raises the same errors as `call`."""
        address: TrainerAddress | None = await self.call("trainer_address")
        if address:
            self.known[address.FILE] = address
            address.write(self.runtime_dir)

    async def answers_again(self) -> bool:
        """Return whether the agent answers within `LOST_S`."""
        for _ in range(int(LOST_S / POLL_S)):
            try:
                await self.call("ping")
                return True
            except ActorUnavailableError:
                await asyncio.sleep(POLL_S)
            except (RayError, Stalled):
                return False
        return False

    async def close(self) -> list[str]:
        """Close the agent and end its processes. Returns the things that it could not remove. If the agent is out of
        reach, its janitor cleans up, and this launcher does not learn the outcome."""
        left: list[str] = []
        if not self.lost:
            try:
                left = await self.call("close", limit_s=CLOSE_S)
            except Stalled as error:
                left = [str(error)]
            except RayError:
                """The agent is gone, and its janitor cleans up."""
        self.kill("it was closed")
        return [f"{item} on {self.slot.held.node.address}" for item in left]

    def kill(self, reason: str) -> None:
        """Kill the agent, and with it its processes."""
        self.lost = self.lost or reason
        ray.kill(self.actor)

    def _unknown_addresses(self) -> dict[str, RuntimeFile]:
        found = (kind.read(self.runtime_dir) for kind in (Address, TrainerAddress))
        return {each.FILE: each for each in found if each and self.known.get(each.FILE) != each}


@dataclass(eq=False, slots=True, kw_only=True)
class RayProcess:
    """One process on a node."""

    spec: ProcessSpec
    agent: NodeAgentHandle
    facts: Mapping[str, Any]
    end: End | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    following: asyncio.Task[None] | None = None

    @property
    def pid(self) -> int:
        return int(self.facts["pid"])

    async def probe(self) -> str | None:
        try:
            await self.agent.send_addresses()
            missing: str | None = await self.agent.call("call_process", self.pid, "probe")
            if missing is not None and self.spec.role == TRAINER:  # its ranks find it first, then it becomes ready
                await self.agent.fetch_trainer_address()
        except (RayError, Stalled):
            return f"{self.agent} does not answer"
        return missing

    async def look(self) -> Look:
        try:
            await self.agent.send_addresses()
            found: Look = await self.agent.call("call_process", self.pid, "look")
        except (RayError, Stalled):
            return Look()
        return found

    async def signal(self, signum: int) -> None:
        if self.end is not None:
            return
        try:
            await self.agent.call("call_process", self.pid, "signal", signum)
        except (RayError, Stalled):
            if signum == signal.SIGKILL:
                self.agent.kill(f"{self.agent} did not answer")

    async def wait(self) -> End:
        await self.ended.wait()
        assert self.end is not None
        return self.end

    async def follow(self) -> None:
        """Wait until the process ends, its agent ends, or its agent stays out of reach."""
        while self.end is None:
            try:
                self.end = await self.agent.actor.call_process.remote(self.pid, "wait")
            except ActorUnavailableError:
                if not await self.agent.answers_again():
                    self.agent.kill(f"{self.agent} is out of reach")
            except RayError as error:
                self.agent.kill(f"{self.agent} is gone: {end_of(error)}")
                self.end = End(lost=self.agent.lost)
        self.ended.set()


@dataclass(eq=False)
class RayLauncher:
    """`ports.Launcher` on a cluster. An async context manager; enter it inside that of the local launcher."""

    local: LocalLauncher
    pools: Pools
    assignments: Mapping[str, SlotAssignment]
    context: RunContext
    keys: Keys
    """Those of the controller."""
    place_s: float
    """Limit for finding room for the pool's part of a dead node."""
    _agents: dict[SlotAssignment, NodeAgentHandle] = field(default_factory=dict)
    _opening: defaultdict[SlotAssignment, asyncio.Lock] = field(default_factory=lambda: defaultdict(asyncio.Lock))
    """Locks; `spawn` holds one while it finds or starts the agent of an assignment."""
    _replacing: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def _turn_s(self) -> float:
        """Limit for a turn at one of these locks: others may have to find room first."""
        return START_S + self.place_s * (len(self.assignments) + 1)

    async def __aenter__(self) -> Self:
        context, node_id = self.context, ray.get_runtime_context().get_node_id()
        (context.run_dir / TOKEN).write_text(context.token)
        self.keys.write(self.local.runtime_dir)
        here, probe = NodeAffinitySchedulingStrategy(node_id, soft=False), ray.remote(SupervisorProbe)
        options = probe.options(
            name=PROBE_NAME, namespace=context.namespace, num_cpus=0, max_restarts=-1, scheduling_strategy=here
        )
        self._probe: Any = options.remote()
        await call(self._probe.ping, seconds=START_S, what="its start", holder="Ray on this machine")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._close_agents()
        ray.kill(self._probe)
        (self.context.run_dir / TOKEN).unlink(missing_ok=True)

    async def spawn(self, spec: ProcessSpec) -> ProcessHandle:
        assignment = self.assignments.get(spec.name)
        if assignment is None:
            return await self.local.spawn(spec)
        lock, holder = self._opening[assignment], "a process of the same slot"
        try:
            async with holding(lock, self._turn_s, waiter=spec.name, resource="its node agent", holder=holder):
                agent = await self._agent_of(assignment)
            return await agent.spawn(spec)
        except RayError as error:
            raise OSError(end_of(error)) from None
        except ConfigError as error:
            raise OSError(str(error)) from None

    async def sweep(self) -> list[str]:
        return await self._close_agents() + await self.local.sweep()

    async def _close_agents(self) -> list[str]:
        agents, self._agents = self._agents, {}
        left = await asyncio.gather(*(agent.close() for agent in agents.values()))
        return [item for each in left for item in each]

    async def _agent_of(self, assignment: SlotAssignment) -> NodeAgentHandle:
        """Return the agent of an assignment; start a new one if there is none. Raises RayError, OSError,
        `DoesNotFit`."""
        agent = self._agents.get(assignment)
        if agent is not None and not agent.lost and not await agent.answers_again():
            agent.kill(f"{agent} is out of reach")
        while agent is None or agent.lost:
            agent = self._agents[assignment] = self._start(assignment, await self._slot_of(assignment))
            try:
                await self._open(agent)
            except BaseException:
                agent.kill("it could not be opened")
                raise
        return agent

    def _start(self, assignment: SlotAssignment, slot: Slot) -> NodeAgentHandle:
        processes = [name for name, each in self.assignments.items() if each == assignment]
        name = f"{'+'.join(processes)}-{secrets.token_hex(3)}"
        placed = {**slot.options(), "runtime_env": {"env_vars": AGENT_ENVIRONMENT}}
        remote = ray.remote(NodeAgent).options(**placed, name=name, namespace=self.context.namespace)
        actor = remote.remote(name, self.context)
        return NodeAgentHandle(name=name, slot=slot, actor=actor, runtime_dir=self.local.runtime_dir)

    async def _open(self, agent: NodeAgentHandle) -> None:
        """Open an agent. If its node is gone meanwhile, mark the agent as lost and return."""
        opening = asyncio.create_task(agent.call("open", self._probe, limit_s=START_S))
        try:
            while await _is_alive(agent.slot):
                await asyncio.wait([opening], timeout=POLL_S)
                if opening.done():
                    opening.result()
                    return
        except RayActorError as error:
            if not await _is_lost(agent.slot, within_s=DEAD_S if isinstance(error, ActorUnavailableError) else 0.0):
                raise
        finally:
            opening.cancel()
        agent.kill("its node is gone")

    async def _slot_of(self, assignment: SlotAssignment) -> Slot:
        """Return the slot of an assignment on a living node. If its node is gone, move the pool's whole part of that
        node to another node."""
        waiter = f"slot {assignment.bundle} of pool {assignment.pool}"
        async with holding(self._replacing, self._turn_s, waiter=waiter, resource="its turn", holder="other slots"):
            slot = self.pools.at(assignment)
            if await _is_alive(slot):
                return slot
            async with deadline(2 * self.place_s + NODES_S, waiter=waiter, resource="a node", holder="Ray"):
                await asyncio.to_thread(self.pools.replace, slot.held, within_s=self.place_s)
            return self.pools.at(assignment)


async def _is_alive(slot: Slot) -> bool:
    """Return whether Ray considers the slot's node alive."""
    async with deadline(NODES_S, waiter="the run", resource="the nodes of the cluster", holder="Ray"):
        return slot.held.node.node_id in await asyncio.to_thread(living)


async def _is_lost(slot: Slot, *, within_s: float) -> bool:
    """Return whether Ray notices within this time that the slot's node is gone."""
    for _ in range(1 + int(within_s / POLL_S)):
        if not await _is_alive(slot):
            return True
        await asyncio.sleep(POLL_S)
    return False
