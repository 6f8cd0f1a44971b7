"""The Ray backend on a cluster of this machine, for the suite that all backends pass."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

import ray

from penstock.cluster.placement import place
from penstock.cluster.ray_group import RayBackend
from penstock.config.cluster import ClusterConfig
from penstock.groups.role import Role


class Placed(RayBackend):
    """In a pool of its own."""

    def __init__(self, roles: Mapping[str, Role], size: int) -> None:
        if not ray.is_initialized():
            path = os.pathsep.join(path for path in sys.path if path)
            ray.init(num_cpus=4, logging_level="ERROR", runtime_env={"env_vars": {"PYTHONPATH": path}})
        pool = {"slots_per_node": size, "cpus": 0.001}
        self._pools = place(ClusterConfig.model_validate({"pools": {"workers": pool}}))
        super().__init__(roles, self._pools["workers"])

    def close(self) -> None:
        super().close()
        self._pools.release()
