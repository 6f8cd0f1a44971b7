"""A Ray cluster of this machine, with nodes that say that they have more than there is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session")
def cluster() -> Iterator[None]:
    """A head without room, and two nodes: 8 CPUs and 4 accelerators each, the second one labelled as fast."""
    import ray
    from ray.cluster_utils import Cluster

    started = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    started.add_node(num_cpus=8, resources={"chip": 4})
    started.add_node(num_cpus=8, resources={"chip": 4}, labels={"kind": "fast"})
    ray.init(address=started.address, logging_level="ERROR")
    yield
    ray.shutdown()
    started.shutdown()
