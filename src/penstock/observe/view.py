"""The visible state of a run, built from its events and metrics. The module reads no files; it receives records."""

from __future__ import annotations

import re
from collections import Counter, deque
from dataclasses import dataclass, field, replace
from typing import Any, Self

from penstock.config import Config
from penstock.observe.notices import notice
from penstock.observe.summary import busy_fraction, mean, numbers

Record = dict[str, Any]
TRAINING, PLAYING, EVALUATING = "training", "playing", "evaluating the policy"
"""Phases of a run."""
INDISPENSABLE = {"controller", "trainer", "rank"}
"""Roles of which the run needs every process."""
CHECKPOINT = re.compile(r"checkpoints/step_[0-9]{1,20}")
"""Path of a checkpoint in its run directory. An event with another path is not written by a run."""
WINDOW_S = 15.0
"""Rates are means over the latest steps; this is about their duration in seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The planned work of a run."""

    num_steps: int
    """Number of optimizer steps. For a run that only generates, it is the number of tasks, and 0 until that is
    known."""
    pipeline: str = "train"
    num_warm_start_steps: int = 0
    num_eval_tasks: int = 0
    max_staleness: int | None = None
    takes_turns: bool = False
    """Whether generation and training take turns on the same devices."""

    @classmethod
    def of(cls, config: Config) -> Self:
        """Return the plan of a configuration."""
        num_held_out = config.validation_tasks
        num_known = 0 if config.validation.tasks == -1 else num_held_out
        return cls(
            pipeline=config.pipeline,
            num_steps={"train": config.trainer.steps, "eval": num_known, "rollout": 0}[config.pipeline],
            num_warm_start_steps=config.model.warm_start.steps,
            num_eval_tasks=num_held_out,
            max_staleness=config.scheduler.max_staleness,
            takes_turns=config.scheduler.mode == "colocated",
        )


@dataclass(slots=True, kw_only=True)
class RunView:
    """Everything the display shows. Pass it records in the order they were written."""

    plan: Plan
    status: str = "pending"
    phase_since: float | None = None
    """Start of the present phase (seconds since the epoch)."""
    processes: dict[str, str] = field(default_factory=dict)
    """Name -> state, in start order, for the present life of the run."""
    restarts: Counter[str] = field(default_factory=Counter)
    """Restarts by process name, in the present life of the run."""
    rewards: dict[int, float] = field(default_factory=dict)
    """Mean reward by step."""
    servers: dict[str, str] = field(default_factory=dict)
    """Name -> URL of each server."""
    evaluations: dict[str, float] = field(default_factory=dict)
    """`before`, `step <n>`, `after` -> mean reward on the held-out tasks."""
    evaluated_tags: dict[str, Record] = field(default_factory=dict)
    """Results of the latest evaluation, by tag."""
    num_evaluated: int = 0
    """Number of held-out tasks in the latest evaluation."""
    checkpoints: dict[int, str] = field(default_factory=dict)
    """Step -> directory of each checkpoint that is still part of the run."""
    is_warm: bool = False
    notices: list[str] = field(default_factory=list)
    """Alarms, losses, restarts and stalls, in order."""
    needs: str | None = None
    """A command that the user must run before the run can continue; None if there is none."""
    played: Record = field(default_factory=dict)
    """Results so far, also between steps; see `summary.PLAYED`."""
    recent: deque[Record] = field(default_factory=deque)
    """The lines of the latest steps; at least two if the run has two."""

    def see_event(self, event: Record) -> None:
        """Update the view with a line of events.jsonl."""
        before = self.phase
        if (text := notice(event)) is not None:
            self.notices.append(text)
        match event:
            case {"event": "state", "to": status}:
                self.status = status
                if status == "starting":
                    self.processes.clear()
                    self.restarts.clear()
            case {"event": "process", "name": name, "state": state}:
                self.processes[name] = state
                self.restarts[name] += state == "backoff"
            case {"event": "joined", "name": name, "url": url}:
                self.servers[name] = url
            case {"event": "no_workers", "command": command}:
                self.needs = command
            case {"event": "attached"}:
                self.needs = None
            case {"event": "tasks", "total": total}:
                self.plan = replace(self.plan, num_steps=total)
            case {"event": "warm_start"}:
                self.is_warm = True
            case {"event": "evaluation", "when": when, "reward": reward} if reward is not None:
                self.evaluations.pop(when, None)
                self.evaluations[when] = reward
                self.evaluated_tags = event.get("tags", {})
                self.num_evaluated = event.get("tasks", 0)
                if self.plan.pipeline == "eval":
                    self.plan = replace(self.plan, num_steps=self.num_evaluated)
            case {"event": "checkpoint", "step": step, "path": path} if CHECKPOINT.fullmatch(path):
                self.checkpoints[step] = path
            case {"event": "resumed" | "rewound", "step": step}:
                self.checkpoints = {saved: path for saved, path in self.checkpoints.items() if saved <= step}
        if self.phase != before:
            self.phase_since = event.get("time")

    def see_step(self, line: Record) -> None:
        """Update the view with a line of metrics.jsonl."""
        before = self.phase
        if line["step"] <= self.step:  # steps after the last checkpoint are taken again
            self.recent.clear()
            self.rewards = {step: reward for step, reward in self.rewards.items() if step < line["step"]}
        self.recent.append(line)
        while len(self.recent) > 2 and line["time"] - self.recent[1]["time"] > WINDOW_S:
            self.recent.popleft()
        if line.get("reward") is not None:
            self.rewards[line["step"]] = line["reward"]
        if self.phase != before:
            self.phase_since = line["time"]

    @property
    def checkpoint(self) -> str | None:
        """Return the directory of the newest checkpoint, from which the run can continue; None if there is none."""
        return self.checkpoints[max(self.checkpoints)] if self.checkpoints else None

    @property
    def step(self) -> int:
        """Return the progress of the run, in its unit."""
        if self.plan.pipeline == "eval":
            return self.num_evaluated or (self.played.get("held_out") or {}).get("ended", 0)
        return int(self.recent[-1]["step"]) if self.recent else 0

    @property
    def latest(self) -> Record:
        """Return the last step's line; empty before the first step."""
        return self.recent[-1] if self.recent else {}

    @property
    def tags(self) -> dict[str, Record]:
        """Return by tag: mean reward and response length over the latest steps, and the result of the latest
        validation."""
        keys = {key for line in self.recent for key in line if key.startswith("reward/")}
        trained = {key.removeprefix("reward/") for key in keys}
        return {
            tag: {
                "reward": mean(numbers(self.recent, f"reward/{tag}")),
                "response_tokens": mean(numbers(self.recent, f"response_length_mean/{tag}")),
                "held_out": self.evaluated_tags.get(tag),
            }
            for tag in sorted(trained | self.evaluated_tags.keys())
        }

    @property
    def phase(self) -> str:
        """Return the current phase of the run, in words."""
        if self.status == "starting":
            waiting = [name for name, state in self.processes.items() if state in ("pending", "starting")]
            return "starting " + ", ".join(waiting) if waiting else "starting"
        if self.status != "running":
            return self.status
        if missing := self._missing:
            restarts = {name: f" (restart {num})" for name, num in self.restarts.items() if num}
            return f"waiting for {', '.join(name + restarts.get(name, '') for name in missing)}"
        if self.needs is not None:
            return f"waiting for an environment worker: {self.needs}"
        if self.plan.pipeline == "eval":
            return EVALUATING
        if self.plan.pipeline == "rollout":
            return PLAYING if self.step < self.plan.num_steps or not self.recent else "writing the rest of the dump"
        if self.recent:
            return TRAINING if self.step < self.plan.num_steps else "evaluating the trained policy"
        if self.plan.num_warm_start_steps and not self.is_warm:
            return "warm start"
        if self.plan.num_eval_tasks and "before" not in self.evaluations:
            return "evaluating the untrained policy"
        return "waiting for the first step"

    @property
    def _missing(self) -> list[str]:
        """Return the missing processes that block the run: controllers and trainers, and other processes if no process
        of their role is ready."""
        is_ready = {name: state in ("ready", "degraded") for name, state in self.processes.items()}
        served = {_role(name) for name in self.processes if is_ready[name]} - INDISPENSABLE
        return [name for name in self.processes if not is_ready[name] and _role(name) not in served]

    @property
    def unit(self) -> str:
        """Return the unit of `step`."""
        return "step" if self.plan.pipeline == "train" else "task"

    @property
    def advances(self) -> bool:
        """Return whether the run is in the phase that takes its steps."""
        return bool(self.recent) and self.phase in (TRAINING, PLAYING)

    @property
    def progress(self) -> Record:
        """Return the progress and speed of the run, with the keys of `penstock status --json`. Rates, reward and busy
        fractions are over the latest steps."""
        latest, steps_per_s = self.latest, self.rate("step")
        return {
            "phase": self.phase,
            "needs": self.needs,
            "unit": self.unit,
            "step": self.step,
            "steps": self.plan.num_steps,
            "policy_version": latest.get("policy_version"),
            "samples": latest.get("ledger", {}).get("trained", 0),
            "episodes": self.played.get("episodes_total", latest.get("episodes_total", 0)),
            "held_out": self.played.get("held_out"),
            "steps_per_second": steps_per_s,
            "episodes_per_second": self.rate("episodes_total"),
            "tokens_generated_per_second": self.rate("tokens_generated_total"),
            "tokens_trained_per_second": self.rate("tokens_trained_total"),
            "reward": mean(numbers(self.recent, "reward")),
            "entropy": latest.get("entropy"),
            "staleness_mean": latest.get("staleness_mean"),
            "staleness_max": latest.get("staleness_max"),
            "trainer_busy_fraction": busy_fraction(self.recent, "trainer_busy_s", "num_trainers"),
            "generator_busy_fraction": busy_fraction(self.recent, "generator_busy_s", "num_servers"),
            "takes_turns": self.plan.takes_turns,
            "eta_seconds": (self.plan.num_steps - self.step) / steps_per_s if steps_per_s and self.advances else None,
            "last_step_at": latest.get("time"),
        }

    def rate(self, key: str) -> float | None:
        """Return the growth per second of a running total over the latest steps; None if it is unknown."""
        if len(self.recent) < 2:
            return None
        first, last = self.recent[0], self.recent[-1]
        wall_s = last["time"] - first["time"]
        return ((last.get(key) or 0) - (first.get(key) or 0)) / wall_s if wall_s > 0 else None


def _role(name: str) -> str:
    return name.partition("-")[0]
