"""A Ray cluster of this machine, with nodes that say that they have more than there is; one for all tests."""

from __future__ import annotations

import atexit
import logging
import os
import sys
from functools import cache
from tempfile import TemporaryDirectory

import ray
from ray._private.utils import write_ray_address
from ray.cluster_utils import Cluster


@cache
def machines() -> Cluster:
    """A head without room, and two nodes of 8 CPUs and 4 chips each, the second one labelled as fast. Workers import
    what the tests do. It has a directory of its own: other clusters of this machine are not taken for it."""
    directory = TemporaryDirectory(prefix="ray-", ignore_cleanup_errors=True)
    atexit.register(directory.cleanup)
    started = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "temp_dir": directory.name})
    atexit.register(started.shutdown)
    write_ray_address(started.address, directory.name)
    started.add_node(num_cpus=8, resources={"chip": 4})
    started.add_node(num_cpus=8, resources={"chip": 4}, labels={"kind": "fast"})
    path = os.pathsep.join(path for path in sys.path if path)
    ray.init(address=started.address, logging_level=logging.ERROR, runtime_env={"env_vars": {"PYTHONPATH": path}})
    atexit.register(ray.shutdown)
    return started
