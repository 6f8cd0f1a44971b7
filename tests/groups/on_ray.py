"""The Ray backend on a cluster of this machine, for the suite that all backends pass."""

from __future__ import annotations

from collections.abc import Mapping

from ray_machines import machines

from penstock.cluster.placement import place
from penstock.cluster.ray_group import RayBackend
from penstock.config.cluster import ClusterConfig
from penstock.groups.role import Role


class Placed(RayBackend):
    """In a pool of its own."""

    def __init__(self, roles: Mapping[str, Role], size: int) -> None:
        machines()
        pool = {"slots_per_node": size, "cpus": 0.001}
        self._pools = place(ClusterConfig.model_validate({"pools": {"workers": pool}}))
        super().__init__(roles, self._pools["workers"])

    def close(self) -> None:
        super().close()
        self._pools.release()
