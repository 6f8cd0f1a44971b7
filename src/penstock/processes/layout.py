"""The processes of a run, and the files that its directory holds before they start."""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from penstock.cluster.slot_assignments import SlotAssignments, assign_slots
from penstock.config import Config
from penstock.config.environments import ATROPOS
from penstock.model.chat import ChatTokenizer
from penstock.model.message_tokens import MessageTokenizer
from penstock.model.tiny import write_tiny_model
from penstock.ports.process_launcher import ProcessSpec
from penstock.supervisor.child import Child

TRAINER = "trainer-0"
RECEIVED = "received"
"""Folder of the runtime directory for weights from other machines, with a subfolder for each server."""
TORCH_ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE"}
"""OpenMP threads sleep while they wait for each other: spinning threads slow every other process on a shared machine
tenfold."""
KEYS = ("api_key", "admin_api_key")
"""Keys of `config.rollout`."""
COMPUTE = ("rollout", "trainer", "rank")
"""Roles that use torch."""


@dataclass(frozen=True, slots=True)
class TrainerNode:
    """A node on which processes of the trainer compute."""

    pool: str | None
    """Cluster pool of the node; None on the supervisor's machine."""
    numbers: range
    """Numbers of these trainer processes. The trainer's processes are numbered by place, then by rank."""


def stages(config: Config) -> list[list[ProcessSpec]]:
    """Return the processes of a run in start order; the processes of one stage start together."""
    config = _with_keys(config)

    def spec(role: str, number: int | None = None, pool: str | None = None, **more: Any) -> ProcessSpec:
        return ProcessSpec(
            name=role if number is None else f"{role}-{number}",
            role=role,
            module="penstock.processes.start",
            ready_s=config.supervisor.ready_timeout_s,
            grace_s=config.supervisor.grace_s,
            env=(TORCH_ENVIRONMENT if role in COMPUTE else {}) | _keys(config, role),
            pool=pool,
            **more,
        )

    rollouts = [
        spec("rollout", number, _pool(config, "rollout"), serves_at=_place_of(config, number))
        for number in range(config.num_servers)
    ]
    environments = [spec("env", number, _pool(config, "environment")) for number in range(config.env.workers)]
    trainers = _trainers(config, spec) if config.has_trainer else []
    computing = [[*rollouts, *trainers]]
    if config.rollout.engine != "penstock":  # such an engine measures its device when it starts, and may share it
        computing = [rollouts, trainers]
    stages = [[spec("controller")], *computing, environments]
    if config.env.name == ATROPOS:  # these may connect before the rest is ready
        stages = [[spec("controller")], computing[0] + environments, *computing[1:]]
    return [stage for stage in stages if stage]


def roles_by_name(config: Config) -> dict[str, str]:
    """Return the role of each process of a run."""
    return {spec.name: spec.role for stage in stages(config) for spec in stage}


def _trainers(config: Config, spec: Callable[..., ProcessSpec]) -> list[ProcessSpec]:
    """Return the trainer and its ranks, which are restarted together. On each node the first of them holds all
    slots."""
    names = rank_names(config)
    together = {"restart_set": TRAINER if names else "", "saves": "checkpoint"}
    own, *others = trainer_nodes(config)
    found = [spec("trainer", 0, own.pool, num_slots=len(own.numbers), **together)]
    for node in (own, *others):
        leader = TRAINER if node is own else rank_name(node.numbers[0])
        for number in node.numbers:
            name = rank_name(number)
            room = {"num_slots": len(node.numbers)} if name == leader else {"beside": leader}
            if name in names:
                found.append(spec("rank", number, node.pool, **room, **together))
    return found


def rank_name(number: int) -> str:
    """Return the name of the trainer process with this number."""
    return f"rank-{number}"


def rank_names(config: Config) -> list[str]:
    """Return the names of the trainer's rank processes. An actor with a single rank runs in the trainer process and has
    none."""
    return [rank_name(number) for number in range(int(config.num_ranks == 1), num_trainer_processes(config))]


def places(config: Config) -> dict[str, list[str]]:
    """Return the trainer's roles by place. Roles of one place share processes, one for each rank.

    Places in the actor's pool come first, then the places of one pool after the other.
    """
    if config.pipeline != "train":
        return {"actor": ["actor"]}
    split, home = config.trainer.split, _pool(config, "actor")
    apart = sorted(split, key=lambda role: (_pool(config, role) != home, _pool(config, role) or ""))
    return {"actor": [role for role in config.trainer.roles if role not in split]} | {role: [role] for role in apart}


def num_trainer_processes(config: Config) -> int:
    """Return the number of trainer processes that compute: all ranks of all places."""
    return config.num_ranks * len(places(config))


def trainer_nodes(config: Config) -> list[TrainerNode]:
    """Return the trainer's own node, then the nodes that have only ranks. The places of one pool share as few nodes as
    have enough slots."""
    nodes: list[TrainerNode] = []
    first = 0
    for pool, together in groupby(places(config), key=lambda place: _pool(config, place)):
        number = config.num_ranks * len(list(together))
        for share in config.cluster.pools[pool].spread(number) if pool is not None else [number]:
            nodes.append(TrainerNode(pool, range(first, first + share)))
            first += share
    return nodes


def _pool(config: Config, role: str) -> str | None:
    """Return the cluster pool of a role's processes; None means the supervisor's machine.

    A split role is in the actor's pool unless it has its own.
    """
    if config.cluster.address is None:
        return None
    pool_of = config.cluster.pool_of
    return pool_of(role) or (pool_of("actor") if role in config.trainer.split else None)


def slots_of(config: Config) -> SlotAssignments:
    """Return the assignment of all processes to nodes of the cluster. Raises `ConfigError`."""
    specs = [spec for stage in stages(config) for spec in stage]
    in_turns = config.scheduler.mode == "colocated"
    return assign_slots(config.cluster, specs, split=config.trainer.split, in_turns=in_turns)


def num_servers_beside(config: Config, name: str) -> int:
    """Return the number of rollout servers on the machine of process `name`; it counts itself if it is one of them."""
    machines = _machines(config)
    return sum(machines[f"rollout-{number}"] == machines[name] for number in range(config.num_servers))


def are_together(config: Config, one: str, other: str) -> bool:
    """Return whether the two processes are on the same machine."""
    machines = _machines(config)
    return machines[one] == machines[other]


def _machines(config: Config) -> Mapping[str, tuple[str, int] | None]:
    """Return the machine of each process by name: (pool, node number), or None for the supervisor's machine."""
    slots = slots_of(config).by_process if config.cluster.address is not None else {}
    return defaultdict(lambda: None, {name: (slot.pool, slot.node) for name, slot in slots.items()})


def server_number(child: Child) -> int:
    """Return the number of this rollout server, from 0 on."""
    return int(child.name.rpartition("-")[2])


def host_of(child: Child, config: Config) -> str:
    """Return the host on which a rollout server listens: its machine's address, if there are several machines."""
    return child.address or config.rollout.host


def _place_of(config: Config, number: int) -> tuple[str, int] | None:
    """Return the host and the port of a rollout server that the run starts; port 0 lets the system choose."""
    rollout = config.rollout
    return None if rollout.urls else (rollout.host, rollout.port + number if rollout.port else 0)


def takes_turns(config: Config) -> bool:
    """Return whether rollout servers and the trainer take turns on the same devices."""
    return config.gives_devices and num_servers_beside(config, TRAINER) > 0


def _with_keys(config: Config) -> Config:
    """Return the configuration with random API keys in place of missing ones, if the run starts its servers: every
    program of the machine reaches them, also those of other users."""
    rollout = config.rollout
    if rollout.urls:
        return config
    made = {name: getattr(rollout, name) or secrets.token_urlsafe() for name in KEYS}
    return config.model_copy(update={"rollout": rollout.model_copy(update=made)})


def without_keys(config: Config) -> Config:
    """Return the configuration without API keys, for processes that need none."""
    rollout = config.rollout.model_copy(update=dict.fromkeys(KEYS))
    return config.model_copy(update={"rollout": rollout})


def _keys(config: Config, role: str) -> dict[str, str]:
    """Return the key variables of a role's environment. Only the controller and the servers get the admin key.

    An empty value hides the variable that a process would inherit.
    """
    admin_key = config.rollout.admin_api_key if role in ("controller", "rollout") else ""
    return {"PENSTOCK_API_KEY": config.rollout.api_key or "", "PENSTOCK_ADMIN_API_KEY": admin_key or ""}


def model_dir(config: Config, run_dir: Path) -> Path:
    """Return the directory of the policy's configuration and tokenizer."""
    return run_dir / "model" if config.model.path == "tiny" else Path(config.model.path)


def chat_of(config: Config, run_dir: Path) -> ChatTokenizer:
    """Return the tokenizer and the chat template of the policy. Raises `ModelError`."""
    if not config.policy.has_tokens:
        return MessageTokenizer()
    return ChatTokenizer.load(model_dir(config, run_dir), tool_format=config.model.tool_format)


def prepare(config: Config, run_dir: Path) -> None:
    """Create the pool's folder, and the tiny model if that is the policy."""
    (run_dir / "pool").mkdir(parents=True, exist_ok=True)
    if config.model.path == "tiny" and config.policy.has_tokens:
        write_tiny_model(model_dir(config, run_dir), config.model.tiny, config.model.max_context)
