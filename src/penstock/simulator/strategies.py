"""The compared strategies as configurations: each name becomes the settings that a user would write."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import ValidationError

from penstock.config import Config, ConfigError
from penstock.config.simulated_cluster import OnAllDevices, Strategy
from penstock.config.yaml_file import merged
from penstock.simulator.workload import Workload

TAIL_BATCHING = 1.25
"""RollPacker's over-sampling of prompts (arXiv 2509.21009)."""
NO_DEADLINE_S = 1e9
"""Deadline that is never reached. Modelled environments never hang, and a virtual clock makes long waits cheap."""

ON_ALL_DEVICES = frozenset(get_args(OnAllDevices))
OVERLAPPING = frozenset({"asynchronous", "segments"})
"""Strategies that may train less than a whole batch at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Combination:
    """A strategy, an order of dispatch and a trigger, with the configuration to simulate."""

    strategy: Strategy
    dispatch: str
    trigger: str
    config: Config
    """The complete configuration; the engine's and the learner's times are those of this strategy's devices."""

    @property
    def name(self) -> str:
        parts = [self.strategy, "" if self.dispatch == "fifo" else self.dispatch]
        if self.strategy in OVERLAPPING and self.trigger != "compute":
            parts.append(self.trigger)
        return " ".join(part for part in parts if part)

    @property
    def shares_devices(self) -> bool:
        """Return whether generation and training take turns on the same devices."""
        is_colocated = self.config.scheduler.mode == "colocated"
        return self.strategy in ON_ALL_DEVICES or (self.strategy == "configured" and is_colocated)


def combinations(config: Config, workload: Workload) -> list[Combination]:
    """Return every strategy with every order of dispatch and, where triggers matter, every trigger."""
    return [
        _combine(config, workload, strategy, dispatch, trigger)
        for strategy in dict.fromkeys(config.simulator.strategies)
        for dispatch, trigger in _variants(config, strategy)
    ]


def _variants(config: Config, strategy: Strategy) -> Iterator[tuple[str, str]]:
    if strategy == "configured":
        yield config.scheduler.dispatch.policy, config.scheduler.trigger_use
        return
    for dispatch in dict.fromkeys(config.simulator.dispatch):
        for trigger in dict.fromkeys(config.simulator.triggers) if strategy in OVERLAPPING else ["batch"]:
            yield dispatch, trigger


def _combine(config: Config, workload: Workload, strategy: Strategy, dispatch: str, trigger: str) -> Combination:
    changes: dict[str, Any] = {} if strategy == "configured" else _scheduler(config, workload, strategy)
    settings: dict[str, Any] = {"use": trigger} | ({"feedback": {"signal": "none"}} if trigger == "batch" else {})
    changes = merged(changes, {"dispatch": {"policy": dispatch}, "trigger": settings})
    tree = merged(config.model_dump(), {"scheduler": changes, **_surroundings(config, workload, strategy)})
    if strategy in ON_ALL_DEVICES:
        tree = merged(tree, _all_devices(config))
    try:
        complete = Config.model_validate(tree)
    except ValidationError as error:
        reasons = "; ".join(problem["msg"].removeprefix("Value error, ") for problem in error.errors())
        raise ConfigError(f"simulator: strategy {strategy} contradicts the configuration: {reasons}") from None
    return Combination(strategy=strategy, dispatch=dispatch, trigger=trigger, config=complete)


def closed_set(config: Config, workload: Workload, policy: str, num_groups: int) -> Config:
    """Return a configuration for one round of `num_groups` groups, all available from the start and none dropped."""
    simulator = config.simulator.model_copy(update={"steps": 1, "warmup_steps": 0})
    trainer = config.trainer.model_copy(update={"groups_per_step": num_groups})
    dispatch = config.scheduler.dispatch.model_copy(update={"look_ahead": None})
    scheduler = config.scheduler.model_copy(update={"group_filter": [], "dispatch": dispatch})
    changed = config.model_copy(update={"simulator": simulator, "trainer": trainer, "scheduler": scheduler})
    return _combine(changed, workload, "synchronous", policy, "batch").config


def _scheduler(config: Config, workload: Workload, strategy: Strategy) -> dict[str, Any]:
    """Return the scheduler settings of a strategy."""
    user = config.scheduler
    plain = {"over_sampling": 1.0, "segment_length": None, "max_segment_count": None}
    match strategy:
        case "synchronous" | "colocated":
            return {**plain, "mode": strategy, "max_staleness": 0}
        case "one_step_off":
            return {**plain, "mode": "one_step_off", "max_staleness": 1}
        case "asynchronous":
            return {**plain, "mode": "asynchronous"}
        case "over_sampling":
            extra = {"over_sampling": config.simulator.over_sampling, "leftovers": "resume"}
            return {**plain, "mode": "colocated", "max_staleness": max(1, user.max_staleness), **extra}
        case "tail_batching":
            extra = {"over_sampling": TAIL_BATCHING, "leftovers": "restart"}
            return {**plain, "mode": "colocated", "max_staleness": 0, **extra}
        case "segments":
            length = math.ceil(workload.max_tokens / config.simulator.segments)
            return {**plain, "mode": "asynchronous", "segment_length": length}
        case "configured":
            return {}


def _surroundings(config: Config, workload: Workload, strategy: Strategy) -> dict[str, Any]:
    """Return settings without evaluation and deadline. They leave room for the longest answer, except for `configured`,
    which keeps the user's bounds."""
    env: dict[str, Any] = {"episode_timeout_s": NO_DEADLINE_S}
    max_context = config.model.max_context
    if strategy != "configured":
        env |= {"max_new_tokens": workload.max_tokens, "max_turns": workload.max_turns}
        max_context = workload.max_tokens + 1
    steps = config.simulator.steps
    return {
        "env": env,
        "model": {"max_context": max_context},
        "data": {"eval_tasks": 0},
        "trainer": {"steps": steps, "total_samples": None, "checkpoint_every": steps + 1},
    }


def _all_devices(config: Config) -> dict[str, Any]:
    """Return settings in which all devices generate, then all devices train."""
    simulator = config.simulator
    devices = config.rollout.num_servers + simulator.trainer_devices
    share = simulator.trainer_devices / devices
    times = simulator.trainer
    trainer = {"token_s": times.token_s * share, "call_s": times.call_s * share, "step_s": times.step_s * share}
    return {"rollout": {"servers": devices}, "simulator": {"trainer": trainer, "trainer_devices": devices}}
