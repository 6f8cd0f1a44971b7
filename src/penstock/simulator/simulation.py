"""One simulated run: the real loop and the real scheduler between modelled workers, servers and learner."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from penstock import loop
from penstock.config import Config
from penstock.data.sources import TaskStream
from penstock.scheduler.scheduler import Scheduler
from penstock.simulator.clock import run_virtual
from penstock.simulator.engine import Totals
from penstock.simulator.experience import Experience
from penstock.simulator.fleet import Fleet
from penstock.simulator.trainer import TrainerModel
from penstock.simulator.workers import FleetWorkers
from penstock.simulator.workload import Tasks, Workload
from penstock.types import EpisodeSummary, LearnerState, Task

WORKER, CAPACITY = "env-0", 1 << 40
"""One modelled worker plays everything; what bounds it is the grants."""

Progress = Callable[[int], None]
"""Called with the number of optimizer steps taken."""


class StepMark(NamedTuple):
    """The state of things when an optimizer step was over."""

    time: float
    num_samples: int
    """Trained so far."""
    trainer_busy_s: float
    cancelled_tokens: int
    """Of groups that had to start over."""
    totals: Totals | None
    """Of the servers; only where the steady part begins and ends."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)  # asyncio prints its main task's result to nowhere
class Outcome:
    """What a simulated run left behind."""

    config: Config
    marks: Sequence[StepMark]
    """Of every step, and of the start."""
    experience: Experience
    num_tasks: int
    """Admitted."""
    waits: Sequence[float]
    """Of each group, between its admission and its start."""
    ended_at: Sequence[float]
    """When each episode had its last token."""
    whole_at: Sequence[float]
    """When each group had its last member."""


class Marks:
    """`ports.Observer` that only notes the steps."""

    def __init__(self, take: Callable[[int], StepMark], progress: Progress) -> None:
        self._take, self._progress = take, progress
        self.marks = [take(0)]

    def event(self, event: str, **details: Any) -> None: ...

    def decision(self, decider: str, reason: str, inputs: Mapping[str, Any]) -> None: ...

    def played(self, tag: str, episodes: Sequence[EpisodeSummary]) -> None: ...

    def accumulated(self, counts: Mapping[str, float]) -> None: ...

    def stepped(
        self, step: int, learner: LearnerState, ledger: Mapping[str, int], scheduling: Mapping[str, float | None]
    ) -> None:
        self.marks.append(self._take(step))
        self._progress(step)

    def evaluated(
        self, when: str, tasks: Sequence[Task], episodes: Sequence[EpisodeSummary], *, num_samples: int
    ) -> None: ...


class Admissions:
    """`TaskSource` that notes when each task was asked for, which is when it is admitted."""

    def __init__(self, tasks: Tasks) -> None:
        self._tasks = tasks
        self.admitted_at: list[float] = []

    def task(self, index: int) -> Task | None:
        found = self._tasks.task(index)
        if found is not None:
            self.admitted_at.append(asyncio.get_running_loop().time())
        return found


def simulate(
    config: Config,
    workload: Workload,
    *,
    seed: int,
    num_tasks: int | None = None,
    progress: Progress = lambda step: None,
) -> Outcome:
    """Run `config` to its last optimizer step on a virtual clock, on `num_tasks` tasks or as many as it takes."""
    with _rare_collection():
        return run_virtual(_simulate(config, workload, seed, num_tasks, progress))


@contextmanager
def _rare_collection() -> Iterator[None]:
    """Millions of small objects live as long as their group, and hardly any is part of a cycle: looking for cycles at
    the usual rate would be a third of the time."""
    usual = gc.get_threshold()
    gc.set_threshold(200_000, 50, 1000)
    try:
        yield
    finally:
        gc.set_threshold(*usual)


async def _simulate(
    config: Config, workload: Workload, seed: int, num_tasks: int | None, progress: Progress
) -> Outcome:
    simulator, now = config.simulator, asyncio.get_running_loop().time
    fleet = Fleet(simulator.engine, num_servers=config.rollout.servers, num_slots=config.rollout.slots)
    experience = Experience(max_staleness=config.scheduler.max_staleness)
    trainer = TrainerModel(simulator.trainer, experience)
    ends = (simulator.warmup_steps, config.trainer.steps)

    def mark(step: int) -> StepMark:
        totals = fleet.totals() if step in ends else None
        return StepMark(now(), experience.num_samples, trainer.busy_s, workers.cancelled_tokens, totals)

    scheduler = Scheduler(config, now=now, record=lambda decider, reason, inputs: None)
    workers = FleetWorkers(
        config,
        fleet=fleet,
        workload=workload,
        experience=experience,
        collect=lambda *played: loop.collect(system, *played),
        ended=scheduler.ended,
        request_grant=scheduler.request_grant,
    )
    observer = Marks(mark, progress)
    source = Admissions(Tasks(workload, seed=seed, size=num_tasks))
    system = loop.System(
        config=config,
        run_dir=Path(),
        scheduler=scheduler,
        tasks=TaskStream(source),
        held_out=(),
        workers=workers,
        trainer=trainer,
        servers=fleet,
        pool=experience,
        recorder=observer,
    )
    scheduler.worker_joined(WORKER, CAPACITY)
    await loop.run(system)
    return Outcome(
        config=config,
        marks=observer.marks,
        experience=experience,
        num_tasks=len(source.admitted_at),
        waits=[started - source.admitted_at[index] for index, started in workers.started_at.items()],
        ended_at=workers.ended_at,
        whole_at=workers.whole_at,
    )
