"""How fast the simulator is at scale: 1,024 servers of 64 slots, 32,768 samples per optimizer step, 200 steps.

The real loop and scheduler on a virtual clock, evaluation off and nothing written. One core.
"""

from __future__ import annotations

import resource
import time

from report import Benchmark, arguments, publish

from penstock.config import Config
from penstock.simulator.measures import measure
from penstock.simulator.simulated_run import simulate
from penstock.simulator.strategies import combinations
from penstock.simulator.trace import open_workload

BENCHMARK = Benchmark(
    name="simulate_scale",
    measures=["simulator", "scheduler", "loop.py", "system.py"],
    figures=["wall_s", "peak_gb", "samples_per_s_simulated", "efficiency", "events_per_s", "us_per_group"],
)
STEPS, QUICK_STEPS = 200, 10


def config(steps: int) -> Config:
    """A reasoning model on lengths like DeepCoder's, a learner that generation keeps four fifths busy."""
    return Config.model_validate(
        {
            "env": {"group_size": 16},
            "rollout": {"servers": 1024, "slots": 64},
            "trainer": {"groups_per_step": 2048},
            "scheduler": {
                "max_staleness": 2,
                "group_filter": [],
                "trigger": {"min_samples": 4096, "max_wait": "60s"},
            },
            "simulator": {
                "engine": {"step_s": 0.012, "sequence_s": 2e-4, "update_s": 1.0},
                "trainer": {"token_s": 2.5e-7, "step_s": 2.0, "publish_s": 1.0},
                "workload": {
                    "median_tokens": 9000.0,
                    "between_sigma": 0.77,
                    "within_sigma": 0.23,
                    "max_tokens": 16_000,
                },
                "strategies": ["asynchronous"],
                "steps": steps,
                "warmup_steps": 3,
            },
        }
    )


def main() -> None:
    options = arguments(__doc__ or "")
    settings = config(QUICK_STEPS if options.quick else STEPS)
    started = time.perf_counter()
    workload = open_workload(settings.simulator.workload, group_size=settings.env.num_members, seed=settings.seed)
    (combination,) = combinations(settings, workload)
    outcome = simulate(combination.config, workload, seed=settings.seed)
    wall_s = time.perf_counter() - started
    found = measure(outcome, workload, shares_devices=False)
    num_events = 2 * outcome.experience.num_groups + settings.simulator.steps * settings.rollout.servers
    figures = {
        "wall_s": wall_s,
        "peak_gb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e9,
        "samples_per_s_simulated": found.samples_per_s,
        "efficiency": found.efficiency,
        "events_per_s": num_events / wall_s,
        "us_per_group": 1e6 * wall_s / outcome.experience.num_groups,
    }
    publish(BENCHMARK, figures, options.json)


if __name__ == "__main__":
    main()
