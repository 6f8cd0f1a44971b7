"""What a run looks like from outside, folded together from its events and metrics. Pure: records in, facts out."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from penstock.config import Config
from penstock.observe.notices import notice
from penstock.observe.summary import busy_fraction

Record = dict[str, Any]
TRAINING, PLAYING, EVALUATING = "training", "playing", "evaluating the policy"
"""Phases of a run."""
INDISPENSABLE = ("controller", "trainer", "ranks")
"""Roles each of whose processes the run needs."""
WINDOW_S = 15.0
"""Rates are means over the latest steps of about this long."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What a run set out to do."""

    num_steps: int
    """Optimizer steps; of a run that only plays, tasks, and 0 until it is known how many."""
    pipeline: str = "train"
    num_warm_start_steps: int = 0
    num_eval_tasks: int = 0
    max_staleness: int | None = None

    @classmethod
    def of(cls, config: Config) -> Self:
        """What `config` asks for."""
        num_held_out = config.validation_tasks
        num_known = 0 if config.validation.tasks == -1 else num_held_out
        return cls(
            pipeline=config.pipeline,
            num_steps={"train": config.trainer.steps, "eval": num_known, "rollout": 0}[config.pipeline],
            num_warm_start_steps=config.model.warm_start.steps,
            num_eval_tasks=num_held_out,
            max_staleness=config.scheduler.max_staleness,
        )


@dataclass(slots=True, kw_only=True)
class RunView:
    """Everything the display shows. Feed it records in the order they were written."""

    plan: Plan
    status: str = "pending"
    phase_since: float | None = None
    """Start of the present phase (seconds since the epoch)."""
    processes: dict[str, str] = field(default_factory=dict)
    """Name -> state, in start order, in the present life of the run."""
    restarts: Counter[str] = field(default_factory=Counter)
    """By name, in the present life."""
    rewards: dict[int, float] = field(default_factory=dict)
    """By step."""
    servers: dict[str, str] = field(default_factory=dict)
    """Name -> where it serves."""
    evaluations: dict[str, float] = field(default_factory=dict)
    """`before`, `step <n>`, `after` -> mean reward on the held-out tasks."""
    evaluated_tags: dict[str, Record] = field(default_factory=dict)
    """What the latest of them found, by tag."""
    num_evaluated: int = 0
    """Held-out tasks that the latest of them played."""
    checkpoints: dict[int, str] = field(default_factory=dict)
    """Step -> directory, of those that were saved and not given up."""
    is_warm: bool = False
    notices: list[str] = field(default_factory=list)
    """Alarms, losses, restarts and stalls, in their order."""
    needs: str | None = None
    """A command that somebody has to type, for the run to go on."""
    played: Record = field(default_factory=dict)
    """What was played so far, between steps too; see `summary.PLAYED`."""
    recent: deque[Record] = field(default_factory=deque)
    """The latest steps, at least two if there are two."""

    def see_event(self, event: Record) -> None:
        """Take in a line of events.jsonl."""
        before = self.phase
        if (told := notice(event)) is not None:
            self.notices.append(told)
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
            case {"event": "checkpoint", "step": step, "path": path}:
                self.checkpoints[step] = path
            case {"event": "resumed" | "rewound", "step": step}:
                self.checkpoints = {saved: path for saved, path in self.checkpoints.items() if saved <= step}
        if self.phase != before:
            self.phase_since = event.get("time")

    def see_step(self, line: Record) -> None:
        """Take in a line of metrics.jsonl."""
        before = self.phase
        if line["step"] <= self.step:  # what follows the last checkpoint is taken again
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
        """The one to go on from."""
        return self.checkpoints[max(self.checkpoints)] if self.checkpoints else None

    @property
    def step(self) -> int:
        """How far the run is, in its unit."""
        if self.plan.pipeline == "eval":
            return self.num_evaluated or (self.played.get("held_out") or {}).get("ended", 0)
        return int(self.recent[-1]["step"]) if self.recent else 0

    @property
    def latest(self) -> Record:
        """The last step's line; empty before the first step."""
        return self.recent[-1] if self.recent else {}

    @property
    def tags(self) -> dict[str, Record]:
        """By tag: reward and length of what was played, means over the latest steps, and the latest validation."""
        prefix = "reward/"
        trained = {key.removeprefix(prefix) for line in self.recent for key in line if key.startswith(prefix)}
        return {
            tag: {
                "reward": self._mean_of(f"reward/{tag}"),
                "response_tokens": self._mean_of(f"response_length_mean/{tag}"),
                "held_out": self.evaluated_tags.get(tag),
            }
            for tag in sorted(trained | self.evaluated_tags.keys())
        }

    def _mean_of(self, key: str) -> float | None:
        return mean([line[key] for line in self.recent if line.get(key) is not None])

    @property
    def phase(self) -> str:
        """What the run is busy with, in words."""
        if self.status == "starting":
            waiting = [name for name, state in self.processes.items() if state in ("pending", "starting")]
            return "starting " + ", ".join(waiting) if waiting else "starting"
        if self.status != "running":
            return self.status
        if missing := self._missing:
            return f"waiting for {', '.join(map(self._with_restarts, missing))}"
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
        """Processes without which nothing goes on: controller and trainers, and of the others all that do the same."""
        by_role: dict[str, dict[str, bool]] = {}
        for name, state in self.processes.items():
            by_role.setdefault(name.partition("-")[0], {})[name] = state in ("ready", "degraded")
        return [
            name
            for role, served in by_role.items()
            for name, is_there in served.items()
            if not is_there and (role in INDISPENSABLE or not any(served.values()))
        ]

    def _with_restarts(self, name: str) -> str:
        return f"{name} (restart {self.restarts[name]})" if self.restarts[name] else name

    @property
    def unit(self) -> str:
        """What is counted."""
        return "step" if self.plan.pipeline == "train" else "task"

    @property
    def advances(self) -> bool:
        """It is in the phase that takes its steps."""
        return bool(self.recent) and self.phase in (TRAINING, PLAYING)

    @property
    def reward(self) -> float | None:
        """Mean over the latest steps."""
        return self._mean_of("reward")

    @property
    def trainer_busy(self) -> float | None:
        return busy_fraction(self.recent, "trainer_busy_s", "num_trainers")

    @property
    def generator_busy(self) -> float | None:
        return busy_fraction(self.recent, "generator_busy_s", "num_servers")

    @property
    def eta_s(self) -> float | None:
        """Until the last step, at the present pace."""
        steps_per_s = self.rate("step")
        return (self.plan.num_steps - self.step) / steps_per_s if steps_per_s else None

    def rate(self, key: str) -> float | None:
        """Growth of a running total per second, over the latest steps."""
        if len(self.recent) < 2:
            return None
        first, last = self.recent[0], self.recent[-1]
        wall_s = last["time"] - first["time"]
        return ((last.get(key) or 0) - (first.get(key) or 0)) / wall_s if wall_s > 0 else None


def mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
