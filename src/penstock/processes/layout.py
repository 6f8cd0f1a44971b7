"""Which processes a run has, and what lies in its directory before they start."""

from __future__ import annotations

import secrets
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from penstock.cluster.seats import Seating, seating
from penstock.config import Config
from penstock.config.atropos import ATROPOS
from penstock.model.tiny import write_tiny_model
from penstock.ports import ProcessSpec

TORCH_ENVIRONMENT = {"OMP_WAIT_POLICY": "PASSIVE"}
"""Threads that wait for each other sleep: spinning ones slow every other process on a shared machine tenfold."""
COMPUTE = ("rollout", "trainer", "ranks")
"""Roles that use torch, or start who does."""


@dataclass(frozen=True, slots=True)
class TrainerNode:
    """Where processes of the trainer compute."""

    pool: str | None
    """None: on the supervisor's machine."""
    numbers: range
    """Of these processes; all are numbered by place, then by rank."""


def stages(config: Config) -> list[list[ProcessSpec]]:
    """Processes in start order; those of one stage start together."""
    config = _with_keys(config)

    def spec(role: str, number: int | None = None, pool: str | None = None, num_slots: int = 1) -> ProcessSpec:
        return ProcessSpec(
            name=role if number is None else f"{role}-{number}",
            role=role,
            module="penstock.processes.start",
            ready_s=config.supervisor.ready_timeout_s,
            grace_s=config.supervisor.grace_s,
            env=(TORCH_ENVIRONMENT if role in COMPUTE else {}) | _keys(config, role),
            pool=pool,
            num_slots=num_slots,
            saves="checkpoint" if role == "trainer" else "",
        )

    rollouts = [spec("rollout", number, _pool(config, "rollout")) for number in range(config.rollout.num_servers)]
    environments = [spec("env", number, _pool(config, "environment")) for number in range(config.env.workers)]
    own, *others = trainer_nodes(config)
    trainers = [spec("trainer", 0, own.pool, len(own.numbers))] if config.has_trainer else []
    keepers = [spec("ranks", number, node.pool, len(node.numbers)) for number, node in enumerate(others, start=1)]
    stages = [[spec("controller"), *keepers], [*rollouts, *trainers], environments]
    if config.env.name == ATROPOS:  # they may be there before the rest is ready, and must find somebody to wait with
        stages = [stages[0], stages[1] + environments]
    return [stage for stage in stages if stage]


def places(config: Config) -> dict[str, list[str]]:
    """The trainer's roles by where they are; what is together shares processes, one for each rank. What is in the
    actor's pool comes first, then one pool after the other."""
    if config.pipeline != "train":
        return {"actor": ["actor"]}
    split, home = config.trainer.split, _pool(config, "actor")
    apart = sorted(split, key=lambda role: (_pool(config, role) != home, _pool(config, role) or ""))
    return {"actor": [role for role in config.trainer.roles if role not in split]} | {role: [role] for role in apart}


def num_trainer_processes(config: Config) -> int:
    """That compute: of all ranks of all the trainer's roles."""
    return config.num_ranks * len(places(config))


def trainer_nodes(config: Config) -> list[TrainerNode]:
    """The trainer's own, then those of each keeper, `ranks-1` and so on: places of one pool together on as few nodes as
    have the slots."""
    nodes: list[TrainerNode] = []
    first = 0
    for pool, together in groupby(places(config), key=lambda place: _pool(config, place)):
        number = config.num_ranks * len(list(together))
        for share in config.cluster.pools[pool].spread(number) if pool is not None else [number]:
            nodes.append(TrainerNode(pool, range(first, first + share)))
            first += share
    return nodes


def _pool(config: Config, role: str) -> str | None:
    """Where it has processes: a split role beside the actor's, unless a pool is its own. None: on the supervisor's
    machine."""
    if config.cluster.address is None:
        return None
    pool_of = config.cluster.pool_of
    return pool_of(role) or (pool_of("actor") if role in config.trainer.split else None)


def seating_of(config: Config) -> Seating:
    """Where everybody lives on the run's cluster. Raises `ConfigError`."""
    specs = [spec for stage in stages(config) for spec in stage]
    in_turns = config.scheduler.mode == "colocated"
    return seating(config.cluster, specs, split=config.trainer.split, in_turns=in_turns)


def num_servers_beside(config: Config, name: str) -> int:
    """Rollout servers on the machine of this one, with it."""
    machines = _machines(config)
    return sum(machines[f"rollout-{number}"] == machines[name] for number in range(config.rollout.num_servers))


def are_together(config: Config, one: str, other: str) -> bool:
    """Whether these processes are on the same machine."""
    machines = _machines(config)
    return machines[one] == machines[other]


def _machines(config: Config) -> Mapping[str, tuple[str, int] | None]:
    """By the name of a process: the pool and which of its nodes. None: the supervisor's machine."""
    seats = seating_of(config).seats if config.cluster.address is not None else {}
    return defaultdict(lambda: None, {name: (seat.pool, seat.node) for name, seat in seats.items()})


def takes_turns(config: Config) -> bool:
    """Whether rollout servers compute where the trainer does, while it does not."""
    return config.scheduler.mode == "colocated" and num_servers_beside(config, "trainer-0") > 0


def _with_keys(config: Config) -> Config:
    """What listens for other machines has keys: those that nobody gave are made here."""
    rollout = config.rollout
    if config.cluster.address is None or rollout.urls:
        return config
    made = {
        "api_key": rollout.api_key or secrets.token_urlsafe(),
        "admin_api_key": rollout.admin_api_key or secrets.token_urlsafe(),
    }
    return config.model_copy(update={"rollout": rollout.model_copy(update=made)})


def without_keys(config: Config) -> Config:
    """For who needs none, on whatever machine."""
    rollout = config.rollout.model_copy(update={"api_key": None, "admin_api_key": None})
    return config.model_copy(update={"rollout": rollout})


def _keys(config: Config, role: str) -> dict[str, str]:
    """Only who controls the servers, and they themselves, know the key for that, and a trainer that gives weights to
    other machines; an empty one hides what a process would inherit."""
    known = role in ("controller", "rollout") or (role == "trainer" and config.cluster.address is not None)
    return {
        "PENSTOCK_API_KEY": config.rollout.api_key or "",
        "PENSTOCK_ADMIN_API_KEY": (config.rollout.admin_api_key or "") if known else "",
    }


def model_dir(config: Config, run_dir: Path) -> Path:
    """Where the policy's configuration and tokenizer lie."""
    return run_dir / "model" if config.model.path == "tiny" else Path(config.model.path)


def prepare(config: Config, run_dir: Path) -> None:
    """Make what the processes expect to find: the pool's folder, and the tiny model if that is the policy."""
    (run_dir / "pool").mkdir(parents=True, exist_ok=True)
    if config.model.path == "tiny":
        write_tiny_model(model_dir(config, run_dir), config.model.tiny, config.model.max_context)
