"""A simulated run that leaves behind the files of a real one."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from penstock.config import Config
from penstock.observe.jsonl import JsonLinesWriter
from penstock.ports.group_records import EndedGroup
from penstock.ports.training import Trainer
from penstock.simulator.clock import run_virtual
from penstock.simulator.experience import Experience
from penstock.simulator.simulated_run import Simulation
from penstock.simulator.trace import open_workload
from penstock.simulator.trainer_model import TrainerWithoutCheckpoints
from penstock.store.experience_pool import ExperiencePool
from penstock.types import EpisodeSummary, GroupRef, LearnerState, PayloadRef, Task, WeightsHandle

ENGINE = {"step_s": 0.02, "sequence_s": 0.001, "prefill_token_s": 1e-4, "update_s": 0.5, "latency_s": 0.4}
TRAINER = {"token_s": 2e-4, "call_s": 0.05, "step_s": 0.3, "publish_s": 0.1}


def config(**scheduler: Any) -> Config:
    return Config.model_validate(
        {
            "env": {"group_size": 4, "max_new_tokens": 400},
            "model": {"max_context": 512},
            "data": {"eval_tasks": 0},
            "rollout": {"slots": 16},
            "trainer": {"steps": 20, "groups_per_step": 8, "checkpoint_every": 100},
            "scheduler": {"trigger": {"min_samples": 8, "max_wait": "500ms"}, "max_running": 12, **scheduler},
            "simulator": {
                "engine": {**ENGINE, "admit_share": 0.125, "admit_tokens": 4096},
                "trainer": TRAINER,
                "workload": {"median_tokens": 80.0, "max_tokens": 400, "prompt_tokens": 30},
                "strategies": ["configured"],
                "steps": 20,
            },
        }
    )


class TeePool(ExperiencePool):
    """Writes down what the simulated learner holds."""

    def __init__(self, directory: Path, experience: Experience) -> None:
        super().__init__(directory)
        self._experience = experience

    def add_group(self, group: int, task: Task, ref: PayloadRef, episodes: Sequence[EpisodeSummary]) -> None:
        super().add_group(group, task, ref, episodes)
        self._experience.add_group(group, task, ref, episodes)

    def end_groups(self, groups: Sequence[EndedGroup]) -> None:
        super().end_groups(groups)
        self._experience.end_groups(groups)


class TimedTrainer(TrainerWithoutCheckpoints):
    """Writes a span for every call of another trainer."""

    def __init__(self, trainer: Trainer, timeline: JsonLinesWriter) -> None:
        self._trainer, self._timeline, self._version = trainer, timeline, 0
        self._began: dict[int, float] = {}

    async def accumulate(self, groups: Sequence[GroupRef]) -> Mapping[str, float]:
        start = now()
        counts = await self._trainer.accumulate(groups)
        self._write("train", start)
        return counts

    async def step(self) -> LearnerState:
        start = now()
        state = await self._trainer.step()
        self._version = state.policy_version
        self._write("step", start)
        return state

    async def begin_publish(self) -> int:
        self._began[self._version] = now()
        return await self._trainer.begin_publish()

    async def finish_publish(self, policy_version: int) -> WeightsHandle:
        handle = await self._trainer.finish_publish(policy_version)
        self._write("publish", self._began.pop(policy_version))
        return handle

    def _write(self, kind: str, start: float) -> None:
        span = {"process": "trainer-0", "kind": kind, "start": start, "end": now()}
        self._timeline.write({**span, "policy_version": self._version})


class StepLines:
    """An observer that writes a line per step, on virtual time."""

    def __init__(self, simulation: Simulation, metrics: JsonLinesWriter) -> None:
        self._simulation, self._metrics = simulation, metrics

    def stepped(
        self, step: int, learner: LearnerState, ledger: Mapping[str, int], scheduling: Mapping[str, float | None]
    ) -> None:
        self._metrics.write({"step": step, "time": now(), "ledger": dict(ledger)})
        self._simulation.stepped(step, learner, ledger, scheduling)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._simulation, name)


def now() -> float:
    return asyncio.get_running_loop().time()


def record(run_dir: Path, config: Config, *, seed: int = 0) -> None:
    """Simulate the configuration as it stands, and write what a run would have written."""
    run_dir.mkdir(parents=True)
    (run_dir / "config.yaml").write_text(yaml.safe_dump(config.model_dump(mode="json", exclude={"simulator"})))
    workload = open_workload(config.simulator.workload, group_size=config.env.group_size, seed=seed)
    timeline, metrics = (JsonLinesWriter(run_dir / name) for name in ("timeline.jsonl", "metrics.jsonl"))
    events = JsonLinesWriter(run_dir / "events.jsonl")

    async def main() -> None:
        simulation = Simulation(config, workload, seed=seed, num_tasks=None, progress=None)
        system = simulation.system
        system.pool = TeePool(run_dir / "pool", simulation.experience)
        system.trainer = TimedTrainer(system.trainer, timeline)
        system.recorder = StepLines(simulation, metrics)  # type: ignore[assignment]
        await simulation.run()
        system.pool.close()
        totals, engine = simulation.fleet.totals(), config.simulator.engine
        busy_s = totals.busy_s(engine)
        x = (engine.step_s, engine.sequence_s, engine.prefill_token_s)
        sums = {
            "nn": totals.n,
            "nb": totals.b,
            "bb": totals.bb,
            "np": totals.p,
            "bp": totals.bp,
            "pp": totals.pp,
            "ny": busy_s,
            "by": x[0] * totals.b + x[1] * totals.bb + x[2] * totals.bp,
            "py": x[0] * totals.p + x[1] * totals.bp + x[2] * totals.pp,
        }
        events.write(
            {
                "event": "process_totals",
                "process": "rollout-0",
                "role": "rollout",
                "busy_s": busy_s,
                "cpu_s": busy_s,
                "counters": {f"cost_{name}": value for name, value in sums.items()},
            }
        )
        span = {"process": "rollout-0", "start": 0.0, "end": engine.update_s, "policy_version": 0}
        timeline.write({**span, "kind": "update_weights"})
        timeline.write({**span, "kind": "generate", "end": busy_s})

    run_virtual(main())
    for writer in (timeline, metrics, events):
        writer.close()
