"""Playing the held-out tasks: before and after training, and every so many optimizer steps beside it.

A validation always plays the same tasks with the same seeds. Beside training it has a queue, a ledger and a share of
the slots of its own, so that what is trained is the same with it and without. There is one at a time: one that is
still running when the next is due has that one passed over, with a notice. A trainer that dies does not concern it;
one that died with its controller is made up for by the next controller, with the weights served then.
"""

from __future__ import annotations

import asyncio

from penstock.deadline import patient
from penstock.recovery import validated_until
from penstock.system import System

PATIENCE_S = 3600.0
"""With a validation that outlasts training, before it is worth a report."""


async def evaluate(system: System, when: str) -> None:
    """Play the held-out tasks with the weights that are served meanwhile."""
    if not system.held_out:
        return
    step, settings = system.num_steps, system.config.validation
    played = await system.scheduler.evaluate(system.held_out, num_samples=settings.samples)
    num_shown = system.config.observe.samples
    system.recorder.evaluated(when, step, system.held_out, played, num_shown=num_shown, solved_at=settings.solved_at)


class Validation:
    """Beside the loops of a run."""

    def __init__(self, system: System, beside: asyncio.TaskGroup) -> None:
        self._system, self._beside = system, beside
        self._every = system.config.validation.every
        self._running: asyncio.Task[None] | None = None
        self._begun_at = 0

    def make_up(self) -> None:
        """Begin the one that was due last, if a dead controller did not bring it to its end; after the last step there
        is one anyway."""
        step = self._system.num_steps
        if self._every and not self._system.done and step - step % self._every > validated_until(self._system):
            self._begin(step)

    def served(self, step: int) -> None:
        """All servers have the weights of `step`: begin, if one is due."""
        if not self._every or step % self._every or self._system.done:
            return
        if self._running is not None and not self._running.done():
            reason = f"that of step {self._begun_at} is still running"
            self._system.recorder.event("validation_skipped", step=step, reason=reason)
            return
        self._begin(step)

    def _begin(self, step: int) -> None:
        self._begun_at = step
        self._running = self._beside.create_task(evaluate(self._system, f"step {step}"))

    async def ended(self) -> None:
        """Until none is running."""
        if self._running is not None:
            with patient(PATIENCE_S, waiter="the run", resource="the last validation", holder="its episodes"):
                await asyncio.wait([self._running])
