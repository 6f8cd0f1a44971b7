"""Placement of the trainer's roles on processes.

Roles that share a place share its processes, one for each rank. An actor with a single rank runs in the trainer
process. All other ranks are separate processes of the run (`rank`): the first ones on the trainer's machine, the last
ones on other nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.config import Config
from penstock.groups.backend import Backend
from penstock.groups.fused import Roles, place
from penstock.groups.local import LocalBackend
from penstock.groups.role import Role
from penstock.processes.layout import places, without_keys
from penstock.processes.trainer_rank import Actor, CriticRank, ReferenceRank, TrainerRank

WORKERS: Mapping[str, type[TrainerRank]] = {"actor": Actor, "critic": CriticRank, "reference": ReferenceRank}

Start = Callable[[Mapping[str, Role], Sequence[int]], Backend]
"""Returns the workers of the given roles, in the trainer's processes with the given numbers."""


def trainer_roles(config: Config, start: Start, *, model_dir: Path, weights_dir: Path) -> Roles:
    """Return all roles of the trainer, placed as configured, with their ranks connected.

    `start`: starts roles in separate processes. `model_dir`: directory of the policy. `weights_dir`: where the weights
    are published.
    """
    together_in = places(config)
    init: dict[str, dict[str, Any]] = {"actor": {"model_dir": model_dir, "weights_dir": weights_dir}}
    roles = {
        name: Role(WORKERS[name], {"config": without_keys(config), "place": number} | init.get(name, {}))
        for number, together in enumerate(together_in.values())
        for name in together
    }
    num_ranks, names = config.num_ranks, list(together_in)

    def begin(name: str, together: Mapping[str, Role]) -> Backend:
        if name == "actor" and num_ranks == 1:
            return LocalBackend(together)
        number = names.index(name) * num_ranks
        return start(together, range(number, number + num_ranks))

    placed = place(roles, together_in, begin)
    try:
        if num_ranks > 1:
            for name, *_ in together_in.values():
                group: Any = getattr(placed, name)
                group.join(group.listen())
    except BaseException:
        placed.close()
        raise
    return placed
