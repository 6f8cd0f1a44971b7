"""`penstock plan`: how a number of accelerators should be split and used, before they are rented.

Splits between generation and training, in eighths, are simulated with every strategy on a slice of the cluster, and so
are the splits beside the fastest one. The search that tunes runs then looks for better settings of the fastest plans,
and these are simulated again with several seeds.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean, stdev
from typing import Any

from penstock.config import Config, ConfigError
from penstock.config.simulated_cluster import Strategy
from penstock.config.tunable import movable, settings_of, with_settings
from penstock.simulator.forecast import forecast
from penstock.simulator.measures import Measures, measure
from penstock.simulator.prediction import Watch
from penstock.simulator.search import Search, slice_of
from penstock.simulator.simulated_run import simulate
from penstock.simulator.strategies import ON_ALL_DEVICES, Combination, combinations
from penstock.simulator.trace import open_workload
from penstock.simulator.workload import Workload

EIGHTHS = range(1, 8)
APART: tuple[Strategy, ...] = ("asynchronous", "segments", "one_step_off")
"""Strategies with devices for generation and devices for training."""
TOGETHER: tuple[Strategy, ...] = ("colocated", "over_sampling", "tail_batching")
"""Strategies in which all devices generate and train in turn."""
FINALISTS, SEEDS = 3, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One way to use the accelerators, and its simulated figures."""

    strategy: str
    servers: int
    trainer_devices: int
    """Devices that train; all of them in a strategy that uses them in turn."""
    changes: Mapping[str, Any]
    """Settings that the search has changed, by short name."""
    config: Config
    """The configuration of the whole cluster."""
    runs: tuple[Measures, ...]
    """Figures of each seed, for the whole cluster."""

    @property
    def split(self) -> str:
        """Return the split as text, such as `24 + 8`."""
        return "in turn" if self.shares_devices else f"{self.servers} + {self.trainer_devices}"

    @property
    def shares_devices(self) -> bool:
        return self.strategy in ON_ALL_DEVICES

    @property
    def samples_per_s(self) -> float:
        """Return trained samples per second, the mean over seeds; see `Measures.fair_samples_per_s`."""
        return fmean(run.fair_samples_per_s for run in self.runs)

    @property
    def spread(self) -> float:
        """Return the standard deviation over the seeds; 0 with one seed."""
        return stdev(run.fair_samples_per_s for run in self.runs) if len(self.runs) > 1 else 0.0

    @property
    def limited_by(self) -> str:
        """Return what bounds the speed: the servers, the learner, or neither, if both wait for much of the time."""
        run = self.runs[0]
        if self.shares_devices:
            return "all devices"
        if run.efficiency < 0.8:
            return "stragglers and staleness"
        return "generation" if run.limit_generation < run.limit_training else "training"

    def cost(self, price: float) -> float:
        """Return the price of 1,000 trained samples, if an accelerator costs `price` per hour."""
        devices = self.servers if self.shares_devices else self.servers + self.trainer_devices
        return 1000 * devices * price / 3600 / self.samples_per_s

    @property
    def name(self) -> str:
        return f"{self.strategy}, {self.split}"

    def forecast(self) -> dict[str, Any]:
        """Return what is predicted of a run that begins with this option."""
        return forecast(self.runs, by="penstock plan", about=self.name, shares_devices=self.shares_devices)

    def plain(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        return {
            "name": self.name,
            "strategy": self.strategy,
            "servers": self.servers,
            "trainer_devices": self.trainer_devices,
            "changes": dict(self.changes),
            "limited_by": self.limited_by,
            "mean": {**_means(self.runs), "samples_per_s": self.samples_per_s},
            "spread": {"samples_per_s": self.spread},
        }


def plan(config: Config, accelerators: int, *, watch: Watch = lambda name, done, total: None) -> list[Option]:
    """Return ways to use this number of accelerators, the fastest first. Raises `ConfigError`."""
    if accelerators < 2:
        raise ConfigError(f"a plan needs at least 2 accelerators (got {accelerators})")
    if config.env.mixture:
        raise ConfigError(
            "env.mixture: a plan has one kind of episode, which simulator.workload describes: plan for a configuration "
            "without a mixture"
        )
    workload = open_workload(config.simulator.workload, group_size=config.env.num_members, seed=config.seed)
    chosen = list(_combinations(config, accelerators, workload))
    options = []
    for number, combination in enumerate(chosen):
        watch("splits and strategies", number, len(chosen))
        options.append(_option(combination, {}, seeds=1))
    watch("splits and strategies", len(chosen), len(chosen))
    options += _between(config, accelerators, options, workload)
    best = sorted(options, key=lambda each: -each.samples_per_s)[:FINALISTS]
    tuned = []
    for number, option in enumerate(best):
        watch("settings", number, len(best))
        tuned.append(_tuned(option))
    watch("settings", len(best), len(best))
    others = [each for each in options if each not in best]
    return sorted([*tuned, *others], key=lambda each: -each.samples_per_s)


def _combinations(config: Config, accelerators: int, workload: Workload) -> Iterator[Combination]:
    servers = sorted({min(max(round(accelerators * part / 8), 1), accelerators - 1) for part in EIGHTHS})
    for number in servers:
        yield from combinations(_split(config, number, accelerators - number, APART), workload)
    yield from combinations(_split(config, accelerators - 1, 1, TOGETHER), workload)


def _between(config: Config, accelerators: int, options: Sequence[Option], workload: Workload) -> list[Option]:
    """Return the fastest strategy with devices apart, with the splits halfway to its neighbours."""
    best = max((each for each in options if not each.shares_devices), key=lambda each: each.samples_per_s)
    tried = {each.servers for each in options if each.strategy == best.strategy}
    step = max(round(accelerators / 16), 1)
    near = sorted({best.servers - step, best.servers + step} - tried)
    splits = [number for number in near if 1 <= number < accelerators]
    strategies: list[Any] = [best.strategy]
    return [
        _option(combination, {}, seeds=1)
        for number in splits
        for combination in combinations(_split(config, number, accelerators - number, strategies), workload)
    ]


def _split(config: Config, servers: int, trainer_devices: int, strategies: Sequence[Strategy]) -> Config:
    """Return the configuration for a split. The times of the learner are inversely proportional to its devices."""
    simulator = config.simulator
    share, times = simulator.trainer_devices / trainer_devices, simulator.trainer
    scaled = {"token_s": times.token_s * share, "call_s": times.call_s * share, "step_s": times.step_s * share}
    changes = {
        "trainer_devices": trainer_devices,
        "trainer": times.model_copy(update=scaled),
        "strategies": list(strategies),
        "dispatch": ["fifo"],
        "triggers": ["compute"],
    }
    rollout = config.rollout.model_copy(update={"servers": servers, "urls": []})
    return config.model_copy(update={"simulator": simulator.model_copy(update=changes), "rollout": rollout})


def _option(combination: Combination, changes: Mapping[str, Any], *, seeds: int) -> Option:
    config = with_settings(combination.config, changes)
    runs = tuple(_measured(config, config.seed + number, shared=combination.shares_devices) for number in range(seeds))
    return Option(
        strategy=combination.strategy,
        servers=config.rollout.num_servers,
        trainer_devices=config.simulator.trainer_devices,
        changes=changes,
        config=config,
        runs=runs,
    )


def _measured(config: Config, seed: int, *, shared: bool) -> Measures:
    """Simulate a slice of the cluster, and return the figures of the whole."""
    part, num_parts = slice_of(config)
    workload = open_workload(config.simulator.workload, group_size=config.env.num_members, seed=seed)
    run = simulate(part, workload, seed=seed, counts_lags=True)
    found = measure(run, workload, shares_devices=shared)
    whole = {name: value * num_parts for name, value in asdict(found).items() if name in PER_CLUSTER}
    return Measures(**{**asdict(found), **whole})


PER_CLUSTER = ("samples_per_s", "limit_samples_per_s", "limit_generation", "limit_training")
"""Figures that grow with the cluster."""


def _tuned(option: Option) -> Option:
    """Return the option with the settings that a search prefers, simulated with several seeds."""
    config = option.config

    def workload(num_members: int, seed: int) -> Workload:
        return open_workload(config.simulator.workload, group_size=num_members, seed=seed)

    search = Search(
        config=config, workload=workload, movable=movable(config), max_staleness=config.scheduler.max_staleness
    )
    found = search.run()
    best = with_settings(config, found.changes)
    runs = tuple(_measured(best, config.seed + number, shared=option.shares_devices) for number in range(SEEDS))
    before = settings_of(config)
    changes = {name: value for name, value in found.changes.items() if value != before[name]}
    return Option(
        strategy=option.strategy,
        servers=option.servers,
        trainer_devices=option.trainer_devices,
        changes=changes,
        config=best,
        runs=runs,
    )


def _means(runs: Sequence[Measures]) -> dict[str, float]:
    found = [asdict(run) for run in runs]
    numbers = [name for name, value in found[0].items() if isinstance(value, int | float)]
    return {name: fmean(run[name] for run in found) for name in numbers if all(run[name] is not None for run in found)}
