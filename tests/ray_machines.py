"""A Ray cluster of this machine, with nodes that say that they have more than there is; one for all tests."""

from __future__ import annotations

import atexit
import logging
import os
import sys
import tempfile
from contextlib import ExitStack
from functools import cache
from pathlib import Path

import ray
from ray.cluster_utils import Cluster


def machines() -> Cluster:
    """A head without room, and two nodes of 8 CPUs and 4 chips each, the second one labelled as fast. A start that
    fails is not tried again: every later call raises the same error."""
    started = _start()
    if isinstance(started, Exception):
        raise started
    return started


@cache
def _start() -> Cluster | Exception:
    with ExitStack() as undo:
        try:
            started = _started(undo)
        except Exception as error:
            return error
        atexit.register(undo.pop_all().close)
        return started


def _started(undo: ExitStack) -> Cluster:
    """Start the cluster; `undo` ends each part that was started. Workers import what the tests do. The cluster has a
    directory of its own, so that it is never taken for another cluster of this machine, nor another one for it. The
    directory lies in that of the session, and its name is short: the paths of sockets have at most 107 bytes."""
    directory = Path(tempfile.gettempdir(), "r")
    if directory.exists():
        raise RuntimeError('this session has a Ray cluster: mark the test with pytest.mark.xdist_group("ray")')
    os.environ["RAY_TMPDIR"] = str(directory)
    undo.callback(os.environ.pop, "RAY_TMPDIR")
    (directory / "ray").mkdir(parents=True)  # where Ray writes down the address of the latest cluster
    cluster = Cluster()
    undo.callback(cluster.shutdown)
    cluster.add_node(num_cpus=0, include_log_monitor=False)
    cluster.add_node(num_cpus=8, resources={"chip": 4}, include_log_monitor=False)
    cluster.add_node(num_cpus=8, resources={"chip": 4}, labels={"kind": "fast"}, include_log_monitor=False)
    path = os.pathsep.join(path for path in sys.path if path)
    undo.callback(ray.shutdown)
    ray.init(address=cluster.address, logging_level=logging.ERROR, runtime_env={"env_vars": {"PYTHONPATH": path}})
    return cluster
