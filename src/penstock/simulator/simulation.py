"""One simulated run: the real loop and the real scheduler between modelled workers, servers and learner."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from penstock import loop
from penstock.config import Config
from penstock.data.sources import TaskStream
from penstock.deadline import reporting_to
from penstock.ports import GroupRecord
from penstock.scheduler.scheduler import Scheduler
from penstock.simulator.clock import run_virtual
from penstock.simulator.engine import Totals
from penstock.simulator.experience import Experience
from penstock.simulator.fleet import Fleet
from penstock.simulator.past import Lengths, Past, other_answers, true_mean
from penstock.simulator.trainer import TrainerModel
from penstock.simulator.workers import FleetWorkers
from penstock.simulator.workload import Tasks, Workload
from penstock.system import System
from penstock.types import EpisodeSummary, LearnerState, Task

WORKER, CAPACITY = "env-0", 1 << 40
"""One modelled worker plays everything; what bounds it is the grants."""

KNOWN_LENGTHS: Mapping[str, Lengths | None] = {"none": None, "history": other_answers, "oracle": true_mean}

Progress = Callable[[int], None]
"""Called with the number of optimizer steps taken."""


def _silent(step: int) -> None:
    """Nobody watches."""


class StepMark(NamedTuple):
    """The state of things when an optimizer step was over."""

    time: float
    num_samples: int
    """Trained so far."""
    trainer_busy_s: float
    cancelled_tokens: int
    """Of groups that had to start over."""
    surplus_tokens: int
    """Of members that their groups did without."""
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
    served_at: Sequence[float]
    """When every server served new weights; the first ones included."""
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

    def take_up(self, records: Iterable[GroupRecord]) -> None: ...

    def played(self, tag: str, episodes: Sequence[EpisodeSummary]) -> None: ...

    def accumulated(self, counts: Mapping[str, float]) -> None: ...

    def stepped(
        self, step: int, learner: LearnerState, ledger: Mapping[str, int], scheduling: Mapping[str, float | None]
    ) -> None:
        self.marks.append(self._take(step))
        self._progress(step)

    def progressed(self, groups: int, ledger: Mapping[str, int], scheduling: Mapping[str, float | None]) -> None: ...

    def evaluated(
        self,
        when: str,
        step: int,
        tasks: Sequence[Task],
        played: Sequence[Sequence[EpisodeSummary]],
        *,
        num_shown: int,
        solved_at: float,
    ) -> None: ...


class Admissions:
    """`TaskSource` that notes when each task was asked for, which is when it is admitted."""

    def __init__(self, tasks: Tasks, past: Past | None) -> None:
        self._tasks, self._past = tasks, past
        self.admitted_at: list[float] = []

    def task(self, index: int) -> Task | None:
        if self._past is not None:
            self._past.reach(index)
        found = self._tasks.task(index)
        if found is not None:
            self.admitted_at.append(asyncio.get_running_loop().time())
        return found


class Simulation:
    """The system and its modelled parts. To be made and run on a virtual event loop."""

    def __init__(
        self,
        config: Config,
        workload: Workload,
        *,
        seed: int,
        num_tasks: int | None = None,
        progress: Progress = _silent,
    ) -> None:
        now = asyncio.get_running_loop().time
        self.config = config
        self.fleet = Fleet(
            config.simulator.engine, num_servers=config.rollout.num_servers, num_slots=config.rollout.slots
        )
        self.experience = Experience(max_staleness=config.scheduler.max_staleness)
        self.trainer = TrainerModel(config.simulator.trainer, self.experience)
        scheduler = Scheduler(config, now=now, record=lambda decider, reason, inputs: None)
        self.workers = FleetWorkers(
            config,
            fleet=self.fleet,
            workload=workload,
            experience=self.experience,
            collect=lambda *played: loop.collect(self.system, *played),
            ended=scheduler.ended,
            request_grant=scheduler.request_grant,
        )
        self.observer = Marks(self._mark, progress)
        tasks, known = Tasks(workload, seed=seed, size=num_tasks), KNOWN_LENGTHS[config.simulator.known_lengths]
        past = None if known is None else Past(workload, tasks, known, scheduler.recall)
        self._admissions = Admissions(tasks, past)
        self.system = System(
            config=config,
            run_dir=Path(),
            scheduler=scheduler,
            tasks=TaskStream(self._admissions),
            held_out=(),
            workers=self.workers,
            trainer=self.trainer,
            servers=self.fleet,
            pool=self.experience,
            recorder=self.observer,
        )
        scheduler.worker_joined(WORKER, CAPACITY)

    async def run(self) -> Outcome:
        """To the last optimizer step."""
        await loop.run(self.system)
        admitted_at = self._admissions.admitted_at
        return Outcome(
            config=self.config,
            marks=self.observer.marks,
            experience=self.experience,
            num_tasks=len(admitted_at),
            served_at=self.fleet.served_at,
            waits=[started - admitted_at[index] for index, started in self.workers.started_at.items()],
            ended_at=self.workers.ended_at,
            whole_at=self.workers.whole_at,
        )

    def _mark(self, step: int) -> StepMark:
        ends = (self.config.simulator.warmup_steps, self.config.trainer.steps)
        return StepMark(
            time=asyncio.get_running_loop().time(),
            num_samples=self.experience.num_samples,
            trainer_busy_s=self.trainer.busy_s,
            cancelled_tokens=self.workers.cancelled_tokens,
            surplus_tokens=self.workers.surplus_tokens,
            totals=self.fleet.totals() if step in ends else None,
        )


def simulate(
    config: Config, workload: Workload, *, seed: int, num_tasks: int | None = None, progress: Progress = _silent
) -> Outcome:
    """Run `config` to its last optimizer step on a virtual clock, on `num_tasks` tasks or as many as it takes."""

    async def main() -> Outcome:
        return await Simulation(config, workload, seed=seed, num_tasks=num_tasks, progress=progress).run()

    # What would hang raises `Stalled` here, or `Deadlock`: nobody need hear before of how long something takes.
    with _rare_collection(), reporting_to(lambda stall: None):
        return run_virtual(main())


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
