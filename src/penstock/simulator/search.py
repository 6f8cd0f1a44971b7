"""Search of better settings on a model of a run: the same loop on the virtual clock, with the groups that the run has
just played.

The search changes one setting at a time, on the same tasks, and combines the changes that help. The best combination
and the settings in force are then simulated again on other tasks, so that luck promises nothing. A change is allowed
only if the trained lengths stay those of the data, and if no sample becomes staler than the run may take.

A search whose processor time is used up keeps the best change so far. It says which settings it did not reach, so that
the next one begins with them.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import harmonic_mean
from typing import Any, NamedTuple

import msgspec
import numpy as np

from penstock.config import Config, EngineModelConfig, SimulatorConfig, WorkloadConfig
from penstock.config.tunable import settings_of, with_settings
from penstock.ports.settings_search import Answer, Question
from penstock.scheduler.bias import critical_distance
from penstock.simulator.fitting import fit_calls
from penstock.simulator.measures import Measures, measure
from penstock.simulator.simulated_run import simulate
from penstock.simulator.strategies import NO_DEADLINE_S
from penstock.simulator.trace import RecordedTask, RecordedWorkload, recorded_task
from penstock.simulator.workload import Plan, Workload

SAMPLES_PER_STEP = 256
"""A larger step is simulated as a slice of the cluster with about this many samples."""
STEPS = 8
"""Simulated optimizer steps after the first ones, in which the servers fill."""
FRESH = 0.98
"""Share of the best speed at which a change that keeps samples fresher is preferred."""
USEFUL = 1.01
"""Smallest factor on the speed for which a change of one setting is combined with others."""
MAX_COMBINED = 6
"""Most changes that are combined with the best one, in one round."""
MAX_KS, KS_SLACK = 0.1, 0.02
"""Kolmogorov-Smirnov distance between trained lengths and the data's that a change may have in any case, and how much
more it may have than the settings in force. A distance that chance explains is allowed too."""
MAX_REDUNDANCY = 2
MAX_SEGMENTS = 32
"""Most segments of the longest answer, for the values of `segment_length` that are tried."""
CHECKS = 2
"""Simulated runs after the search."""


def recorded_tasks(question: Question) -> list[RecordedTask]:
    """Return the groups that the run has played, as tasks of a workload."""
    found = (recorded_task(group.task_id, group.episodes) for group in question.groups)
    return [task for task in found if task is not None]


def modelled(config: Config, question: Question, engine: EngineModelConfig) -> Config:
    """Return the configuration of the run with models of its machines, and its settings in force."""
    simulator = SimulatorConfig(
        engine=engine,
        trainer=fit_calls(question.calls),
        workload=WorkloadConfig(source="trace", path="the latest groups"),
        strategies=["configured"],
        known_lengths="history" if question.knows_lengths else "none",
    )
    complete = config.model_copy(update={"simulator": simulator})
    return with_settings(complete, question.settings)


def answer(config: Config, question: Question, engine: EngineModelConfig, *, max_cpu_s: float = math.inf) -> Answer:
    """Search better settings for a run with this configuration."""
    tasks = recorded_tasks(question)
    lengths = [episode.tokens for task in tasks for episode in task.episodes]
    if not lengths or not question.calls:
        return Answer(reason="the run has played and trained too little for a search")
    complete = modelled(config, question, engine)

    def workload(num_members: int, seed: int) -> Workload:
        return RecordedWorkload(tasks, complete.simulator.workload, group_size=num_members, seed=seed)

    search = Search(
        config=complete,
        workload=workload,
        movable=question.movable,
        trust=question.trust,
        rejected=question.rejected,
        max_staleness=config.scheduler.max_staleness,
        may_be_staler=question.may_be_staler,
        knows_lengths=question.knows_lengths,
        min_gain=question.min_gain,
        max_cpu_s=max_cpu_s,
        lengths=lengths,
    )
    return search.run()


class OutOfTime(Exception):
    """A simulated run takes longer than the search may."""


class TimedWorkload:
    """A workload that raises `OutOfTime` when a clock has passed a moment."""

    def __init__(self, workload: Workload, clock: Callable[[], float], *, until: float) -> None:
        self.max_tokens, self.max_turns = workload.max_tokens, workload.max_turns
        self._workload, self._clock, self._until = workload, clock, until
        self.task_id, self.tag = workload.task_id, workload.tag

    def plan(self, index: int, attempt: int) -> Plan:
        if self._clock() > self._until:
            raise OutOfTime
        return self._workload.plan(index, attempt)


class Candidate(NamedTuple):
    """Changed settings, and their simulated figures."""

    changes: dict[str, Any]
    measures: Measures

    @property
    def speed(self) -> float:
        return self.measures.fair_samples_per_s


@dataclass(eq=False, kw_only=True)
class Search:
    """One search, on a model of a run."""

    config: Config
    """The model, with the settings in force."""
    workload: Callable[[int, int], Workload]
    """workload(members of a group, seed)."""
    movable: Sequence[str]
    """Names of the settings that may change, in the order in which they are tried."""
    trust: Mapping[str, float] = field(default_factory=dict)
    rejected: Sequence[Mapping[str, Any]] = ()
    max_staleness: int
    """The bound that the user has set."""
    may_be_staler: bool = True
    knows_lengths: bool = False
    min_gain: float = 0.05
    max_cpu_s: float = math.inf
    lengths: Sequence[int] = ()
    """Lengths of the latest answers, for the choice of segments."""
    num_simulated: int = 0
    tried: list[Candidate] = field(default_factory=list)
    """All candidates on the first tasks."""
    clock: Callable[[], float] = time.process_time
    _began: float = 0.0
    _was_cut: bool = False
    _reached: set[str] = field(default_factory=set)

    def run(self) -> Answer:
        """Return the best change."""
        self._began = self.clock()
        try:
            found = self._run()
        except OutOfTime:
            self._was_cut = True
            found = self._nothing(f"the search has used its {self.max_cpu_s:.3g} s of processor time")
        return msgspec.structs.replace(
            found,
            num_simulated=self.num_simulated,
            cpu_s=self.clock() - self._began,
            left_out=[name for name in self.movable if self._was_cut and name not in self._reached],
            was_cut=self._was_cut,
        )

    def _run(self) -> Answer:
        seed = self.config.seed
        now = self._simulate({}, seed)
        tried = [each for name in self.movable for each in self._single(name, now, seed)]
        best = max(tried, key=lambda each: self._trusted_gain(each, now), default=now)
        helpful = sorted((each for each in tried if each.speed > USEFUL * now.speed), key=lambda each: -each.speed)
        for other in helpful[:MAX_COMBINED]:
            if self._runs_out() or set(other.changes) <= set(best.changes):
                continue
            both = self._allowed({**other.changes, **best.changes}, now, seed)
            if both is not None and self._trusted_gain(both, now) > USEFUL * self._trusted_gain(best, now):
                best = both
        best = self._fresher(best, now, seed)
        return self._answer(best, now, seed)

    def _answer(self, best: Candidate, now: Candidate, seed: int) -> Answer:
        if not best.changes or not now.speed:
            return self._nothing("no setting is faster")
        again, before = self._simulate(best.changes, seed + 1), self._simulate({}, seed + 1)
        speed_now = harmonic_mean((now.speed, before.speed))
        speed = harmonic_mean((best.speed, again.speed))
        gain = 1 + (speed / speed_now - 1) * self._trust(best)
        if gain < 1 + self.min_gain:
            return self._nothing(f"no setting is {self.min_gain:.0%} faster, the best one {gain:.3g} times as fast")
        return Answer(
            changes=best.changes,
            gain=gain,
            predicted={
                "predicted_samples_per_s_now": speed_now,
                "predicted_samples_per_s": speed,
                "predicted_staleness_now": now.measures.staleness_mean,
                "predicted_staleness": best.measures.staleness_mean,
            },
            reason=f"{gain:.3g} times the speed predicted by {self.num_simulated} simulated runs",
        )

    def _nothing(self, reason: str) -> Answer:
        return Answer(reason=f"{reason}: {self.num_simulated} simulated runs")

    def _runs_out(self) -> bool:
        """Return, and remember, whether only the time for the check of the best candidate is left."""
        self._was_cut = self._was_cut or self.clock() - self._began + self._checks_s >= self.max_cpu_s
        return self._was_cut

    @property
    def _checks_s(self) -> float:
        """Return the time that the check of the best candidate will take."""
        return CHECKS * (self.clock() - self._began) / max(self.num_simulated, 1)

    def _single(self, name: str, now: Candidate, seed: int) -> Iterator[Candidate]:
        """Simulate each other value of one setting that can still be the best."""
        made: list[Candidate] = []
        for value in self._values(name):
            if self._runs_out():
                return
            if name == "max_running" and self._is_hopeless(value, made, now):
                continue
            found = self._allowed({name: value}, now, seed)
            if found is not None:
                made.append(found)
                yield found
        if not self._was_cut:
            self._reached.add(name)

    def _is_hopeless(self, value: int, made: Sequence[Candidate], now: Candidate) -> bool:
        """Return whether what was simulated shows that this number of running episodes is not the best: fewer, where
        more of them help, or even more, where more do not help."""
        in_force = self.config.max_running
        more = [each for each in made if each.changes["max_running"] > in_force]
        if value < in_force:
            return any(each.speed > USEFUL * now.speed for each in more)
        return any(each.speed < now.speed and each.changes["max_running"] < value for each in more)

    def _values(self, name: str) -> Iterator[Any]:
        """Return the values to try of a setting, without the one in force."""
        in_force = settings_of(self.config)[name]
        yield from (value for value in dict.fromkeys(self._choices(name)) if value != in_force)

    def _choices(self, name: str) -> Sequence[Any]:
        config = self.config
        step = config.trainer.groups_per_step
        match name:
            case "dispatch":
                return ["fifo", "probe", *(["sjf", "ljf"] if self.knows_lengths else [])]
            case "look_ahead":
                return [step, 2 * step, 4 * step] if config.scheduler.dispatch.policy in ("sjf", "ljf") else []
            case "entropy_gain":
                return [0.0, 1.0, 2.0] if config.scheduler.dispatch.policy == "sjf" else []
            case "max_running":
                most, least = config.max_open, config.env.num_members
                sizes = (
                    round(config.max_running * factor) for factor in (2, 4, 0.5, 3, 1.5, 0.75)
                )  # the boldest first
                return [min(max(size, least), most) for size in sizes]
            case "min_samples":
                whole = step * config.env.group_size
                return [None, *(max(whole // part, 1) for part in (8, 4, 2, 1))]
            case "max_wait":
                return ["0.1x", "0.25x", "0.5x", "1x"]
            case "segment_length":
                if len(self.lengths) == 0:
                    return []
                fewest = max(self.lengths) / MAX_SEGMENTS
                usual = np.percentile(self.lengths, (50, 90)).tolist()
                return [None, *(_round(max(tokens, fewest)) for tokens in usual)]
            case "redundancy":
                return list(range(MAX_REDUNDANCY + 1))
            case "max_staleness":
                return list(range(1, self.max_staleness + 1))
        raise ValueError(f"no values of {name} are known")

    def _allowed(self, changes: dict[str, Any], now: Candidate, seed: int) -> Candidate | None:
        """Simulate changes. Return None if they have been rejected, or would train other samples than the run may."""
        if any(dict(each).items() <= changes.items() for each in self.rejected) or self._runs_out():
            return None
        try:
            found = self._simulate(changes, seed, spare_s=self._checks_s)
        except OutOfTime:
            self._was_cut = True
            return None
        num_groups = found.measures.steps * slice_of(self.config)[0].trainer.groups_per_step
        certain = critical_distance(num_groups, num_groups)
        most_ks = max(MAX_KS, certain, now.measures.length_ks_trained_population + KS_SLACK)
        is_biased = found.measures.length_ks_trained_population > most_ks
        is_staler = found.measures.staleness_mean > now.measures.staleness_mean and not self.may_be_staler
        if is_biased or is_staler:
            return None
        self.tried.append(found)
        return found

    def _fresher(self, best: Candidate, now: Candidate, seed: int) -> Candidate:
        """Return `best`, or the lowest staleness bound with nearly its speed."""
        bound, least = with_settings(self.config, best.changes).scheduler.max_staleness, FRESH * best.speed
        while "max_staleness" in self.movable and bound > 1 and not self._runs_out():
            bound -= 1
            fresher = self._allowed({**best.changes, "max_staleness": bound}, now, seed)
            if fresher is None or fresher.speed < least:
                break
            best = fresher
        return best

    def _trust(self, each: Candidate) -> float:
        return min((self.trust.get(name, 1.0) for name in each.changes), default=1.0)

    def _trusted_gain(self, each: Candidate, now: Candidate) -> float:
        return 1 + (each.speed / max(now.speed, 1e-12) - 1) * self._trust(each)

    def _simulate(self, changes: dict[str, Any], seed: int, *, spare_s: float = 0.0) -> Candidate:
        """Simulate a run with these changes. Raises `OutOfTime` if no more than `spare_s` would be left."""
        self.num_simulated += 1
        config = slice_of(with_settings(self.config, changes))[0]
        until = self._began + self.max_cpu_s - spare_s
        workload = TimedWorkload(self.workload(config.env.num_members, seed), self.clock, until=until)
        run = None
        try:
            run = simulate(config, workload, seed=seed)
        except* OutOfTime:
            pass
        if run is None:
            raise OutOfTime
        return Candidate(changes, measure(run, workload, shares_devices=config.scheduler.mode == "colocated"))


def _round(tokens: float) -> int:
    """Return a number of tokens with two significant digits."""
    if tokens < 10:
        return max(round(tokens), 1)
    digits = int(10 ** (math.floor(math.log10(tokens)) - 1))
    return round(tokens / digits) * digits


def slice_of(config: Config) -> tuple[Config, int]:
    """Return a slice of a large cluster that behaves as the whole does, for as many steps as a search simulates, and
    how many such slices make the cluster."""
    batch, servers = config.trainer.groups_per_step * config.env.group_size, config.rollout.num_servers
    parts = max(min(batch // SAMPLES_PER_STEP, servers), 1)
    while parts > 1 and (servers % parts or config.trainer.groups_per_step % parts):
        parts -= 1
    warmup = config.scheduler.max_staleness + 3
    times = config.simulator.trainer
    simulator = config.simulator.model_copy(
        update={
            "steps": warmup + STEPS,
            "warmup_steps": warmup,
            "trainer": times.model_copy(update={"token_s": times.token_s * parts}),
        }
    )
    trigger = config.scheduler.trigger
    min_samples = None if trigger.min_samples is None else max(trigger.min_samples // parts, 1)
    look_ahead, max_running = (
        max(config.look_ahead // parts, 1),
        max(config.max_running // parts, config.env.num_members),
    )
    scheduler = config.scheduler.model_copy(
        update={
            "max_running": max_running,
            "dispatch": config.scheduler.dispatch.model_copy(update={"look_ahead": look_ahead}),
            "trigger": trigger.model_copy(update={"min_samples": min_samples}),
            "tuning": config.scheduler.tuning.model_copy(update={"mode": "off"}),
            "early_stop": None,
        }
    )
    trainer = config.trainer.model_copy(
        update={
            "groups_per_step": config.trainer.groups_per_step // parts,
            "steps": warmup + STEPS,
            "total_samples": None,
            "checkpoint_every": warmup + STEPS + 1,
        }
    )
    part = config.model_copy(
        update={
            "simulator": simulator,
            "scheduler": scheduler,
            "trainer": trainer,
            "rollout": config.rollout.model_copy(update={"servers": servers // parts, "urls": []}),
            "env": config.env.model_copy(update={"episode_timeout_s": NO_DEADLINE_S}),
            "data": config.data.model_copy(update={"eval_tasks": 0}),
            "validation": config.validation.model_copy(update={"every": 0}),
        }
    )
    return part, parts
