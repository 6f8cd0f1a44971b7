"""Which processes a run has, and what lies in its directory before they start."""

from __future__ import annotations

import secrets
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


def stages(config: Config) -> list[list[ProcessSpec]]:
    """Processes in start order; those of one stage start together."""
    config, by_node = _with_keys(config), trainer_processes_by_node(config)

    def spec(role: str, number: int | None = None) -> ProcessSpec:
        return ProcessSpec(
            name=role if number is None else f"{role}-{number}",
            role=role,
            module="penstock.processes.start",
            ready_s=config.supervisor.ready_timeout_s,
            grace_s=config.supervisor.grace_s,
            env=(TORCH_ENVIRONMENT if role in COMPUTE else {}) | _keys(config, role),
            num_slots=by_node[number or 0] if role in ("trainer", "ranks") else 1,
            saves="checkpoint" if role == "trainer" else "",
        )

    rollouts = [spec("rollout", number) for number in range(config.rollout.num_servers)]
    environments = [spec("env", number) for number in range(config.env.workers)]
    trainers = [spec("trainer", 0)] if config.has_trainer else []
    others = [spec("ranks", node) for node in range(1, len(by_node))]
    stages = [[spec("controller"), *others], [*rollouts, *trainers], environments]
    if config.env.name == ATROPOS:  # they may be there before the rest is ready, and must find somebody to wait with
        stages = [stages[0], stages[1] + environments]
    return [stage for stage in stages if stage]


def places(config: Config) -> dict[str, list[str]]:
    """The trainer's roles by where they are; what is together shares processes, one for each rank."""
    if config.pipeline != "train":
        return {"actor": ["actor"]}
    split = config.trainer.split
    return {"actor": [role for role in config.trainer.roles if role not in split]} | {role: [role] for role in split}


def num_trainer_processes(config: Config) -> int:
    """That compute: of all ranks of all the trainer's roles."""
    return config.num_ranks * len(places(config))


def trainer_processes_by_node(config: Config) -> list[int]:
    """How many of them live on each node, those of the trainer's own first: all of them there, unless its pool has no
    node with that many slots. They are numbered by place, then by rank, over all nodes."""
    pool = config.cluster.pool_of("actor") if config.cluster.address is not None else None
    number = num_trainer_processes(config)
    return config.cluster.pools[pool].spread(number) if pool is not None else [number]


def seating_of(config: Config) -> Seating:
    """Where everybody lives on the run's cluster. Raises `ConfigError`."""
    specs = [spec for stage in stages(config) for spec in stage]
    return seating(config.cluster, specs, in_turns=config.scheduler.mode == "colocated")


def num_servers_beside(config: Config, name: str) -> int:
    """Rollout servers on the machine of this one, with it."""
    seats = seating_of(config).seats if config.cluster.address is not None else {}

    def machine(server: str) -> tuple[str, int] | None:
        seat = seats.get(server)
        return (seat.pool, seat.node) if seat is not None else None

    return sum(machine(f"rollout-{number}") == machine(name) for number in range(config.rollout.num_servers))


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
