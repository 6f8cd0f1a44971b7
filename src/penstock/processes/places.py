"""Which processes play the roles of the trainer.

All that share a place share its processes, one for each rank. A single process is this one; others are processes of
their own on this machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from penstock.config import Config
from penstock.groups.backend import Backend
from penstock.groups.fused import Roles, place
from penstock.groups.local import LocalBackend
from penstock.groups.role import Role
from penstock.groups.spawned import SpawnedBackend
from penstock.processes.actor import Actor
from penstock.processes.critic import CriticRank
from penstock.processes.rank import TrainerRank
from penstock.processes.reference import ReferenceRank

WORKERS: Mapping[str, type[TrainerRank]] = {"actor": Actor, "critic": CriticRank, "reference": ReferenceRank}


def trainer_roles(config: Config, *, model_dir: Path, weights_dir: Path) -> Roles:
    """All of them, placed as configured, and met. `model_dir`: of the policy. `weights_dir`: where it is published."""
    init: dict[str, dict[str, Any]] = {"actor": {"model_dir": model_dir, "weights_dir": weights_dir}}
    roles = {
        name: Role(WORKERS[name], {"config": config, "place": number} | init.get(name, {}))
        for number, together in enumerate(config.places.values())
        for name in together
    }

    def start(name: str, together: Mapping[str, Role]) -> Backend:
        if name == "actor" and config.num_ranks == 1:
            return LocalBackend(together)
        return SpawnedBackend(together, config.num_ranks)

    placed = place(roles, config.places, start)
    try:
        if config.num_ranks > 1:
            for name, *_ in config.places.values():
                group: Any = getattr(placed, name)
                group.meet(group.listen())
    except BaseException:
        placed.close()
        raise
    return placed
