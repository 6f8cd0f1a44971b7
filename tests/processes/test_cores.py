"""How many cores a model computes on."""

import os
from typing import Any

import pytest

from penstock.config import Config
from penstock.processes.devices import num_threads, num_usable_cpus
from penstock.processes.layout import num_servers_beside


def test_processes_that_take_turns_have_all_cores_each() -> None:
    assert 1 <= num_usable_cpus() <= (os.cpu_count() or 1)
    apart = Config.model_validate({"scheduler": {"mode": "synchronous", "max_staleness": 0}})
    together = Config.model_validate({"scheduler": {"mode": "colocated", "max_staleness": 0}})
    assert num_threads(apart, 3) == 3
    assert num_threads(together, 3) == num_usable_cpus()


@pytest.mark.parametrize(
    ("mode", "pools", "expected"),
    [
        ("colocated", {"all": {"roles": ["actor", "rollout"], "nodes": 3, "slots_per_node": 2}}, [3, 3, 2, 2, 3]),
        ("synchronous", {"all": {"roles": ["actor", "rollout"], "nodes": 3, "slots_per_node": 4}}, [3, 2, 3, 2, 3]),
        ("colocated", {"serve": {"roles": ["rollout"], "nodes": 5}}, [1, 1, 1, 1, 1]),
        ("colocated", {"learn": {"roles": ["actor"], "slots_per_node": 4}}, [5, 5, 5, 5, 5]),
    ],
)
def test_servers_share_the_cores_of_one_machine(mode: str, pools: dict[str, Any], expected: list[int]) -> None:
    config = Config.model_validate(
        {
            "scheduler": {"mode": mode, "max_staleness": 0},
            "trainer": {"ranks": 4},
            "rollout": {"servers": 5},
            "cluster": {"address": "auto", "pools": pools},
        }
    )
    assert [num_servers_beside(config, f"rollout-{number}") for number in range(5)] == expected
