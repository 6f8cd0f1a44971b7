"""`predict(config)`: simulate every combination with every seed, and collect the figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev

from penstock.config import Config, ConfigError
from penstock.observe.jsonl import write_json
from penstock.observe.summary import PREDICTION
from penstock.simulator import run_record
from penstock.simulator.forecast import forecast
from penstock.simulator.measures import Measures, measure
from penstock.simulator.model_searcher import ModelSearcher
from penstock.simulator.simulated_run import Recorded, simulate
from penstock.simulator.strategies import Combination, closed_set, combinations
from penstock.simulator.trace import open_workload
from penstock.simulator.workload import Workload

Watch = Callable[[str, int, int], None]
"""Called as watch(name of the run, number of optimizer steps taken, total number of steps)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """The figures of one combination, for all its seeds."""

    name: str
    strategy: str
    dispatch: str
    trigger: str
    runs: tuple[Measures, ...]
    """Figures of each seed."""

    def mean(self, key: str) -> float | None:
        """Return the mean over the seeds that have a value; None if there is none."""
        values = self._values(key)
        return fmean(values) if values else None

    def spread(self, key: str) -> float:
        """Return the standard deviation over the seeds; 0 with one seed."""
        values = self._values(key)
        return stdev(values) if len(values) > 1 else 0.0

    def _values(self, key: str) -> list[float]:
        return [value for run in self.runs if isinstance(value := getattr(run, key), int | float)]

    def plain(self) -> dict[str, object]:
        """Return plain values for JSON: every run, and the mean and spread of every number."""
        keys = [key for key, value in asdict(self.runs[0]).items() if isinstance(value, int | float)]
        return {**asdict(self), "mean": {k: self.mean(k) for k in keys}, "spread": {k: self.spread(k) for k in keys}}


@dataclass(frozen=True, slots=True, kw_only=True)
class Makespan:
    """Time for a closed set of groups that are all available from the start."""

    dispatch: str
    seconds: tuple[float, ...]
    """Time until the last group was complete; one value per seed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Report:
    """Results of all simulated combinations."""

    results: tuple[Result, ...]
    makespans: tuple[Makespan, ...] = ()

    def __getitem__(self, name: str) -> Result:
        """Return the result called `name`."""
        return next(result for result in self.results if result.name == name)

    def plain(self) -> dict[str, object]:
        """Return the report as plain values for JSON."""
        return {**asdict(self), "results": [result.plain() for result in self.results]}


@dataclass(frozen=True, slots=True, kw_only=True)
class Records:
    """Where simulated runs leave their files: a run directory for each combination, with its first seed."""

    runs_dir: Path
    run_id: str
    fitted_to: str | None = None
    """Id of the run that the models were fitted to."""

    def run_dir(self, combination: Combination) -> Path:
        """Return the directory of a combination's run."""
        strategy = "" if combination.strategy == "configured" else f"-{combination.name.replace(' ', '-')}"
        return self.runs_dir / f"{self.run_id}-simulated{strategy}"


def predict(config: Config, *, watch: Watch = lambda name, step, steps: None, records: Records | None = None) -> Report:
    """Simulate everything that `config.simulator` asks for. `records`: where the runs leave their files, if they do.
    Raises `ConfigError` before anything runs."""
    if config.env.mixture:
        raise ConfigError(
            "env.mixture: a simulation has one kind of episode, which simulator.workload describes: simulate a "
            "configuration without a mixture"
        )
    seeds = [config.seed + number for number in range(config.simulator.seeds)]
    workloads = {seed: _open(config, seed) for seed in seeds}
    chosen = combinations(config, workloads[seeds[0]])
    results = tuple(_simulate_all(combination, workloads, watch, records) for combination in chosen)
    return Report(results=results, makespans=_makespans(config, workloads, watch))


def _open(config: Config, seed: int) -> Workload:
    room, settings = config.simulator.engine.kv_tokens, config.simulator.workload
    workload = open_workload(settings, group_size=config.env.num_members, seed=seed)
    longest = workload.max_tokens + settings.prompt_tokens
    if room is not None and room < longest:
        raise ConfigError(f"simulator.engine.kv_tokens {room} does not hold the longest sequence, {longest} tokens")
    return workload


def _simulate_all(
    combination: Combination, workloads: dict[int, Workload], watch: Watch, records: Records | None
) -> Result:
    runs = []
    for number, (seed, workload) in enumerate(workloads.items(), start=1):
        name = combination.name + (f", seed {number} of {len(workloads)}" if len(workloads) > 1 else "")
        runs.append(_simulate_one(combination, workload, seed, name, watch, records if number == 1 else None))
    return Result(
        name=combination.name,
        strategy=combination.strategy,
        dispatch=combination.dispatch,
        trigger=combination.trigger,
        runs=tuple(runs),
    )


def _simulate_one(
    combination: Combination, workload: Workload, seed: int, name: str, watch: Watch, records: Records | None
) -> Measures:
    config, steps = combination.config, combination.config.trainer.steps
    watch(name, 0, steps)
    searcher = ModelSearcher(config) if config.scheduler.tuning.mode == "auto" else None

    def run(recorded: Recorded | None) -> Measures:
        done = simulate(
            config,
            workload,
            seed=seed,
            progress=lambda step: watch(name, step, steps),
            searcher=searcher,
            counts_lags=recorded is not None,
            recorded=recorded,
        )
        return measure(done, workload, shares_devices=combination.shares_devices)

    return run(None) if records is None else _recorded(combination, records, run)


def _recorded(combination: Combination, records: Records, run: Callable[[Recorded], Measures]) -> Measures:
    """Simulate a run that leaves its files behind, and return its figures."""
    run_dir = records.run_dir(combination)
    begun = run_record.begin(run_dir, combination.config, strategy=combination.name, fitted_to=records.fitted_to)
    try:
        found = run(Recorded(run_dir, begun))
    except BaseException as error:
        run_record.end(run_dir, simulated_s=0.0, error=_cause(error))
        raise
    predicted = forecast(
        [found], by="penstock simulate", about=combination.name, shares_devices=combination.shares_devices
    )
    write_json(run_dir / PREDICTION, predicted)
    run_record.end(run_dir, simulated_s=found.simulated_s)
    return found


def _cause(error: BaseException) -> str:
    """Return the text of an error; of a group, that of its first."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) or type(error).__name__


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
            seconds.append(max(simulate(closed, workload, seed=seed, num_tasks=number).workers.whole_at))
        made.append(Makespan(dispatch=dispatch, seconds=tuple(seconds)))
    return tuple(made)
