"""What self-tuning gains: `scheduler.tuning: auto` against the defaults and against the best fixed settings.

Simulated workloads on clusters of 8, 32 and 1,024 accelerators. The best fixed settings are found by the same search,
which is given what no run knows: the true workload. The candidates of this search are then simulated for the whole
length, and the fastest counts. `tuned_runs.py` makes the real runs on this machine.

The tuned run knows the times of its simulated machines, as a run knows them that has fitted them to its own steps. It
learns lengths, tools and rewards from the groups that it has completed. Simulated rates are trained samples per second
from a quarter of the steps on, where the first changes are made. On the drifting workload they are those of the whole
run, because there a fixed setting is wrong for a part of the run. Those of real runs are over the last steps.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np
from lab import Lab
from report import SPREAD, Benchmark, Figures, publish, runs_dir
from tuned_runs import CASES as REAL_CASES
from tuned_runs import measured

from penstock.config import Config, WorkloadConfig
from penstock.config.tunable import movable, with_settings
from penstock.ports.settings_search import Answer, Question
from penstock.simulator.measures import measure
from penstock.simulator.model_searcher import ModelSearcher
from penstock.simulator.search import Search
from penstock.simulator.simulated_run import simulate
from penstock.simulator.workload import LogNormalWorkload, Plan, Turn, Workload

GROUP_SIZE, MAX_REDUNDANCY = 8, 2
STEPS, QUICK_STEPS = 160, 40
TOKEN_S = 1.1e-4
"""Seconds of one device of the learner per token."""
QUICK_CASES = ("bimodal, 8", "long-tailed answers, this machine")
TABLE = "Self-tuning on simulated clusters: trained samples per second, as a ratio"
REAL_TABLE = "Self-tuning on this machine: trained samples per second, as a ratio, and the processor time of searches"
FIGURES = ("auto_vs_best_static", "auto_vs_default")
FINALISTS = 3
BENCHMARK = Benchmark(
    name="tuning",
    measures=["scheduler", "simulator", "processes", "loop.py"],
    figures=[*(f"{figure}{kind}" for figure in FIGURES for kind in ("", "_worst")), "tuning_cpu_share"],
)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A simulated workload on a cluster."""

    accelerators: int
    servers: int
    groups_per_step: int
    workload: dict[str, Any]
    slots: int = 32
    steps: int = STEPS
    drifts: bool = False
    make: Callable[[WorkloadConfig, int, int], Workload] = field(
        default=lambda config, group_size, seed: LogNormalWorkload(config, group_size=group_size, seed=seed)
    )

    def config(self, steps: int, **scheduler: Any) -> Config:
        tree: dict[str, Any] = {
            "env": {"group_size": GROUP_SIZE, "max_new_tokens": 16_000, "max_turns": 8, "episode_timeout_s": 1e9},
            "model": {"max_context": 20_000},
            "data": {"eval_tasks": 0},
            "rollout": {"servers": self.servers, "slots": self.slots},
            "trainer": {"groups_per_step": self.groups_per_step, "steps": steps, "checkpoint_every": steps + 1},
            "scheduler": {"early_stop": None, **scheduler},
            "simulator": {
                "engine": {"step_s": 0.012, "sequence_s": 2e-4, "update_s": 1.0},
                "trainer": {
                    "token_s": TOKEN_S / (self.accelerators - self.servers),
                    "call_s": 0.2,
                    "step_s": 1.0,
                    "publish_s": 0.5,
                },
                "trainer_devices": self.accelerators - self.servers,
                "workload": {"max_tokens": 16_000, **self.workload},
                "strategies": ["configured"],
                "steps": steps,
                "warmup_steps": 0 if self.drifts else steps // 4,
            },
        }
        return Config.model_validate(tree)

    def open(self, config: Config, num_members: int, seed: int) -> Workload:
        return self.make(config.simulator.workload, num_members, seed)


class Bimodal(LogNormalWorkload):
    """Every fourth task needs answers ten times as long."""

    def _draw(self, rng: np.random.Generator, indexes: Sequence[int]) -> list[Plan]:
        plans = super()._draw(rng, indexes)
        return [
            _longer(plan, 10.0, self.max_tokens) if index % 4 == 0 else plan
            for index, plan in zip(indexes, plans, strict=True)
        ]


class Drifting(LogNormalWorkload):
    """The run goes over from short answers with slow tools to answers that are sixteen times as long and need none."""

    num_tasks = 1

    def plan(self, index: int, attempt: int) -> Plan:
        share = min(index / self.num_tasks, 1.0)
        plan = _longer(super().plan(index, attempt), 16.0**share, self.max_tokens)
        assert plan.turns is not None
        turns = [[turn._replace(tool_s=(1.0 - share) * turn.tool_s) for turn in member] for member in plan.turns]
        return replace(plan, turns=turns)


def _longer(plan: Plan, factor: float, most: int) -> Plan:
    if plan.turns is None:
        return replace(plan, lengths=[min(max(round(length * factor), 1), most) for length in plan.lengths])
    turns = [[Turn(max(round(turn.tokens * factor), 1), turn.tool_s) for turn in member] for member in plan.turns]
    return replace(plan, turns=turns, lengths=[sum(turn.tokens for turn in member) for member in turns])


def drifting(config: WorkloadConfig, group_size: int, seed: int) -> Workload:
    return Drifting(config, group_size=group_size, seed=seed)


def bimodal(config: WorkloadConfig, group_size: int, seed: int) -> Workload:
    return Bimodal(config, group_size=group_size, seed=seed)


SHORT = {"median_tokens": 300.0, "between_sigma": 0.4, "within_sigma": 0.4}
LONG_TAILED = {"median_tokens": 2000.0, "between_sigma": 0.77, "within_sigma": 0.5, "runaway_share": 0.02}
TWO_LENGTHS = {"median_tokens": 800.0, "between_sigma": 0.2, "within_sigma": 0.2}
SLOW_TURNS = {"median_tokens": 1200.0, "turns": 6, "tool_median_s": 20.0, "tool_sigma": 1.0}
SLOW_REWARDS = {"median_tokens": 600.0, "reward_median_s": 60.0, "reward_sigma": 0.5}
LARGE: dict[str, Any] = {"accelerators": 1024, "groups_per_step": 512, "slots": 16, "steps": 40}
CASES = {
    "short, generation-bound, 8": Case(accelerators=8, servers=6, groups_per_step=32, workload=SHORT),
    "short, learner-bound, 32": Case(accelerators=32, servers=28, groups_per_step=128, workload=SHORT),
    "long-tailed, generation-bound, 8": Case(accelerators=8, servers=5, groups_per_step=16, workload=LONG_TAILED),
    "long-tailed, learner-bound, 32": Case(accelerators=32, servers=28, groups_per_step=64, workload=LONG_TAILED),
    "long-tailed, 1024": Case(**LARGE, servers=704, workload=LONG_TAILED),
    "bimodal, 8": Case(accelerators=8, servers=6, groups_per_step=16, workload=TWO_LENGTHS, make=bimodal),
    "bimodal, 1024": Case(**LARGE, servers=768, workload=TWO_LENGTHS, make=bimodal),
    "slow turns, 8": Case(accelerators=8, servers=6, groups_per_step=16, workload=SLOW_TURNS),
    "slow turns, 32": Case(accelerators=32, servers=24, groups_per_step=64, workload=SLOW_TURNS),
    "slow rewards, 8": Case(accelerators=8, servers=6, groups_per_step=16, workload=SLOW_REWARDS),
    "slow rewards, 32": Case(accelerators=32, servers=24, groups_per_step=64, workload=SLOW_REWARDS),
    "drifting lengths, 8": Case(
        accelerators=8,
        servers=5,
        groups_per_step=16,
        workload={
            "median_tokens": 300.0,
            "between_sigma": 0.3,
            "within_sigma": 0.1,
            "turns": 4,
            "tool_median_s": 20.0,
            "tool_sigma": 1.0,
        },
        drifts=True,
        make=drifting,
    ),
}


def speed(case: Case, config: Config, *, tuned: bool = False) -> tuple[float, float]:
    """Return trained samples per second of a whole simulated run, and the processor seconds of its searches."""
    searcher = Counted(config) if tuned else None
    workload = case.open(config, GROUP_SIZE + MAX_REDUNDANCY, config.seed)
    run = simulate(config, workload, seed=config.seed, searcher=searcher)
    found = measure(run, workload, shares_devices=False)
    return found.fair_samples_per_s, searcher.cpu_s if searcher else 0.0


class Counted(ModelSearcher):
    """Counts the processor time of searches."""

    cpu_s = 0.0

    async def search(self, question: Question) -> Answer:
        answer = await super().search(question)
        self.cpu_s += answer.cpu_s
        return answer


def best_static(case: Case, config: Config, default: float, *, quick: bool) -> float:
    """Return the speed of the fastest fixed settings among those that a search on the true workload prefers."""
    search = Search(
        config=config,
        workload=lambda num_members, seed: case.open(config, num_members, seed),
        movable=movable(config),
        max_staleness=config.scheduler.max_staleness,
    )
    search.run()
    chosen = sorted(search.tried, key=lambda each: -each.speed)[: 1 if quick else FINALISTS]
    return max([default, *(speed(case, with_settings(config, each.changes))[0] for each in chosen)])


def simulated(figures: Figures, *, quick: bool, only: Sequence[str]) -> dict[str, list[float]]:
    """Return the ratios on simulated clusters."""
    ratios: dict[str, list[float]] = {figure: [] for figure in FIGURES}
    for name, case in CASES.items():
        if (quick and name not in QUICK_CASES) or (only and name not in only):
            continue
        steps = QUICK_STEPS if quick else case.steps
        Drifting.num_tasks = case.groups_per_step * steps
        started = time.monotonic()
        default, _ = speed(case, case.config(steps))
        auto, searches_s = speed(case, case.config(steps, tuning="auto"), tuned=True)
        static = best_static(case, case.config(steps), default, quick=quick)
        for figure, value in zip(FIGURES, (auto / static, auto / default), strict=True):
            ratios[figure].append(value)
            figures.tables.setdefault(TABLE, {}).setdefault(name, {})[figure] = [value]
        print(f"{name}: {time.monotonic() - started:.0f} s, of them searches {searches_s:.0f} s", flush=True)
    return ratios


def real(lab: Lab, figures: Figures, *, only: Sequence[str]) -> dict[str, list[float]]:
    """Return the ratios on this machine, and add the share of the processor time that searches took."""
    ratios: dict[str, list[float]] = {figure: [] for figure in FIGURES}
    shares = []
    for name in REAL_CASES:
        if (lab.quick and name not in QUICK_CASES) or (only and name not in only):
            continue
        found = measured(lab, name)
        shares.append(found.cpu_share)
        row = dict(zip(FIGURES, (found.tuned / found.best_fixed, found.tuned / found.default), strict=True))
        for figure, value in row.items():
            ratios[figure].append(value)
        cells = {figure: [value] for figure, value in [*row.items(), ("tuning_cpu_share", found.cpu_share)]}
        figures.tables.setdefault(REAL_TABLE, {})[name] = cells
    if shares:
        figures.add("tuning_cpu_share", [max(shares)])
    return ratios


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures there")
    parser.add_argument("--quick", action="store_true", help="one small workload, few steps")
    parser.add_argument("--only", metavar="CASE", nargs="*", default=[], help="only these workloads")
    parser.add_argument("--runs", type=Path, metavar="DIR", default=Path("runs/tuning"), help="where runs are kept")
    options = parser.parse_args()
    lab, figures = Lab(runs=runs_dir(options.runs, quick=options.quick), quick=options.quick), Figures()
    lab.runs.mkdir(parents=True, exist_ok=True)
    on_machine = real(lab, figures, only=options.only)
    for figure, ratios in simulated(figures, quick=options.quick, only=options.only).items():
        found = [*ratios, *on_machine[figure]]
        figures.add(figure, [fmean(found)])
        figures.add(f"{figure}_worst", [min(found)])
    flat = {name: value for name, value in figures.flat.items() if not name.endswith(SPREAD)}
    publish(
        BENCHMARK,
        flat,
        options.json,
        tables=figures.tables,
        seeds=[0],
        runs_of=lab.commits,
        partial=bool(options.only),
    )


if __name__ == "__main__":
    main()
