"""The system on one page. It runs in the controller, or in the simulator on a virtual clock.

     tasks ─admit─► scheduler ─dispatch─► environment workers ─HTTP─► rollout servers
                       ▲  │                       │                        ▲
                       │  └─train─► trainer       │ collect                │ swap
                       └──────────────────────────┘      trainer ─publish──┘

  loop      waits for                                       is woken by
  admit     room in the look-ahead                          a dispatched group
  dispatch  something to run, slots, staleness budget       an admitted group, a grant request, a finished group,
                                                            a new worker, weights served
  collect   a completed group (a callback, not a loop)      DATA_GENERATED on the bus
  train     the trigger: N_min samples, or T_max            a group becoming ready, or the clock
  swap      a policy version that is being written          the trainer, after its step
  tune      a search for better settings that is due        the trainer, after its step

The trainer ends the run: when the weights of its last step are served, the other loops end. A group leaves the
staleness budget only after the swap. In the alternating modes, generation pauses from a complete batch until the swap.
`recovery.py` describes how a run continues after a process has died.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, NoReturn

from penstock import recovery
from penstock.deadline import alongside, warn_if_stalled
from penstock.ports.settings_search import Searcher
from penstock.ports.training import TrainerLost
from penstock.ports.work import Work
from penstock.scheduler.scheduler import TrainBatch
from penstock.system import CHECKPOINTS, System
from penstock.types import LearnerState, PayloadRef, Summaries
from penstock.validation import Validation, evaluate

Swaps = asyncio.Queue[tuple[int, int]]
"""(optimizer step, policy_version) of weights that are published."""

PROGRESS_S = 1.0
"""Seconds between two records of metrics in a run without a trainer."""
STALL_WARNING_S = 3600.0
"""A loop that waits this many seconds for another loop is reported. An optimizer step and its swap take less."""


async def run(system: System) -> None:
    """Start or continue the run: evaluate, train to the last step, evaluate again."""
    await recovery.begin(system)
    await restore_dumps(system)
    async with alongside(never_returns(dispatch, system)):
        if not recovery.was_evaluated(system):
            await evaluate(system, "before")
        await train_all(system)
        cancel_rest(system)
        await evaluate(system, "after")
    await finish_dumps(system)
    system.recorder.event("completed", step=system.num_steps, ledger=system.scheduler.ledger.counts())


async def evaluate_only(system: System) -> None:
    """Play the held-out tasks with the current policy."""
    await recovery.begin_without_trainer(system)
    async with alongside(never_returns(dispatch, system)):
        await evaluate(system, "given")
    system.recorder.event("completed", step=system.num_steps, ledger=system.scheduler.evaluations.ledger.counts())


async def synthesize(system: System) -> None:
    """Play every task once, as a group. Nothing is trained, and the weights never change."""
    await recovery.begin_without_trainer(system)
    await restore_dumps(system)
    async with alongside(never_returns(dispatch, system), never_returns(watch_progress, system)):
        await admit(system)
        await system.scheduler.wait_until_ended()
    await finish_dumps(system)
    record_progress(system)
    system.recorder.event("completed", step=system.scheduler.groups.num_ended, ledger=system.scheduler.ledger.counts())


async def train_all(system: System) -> None:
    """Admit, train and swap beside dispatch, until the weights of the last step are served."""
    swaps: Swaps = asyncio.Queue(maxsize=1)
    async with asyncio.TaskGroup() as loops:
        validation = Validation(system, loops)
        validation.repeat_missed()
        endless = [loops.create_task(admit(system)), loops.create_task(never_returns(swap, system, swaps, validation))]
        if system.searcher is not None:
            endless.append(loops.create_task(never_returns(tune, system, system.searcher)))
        while True:
            try:
                await train(system, swaps)
                await wait_for_swap(swaps)
                system.scheduler.check_weights()
                break
            except TrainerLost:
                await wait_for_swap(swaps)
                with suppress(TrainerLost):
                    await finish_checkpoint(system)
                await recovery.regain_weights(system)
        for loop in endless:
            loop.cancel()
        await validation.wait_until_ended()


async def admit(system: System) -> None:
    """Admit tasks while there is room. Returns when the task source ends."""
    while True:
        room = await system.scheduler.wait_for_room()
        tasks = system.tasks.take(room)
        system.pool.admit_groups(system.scheduler.admit_tasks(tasks))
        if len(tasks) < room:
            break
    system.scheduler.end_of_tasks(
        f"data: the task source is used up after {system.tasks.position - 1} tasks, before the last of "
        f"{system.config.trainer.steps} optimizer steps: give it more tasks or lower trainer.steps"
    )


async def dispatch(system: System) -> NoReturn:
    """Send work and grants to the environment workers."""
    while True:
        for assignment in await system.scheduler.next_assignments():
            if isinstance(assignment.item, Work):
                system.workers.start(assignment.worker, assignment.item)
            else:
                system.workers.grant(assignment.worker, assignment.item)


def collect(system: System, group: int, ref: PayloadRef | None, episodes: Summaries) -> None:
    """Record a completed group from a worker. Groups of an earlier attempt are ignored."""
    attempt = episodes[0].episode.group_attempt
    if (task := system.scheduler.task_of(attempt)) is None:
        return
    if ref is not None:
        system.pool.add_group(group, task, ref, episodes)
    state = system.scheduler.finish_group(attempt, ref, episodes)
    if ref is not None and task.purpose == "train":
        system.recorder.group_completed(task.tag, episodes)
    system.update_pool()
    system.record_alarms()
    if ref is not None and state is not None:
        for dump in system.dumps:
            dump.add_group(attempt, state, len(episodes))


async def train(system: System, swaps: Swaps) -> None:
    """Accumulate, step, publish and checkpoint until the last step. Weights and checkpoints are written beside later
    steps."""
    if not system.num_steps and system.config.model.warm_start.steps:
        await begin_checkpoint(system)  # so that no later start repeats the warm start
    while not system.done:
        batch = await system.scheduler.next_batch()
        if batch.early_stop:
            end_early(system, batch.early_stop)
            break
        await free_devices(system, batch)
        if batch.groups:
            system.recorder.accumulated(await system.trainer.accumulate(batch.groups))
        if not batch.step:
            continue
        system.stepping = asyncio.create_task(step(system))
        learner = await asyncio.shield(system.stepping)
        version = await system.trainer.begin_publish()
        with watch_swap("the swap before"):
            await swaps.put((system.num_steps, version))
        scheduler = system.scheduler
        system.recorder.stepped(system.num_steps, learner, scheduler.ledger.counts(), scheduler.health.metrics())
        for dump in system.dumps:
            dump.stepped(system.num_steps)
        system.record_alarms(learner.alarms)
        if system.num_steps % system.config.trainer.checkpoint_every == 0:
            await begin_checkpoint(system)
    await finish_checkpoint(system)
    if not system.is_saved:
        await begin_checkpoint(system)
        await finish_checkpoint(system)


def end_early(system: System, reason: str) -> None:
    """Record that training ends before its last step."""
    system.ends_early = True
    system.recorder.event("early_stop", step=system.num_steps, reason=reason)


async def free_devices(system: System, batch: TrainBatch) -> None:
    """In mode colocated, free the devices of the servers. Their requests continue or restart after the swap."""
    if batch.restarted:
        system.workers.cancel(batch.restarted)
    await system.free_devices()


async def step(system: System) -> LearnerState:
    """Take an optimizer step and record it. A stop waits for `system.stepping`, so it never cancels a step half-way."""
    learner = await system.trainer.step()
    system.complete_step(learner)
    return learner


async def swap(system: System, swaps: Swaps, validation: Validation) -> NoReturn:
    """Bring weights to the servers when they are written, forever."""
    while True:
        published, holder = "a published policy_version", "the trainer's loop"
        with warn_if_stalled(STALL_WARNING_S, waiter="swap", resource=published, holder=holder):
            step, version = await swaps.get()
        try:
            handle = await system.trainer.finish_publish(version)
            began = asyncio.get_running_loop().time()
            await system.update_servers(handle)
        except TrainerLost as lost:
            system.recorder.event("weights_lost", policy_version=version, reason=str(lost))
            system.scheduler.mark_weights_lost(str(lost))
        else:
            update_s = asyncio.get_running_loop().time() - began
            system.scheduler.mark_served(version, update_s=update_s)
            validation.begin_if_due(step)
        swaps.task_done()


async def tune(system: System, searcher: Searcher) -> NoReturn:
    """Search better settings whenever a search is due, and put them in force."""
    while True:
        question = await system.scheduler.next_question()
        system.scheduler.take_answer(await searcher.search(question))


async def wait_for_swap(swaps: Swaps) -> None:
    """Wait until the servers have the published weights, or until they cannot get them."""
    with watch_swap("the last swap"):
        await swaps.join()


def watch_swap(resource: str) -> AbstractContextManager[None]:
    """Report if the rollout servers take long to swap."""
    waiter, holder = "the trainer's loop", "the rollout servers"
    return warn_if_stalled(STALL_WARNING_S, waiter=waiter, resource=resource, holder=holder)


async def begin_checkpoint(system: System) -> None:
    """Begin to save weights, optimizer and the scheduler's state, after the checkpoint before is complete.

    The pool's index records the groups on which the weights were trained.
    """
    await finish_checkpoint(system)
    directory = system.run_dir / CHECKPOINTS / f"step_{system.num_steps}"
    version = system.scheduler.trained_version
    system.pool.sync()
    state = {
        "step": system.num_steps,
        "policy_version": version,
        "task_position": system.tasks.position,
        "ledger": system.scheduler.ledger.counts(),
        "scheduler": system.scheduler.restoring.state_dict(),
    }
    await system.trainer.begin_checkpoint(directory, state, best=system.best_step)
    system.saving = asyncio.create_task(record_checkpoint(system, directory, system.num_steps, version))


async def finish_checkpoint(system: System) -> None:
    """Wait until the latest checkpoint is complete. Raises `TrainerLost`."""
    if system.saving is not None:
        waiter, resource, holder = "the trainer's loop", "the checkpoint before", "the trainer, or its disk"
        with warn_if_stalled(STALL_WARNING_S, waiter=waiter, resource=resource, holder=holder):
            await asyncio.wait([system.saving])
        saving, system.saving = system.saving, None
        saving.result()


async def record_checkpoint(system: System, directory: Path, step: int, version: int) -> None:
    """Record the checkpoint of an optimizer step when it is complete. The pool then frees the tokens of groups that the
    oldest kept checkpoint covers."""
    await system.trainer.finish_checkpoint()
    system.recorder.event("checkpoint", step=step, path=str(directory.relative_to(system.run_dir)))
    keep = system.config.trainer.keep_checkpoints
    system.saved_versions = [*system.saved_versions, version][-keep:]
    if len(system.saved_versions) == keep:
        unwritten = {group for dump in system.dumps for group in dump.unwritten}
        system.pool.free_covered(system.saved_versions[0], keep=unwritten)


async def watch_progress(system: System) -> NoReturn:
    """Record progress every second."""
    while True:
        await asyncio.sleep(PROGRESS_S)
        record_progress(system)


def record_progress(system: System) -> None:
    """Record the progress of a run without a trainer: it has no optimizer steps."""
    scheduler = system.scheduler
    system.recorder.progressed(scheduler.groups.num_ended, scheduler.ledger.counts(), scheduler.health.metrics())


async def restore_dumps(system: System) -> None:
    """Give the dumps the group records of earlier controllers."""
    for dump in system.dumps:
        await dump.restore(system.pool.each_record())


async def finish_dumps(system: System) -> None:
    for dump in system.dumps:
        await dump.finish()


def cancel_rest(system: System) -> None:
    """Cancel everything that is still in flight."""
    system.workers.cancel(system.scheduler.cancel_all())
    system.update_pool()


async def never_returns(loop: Callable[..., Awaitable[None]], *args: Any) -> NoReturn:
    """Run an endless loop; raise if it ends."""
    await loop(*args)
    raise RuntimeError(f"the {loop.__name__} loop ended by itself")
