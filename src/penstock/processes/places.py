"""Which processes play the roles of the trainer.

All that share a place share its processes, one for each rank. The actor's, if it is a single one, is this process;
others are processes of their own, on this machine and, the last ones, on those of other nodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.config import Config
from penstock.groups.backend import Backend
from penstock.groups.fused import Roles, place
from penstock.groups.link import Link
from penstock.groups.local import LocalBackend
from penstock.groups.role import Role
from penstock.groups.spawned import SpawnedBackend
from penstock.processes.actor import Actor
from penstock.processes.critic import CriticRank
from penstock.processes.layout import places, without_keys
from penstock.processes.rank import TrainerRank
from penstock.processes.reference import ReferenceRank

WORKERS: Mapping[str, type[TrainerRank]] = {"actor": Actor, "critic": CriticRank, "reference": ReferenceRank}


def trainer_roles(config: Config, *, model_dir: Path, weights_dir: Path, elsewhere: Sequence[Link] = ()) -> Roles:
    """All of them, placed as configured, and met. `model_dir`: of the policy. `weights_dir`: where it is published.
    `elsewhere`: connections to the last processes (`layout.trainer_nodes`); they end with the roles."""
    together_in = places(config)
    init: dict[str, dict[str, Any]] = {"actor": {"model_dir": model_dir, "weights_dir": weights_dir}}
    roles = {
        name: Role(WORKERS[name], {"config": without_keys(config), "place": number} | init.get(name, {}))
        for number, together in enumerate(together_in.values())
        for name in together
    }

    num_ranks, names = config.num_ranks, list(together_in)
    num_here = len(names) * num_ranks - len(elsewhere)
    links: list[Link | None] = [*[None] * num_here, *elsewhere]

    def start(name: str, together: Mapping[str, Role]) -> Backend:
        if name == "actor" and num_ranks == 1:
            return LocalBackend(together)
        first = names.index(name) * num_ranks
        theirs = [link for link in links[first : first + num_ranks] if link is not None]
        return SpawnedBackend(together, num_ranks, elsewhere=theirs, start_s=config.supervisor.ready_timeout_s)

    try:
        placed = place(roles, together_in, start)
    except BaseException:
        for link in elsewhere:
            link.socket.close()
        raise
    try:
        if num_ranks > 1:
            for name, *_ in together_in.values():
                group: Any = getattr(placed, name)
                group.meet(group.listen())
    except BaseException:
        placed.close()
        raise
    return placed
