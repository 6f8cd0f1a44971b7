"""The system: the parts that the loops use, behind ports, and the progress of the run."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from penstock.config import Config
from penstock.data.sources import TaskStream
from penstock.observe.summary import best_step
from penstock.ports.group_pool import Dump, Pool
from penstock.ports.inference import RolloutServers
from penstock.ports.observer import Observer
from penstock.ports.settings_search import Searcher
from penstock.ports.training import Trainer
from penstock.ports.work import Workers
from penstock.scheduler.scheduler import Scheduler
from penstock.types import EpisodeState, LearnerState, Task, WeightsHandle

CHECKPOINTS = "checkpoints"
"""Name of the checkpoint folder in the run directory."""


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
    searcher: Searcher | None = None
    """Searches better settings while the run trains; None if settings stay as configured."""
    num_steps: int = 0
    """Optimizer steps taken so far."""
    stepping: asyncio.Task[LearnerState] | None = None
    """The latest optimizer step."""
    validated: dict[int, float] = field(default_factory=dict)
    """Mean held-out reward after each validated step that is still part of the run."""
    ends_early: bool = False
    """Whether training ends before its last step, because nothing more is learnt."""
    saving: asyncio.Task[None] | None = None
    """The end of the latest checkpoint."""
    saved_versions: list[int] = field(default_factory=list)
    """Versions of the kept checkpoints that this process saved, the oldest first."""

    @property
    def done(self) -> bool:
        """Return whether training is complete: it reached `trainer.steps` or `trainer.total_samples`, or ends early."""
        if self.ends_early:
            return True
        settings, num_samples = self.config.trainer, self.scheduler.ledger.count(EpisodeState.TRAINED)
        return self.num_steps >= settings.steps or num_samples >= (settings.total_samples or math.inf)

    @property
    def is_saved(self) -> bool:
        """Return whether the newest checkpoint holds the current state of the trainer."""
        return self.saved_versions[-1:] == [self.scheduler.trained_version]

    @property
    def best_step(self) -> int | None:
        """Return the step with the highest held-out reward among those with a checkpoint; None if the run is not
        validated while it trains."""
        if not self.config.validation.every:
            return None
        return best_step(self.validated, self.run_dir / CHECKPOINTS)

    async def update_servers(self, handle: WeightsHandle) -> None:
        """Bring every server to `handle`, and let the servers generate again.

        Raises `TrainerLost` if no server can get these weights.
        """
        self.recorder.updated(await self.servers.update_weights(handle))
        if self.config.gives_devices:
            await self.servers.resume()

    async def free_devices(self) -> None:
        """In mode colocated, free the devices of the servers for the trainer, until `update_servers`."""
        if self.config.gives_devices:
            await self.servers.release()

    def complete_step(self, learner: LearnerState) -> None:
        """Record an optimizer step."""
        self.scheduler.complete_step(learner)
        self.update_pool()
        self.num_steps += 1

    def record_alarms(self, alarms: Sequence[str] = ()) -> None:
        """Record `alarms` and the new alarms of the scheduler."""
        for reason in (*alarms, *self.scheduler.alarms.take()):
            self.recorder.event("alarm", reason=reason)

    def update_pool(self) -> None:
        """Write the scheduler's decisions about groups to the pool's index."""
        if ended := self.scheduler.groups.take_ended():
            self.pool.end_groups(ended)
        if replayed := self.scheduler.restoring.take_replayed():
            self.pool.admit_groups(replayed)
