"""The strategies, orders and triggers at 1,024 accelerators: the real scheduler and loop in the simulator.

Every strategy with both triggers where it has a choice, in the order of the data; every order of dispatch for the
asynchronous one. Deterministic: the figures depend on the seeds alone, not on the machine. A run is a few steps of
32,768 samples: what is still being generated at its end is longer than what was trained, which `length_mean_ratio`
shows and `share_of_bound` takes back.
"""

from __future__ import annotations

from typing import Any, get_args

from report import Benchmark, Figures, arguments, publish

from penstock.config import Config
from penstock.config.simulated_cluster import Strategy
from penstock.simulator.prediction import predict

SEEDS = 3
STRATEGIES_TABLE = "Strategies and triggers, first come, first served"
ORDERS_TABLE = "Orders of dispatch, asynchronous, lengths known from an earlier epoch"
MAKESPAN_TABLE = "Makespan of a closed set of 4,096 groups"

CLUSTER: dict[str, Any] = {
    "env": {"group_size": 16},
    "rollout": {"servers": 768, "slots": 64},
    "trainer": {"groups_per_step": 2048},
    "scheduler": {
        "max_staleness": 2,
        "group_filter": [],
        "dispatch": {"aging": "600s", "max_wait": "1h"},
        "trigger": {"min_samples": 2048, "max_wait": "30s"},
    },
    "simulator": {
        "trainer_devices": 256,
        "trainer": {"token_s": 4.2e-7, "step_s": 2.0, "publish_s": 1.0},
        "engine": {"step_s": 0.012, "sequence_s": 2e-4, "update_s": 2.0},
        "workload": {"median_tokens": 9000.0, "max_tokens": 16_000, "prompt_tokens": 400, "tasks": 4096},
        "strategies": [name for name in get_args(Strategy) if name != "configured"],
        "dispatch": ["fifo"],
        "triggers": ["compute", "batch"],
        "known_lengths": "history",
    },
}
"""1,024 accelerators on a reasoning model's lengths (DeepCoder's, as published with PolyTrace), balanced."""
FIGURES = (
    "efficiency",
    "samples_per_s",
    "trainer_idle",
    "staleness_mean",
    "wait_max_s",
    "length_mean_ratio",
    "first_samples_s",
    "first_samples_length_ratio",
    "refill_s",
)
STRATEGIES = (
    *("synchronous", "colocated", "one_step_off", "asynchronous", "asynchronous batch", "over_sampling"),
    *("tail_batching", "segments", "segments batch", "asynchronous step"),
)
ORDERS = ("fifo", "sjf", "ljf", "probe")
ORDERED = ("asynchronous sjf", "asynchronous ljf", "asynchronous probe")
BENCHMARK = Benchmark(
    name="strategies",
    measures=["simulator", "scheduler", "loop.py", "system.py"],
    figures=[
        *(f"{row}_{figure}".replace(" ", "_") for row in (*STRATEGIES, *ORDERED) for figure in FIGURES),
        *(f"{order}_makespan_s" for order in ORDERS),
        *("async_speedup_over_sync_split", "async_speedup_over_sync_all_cores", "share_of_bound"),
    ],
)


SMALL: dict[str, Any] = {"rollout": {"servers": 48}, "trainer": {"groups_per_step": 128}}
"""Of the quick form: a sixteenth, as its learner's devices are."""


def cluster(changes: dict[str, Any] | None = None, **simulator: Any) -> Config:
    """The configuration, with other settings of the simulator and of other sections."""
    tree = {**CLUSTER, "simulator": CLUSTER["simulator"] | simulator}
    for section, values in (changes or {}).items():
        tree[section] = tree[section] | values
    return Config.model_validate(tree)


def main() -> None:
    options = arguments(__doc__ or "")
    seeds = 1 if options.quick else SEEDS
    shape: dict[str, Any] = {"steps": 5 if options.quick else 7, "warmup_steps": 3, "seeds": seeds}
    size: dict[str, Any] = SMALL if options.quick else {}
    shape |= {"trainer_devices": 16} if options.quick else {}
    step = {"trigger": {"use": "step", "min_samples": 1024 if options.quick else 16_384, "max_wait": "2m"}}
    asynchronous: dict[str, Any] = {"strategies": ["asynchronous"], **shape}
    orders: dict[str, Any] = {"dispatch": [*ORDERS], "triggers": ["compute"], **asynchronous}
    tables = {
        STRATEGIES_TABLE: [
            predict(cluster(size, **shape)),
            predict(cluster({**size, "scheduler": step}, triggers=["step"], **asynchronous)),
        ],
        ORDERS_TABLE: [predict(cluster(size, makespan_groups=256 if options.quick else 4096, **orders))],
    }
    figures = Figures()
    for title, reports in tables.items():
        for result in (result for report in reports for result in report.results):
            for key in FIGURES:
                figures.cell(title, result.name, key, (getattr(run, key) for run in result.runs))
    for made in tables[ORDERS_TABLE][0].makespans:
        figures.cell(MAKESPAN_TABLE, made.dispatch, "makespan_s", made.seconds)
    flat = figures.flat
    for baseline, strategy in {"sync_split": "synchronous", "sync_all_cores": "colocated"}.items():
        ratio = flat["asynchronous_samples_per_s"] / flat[f"{strategy}_samples_per_s"]
        figures.add(f"async_speedup_over_{baseline}", [ratio])
    figures.add("share_of_bound", [flat["asynchronous_efficiency"] * flat["asynchronous_length_mean_ratio"]])
    publish(BENCHMARK, flat, options.json, tables=figures.tables, seeds=range(seeds))


if __name__ == "__main__":
    main()
