"""How many cores a model computes on."""

import os

from penstock.config import Config
from penstock.processes.cores import num_threads, num_usable_cpus


def test_processes_that_take_turns_have_all_cores_each() -> None:
    assert 1 <= num_usable_cpus() <= (os.cpu_count() or 1)
    apart = Config.model_validate({"scheduler": {"mode": "synchronous", "max_staleness": 0}})
    together = Config.model_validate({"scheduler": {"mode": "colocated", "max_staleness": 0}})
    assert num_threads(apart, 3) == 3
    assert num_threads(together, 3) == num_usable_cpus()
