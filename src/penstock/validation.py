"""Validation: the run plays the held-out tasks before training, after training, and every few optimizer steps.

Every validation plays the same tasks with the same seeds. A validation during training has its own queue, ledger and
share of the slots, so that training is the same with and without it. Only one validation runs at a time. If the next
one is due while it still runs, the run skips the next one and records an event. The death of a trainer does not affect
a validation. If the controller dies, the next controller repeats the validation with the weights served then.
"""

from __future__ import annotations

import asyncio
from statistics import fmean

from penstock.deadline import warn_if_stalled
from penstock.recovery import last_validated_step
from penstock.system import System

STALL_WARNING_S = 3600.0
"""The run reports a validation that outlasts training by this many seconds."""


async def evaluate(system: System, when: str) -> None:
    """Play the held-out tasks with the weights that servers serve at the time."""
    if not system.held_out:
        return
    step, settings = system.num_steps, system.config.validation
    played = await system.scheduler.evaluations.evaluate_tasks(system.held_out, num_samples=settings.samples)
    if rewards := [episode.reward for episodes in played for episode in episodes]:
        system.validated[step] = fmean(rewards)
    num_shown = system.config.observe.samples
    system.recorder.evaluated(when, step, system.held_out, played, shown=num_shown, solved_at=settings.solved_at)


class Validation:
    """The validations that run beside the loops of a run."""

    def __init__(self, system: System, beside: asyncio.TaskGroup) -> None:
        self._system, self._beside = system, beside
        self._every = system.config.validation.every
        self._running: asyncio.Task[None] | None = None
        self._begun_at = 0

    def repeat_missed(self) -> None:
        """Begin the validation that a dead controller did not complete.

        Do nothing if training is done, because a validation follows the last step anyway.
        """
        step = self._system.num_steps
        if self._every and not self._system.done and step - step % self._every > last_validated_step(self._system):
            self._begin(step)

    def begin_if_due(self, step: int) -> None:
        """Begin a validation if one is due at `step`. All servers have the weights of `step`."""
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

    async def wait_until_ended(self) -> None:
        """Wait until no validation is running."""
        if self._running is not None:
            with warn_if_stalled(STALL_WARNING_S, waiter="the run", resource="the validation", holder="its episodes"):
                await asyncio.wait([self._running])
