"""One simulated run: the real training loop and scheduler with modelled workers, servers and learner."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from penstock import loop
from penstock.config import Config
from penstock.data.sources import TaskStream
from penstock.deadline import reporting_to
from penstock.ports.observer import Observer, Scheduling
from penstock.ports.settings_search import Searcher
from penstock.scheduler.scheduler import Scheduler
from penstock.simulator.clock import run_virtual
from penstock.simulator.experience import Experience
from penstock.simulator.fleet import Fleet
from penstock.simulator.run_record import RunRecord
from penstock.simulator.server_model import Totals
from penstock.simulator.trainer_model import TrainerModel
from penstock.simulator.workers import FleetWorkers
from penstock.simulator.workload import AdmittedTasks, Tasks, Workload
from penstock.system import System
from penstock.types import LearnerState

WORKER, CAPACITY = "env-0", 1 << 40
"""One modelled worker runs all episodes; only the grants limit it."""

Progress = Callable[[int], None]
"""Called with the number of optimizer steps taken."""


class Recorded(NamedTuple):
    """Where a simulated run leaves its files."""

    run_dir: Path
    begun: float
    """Time at which its clock begins, in seconds since the epoch."""


class StepMark(NamedTuple):
    """State of the run at the end of an optimizer step."""

    time: float
    num_samples: int
    """Samples trained so far."""
    trainer_busy_s: float
    cancelled_tokens: int
    """Tokens of groups that had to start again."""
    surplus_tokens: int
    """Tokens of redundant members that their groups did not use."""
    totals: Totals | None
    """Sums over the servers; only at the beginning and the end of the steady part."""


class Simulation(Observer):
    """The system and its modelled parts, and the results of its run. Create and run it on a virtual event loop. As an
    observer, it records only the steps."""

    def __init__(
        self,
        config: Config,
        workload: Workload,
        *,
        seed: int,
        num_tasks: int | None,
        progress: Progress | None,
        searcher: Searcher | None = None,
        counts_lags: bool = False,
        recorded: Recorded | None = None,
    ) -> None:
        now, rollout = asyncio.get_running_loop().time, config.rollout
        self.config, self._progress = config, progress
        self.fleet = Fleet(config.simulator.engine, num_servers=rollout.num_servers, num_slots=rollout.slots)
        self.experience = Experience(max_staleness=config.scheduler.max_staleness, counts_lags=counts_lags)
        self.trainer = TrainerModel(config.simulator.trainer, self.experience)
        self.record = None if recorded is None else self._record(recorded)
        recorder = self.record or self
        scheduler = Scheduler(config, now=now, log_decision=recorder.decision)
        self.workers = FleetWorkers(
            config,
            fleet=self.fleet,
            plans=workload,
            pool=self.experience,
            collect=lambda *played: loop.collect(self.system, *played),
            reports=scheduler.members,
        )
        self._tasks = AdmittedTasks(
            workload,
            Tasks(workload, seed=seed, size=num_tasks),
            known_lengths=config.simulator.known_lengths,
            learn_lengths=scheduler.lengths.learn_lengths,
        )
        self.system = System(
            config=config,
            run_dir=Path(),
            scheduler=scheduler,
            tasks=TaskStream(self._tasks),
            held_out=(),
            workers=self.workers,
            trainer=self.trainer,
            servers=self.fleet,
            pool=self.experience,
            recorder=recorder,
            searcher=searcher,
        )
        scheduler.add_worker(WORKER, CAPACITY)
        self.marks = [self._mark(0)]
        """One mark for the start, and one for every step."""

    @property
    def num_tasks(self) -> int:
        """Return the number of admitted tasks."""
        return len(self._tasks.admitted_at)

    @property
    def waits(self) -> list[float]:
        """Return the waiting time of each group between its admission and its start."""
        return [started - self._tasks.admitted_at[index] for index, started in self.workers.started_at.items()]

    def _record(self, recorded: Recorded) -> RunRecord:
        """Return the recorder of a run that leaves files behind."""
        return RunRecord(
            recorded.run_dir,
            begun=recorded.begun,
            fleet=self.fleet,
            trainer=self.trainer,
            num_servers=self.config.rollout.num_servers,
            observer=self,
        )

    async def run(self) -> Simulation:
        """Run to the last optimizer step."""
        try:
            await loop.run(self.system)
        finally:
            if self.record is not None:
                self.record.close()
        return self

    def stepped(self, step: int, learner: LearnerState, ledger: Mapping[str, int], scheduling: Scheduling) -> None:
        self.marks.append(self._mark(step))
        if self._progress is not None:
            self._progress(step)

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
    config: Config,
    workload: Workload,
    *,
    seed: int,
    num_tasks: int | None = None,
    progress: Progress | None = None,
    searcher: Searcher | None = None,
    counts_lags: bool = False,
    recorded: Recorded | None = None,
) -> Simulation:
    """Run `config` to its last optimizer step on a virtual clock, on `num_tasks` tasks or on as many as needed.
    `searcher`: searches better settings if the configuration asks for it. `counts_lags`: whether trained tokens are
    counted by their staleness. `recorded`: where the run leaves its files, if it does."""

    async def main() -> Simulation:
        run = Simulation(
            config,
            workload,
            seed=seed,
            num_tasks=num_tasks,
            progress=progress,
            searcher=searcher,
            counts_lags=counts_lags,
            recorded=recorded,
        )
        return await run.run()

    # A hang raises `Stalled` or `Deadlock` here, so reports of long waits are not needed.
    with _rare_collection(), reporting_to(lambda stall: None):
        return run_virtual(main())


@contextmanager
def _rare_collection() -> Iterator[None]:
    """Make garbage collection rare in the body. Millions of small objects live as long as their group, and few are part
    of a cycle. The search for cycles at the usual rate would take a third of the time."""
    usual = gc.get_threshold()
    gc.set_threshold(200_000, 50, 1000)
    try:
        yield
    finally:
        gc.set_threshold(*usual)
