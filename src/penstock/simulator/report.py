"""`predict(config)`: simulate every combination with every seed, and put the numbers side by side."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

from penstock.config import Config, ConfigError, EngineModelConfig
from penstock.simulator.measures import Measures, measure
from penstock.simulator.simulation import simulate
from penstock.simulator.strategies import Combination, closed_set, combinations
from penstock.simulator.trace import open_workload
from penstock.simulator.workload import Workload

Watch = Callable[[str, int, int], None]
"""Called as watch(name of the run, optimizer steps taken, optimizer steps in all)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """One combination, all its seeds."""

    name: str
    strategy: str
    dispatch: str
    trigger: str
    runs: tuple[Measures, ...]
    """One per seed."""

    def mean(self, key: str) -> float | None:
        """Over the seeds that have a value."""
        values = self._values(key)
        return fmean(values) if values else None

    def spread(self, key: str) -> float:
        """Standard deviation over the seeds; 0 with one of them."""
        values = self._values(key)
        return stdev(values) if len(values) > 1 else 0.0

    def _values(self, key: str) -> list[float]:
        return [value for run in self.runs if isinstance(value := getattr(run, key), int | float)]

    def plain(self) -> dict[str, object]:
        """For JSON: every run, and the mean and spread of every number."""
        keys = [key for key, value in self.runs[0].plain().items() if isinstance(value, int | float)]
        return {
            "name": self.name,
            "strategy": self.strategy,
            "dispatch": self.dispatch,
            "trigger": self.trigger,
            "mean": {key: self.mean(key) for key in keys},
            "spread": {key: self.spread(key) for key in keys},
            "runs": [run.plain() for run in self.runs],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class Makespan:
    """A closed set of groups, all there from the start."""

    dispatch: str
    seconds: tuple[float, ...]
    """Until the last one was whole; one per seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Everything that was simulated."""

    results: tuple[Result, ...]
    makespans: tuple[Makespan, ...] = ()

    def __getitem__(self, name: str) -> Result:
        """The result called `name`."""
        return next(result for result in self.results if result.name == name)

    def plain(self) -> dict[str, object]:
        """For JSON."""
        return {
            "results": [result.plain() for result in self.results],
            "makespans": [{"dispatch": made.dispatch, "seconds": list(made.seconds)} for made in self.makespans],
        }


def predict(config: Config, *, watch: Watch = lambda name, step, steps: None) -> Report:
    """Simulate everything that `config.simulator` asks for. Raises `ConfigError` before anything runs."""
    if config.env.mixture:
        raise ConfigError(
            "env.mixture: a simulation has one kind of episode, which simulator.workload describes: simulate a "
            "configuration without a mixture"
        )
    seeds = [config.seed + number for number in range(config.simulator.seeds)]
    workloads = {seed: _open(config, seed) for seed in seeds}
    chosen = combinations(config, workloads[seeds[0]])
    results = tuple(_simulate_all(combination, workloads, watch) for combination in chosen)
    return Report(results=results, makespans=_makespans(config, workloads, watch))


def _open(config: Config, seed: int) -> Workload:
    workload = open_workload(config.simulator.workload, group_size=config.env.num_members, seed=seed)
    _check_memory(config.simulator.engine, workload, config.simulator.workload.prompt_tokens)
    return workload


def _check_memory(engine: EngineModelConfig, workload: Workload, prompt_tokens: int) -> None:
    longest = workload.max_tokens + prompt_tokens
    if engine.kv_tokens is not None and engine.kv_tokens < longest:
        raise ConfigError(
            f"simulator.engine.kv_tokens ({engine.kv_tokens}) does not hold the longest sequence ({longest} tokens)"
        )


def _simulate_all(combination: Combination, workloads: dict[int, Workload], watch: Watch) -> Result:
    runs = []
    for number, (seed, workload) in enumerate(workloads.items(), start=1):
        name = combination.name + (f", seed {number} of {len(workloads)}" if len(workloads) > 1 else "")
        runs.append(_simulate_one(combination, workload, seed, name, watch))
    return Result(
        name=combination.name,
        strategy=combination.strategy,
        dispatch=combination.dispatch,
        trigger=combination.trigger,
        runs=tuple(runs),
    )


def _simulate_one(combination: Combination, workload: Workload, seed: int, name: str, watch: Watch) -> Measures:
    steps = combination.config.trainer.steps
    watch(name, 0, steps)
    outcome = simulate(combination.config, workload, seed=seed, progress=lambda step: watch(name, step, steps))
    return measure(outcome, workload, shares_devices=combination.shares_devices)


def _makespans(config: Config, workloads: dict[int, Workload], watch: Watch) -> tuple[Makespan, ...]:
    number = config.simulator.makespan_groups
    if number is None:
        return ()
    made = []
    for dispatch in dict.fromkeys(config.simulator.dispatch):
        seconds: list[float] = []
        for seed, workload in workloads.items():
            closed = closed_set(config, workload, dispatch, number)
            watch(f"{number} groups, {dispatch}", 0, 1)
            seconds.append(max(simulate(closed, workload, seed=seed, num_tasks=number).whole_at))
        made.append(Makespan(dispatch=dispatch, seconds=tuple(seconds)))
    return tuple(made)


def ranked(results: Sequence[Result], key: str = "samples_per_s") -> list[Result]:
    """Best first."""
    return sorted(results, key=lambda result: -(result.mean(key) or 0.0))
