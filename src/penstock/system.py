"""Everything the loops touch, behind ports, and how far the run is."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from penstock.config import Config
from penstock.data.sources import TaskStream
from penstock.ports import Dump, Observer, Pool, RolloutServers, Trainer, Workers
from penstock.scheduler.scheduler import Scheduler
from penstock.types import EpisodeState, LearnerState, Task, WeightsHandle

CHECKPOINTS = "checkpoints"
"""Folder of the run directory."""


@dataclass(slots=True, kw_only=True)
class System:
    """One run, in the controller or in the simulator."""

    config: Config
    run_dir: Path
    scheduler: Scheduler
    tasks: TaskStream
    held_out: Sequence[Task]
    workers: Workers
    trainer: Trainer
    servers: RolloutServers
    pool: Pool
    recorder: Observer
    dumps: Sequence[Dump] = ()
    num_steps: int = 0
    """Optimizer steps taken so far."""
    stepping: asyncio.Task[LearnerState] | None = None
    """The latest optimizer step."""
    saved_versions: list[int] = field(default_factory=list)
    """Versions in the checkpoints that are kept, the oldest first; of those that this process has seen being saved."""

    @property
    def done(self) -> bool:
        """The last optimizer step is taken."""
        settings, num_samples = self.config.trainer, self.scheduler.ledger.count(EpisodeState.TRAINED)
        return self.num_steps >= settings.steps or num_samples >= (settings.total_samples or math.inf)

    @property
    def is_saved(self) -> bool:
        """What the trainer holds now is in a checkpoint."""
        return self.saved_versions[-1:] == [self.scheduler.trained_version]

    async def bring_servers_to(self, handle: WeightsHandle) -> None:
        """Bring every server to `handle`. Raises `TrainerLost`."""
        await self.servers.update_weights(handle)
        if self.config.scheduler.mode == "colocated":
            await self.servers.resume()

    def book(self, learner: LearnerState) -> None:
        """An optimizer step was taken."""
        self.scheduler.learned(learner)
        self.settle()
        self.num_steps += 1

    def tell(self, alarms: Sequence[str] = ()) -> None:
        """Of these alarms, and of the scheduler's own."""
        for reason in (*alarms, *self.scheduler.take_alarms()):
            self.recorder.event("alarm", reason=reason)

    def settle(self) -> None:
        """The pool's index follows the scheduler in what became of groups."""
        if ended := self.scheduler.take_ended():
            self.pool.end(ended)
        if replayed := self.scheduler.take_replayed():
            self.pool.admit(replayed)
