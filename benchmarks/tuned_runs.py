"""Real runs on this machine for the benchmark of self-tuning: with it, with the defaults, and with fixed settings.

The fixed settings come from a search on a model that is fitted to the whole run with the defaults. This run evaluates
too, so that the model knows servers with fewer answers. The fastest settings are run. The settings with which the tuned
run ends are a candidate too. Speeds are trained samples per second over the last steps, reduced if the trained samples
are shorter than the tasks' answers. The best fixed settings are the fastest of several runs, so noise of the machine
speaks for them. A machine that others share is some percent faster or slower from minute to minute. So the run with the
defaults is made before and after the tuned one, and their mean counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

from lab import Lab, decisions, lines, mean_length

from penstock.config import load_config
from penstock.config.tunable import PATHS, movable
from penstock.simulator.calibration import calibrate
from penstock.simulator.search import Search
from penstock.simulator.trace import open_workload

FINALISTS = 2
STILL = "trainer.learning_rate=1e-10"
"""The policy does not change, so that its answers are as long at the end of a long run as in a short one."""


@dataclass(frozen=True)
class Case:
    """A workload. Steps of the tuned run, and of the others, and the last ones, over which speed is measured. A search
    may take 2 % of the processor time, and so the first whole one ends after several minutes."""

    settings: tuple[str, ...] = ()
    """Beyond those of the task with long-tailed answers."""
    tuned_steps: int = 900
    fixed_steps: int = 300
    measured_steps: int = 200


CASES = {
    "long-tailed answers, this machine": Case(),
    "few tokens per step, this machine": Case(
        ("env.max_new_tokens=24", "trainer.groups_per_step=8"), tuned_steps=3000, fixed_steps=800, measured_steps=600
    ),
    "slow tools, this machine": Case(
        ("env.name=long_answers:Research", "env.max_turns=4", "env.max_new_tokens=48"),
        tuned_steps=170,
        fixed_steps=60,
        measured_steps=45,
    ),
}


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """Trained samples per second of one workload."""

    default: float
    tuned: float
    best_fixed: float
    cpu_share: float
    """Share of the run's processor time that its searches took."""


def measured(lab: Lab, name: str) -> Outcome:
    """Make the runs of one workload, and compare them."""
    draining = [f"data.eval_tasks={32 if lab.quick else 256}", "env.eval_temperature=1.0"]
    label, case, seeds = name.partition(",")[0].replace(" ", "_"), CASES[name], lab.seeds[:1]
    settings, measured_steps = [*case.settings, STILL], case.measured_steps
    (default,) = lab.long(label, [*settings, *draining], steps=case.fixed_steps, seeds=seeds)
    (tuned,) = lab.long(f"{label}_tuned", [*settings, "scheduler.tuning=auto"], steps=case.tuned_steps, seeds=seeds)
    again = lab.long(f"{label}_again", [*settings, *draining], steps=case.fixed_steps, seeds=seeds, spare=True)
    usual = mean_length(default)
    speeds = [fmean(speed(run, usual, measured_steps) for run in (default, *again))]
    for number, changes in enumerate(filter(None, [*fixed_settings(default), ended_with(tuned)])):
        words = [f"{setting}={'null' if value is None else value}" for setting, value in changes.items()]
        fixed = [*settings, *words]
        runs = lab.long(f"{label}_fixed_{number}", fixed, steps=case.fixed_steps, seeds=seeds, spare=True)
        speeds += [speed(run, usual, measured_steps) for run in runs]
    last = lines(tuned / "metrics.jsonl")[-1]
    share = last["searches_cpu_s"] / (last["searches_cpu_s"] + last["cpu_s"])
    tuned_speed = speed(tuned, usual, measured_steps)
    return Outcome(default=speeds[0], tuned=tuned_speed, best_fixed=max(speeds), cpu_share=share)


def fixed_settings(run_dir: Path) -> list[Mapping[str, Any]]:
    """Return the fastest settings on a model of a run, by their names in the configuration."""
    config = load_config(run_dir / "config.yaml").model_copy(update={"simulator": calibrate(run_dir)})
    search = Search(
        config=config,
        workload=lambda members, seed: open_workload(config.simulator.workload, group_size=members, seed=seed),
        movable=movable(config),
        max_staleness=config.scheduler.max_staleness,
    )
    search.run()
    fastest = sorted(search.tried, key=lambda each: -each.speed)[:FINALISTS]
    return [{PATHS[setting]: value for setting, value in each.changes.items()} for each in fastest]


def ended_with(run_dir: Path) -> Mapping[str, Any]:
    """Return the settings that a run has changed by itself, with their last values."""
    changes = [line["adapted"] for line in decisions(run_dir, "tuning") if "adapted" in line]
    return {setting: pair[1] for each in changes for setting, pair in each.items()}


def speed(run_dir: Path, usual_length: float, num_steps: int) -> float:
    """Return trained samples per second over the last steps. `usual_length`: mean tokens of all episodes played."""
    first, *_, last = lines(run_dir / "metrics.jsonl")[-num_steps:]
    seconds, samples = last["time"] - first["time"], last["ledger"]["trained"] - first["ledger"]["trained"]
    tokens = sum(last[name] - first[name] for name in ("tokens_trained_total", "tokens_masked_total"))
    return float(samples / seconds * min(tokens / samples / usual_length, 1.0))
